package shm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// endpoint is one end of a connection. It has two rings: it posts entries to its own ring, which
// the peer performs, and it performs the entries of the peer's ring.
type endpoint struct {
	d      *Domain
	id     id
	cookie uint64

	// own is the ring to which this endpoint posts. Only free unmaps own and peer, under
	// Domain.pollMu, recvMu and sendMu.
	own      *ring
	ownMem   []byte
	ownFile  *os.File
	arrivals chan *arrival

	// ctx ends with Shut, and a Connect in progress ends with ctx. connecting counts the running
	// calls of Connect.
	ctx        context.Context
	cancel     context.CancelFunc
	connecting sync.WaitGroup
	reading    sync.WaitGroup

	// recvMu is held while a chunk of an entry (an operation in the peer's ring) is performed. It
	// guards stopped and views, the mapped segments of the peer by segment number.
	recvMu sync.Mutex
	// stopped: no entry of the peer is performed any more.
	stopped bool
	views   map[uint64]*arena.View
	// peer is the ring to which the peer posts.
	peer    *ring
	peerMem []byte
	// stalled: the peer's next entry names a segment that has not been received yet.
	stalled atomic.Bool

	// sendMu guards conn, bell and called (Connect has been called). It also guards changes of
	// posted: once ending is set, posted does not change.
	sendMu sync.Mutex
	called bool
	conn   *net.UnixConn
	bell   int // the peer's bell
	freed  bool
	// posted is the number of our entries that were put into the ring, reaped the number of our
	// entries whose completion was polled. Invariant: reaped <= posted <= reaped+depth.
	posted, reaped atomic.Uint64
	cookies        [depth]uint64
	// ending: the endpoint is shut, or broken for the reason cause.
	ending atomic.Bool
	cause  atomic.Pointer[error]
	shut   atomic.Bool

	// The fields below belong to the poller. next is the number of the peer's next entry, and now
	// the entry that is being performed. final: the endpoint is ending, and ended is the final
	// number of our entries that the peer has performed. brokenReturned: the poller has
	// returned the KindBroken of the endpoint.
	next           uint64
	now            work
	process        *process
	final          bool
	ended          uint64
	brokenReturned bool
	// warned: a line has been logged that the peer cannot read our memory.
	warned bool
}

var _ group.Endpoint = (*endpoint)(nil)

// NewEndpoint implements group.Domain. Traffic classes make no difference between processes of a
// host.
func (d *Domain) NewEndpoint(cookie uint64, _ rdma.Class) (group.Endpoint, error) {
	e := &endpoint{d: d, id: newID(), cookie: cookie, arrivals: make(chan *arrival, 1), views: make(map[uint64]*arena.View), bell: -1}
	var err error
	if e.own, e.ownMem, e.ownFile, err = newRing(); err != nil {
		return nil, err
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		e.cancel()
		return nil, errors.Join(errClosed, unix.Munmap(e.ownMem), e.ownFile.Close())
	}
	d.awaited[e.id] = e
	return e, nil
}

// Local implements group.Endpoint.
func (e *endpoint) Local() []byte { return address{e.d.id, e.id}.encode() }

// Connect implements group.Endpoint. The endpoint with the lesser id dials, the other endpoint
// waits.
func (e *endpoint) Connect(remote []byte) error {
	var to address
	if err := to.decode(remote); err != nil {
		return err
	}
	e.sendMu.Lock()
	switch {
	case e.called:
		e.sendMu.Unlock()
		return errors.New("shm: the endpoint has been connected before")
	case e.ending.Load():
		e.sendMu.Unlock()
		return e.why()
	}
	e.called = true
	e.connecting.Add(1)
	e.sendMu.Unlock()
	defer e.connecting.Done()
	ctx, cancel := context.WithTimeout(e.ctx, connectTimeout)
	defer cancel()
	var a *arrival
	var err error
	switch order := bytes.Compare(e.id[:], to.endpoint[:]); {
	case order == 0:
		return errors.New("shm: connect: the address is the endpoint's own")
	case order < 0:
		a, err = e.dial(ctx, to)
	default:
		a, err = e.await(ctx, to)
	}
	if err != nil {
		return err
	}
	return e.join(a)
}

