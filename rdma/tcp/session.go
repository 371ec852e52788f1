package tcp

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/rdma"
)

// waiter is a submitter that waits for room.
type waiter struct {
	bytes int64
	// granted receives the reserved op, or nil when the session died.
	granted chan *op
}

// session is what two engines share: rails between their NICs, and the
// operations in flight in both directions.
type session struct {
	e      *Engine
	id     [16]byte
	dialed bool
	// addr and token are how to reach the peer's NICs, for the side that dialed.
	addr  rdma.Addr
	token rdma.Token
	rails []*rail
	// ctx ends, and dying is closed, when the session begins to end; ready is
	// closed when the first rail is up, removed when nothing is left.
	ctx                   context.Context
	cancel                context.CancelFunc
	ready, dying, removed chan struct{}
	// activating makes the first rail introduce the session to the engine.
	activating sync.Once
	// running counts readers, writers and menders. It grows under mu, and only
	// while why is nil.
	running sync.WaitGroup

	mu sync.Mutex
	// peer and remote, its address as we see it, do not change after ready.
	peer   rdma.EngineID
	remote string
	// why is set when the session begins to end, and unacked if operations of ours
	// are in flight then.
	why       error
	unacked   bool
	freeBytes int64
	// Invariant: active = ops reserved or submitted = len(ops) - len(free).
	active  int
	ops     []*op
	free    []*op
	waiters []*waiter
	// up counts the rails in state railUp. quiet is set when a rail ended because
	// the peer was through with it.
	up    int
	quiet bool
	// lanes has one queue for each class, or one for all.
	lanes []*lane
	// messages wait for messenger, the one connection that carries them, so that
	// they mostly keep their order.
	messages  queue
	messenger *conn

	// inbound is by the slot of the peer's operation; openOps and openFrames
	// count those that are not complete, and their pieces.
	inbound             []inbound
	openOps, openFrames int
	// acksOwed are acks of operations that are complete, not written yet. parted,
	// unless nil, is closed when there are none, or the session ends.
	acksOwed int
	parted   chan struct{}
	// ended is closed when the streams of all connections have ended.
	ended chan struct{}
}

// newSession returns a session whose rails are all down. n is their number,
// conns how many connections a lane of a rail has.
func newSession(e *Engine, peer rdma.EngineID, id [16]byte, n, lanes, conns int, dialed bool) *session {
	s := &session{
		e: e, peer: peer, id: id, dialed: dialed,
		ready: make(chan struct{}), dying: make(chan struct{}), removed: make(chan struct{}), ended: make(chan struct{}),
		freeBytes: e.opts.InFlightBytes,
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	for i := range lanes {
		s.lanes = append(s.lanes, &lane{class: rdma.Class(i)})
	}
	for i := range n {
		s.rails = append(s.rails, &rail{s: s, index: i, connsEach: conns, fenced: true})
	}
	return s
}

// goneLocked is the error of an operation that finds the session ended.
func (s *session) goneLocked() error {
	return fmt.Errorf("rdma: session with %v ended (%w): %w", s.peer, s.why, rdma.ErrNoPeer)
}

// roomLocked reports whether an operation of that many bytes may start.
func (s *session) roomLocked(bytes int64) bool {
	return s.active < s.e.opts.InFlightOps && s.freeBytes >= bytes
}

// takeLocked reserves an op.
func (s *session) takeLocked(bytes int64) *op {
	var o *op
	if n := len(s.free); n > 0 {
		o, s.free = s.free[n-1], s.free[:n-1]
	} else {
		o = &op{slot: uint32(len(s.ops)), generation: 1}
		s.ops = append(s.ops, o)
	}
	o.reserved, o.bytes = true, bytes
	s.active++
	s.freeBytes -= bytes
	return o
}

// giveLocked returns an op and what it was charged, and lets waiters in.
func (s *session) giveLocked(o *op) {
	s.active--
	s.freeBytes += o.bytes
	o.reset()
	s.free = append(s.free, o)
	for len(s.waiters) > 0 && s.roomLocked(s.waiters[0].bytes) {
		w := s.waiters[0]
		s.waiters = s.waiters[1:]
		w.granted <- s.takeLocked(w.bytes)
	}
	if invariants.Enabled {
		s.checkLocked()
	}
}

// checkLocked panics if the accounts of the session are wrong.
func (s *session) checkLocked() {
	active, bytes := 0, s.freeBytes
	for _, o := range s.ops {
		if o.reserved {
			active++
			bytes += o.bytes
		}
	}
	invariants.Assert(active == s.active && active+len(s.free) == len(s.ops), "%d ops, %d free, %d reserved, active says %d", len(s.ops), len(s.free), active, s.active)
	invariants.Assert(bytes == s.e.opts.InFlightBytes, "reserved and free bytes are %d, the budget %d", bytes, s.e.opts.InFlightBytes)
	invariants.Assert(s.acksOwed >= 0, "%d acks owed", s.acksOwed)
}

// reserve takes an op for n bytes, waiting for room unless noWait. Waiters are
// served in order.
func (s *session) reserve(ctx context.Context, n uint64, noWait bool) (*op, error) {
	// An operation larger than the whole budget is charged all of it.
	bytes := int64(min(n, uint64(s.e.opts.InFlightBytes)))
	s.mu.Lock()
	if s.why != nil {
		defer s.mu.Unlock()
		return nil, s.goneLocked()
	}
	if len(s.waiters) == 0 && s.roomLocked(bytes) {
		o := s.takeLocked(bytes)
		s.mu.Unlock()
		return o, nil
	}
	if noWait {
		defer s.mu.Unlock()
		return nil, fmt.Errorf("rdma: %d operations in flight to %v: %w", s.active, s.peer, rdma.ErrBusy)
	}
	w := &waiter{bytes: bytes, granted: make(chan *op, 1)}
	s.waiters = append(s.waiters, w)
	s.mu.Unlock()
	return s.await(ctx, w)
}

// await waits for the grant of w.
func (s *session) await(ctx context.Context, w *waiter) (*op, error) {
	var o *op
	select {
	case o = <-w.granted:
	case <-ctx.Done():
		if !s.leave(w) {
			// Granted meanwhile: give it back, as the caller's time is over.
			if o = <-w.granted; o != nil {
				s.unreserve(o)
			}
		}
		return nil, fmt.Errorf("rdma: waiting for room to %v: %w", s.peer, ctx.Err())
	}
	if o == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		return nil, s.goneLocked()
	}
	return o, nil
}

