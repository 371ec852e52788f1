package binding

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/client"
)

// Handle names a store, a namespace, memory, a lease or a job. 0 names nothing.
type Handle uint64

// Library is the table of handles of a process.
type Library struct {
	mu   sync.RWMutex
	last Handle
	open map[Handle]any
}

// NewLibrary returns an empty one.
func NewLibrary() *Library { return &Library{open: make(map[Handle]any)} }

// next returns a number that was not used.
func (l *Library) next() Handle {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	return l.last
}

// add gives v a handle.
func (l *Library) add(v any) Handle {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	l.open[l.last] = v
	return l.last
}

// remove makes a handle unknown. It reports false if it was.
func (l *Library) remove(h Handle) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.open[h]
	delete(l.open, h)
	return ok
}

// removeOf makes all handles of a store unknown.
func (l *Library) removeOf(s *Store) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for h, v := range l.open {
		if owner, ok := v.(interface{ of() *Store }); ok && owner.of() == s {
			delete(l.open, h)
		}
	}
}

// find returns what a handle names.
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

// Sentinels beside those of package client.
var (
	// ErrHandle: the handle is closed, or never was one.
	ErrHandle = errors.New("not open")
	// ErrInvalid: an argument cannot be.
	ErrInvalid = errors.New("bad argument")
	// ErrUnregistered: bytes of a value do not lie in registered memory.
	ErrUnregistered = errors.New("memory is not registered")
	// ErrBusy: a bound was reached, or the thing is in use.
	ErrBusy = errors.New("busy")
	// ErrNoJob: no such job, or its completion was returned.
	ErrNoJob = errors.New("no such job")
)

// Code is PENSTOCK_OK or one of PENSTOCK_ERR_*.
type Code int32

// The codes of penstock.h; capi's tests compare them with it.
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
)

// codes says which code an error is, first match first.
var codes = []struct {
	err  error
	code Code
}{
	{ErrHandle, Closed},
	{client.ErrClosed, Closed},
	{ErrUnregistered, Unregistered},
	{ErrBusy, Busy},
	{ErrNoJob, NotFound},
	{client.ErrAuth, Auth},
	{client.ErrProvider, Provider},
	{client.ErrMismatch, Mismatch},
	{client.ErrNotFound, NotFound},
	{client.ErrUnavailable, Unavailable},
	{client.ErrUnsupported, Version},
	{ErrInvalid, Invalid},
	{client.ErrRequest, Invalid},
	{context.DeadlineExceeded, Timeout},
	{context.Canceled, Canceled},
}

// CodeOf is the code of an error.
func CodeOf(err error) Code {
	if err == nil {
		return OK
	}
	for _, c := range codes {
		if errors.Is(err, c.err) {
			return c.code
		}
	}
	return Internal
}
