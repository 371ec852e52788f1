package tcp

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// session is the state that this engine holds for a connected peer: the rails between the NICs of
// the two engines, and the operations in flight in both directions.
type session struct {
	sessions.Session[*op]
	e     *Engine
	id    [16]byte
	rails []*rail
	// ctx ends when the session begins to end (Fail).
	ctx    context.Context
	cancel context.CancelFunc
	// activating adds the session to the engine once, when its first rail is up.
	activating sync.Once
	// running is the number of readers, writers and redialing goroutines. It is incremented under
	// Mu while Why is nil.
	running sync.WaitGroup

	// The fields below are guarded by Mu. unacked: local operations were in flight when the
	// session began to end.
	unacked bool
	// up is the number of rails in state railUp. peerClosed: a rail ended because the peer closed
	// the session with no operation in flight.
	up         int
	peerClosed bool
	// lanes has one queue for each class, or one for all.
	lanes []*lane
	// messages are queued for messenger, the only connection that carries messages, so that
	// messages usually keep their order.
	messages  queue
	messenger *conn

	// inbound is indexed by the slot of the peer's operation. openOps is the number of incomplete
	// operations of the peer, and openFrames the number of their pieces.
	inbound             []inbound
	openOps, openFrames int
	// acksOwed is the number of acks of complete operations that are not written yet. acksDrained,
	// if not nil, is closed when acksOwed is 0 or the session ends.
	acksOwed    int
	acksDrained chan struct{}
	// ended is closed when the streams of all connections have ended.
	ended chan struct{}
}

// newSession returns a session whose n rails are all down. conns is the number of connections
// of each lane of a rail.
func newSession(e *Engine, peer rdma.EngineID, id [16]byte, n, lanes, conns int, dialed bool) *session {
	s := &session{e: e, id: id, ended: make(chan struct{})}
	s.Init(peer, dialed, &e.core.Counters, sessions.Rules[*op]{
		Ops: e.opts.InFlightOps, Bytes: e.opts.InFlightBytes,
		New: func() *op { return &op{} }, Gone: s.gone,
		Room: func() bool { return s.Limited < MaxMessages },
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

// gone is the error of an operation on a session that ended for the reason why.
func (s *session) gone(why error) error {
	return fmt.Errorf("rdma: session with %v ended (%w): %w", s.Peer, why, rdma.ErrNoPeer)
}

// submit queues the frames of o. If it returns an error it has released o.
func (s *session) submit(o *op) error {
	s.Mu.Lock()
	if err := s.BeginLocked(o, s.e.core.Ticks.Load()); err != nil {
		s.Mu.Unlock()
		s.Unreserve(o)
		return err
	}
	o.unsent = len(o.cuts)
	if o.kind == frameMessage {
		// A sender with more than half of MaxMessages in flight does not permit delayed acks.
		o.ackMayWait = 2*s.Limited <= MaxMessages
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

// lane returns the lane of a class. If the session's dialer marks no classes, there is one lane
// for all classes.
func (s *session) lane(class rdma.Class) *lane {
	if int(class) < len(s.lanes) {
		return s.lanes[class]
	}
	return s.lanes[0]
}

// endLocked ends o. It returns the callback that must be called after the lock is released.
func (s *session) endLocked(o *op, err error) sessions.Ended {
	return s.EndLocked(o, o.kind == frameMessage, err)
}

// settleOpLocked ends o, if o is acked and no writer needs o any more. It appends o to out.
func (s *session) settleOpLocked(o *op, out []sessions.Ended) []sessions.Ended {
	if !o.acked || o.unsent > 0 {
		return out
	}
	return append(out, s.endLocked(o, s.verdict(o)))
}

// verdict returns the error that the ack of o reported.
func (s *session) verdict(o *op) error {
	if o.status != rdma.ReasonNone {
		return &rdma.RefusedError{Peer: s.Peer, Reason: o.status}
	}
	return nil
}

// acked handles a batch of acks of the peer and appends the operations that ended to out. A rail
// failure may repeat an ack; the repetition is ignored.
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

// Fail begins the end of the session. Only the reason of the first call is kept. The session's own
// goroutines may call Fail.
func (s *session) Fail(why error) {
	s.Mu.Lock()
	conns, first := s.beginEndLocked(why)
	s.Mu.Unlock()
	if first {
		s.finishEnd(conns)
	}
}

// beginEndLocked makes the session refuse new operations and returns the connections to close.
// first: this call, and no earlier call, ended the session.
func (s *session) beginEndLocked(why error) (conns []*conn, first bool) {
	if !s.FailLocked(why) {
		return nil, false
	}
	s.unacked = s.Active > 0
	if s.acksDrained != nil {
		close(s.acksDrained)
		s.acksDrained = nil
	}
	for _, r := range s.rails {
		conns = append(conns, r.conns...)
		// remove waits for the packets of these connections too.
		conns = append(conns, r.resetting...)
		r.resetting = nil
	}
	return conns, true
}

// finishEnd does the work that beginEndLocked leaves for the time after the lock is released.
func (s *session) finishEnd(conns []*conn) {
	close(s.Dying)
	s.cancel()
	s.e.forget(s)
	for _, c := range conns {
		c.close(s.unacked) // unacked does not change after beginEndLocked
	}
	go s.remove(conns)
}

// remove ends the remaining operations of the session. Before that, it waits until no reader or
// writer can touch memory and no packet of conns in this host refers to a source. It waits at most
// IdleTimeout for a queue that does not empty (a NIC without carrier). By then the peer has ended
// the silent session, so a packet that leaves later finds the connection closed.
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

// drainAcks waits for the queued acks to be written, because a peer that does not receive them
// reports the end of this engine as a failure. The returned channel is closed when the acks are
// written; it is nil if none are queued.
func (s *session) drainAcks() <-chan struct{} {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if s.Why != nil || s.acksOwed == 0 {
		return nil
	}
	s.acksDrained = make(chan struct{})
	for _, r := range s.rails {
		for _, c := range r.conns {
			c.signal()
		}
	}
	return s.acksDrained
}

// idleLocked reports whether no operation is in flight in either direction. It counts an acked
// operation as ended, even if the operation's writer has not settled it yet.
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

// idle is idleLocked for callers without the lock.
func (s *session) idle() bool {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.idleLocked()
}

// endedNormally reports whether the session ended because the peer closed it with no operation in
// flight.
func (s *session) endedNormally() bool {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return errors.Is(s.Why, sessions.ErrPeerClosed)
}