// leave takes w out of the queue; false if it is not in it any more.
func (s *session) leave(w *waiter) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, x := range s.waiters {
		if x == w {
			s.waiters = append(s.waiters[:i], s.waiters[i+1:]...)
			return true
		}
	}
	return false
}

// unreserve gives back an op that was not submitted.
func (s *session) unreserve(o *op) {
	s.mu.Lock()
	src := o.src
	s.giveLocked(o)
	s.mu.Unlock()
	if src != nil {
		src.readers.Release()
	}
}

// submit queues the frames of o. After an error o has been given back.
func (s *session) submit(o *op) error {
	s.mu.Lock()
	if s.why != nil {
		err := s.goneLocked()
		s.mu.Unlock()
		s.unreserve(o)
		return err
	}
	o.submitted = true
	o.unsent = len(o.cuts)
	o.tick = s.e.ticks.Load()
	if o.kind == frameMessage {
		// Whoever has much in flight needs the room back.
		o.patient = 2*s.active <= s.e.opts.InFlightOps && 2*s.freeBytes >= s.e.opts.InFlightBytes
		s.messages.push(o.frame(0))
		s.messenger.signal()
	} else {
		l := s.lane(o.class)
		for i := range o.cuts {
			l.push(o.frame(uint32(i)))
		}
		l.wake()
	}
	s.mu.Unlock()
	return nil
}

// lane returns the lane of a class. Where the session has one for all, because
// its dialer marks no classes, that is it.
func (s *session) lane(class rdma.Class) *lane {
	if int(class) < len(s.lanes) {
		return s.lanes[class]
	}
	return s.lanes[0]
}

// endLocked gives o back and returns what is left to do outside of the lock.
func (s *session) endLocked(o *op, err error) ended {
	x := ended{o.done, err, o.src}
	if o.kind == frameMessage {
		s.e.stats.SendEnded(err)
	} else {
		s.e.stats.WriteEnded(o.runBytes(), err)
	}
	s.giveLocked(o)
	return x
}

// settleOpLocked ends o, appending to out, if it is acked and no writer needs it.
func (s *session) settleOpLocked(o *op, out []ended) []ended {
	if !o.acked || o.unsent > 0 {
		return out
	}
	return append(out, s.endLocked(o, s.verdict(o)))
}

// verdict is what the ack of o said.
func (s *session) verdict(o *op) error {
	if o.status != rdma.ReasonNone {
		return &rdma.RefusedError{Peer: s.peer, Reason: o.status}
	}
	return nil
}

