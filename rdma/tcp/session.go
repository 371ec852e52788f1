package tcp

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// session is what two engines share: rails between their NICs, and the
// operations in flight in both directions.
type session struct {
	sessions.Session[*op]
	e     *Engine
	id    [16]byte
	rails []*rail
	// ctx ends when the session begins to end.
	ctx    context.Context
	cancel context.CancelFunc
	// activating makes the first rail introduce the session to the engine.
	activating sync.Once
	// running counts readers, writers and menders. It grows under Mu, and only
	// while Why is nil.
	running sync.WaitGroup

	// Guarded by Mu, as are the fields below: unacked is set if operations of ours
	// are in flight when the session begins to end.
	unacked bool
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
	s := &session{e: e, id: id, ended: make(chan struct{})}
	s.Init(peer, dialed, &e.core.Counters, sessions.Rules[*op]{
		Ops: e.opts.InFlightOps, Bytes: e.opts.InFlightBytes,
		New: func() *op { return &op{} }, Gone: s.gone,
	})
	s.ctx, s.cancel = context.WithCancel(context.Background())
	for i := range lanes {
		s.lanes = append(s.lanes, &lane{class: rdma.Class(i)})
	}
	for i := range n {
		s.rails = append(s.rails, &rail{s: s, index: i, connsEach: conns, fenced: true})
	}
	return s
}

// gone is the error of an operation that finds the session ended for why.
func (s *session) gone(why error) error {
	return fmt.Errorf("rdma: session with %v ended (%w): %w", s.Peer, why, rdma.ErrNoPeer)
}

// submit queues the frames of o. After an error o has been given back.
func (s *session) submit(o *op) error {
	s.Mu.Lock()
	if err := s.BeginLocked(o, s.e.core.Ticks.Load()); err != nil {
		s.Mu.Unlock()
		s.Unreserve(o)
		return err
	}
	o.unsent = len(o.cuts)
	if o.kind == frameMessage {
		// Whoever has much in flight needs the room back.
		o.patient = 2*s.Active <= s.e.opts.InFlightOps && 2*s.FreeBytes >= s.e.opts.InFlightBytes
		s.messages.push(o.frame(0))
		s.messenger.signal()
	} else {
		l := s.lane(o.Class)
		for i := range o.cuts {
			l.push(o.frame(uint32(i)))
		}
		l.wake()
	}
	s.Mu.Unlock()
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
func (s *session) endLocked(o *op, err error) sessions.Ended {
	return s.EndLocked(o, o.kind == frameMessage, err)
}

// settleOpLocked ends o, appending to out, if it is acked and no writer needs it.
func (s *session) settleOpLocked(o *op, out []sessions.Ended) []sessions.Ended {
	if !o.acked || o.unsent > 0 {
		return out
	}
	return append(out, s.endLocked(o, s.verdict(o)))
}

// verdict is what the ack of o said.
func (s *session) verdict(o *op) error {
	if o.status != rdma.ReasonNone {
		return &rdma.RefusedError{Peer: s.Peer, Reason: o.status}
	}
	return nil
}

// acked takes a batch of acks of the peer and appends what ended to out. An ack
// may come twice, once more after a rail has died: the second says nothing.
func (s *session) acked(acks []byte, out []sessions.Ended) ([]sessions.Ended, error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for b := acks; len(b) >= ackSize; b = b[ackSize:] {
		a, err := decodeAck(b)
		if err != nil {
			return out, err
		}
		slot := uint32(a.op)
		if int(slot) >= len(s.Ops) {
			return out, fmt.Errorf("ack of operation %#x, which never was: %w", a.op, errFrame)
		}
		o := s.Ops[slot]
		switch behind := int32(o.Generation - uint32(a.op>>32)); {
		case behind < 0 || behind == 0 && !o.Submitted:
			return out, fmt.Errorf("ack of operation %#x, which has not begun: %w", a.op, errFrame)
		case behind > 0 || o.acked:
			continue
		}
		o.acked, o.status = true, a.status
		out = s.settleOpLocked(o, out)
	}
	return out, nil
}

// Fail begins the end of the session; only the first reason counts. It may be
// called from the session's own goroutines.
func (s *session) Fail(why error) {
	s.Mu.Lock()
	conns, first := s.condemnLocked(why)
	s.Mu.Unlock()
	if first {
		s.failed(conns)
	}
}

// condemnLocked makes the session refuse everything from here on, and returns the
// connections to close; first is whether it was this call that did.
func (s *session) condemnLocked(why error) (conns []*conn, first bool) {
	if !s.FailLocked(why) {
		return nil, false
	}
	s.unacked = s.Active > 0
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

// failed is what condemnLocked leaves to be done outside of the lock.
func (s *session) failed(conns []*conn) {
	close(s.Dying)
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
	var out []sessions.Ended
	s.Mu.Lock()
	for _, o := range s.Ops {
		if o.acked {
			out = append(out, s.endLocked(o, s.verdict(o)))
		} else if o.Submitted {
			out = append(out, s.endLocked(o, s.Why))
		}
	}
	s.Mu.Unlock()
	sessions.CallAll(out)
	s.e.core.Remove(s)
}

// part has the acks written that are queued: a peer that does not get them takes the
// end of this engine for a death. The result is closed when that is done; nil if there
// is nothing to do.
func (s *session) part() <-chan struct{} {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if s.Why != nil || s.acksOwed == 0 {
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
	for _, o := range s.Ops {
		if o.acked {
			over++
		}
	}
	return s.Active == over
}

// idle is idleLocked for readers.
func (s *session) idle() bool {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.idleLocked()
}

// hungUp reports whether the session ended because the peer was through.
func (s *session) hungUp() bool {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return errors.Is(s.Why, sessions.ErrHungUp)
}
