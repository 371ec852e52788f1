package shm

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// Domain is the NIC of an engine between processes of a host. The target's poller copies the
// payload that its peers post.
type Domain struct {
	id       id
	name     string
	log      *slog.Logger
	listener *net.UnixListener
	bell     bell
	// probe points to a random number. A peer reads this number to test whether it can read the
	// memory of this process.
	probe *id
	// accepting is the number of running goroutines that accept connections or perform handshakes.
	// ending is closed when the domain closes.
	accepting sync.WaitGroup
	ending    chan struct{}

	// keysMu guards keys, which holds the open memory by key. keys is nil once the domain is
	// closed.
	keysMu sync.RWMutex
	keys   map[uint64]*memory

	// mu guards the fields below. It is also held while segments (shared arenas) are sent to a
	// peer, so that each peer receives each segment once.
	mu         sync.Mutex
	closed     bool
	segments   []segment
	segmentIDs uint64
	// awaited are the endpoints that are not closed, by id. connected are the endpoints whose
	// peers must be notified of new segments.
	awaited   map[id]*endpoint
	connected map[*endpoint]struct{}

	// live are the endpoints that Poll polls. The slice is replaced as a whole, under mu.
	live atomic.Pointer[[]*endpoint]

	// pollMu is held by Poll, by Wait while it checks rings, and by Endpoint.Close, so that no
	// ring is unmapped while another goroutine uses it.
	pollMu sync.Mutex
	// turn is the index of the endpoint with which the next Poll begins. buffers are the buffers
	// of PostRecv, in the order posted. Only the poller uses turn and buffers.
	turn    int
	buffers recvQueue
	spin    spinner

	// fence is the operand of an atomic addition whose only purpose is to order memory accesses.
	fence uint32

	dead     atomic.Pointer[error]
	sleeping atomic.Bool
	woken    atomic.Bool
}

var _ group.Domain = (*Domain)(nil)

// errClosed is the error of a closed domain.
var errClosed = fmt.Errorf("shm: the domain is closed: %w", rdma.ErrClosed)

// NewDomain opens a domain; name is used in logs and status. log, which may be nil, receives a
// line for each endpoint whose peer cannot read a source. Peers connect through an abstract unix
// socket, so they must be in the same network namespace.
func NewDomain(name string, log *slog.Logger) (*Domain, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	d := &Domain{
		id: newID(), name: name, log: log, keys: make(map[uint64]*memory), awaited: make(map[id]*endpoint), connected: make(map[*endpoint]struct{}),
		probe: new(id), ending: make(chan struct{}),
	}
	*d.probe = newID()
	d.live.Store(new([]*endpoint))
	var err error
	if d.bell, err = newBell(); err != nil {
		return nil, err
	}
	if d.listener, err = net.ListenUnix("unixpacket", socketName(d.id)); err != nil {
		_ = d.bell.file.Close()
		return nil, fmt.Errorf("shm: %w", err)
	}
	d.accepting.Go(d.accept)
	return d, nil
}

// Name implements group.Domain.
func (d *Domain) Name() string { return d.name }

// Limits of a domain.
const (
	maxWrite   = 1 << 40
	maxMessage = 1 << 20
)

// Limits implements group.Domain.
func (d *Domain) Limits() group.Limits {
	return group.Limits{
		MaxWrite: maxWrite, MaxMessage: maxMessage, QueueDepth: depth,
		Ordered: true, CloseIsFinal: true, Windows: true, Spans: true,
	}
}

// PostRecv implements group.Domain.
func (d *Domain) PostRecv(slot uint32, m group.Memory, buf []byte) error {
	if x, ok := m.(*memory); !ok || x.d != d {
		return fmt.Errorf("shm: receive buffer %d: %w", slot, rdma.ErrForeign)
	}
	d.buffers.push(recvBuffer{slot, buf})
	return nil
}

// recvBuffer is a buffer posted for a message.
type recvBuffer struct {
	slot uint32
	buf  []byte
}

// recvQueue is the queue of posted buffers, first in, first out. Its length is limited by the
// caller that posts the buffers.
type recvQueue struct {
	items []recvBuffer
	head  int
}

func (q *recvQueue) push(b recvBuffer) {
	if q.head > 0 && len(q.items) == cap(q.items) {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, b)
}

// first returns the first buffer, if it has at least n bytes.
func (q *recvQueue) first(n uint64) (recvBuffer, bool) {
	if q.head == len(q.items) || uint64(len(q.items[q.head].buf)) < n {
		return recvBuffer{}, false
	}
	return q.items[q.head], true
}

// pop removes the first buffer.
func (q *recvQueue) pop() {
	q.items[q.head] = recvBuffer{}
	q.head++
}

// fail ends the domain, as a failure ends a NIC: Poll returns the reason from then on.
func (d *Domain) fail(why error) {
	why = fmt.Errorf("shm: %w: %w", why, group.ErrDead)
	if d.dead.CompareAndSwap(nil, &why) {
		d.Wake()
	}
}

// Close implements group.Domain.
func (d *Domain) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	segments := d.segments
	d.segments = nil
	d.mu.Unlock()
	d.keysMu.Lock()
	d.keys = nil
	d.keysMu.Unlock()
	close(d.ending)
	err := d.listener.Close()
	d.accepting.Wait()
	for _, s := range segments {
		err = errors.Join(err, s.file.Close())
	}
	return errors.Join(err, d.bell.file.Close())
}

// handshakesMax is the largest number of accepted connections whose hello has not been read yet.
// Further connections wait in the listener's backlog.
const handshakesMax = 16

// accept is the goroutine that accepts peers' connections.
func (d *Domain) accept() {
	slots := make(chan struct{}, handshakesMax)
	var pause time.Duration
	for {
		conn, err := d.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// The most likely cause is that file descriptors are used up. A peer's Connect has a
			// time limit and reports the failure.
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			select {
			case <-time.After(pause):
			case <-d.ending:
			}
			continue
		}
		pause = 0
		slots <- struct{}{}
		d.accepting.Go(func() {
			defer func() { <-slots }()
			d.receive(conn)
		})
	}
}

// receive passes a connection to the endpoint that the connection's hello names.
func (d *Domain) receive(conn *net.UnixConn) {
	a, err := readHello(conn)
	if err != nil {
		_ = conn.Close()
		return
	}
	d.mu.Lock()
	e := d.awaited[a.hello.to]
	taken := e != nil && e.arriveLocked(a)
	d.mu.Unlock()
	if !taken {
		a.close()
	}
}

// arrival is a connection whose hello has been read.
type arrival struct {
	conn       *net.UnixConn
	hello      hello
	ring, bell int // descriptors
}

func (a *arrival) close() {
	closeFDs([]int{a.ring, a.bell})
	_ = a.conn.Close()
}

// connectTimeout is the longest time for a Connect and for each of its steps.
const connectTimeout = 5 * time.Second

// readHello reads the first message of a connection. If it fails, the caller still owns the
// connection.
func readHello(conn *net.UnixConn) (*arrival, error) {
	if err := sameUser(conn); err != nil {
		return nil, err
	}
	_ = conn.SetReadDeadline(time.Now().Add(connectTimeout))
	b := make([]byte, helloBytes)
	n, fds, err := receive(conn, b, 2)
	if err != nil {
		return nil, fmt.Errorf("shm: hello: %w", err)
	}
	a := &arrival{conn: conn, ring: fds[0], bell: fds[1]}
	if err := a.hello.decode(b[:n]); err != nil {
		closeFDs(fds)
		return nil, err
	}
	_ = conn.SetReadDeadline(time.Time{})
	return a, nil
}