// dial connects to the peer's domain and exchanges hellos.
func (e *endpoint) dial(ctx context.Context, to address) (*arrival, error) {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unixpacket", socketName(to.domain).Name)
	if err != nil {
		return nil, fmt.Errorf("shm: the peer must be on this host, and in the same network namespace: %w", err)
	}
	conn := c.(*net.UnixConn)
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	a, err := e.exchangeHello(conn, to)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return a, nil
}

// exchangeHello is the dialing endpoint's exchange of hellos.
func (e *endpoint) exchangeHello(conn *net.UnixConn, to address) (*arrival, error) {
	if err := sameUser(conn); err != nil {
		return nil, err
	}
	if err := e.sendHello(conn, to); err != nil {
		return nil, err
	}
	a, err := readHello(conn)
	if err != nil {
		return nil, err
	}
	if a.hello.to != e.id || a.hello.from != to.endpoint {
		closeFDs([]int{a.ring, a.bell})
		return nil, errors.New("shm: another endpoint answered")
	}
	return a, nil
}

// await waits until the peer dials, and answers the peer's hello.
func (e *endpoint) await(ctx context.Context, to address) (*arrival, error) {
	select {
	case a := <-e.arrivals:
		if a.hello.from != to.endpoint {
			a.close()
			return nil, errors.New("shm: another endpoint has dialed")
		}
		if err := e.sendHello(a.conn, to); err != nil {
			a.close()
			return nil, err
		}
		return a, nil
	case <-ctx.Done():
		if e.ending.Load() {
			return nil, e.why()
		}
		return nil, fmt.Errorf("shm: the peer has not dialed within %v: it must be on this host, in the same network namespace and of the same user", connectTimeout)
	}
}

// sendHello sends this endpoint's hello with its ring and bell.
func (e *endpoint) sendHello(conn *net.UnixConn, to address) error {
	_ = conn.SetWriteDeadline(time.Now().Add(sendTimeout))
	h := hello{to: to.endpoint, from: e.id, probe: *e.d.probe, where: addressOf(e.d.probe[:])}
	if err := sendFiles(conn, h.encode(), int(e.ownFile.Fd()), e.d.bell.fd); err != nil {
		return fmt.Errorf("shm: hello: %w", err)
	}
	return nil
}

// arriveLocked accepts a connection that names this endpoint, if the endpoint has no connection
// yet. Domain.mu is held.
func (e *endpoint) arriveLocked(a *arrival) bool {
	select {
	case e.arrivals <- a:
		return true
	default:
		return false
	}
}

// join starts to use the peer's ring and bell.
func (e *endpoint) join(a *arrival) error {
	peer, mem, err := openRing(a.ring)
	if err == nil {
		err = checkBell(a.bell)
	}
	if err == nil {
		err = e.adopt(a, peer, mem)
	}
	if err != nil {
		if mem != nil {
			_ = unix.Munmap(mem)
		}
		a.close()
		return err
	}
	_ = unix.Close(a.ring)
	if err := e.d.sendSegments(e); err != nil {
		e.broke(err)
		return err
	}
	e.reading.Go(e.read)
	e.d.enlist(e)
	return nil
}

// adopt stores the peer's ring, bell and connection, unless the endpoint has been shut in the
// meantime.
func (e *endpoint) adopt(a *arrival, peer *ring, mem []byte) error {
	e.recvMu.Lock()
	defer e.recvMu.Unlock()
	e.sendMu.Lock()
	defer e.sendMu.Unlock()
	if e.ending.Load() {
		return e.why()
	}
	e.conn, e.bell, e.peer, e.peerMem = a.conn, a.bell, peer, mem
	e.process = peerProcess(a.conn, &a.hello)
	return nil
}

// read is the goroutine that receives the peer's segments and detects the end of the peer.
func (e *endpoint) read() {
	b := make([]byte, segmentBytes)
	for {
		n, fds, err := receive(e.conn, b, 1)
		if err != nil {
			e.broke(fmt.Errorf("shm: the peer is gone: %w", err))
			return
		}
		var m segmentMessage
		if err = m.decode(b[:n]); err == nil {
			err = e.takeSegment(m.id, fds[0])
		}
		closeFDs(fds)
		if err != nil {
			e.broke(err)
			return
		}
	}
}