// acked takes a batch of acks of the peer and appends what ended to out. An ack
// may come twice, once more after a rail has died: the second says nothing.
func (s *session) acked(acks []byte, out []ended) ([]ended, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for b := acks; len(b) >= ackSize; b = b[ackSize:] {
		a, err := decodeAck(b)
		if err != nil {
			return out, err
		}
		slot := uint32(a.op)
		if int(slot) >= len(s.ops) {
			return out, fmt.Errorf("ack of operation %#x, which never was: %w", a.op, errFrame)
		}
		o := s.ops[slot]
		switch behind := int32(o.generation - uint32(a.op>>32)); {
		case behind < 0 || behind == 0 && !o.submitted:
			return out, fmt.Errorf("ack of operation %#x, which has not begun: %w", a.op, errFrame)
		case behind > 0 || o.acked:
			continue
		}
		o.acked, o.status = true, a.status
		out = s.settleOpLocked(o, out)
	}
	return out, nil
}

// fail begins the end of the session; only the first reason counts. It may be
// called from the session's own goroutines.
func (s *session) fail(why error) {
	s.mu.Lock()
	conns, first := s.failLocked(why)
	s.mu.Unlock()
	if first {
		s.failed(conns)
	}
}

// failLocked makes the session refuse everything from here on, and returns the
// connections to close; first is whether it was this call that did.
func (s *session) failLocked(why error) (conns []*conn, first bool) {
	if s.why != nil {
		return nil, false
	}
	s.why, s.unacked = why, s.active > 0
	for _, w := range s.waiters {
		w.granted <- nil
	}
	s.waiters = nil
	if s.parted != nil {
		close(s.parted)
		s.parted = nil
	}
	for _, r := range s.rails {
		conns = append(conns, r.conns...)
		// Their packets are waited for with those of the others.
		conns = append(conns, r.resetting...)
		r.resetting = nil
	}
	return conns, true
}

// failed is what failLocked leaves to be done outside of the lock.
func (s *session) failed(conns []*conn) {
	close(s.dying)
	s.cancel()
	s.e.forget(s)
	for _, c := range conns {
		c.hangUp(s.unacked) // does not change any more
	}
	go s.remove(conns)
}

// remove ends the operations that the session leaves behind, once no reader or
// writer of it can touch memory any more, and no packet of conns that has not left this
// host refers to a source. A queue that does not empty, of a NIC without carrier, is
// waited for as long as the peer keeps a session that is silent: what leaves later finds
// the peer's end closed.
func (s *session) remove(conns []*conn) {
	s.running.Wait()
	for _, c := range conns {
		if c.w.splicer != nil {
			c.w.splicer.awaitSent(s.e.opts.IdleTimeout)
		}
	}
	var out []ended
	s.mu.Lock()
	for _, o := range s.ops {
		if o.acked {
			out = append(out, s.endLocked(o, s.verdict(o)))
		} else if o.submitted {
			out = append(out, s.endLocked(o, s.why))
		}
	}
	s.mu.Unlock()
	callAll(out)
	s.e.removed(s)
	close(s.removed)
}

// part has the acks written that are queued: a peer that does not get them takes the
// end of this engine for a death. The result is closed when that is done; nil if there
// is nothing to do.
func (s *session) part() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.why != nil || s.acksOwed == 0 {
		return nil
	}
	s.parted = make(chan struct{})
	for _, r := range s.rails {
		for _, c := range r.conns {
			c.signal()
		}
	}
	return s.parted
}

// idleLocked reports whether no operation is in flight in either direction.
// What is acked, and not settled by its writer yet, is over.
func (s *session) idleLocked() bool {
	if s.openOps > 0 {
		return false
	}
	over := 0
	for _, o := range s.ops {
		if o.acked {
			over++
		}
	}
	return s.active == over
}

// idle is idleLocked for readers.
func (s *session) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.idleLocked()
}

// hungUp reports whether the session ended because the peer was through.
func (s *session) hungUp() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Is(s.why, errHungUp)
}

// hasEnded reports whether the session has begun to end.
func (s *session) hasEnded() bool {
	select {
	case <-s.dying:
		return true
	default:
		return false
	}
}

// overdue reports whether an operation has waited for its ack since before the
// given tick.
func (s *session) overdue(tick uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.active == 0 {
		return false
	}
	for _, o := range s.ops {
		if o.submitted && o.tick < tick {
			return true
		}
	}
	return false
}
