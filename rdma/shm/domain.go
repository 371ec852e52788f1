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

// Domain is the NIC between the processes of a host: the target's poller places
// what its peers post.
type Domain struct {
	id       id
	name     string
	log      *slog.Logger
	listener *net.UnixListener
	bell     bell
	// probe lies in memory for peers to try whether they may read this process.
	probe *id
	// accepting counts the accepting goroutine and its handshakes; ending is
	// closed with the domain.
	accepting sync.WaitGroup
	ending    chan struct{}

	// keysMu guards keys: what is open, by key; nil once the domain is closed.
	keysMu sync.RWMutex
	keys   map[uint64]*memory

	// mu guards what follows, and orders the messages that tell of segments.
	mu         sync.Mutex
	closed     bool
	segments   []segment
	segmentIDs uint64
	// awaited are endpoints that are not closed, by id; connected those whose
	// peer is told of new segments.
	awaited   map[id]*endpoint
	connected map[*endpoint]struct{}

	// live are the endpoints to be polled; replaced as a whole, under mu.
	live atomic.Pointer[[]*endpoint]

	// pollMu is held by Poll, by Wait while it looks at rings, and by
	// Endpoint.Close, so that a ring is not unmapped under them.
	pollMu sync.Mutex
	// turn is where the next Poll begins; buffers are those of PostRecv, in the
	// order lent. Both are the poller's.
	turn    int
	buffers recvQueue
	spin    spinner

	// fence is added to for its effect on the order of memory accesses.
	fence uint32

	dead     atomic.Pointer[error]
	sleeping atomic.Bool
	woken    atomic.Bool
}

var _ group.Domain = (*Domain)(nil)

// errClosed is what a domain answers that is closed.
var errClosed = fmt.Errorf("shm: the domain is closed: %w", rdma.ErrClosed)

// NewDomain opens a domain, which people know by the name; log, which may be nil,
// is told of sources that a peer can't read, once for each endpoint. Peers reach it through an abstract unix socket, so
// that they must be in the same network namespace.
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

// recvBuffer is a buffer lent for a message.
type recvBuffer struct {
	slot uint32
	buf  []byte
}

// recvQueue is the buffers lent, first in, first out. Its length is bounded by
// who lends them.
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

// first returns the first buffer, if it holds n bytes.
func (q *recvQueue) first(n uint64) (recvBuffer, bool) {
	if q.head == len(q.items) || uint64(len(q.items[q.head].buf)) < n {
		return recvBuffer{}, false
	}
	return q.items[q.head], true
}

// pop takes the first buffer away.
func (q *recvQueue) pop() {
	q.items[q.head] = recvBuffer{}
	q.head++
}

// fail makes the domain die, as a NIC does: Poll answers why from now on.
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

// handshakesMax bounds the connections that have not said yet which endpoint they
// are for; more wait in the listener's backlog.
const handshakesMax = 16

// accept is the goroutine that takes connections of peers.
func (d *Domain) accept() {
	slots := make(chan struct{}, handshakesMax)
	var pause time.Duration
	for {
		conn, err := d.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of file descriptors, most likely: Connect has a time limit, which
			// tells.
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

// receive hands a connection to the endpoint that it is for.
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

// connectTimeout bounds a Connect and each of its steps.
const connectTimeout = 5 * time.Second

// readHello reads the first message of a connection. If it fails the connection
// is the caller's still.
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