// Post implements group.Endpoint. It allocates nothing and makes a system call
// only if the peer sleeps.
func (e *endpoint) Post(works []group.Work) (int, error) {
	e.sendMu.Lock()
	defer e.sendMu.Unlock()
	if e.ending.Load() {
		return 0, e.why()
	}
	if e.conn == nil {
		return 0, errors.New("shm: the endpoint is not connected")
	}
	first := e.posted.Load()
	room := depth - (first - e.reaped.Load())
	n := min(uint64(len(works)), room)
	for i := range n {
		w := &works[i]
		x := work{op: uint32(w.Op), imm: w.Imm, len: w.Len, addr: w.RemoteAddr, key: w.RemoteKey}
		if w.Len > 0 {
			m, ok := w.Src.(*memory)
			if !ok || m.d != e.d {
				return e.publish(first, i, fmt.Errorf("shm: the source of a Work: %w", rdma.ErrForeign))
			}
			x.segment, x.offset = m.segment, m.offset+w.SrcOff
		}
		e.cookies[(first+i)%depth] = w.Cookie
		e.own.put(first+i, &x)
	}
	return e.publish(first, n, nil)
}

// publish makes the n entries from number first on visible to the peer. It returns n and err, as
// Post does. sendMu is held.
func (e *endpoint) publish(first, n uint64, err error) (int, error) {
	if n > 0 {
		e.posted.Store(first + n)
		released()
		e.own.tail.Store(first + n)
		if e.own.performerSleeps.Load() != 0 && e.own.performerSleeps.Swap(0) != 0 {
			ringBell(e.bell)
		}
	}
	return int(n), err
}

// why returns the reason why an ending endpoint accepts no Works.
func (e *endpoint) why() error {
	if c := e.cause.Load(); c != nil {
		return *c
	}
	return errShut
}

var errShut = errors.New("shm: the endpoint is shut")

// broke ends the endpoint for the reason why, which Poll then reports with KindBroken.
func (e *endpoint) broke(why error) {
	e.sendMu.Lock()
	if !e.ending.Load() {
		e.cause.Store(&why)
		e.ending.Store(true)
	}
	e.sendMu.Unlock()
	e.d.Wake()
}

// Shut implements group.Endpoint.
func (e *endpoint) Shut() {
	e.sendMu.Lock()
	e.ending.Store(true)
	if !e.shut.Swap(true) && !e.freed {
		e.own.withdrawn.Store(1)
	}
	conn := e.conn
	e.sendMu.Unlock()
	e.cancel()
	// The lock of recvMu waits until a chunk that is being copied into memory is complete.
	e.recvMu.Lock()
	e.stopped = true
	e.recvMu.Unlock()
	if conn != nil {
		_ = conn.Close() // so that the peer notices
	}
	e.d.Wake()
}

// Close implements group.Endpoint.
func (e *endpoint) Close() error {
	e.Shut()
	e.connecting.Wait()
	e.d.delist(e)
	e.reading.Wait()
	return e.free()
}

// delist removes the endpoint from all tables of the domain.
func (d *Domain) delist(e *endpoint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.awaited, e.id)
	delete(d.connected, e)
	var live []*endpoint
	for _, x := range *d.live.Load() {
		if x != e {
			live = append(live, x)
		}
	}
	d.live.Store(&live)
	select {
	case a := <-e.arrivals:
		a.close()
	default:
	}
}

// enlist makes the endpoint visible to the poller.
func (d *Domain) enlist(e *endpoint) {
	d.mu.Lock()
	live := append([]*endpoint(nil), *d.live.Load()...)
	live = append(live, e)
	d.live.Store(&live)
	d.mu.Unlock()
	d.Wake()
}

// free releases the endpoint's resources. It waits for the last Poll that uses the endpoint.
func (e *endpoint) free() error {
	e.d.pollMu.Lock()
	defer e.d.pollMu.Unlock()
	e.recvMu.Lock()
	defer e.recvMu.Unlock()
	e.sendMu.Lock()
	defer e.sendMu.Unlock()
	if e.freed {
		return nil
	}
	e.freed = true
	err := errors.Join(unix.Munmap(e.ownMem), e.ownFile.Close())
	e.own = nil
	if e.peer != nil {
		err = errors.Join(err, unix.Munmap(e.peerMem), unix.Close(e.bell))
		e.peer, e.peerMem = nil, nil
	}
	for id, v := range e.views {
		err = errors.Join(err, v.Close())
		delete(e.views, id)
	}
	e.process.close()
	return err
}
