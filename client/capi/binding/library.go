package binding

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/rdma"
)

// Handle identifies an object of the library: a store, a namespace, memory, a lease, a job, a
// leader, an attempt, a gateway, a request, a traffic manager or a transfer. 0 is no handle.
type Handle uint64

// Library is the table of handles of a process.
type Library struct {
	mu   sync.RWMutex
	last Handle
	open map[Handle]any
	// leases is the number of leases in open. When it reaches sweepAt, addLease removes the leases that
	// have ended.
	leases, sweepAt int
}

const (
	// sweepMin is the least number of leases at which the table removes leases that have ended.
	sweepMin = 1024
	// endedLease is the time for which the table keeps a lease after its end.
	endedLease = time.Minute
)

// NewLibrary returns an empty table.
func NewLibrary() *Library { return &Library{open: make(map[Handle]any), sweepAt: sweepMin} }

// next returns an unused handle.
func (l *Library) next() Handle {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	return l.last
}

// add adds v and returns its handle.
func (l *Library) add(v any) Handle {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	l.open[l.last] = v
	return l.last
}

// remove removes a handle and reports whether the table had it.
func (l *Library) remove(h Handle) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.open[h]
	l.removeLocked(h)
	return ok
}

func (l *Library) removeLocked(h Handle) {
	if _, ok := l.open[h].(*Lease); ok {
		l.leases--
	}
	delete(l.open, h)
}

// addLease adds a lease that ends after ttl, and returns its handle. A caller need not release a lease,
// so addLease removes leases that have ended: at most half as often as it adds one.
func (l *Library) addLease(lease *Lease, ttl time.Duration) Handle {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if l.leases >= l.sweepAt {
		for h, v := range l.open {
			if old, ok := v.(*Lease); ok && now.After(old.ends.Add(endedLease)) {
				l.removeLocked(h)
			}
		}
		l.sweepAt = max(sweepMin, 2*l.leases)
	}
	l.leases++
	l.last++
	lease.handle, lease.ends = l.last, now.Add(ttl)
	l.open[l.last] = lease
	return l.last
}

// renewed keeps a lease in the table that ends after ttl.
func (l *Library) renewed(lease *Lease, ttl time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ends := time.Now().Add(ttl); ends.After(lease.ends) {
		lease.ends = ends
	}
}

// removeOf removes all handles of a store.
func (l *Library) removeOf(s *Store) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for h, v := range l.open {
		if owner, ok := v.(interface{ of() *Store }); ok && owner.of() == s {
			l.removeLocked(h)
		}
	}
}

// find returns the value of a handle. Errors name the kind of the handle, what.
func find[T any](l *Library, h Handle, what string) (T, error) {
	l.mu.RLock()
	v := l.open[h]
	l.mu.RUnlock()
	t, ok := v.(T)
	if !ok {
		return t, fmt.Errorf("%w: %d is not an open %s", ErrHandle, h, what)
	}
	return t, nil
}

// Store returns the store of a handle.
func (l *Library) Store(h Handle) (*Store, error) { return find[*Store](l, h, "store") }

// Namespace returns the namespace of a handle.
func (l *Library) Namespace(h Handle) (*Namespace, error) {
	return find[*Namespace](l, h, "namespace")
}

// Memory returns the memory of a handle.
func (l *Library) Memory(h Handle) (*Memory, error) { return find[*Memory](l, h, "memory") }

// Lease returns the lease of a handle.
func (l *Library) Lease(h Handle) (*Lease, error) { return find[*Lease](l, h, "lease") }

// Leader returns the leader of a handle.
func (l *Library) Leader(h Handle) (*Leader, error) { return find[*Leader](l, h, "leader") }

// Attempt returns the attempt of a handle.
func (l *Library) Attempt(h Handle) (*Attempt, error) { return find[*Attempt](l, h, "attempt") }

// Gateway returns the gateway of a handle.
func (l *Library) Gateway(h Handle) (*Gateway, error) { return find[*Gateway](l, h, "gateway") }

// Request returns the request of a handle.
func (l *Library) Request(h Handle) (*Request, error) { return find[*Request](l, h, "request") }

// Traffic returns the traffic manager of a handle.
func (l *Library) Traffic(h Handle) (*Traffic, error) { return find[*Traffic](l, h, "traffic manager") }

// Transfer returns the transfer of a handle.
func (l *Library) Transfer(h Handle) (*Transfer, error) { return find[*Transfer](l, h, "transfer") }

// Errors in addition to those of package client.
var (
	// ErrHandle: the handle is closed, or was never returned by the library.
	ErrHandle = errors.New("not open")
	// ErrInvalid: an argument is invalid.
	ErrInvalid = errors.New("bad argument")
	// ErrUnregistered: a value does not lie in registered memory.
	ErrUnregistered = errors.New("memory is not registered")
	// ErrBusy: JobsMax is reached, or the memory is in use.
	ErrBusy = errors.New("busy")
	// ErrNoJob: the job does not exist, or its completion was returned.
	ErrNoJob = errors.New("no such job")
	// ErrNoEngine: no member of the leader's group has the name.
	ErrNoEngine = errors.New("no such engine")
	// ErrEnded: the transfer has ended. Its last event has the reason.
	ErrEnded = errors.New("the transfer has ended")
)

// Code is a return code of penstock.h: PENSTOCK_OK or one of PENSTOCK_ERR_*.
type Code int32

// The codes of penstock.h. Tests of capi compare these values with the header.
const (
	OK Code = iota
	Invalid
	Closed
	Forked
	Auth
	Mismatch
	NotFound
	Unavailable
	Busy
	Timeout
	Canceled
	Unregistered
	Provider
	Version
	Internal
	Refused
)

// codes maps errors to codes. The first entry that matches an error determines its code.
var codes = []struct {
	err  error
	code Code
}{
	{ErrHandle, Closed},
	{client.ErrClosed, Closed},
	{ErrUnregistered, Unregistered},
	{ErrBusy, Busy},
	{ErrNoJob, NotFound},
	{ErrNoEngine, NotFound},
	{client.ErrAuth, Auth},
	{client.ErrProvider, Provider},
	{client.ErrMismatch, Mismatch},
	{client.ErrNotFound, NotFound},
	{client.ErrUnavailable, Unavailable},
	{client.ErrVersion, Version},
	{ErrInvalid, Invalid},
	{client.ErrRequest, Invalid},
	{ErrEnded, Canceled},
	{traffic.ErrJob, Invalid},
	{traffic.ErrExists, Invalid},
	{traffic.ErrBusy, Busy},
	{traffic.ErrClosed, Closed},
	{traffic.ErrCancelled, Canceled},
	{rdma.ErrAuth, Auth},
	{rdma.ErrVersion, Version},
	{rdma.ErrPeerDied, Unavailable},
	{rdma.ErrNoPeer, Unavailable},
	{context.DeadlineExceeded, Timeout},
	{context.Canceled, Canceled},
}

// CodeOf returns the code of an error.
func CodeOf(err error) Code {
	if err == nil {
		return OK
	}
	for _, c := range codes {
		if errors.Is(err, c.err) {
			return c.code
		}
	}
	if unreached := (*net.OpError)(nil); errors.As(err, &unreached) {
		return Unavailable
	}
	if refused := (*gateway.RefusedError)(nil); errors.As(err, &refused) {
		return Refused
	}
	if c, ok := plannerCode(err); ok {
		return c
	}
	return Internal
}
