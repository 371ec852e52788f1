package group

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// session is the state that this engine holds for a connected peer: a control connection, the lanes
// between the NICs of the two engines, and the operations in flight.
type session struct {
	sessions.Session[*op]
	e   *Engine
	ctl *stream
	// lanes are indexed by class and pair of NICs: class*pairs+pair.
	lanes   []*lane
	pairs   int
	classes int
	// next rotates over lanes of equal load. ups is the number of times that a lane came up after
	// an endpoint that had worked.
	next, ups atomic.Uint32

	// settled is closed when each lane has come up or failed once.
	settled chan struct{}
	// running counts the goroutines of the session.
	running sync.WaitGroup
	// withdrawn are the keys that the peer has requested this engine not to use.
	withdrawn withdrawals
	requests  withdrawalRequests
	rx        inbound
	watchState

	// The fields below are guarded by Mu.
	//
	// parked are the jobs that wait because no lane is up.
	parked []job
	// unverified are the jobs that are sent again only if the target answers that it would accept
	// them. The key is the operation's number.
	unverified map[uint64][]job
	// unsettled is the number of lanes that have neither come up nor failed yet.
	unsettled int
	// messages are the messages in flight. seq is the seq of the last message sent, low the lowest
	// seq in flight.
	messages []*op
	seq, low uint64
}

// Queues of operations that wait for room in the session: one for writes, and one for messages,
// which also wait for room in messageWindow.
const (
	forWrite   = sessions.Plain
	forMessage = sessions.Limited
)

// newSession returns a session whose control connection has been set up.
func newSession(e *Engine, peer rdma.EngineID, dialed bool, ctl *stream, theirs *setup) *session {
	s := &session{
		e: e, ctl: ctl, settled: make(chan struct{}), low: 1,
		pairs: max(len(e.nics), len(theirs.nics)), classes: 1,
	}
	s.Remote = ctl.remoteAddr()
	s.Init(peer, dialed, &e.core.Counters, sessions.Rules[*op]{
		Ops: e.opts.InFlightOps, Bytes: e.opts.InFlightBytes,
		New: func() *op { return &op{kind: opWrite, final: noRun} }, Gone: s.gone,
		Room: s.messageRoom, Started: s.beginMessage, Ended: s.endMessage,
	})
	if e.opts.SeparateClasses || theirs.separate {
		s.classes = rdma.Classes
	}
	for i := range s.pairs * s.classes {
		s.lanes = append(s.lanes, newLane(s, i, rdma.Class(i/s.pairs), i%s.pairs%len(e.nics)))
	}
	s.unsettled = len(s.lanes)
	return s
}

// gone is the error of an operation on a session that ended for the reason why.
func (s *session) gone(why error) error {
	if errors.Is(why, rdma.ErrClosed) {
		return fmt.Errorf("rdma: %w", rdma.ErrClosed)
	}
	return fmt.Errorf("rdma: session with %v ended (%w): %w", s.Peer, why, rdma.ErrNoPeer)
}

// messageRoom reports whether a message may start.
func (s *session) messageRoom() bool {
	return len(s.messages) < messageWindow && s.seq+1 < s.low+sequenceWindow
}

// beginMessage makes o a message.
func (s *session) beginMessage(o *op) {
	s.seq++
	o.kind, o.seq, o.slotIndex = opMessage, s.seq, -1
	s.messages = append(s.messages, o)
}

// endMessage removes o from the messages in flight, if o is a message.
func (s *session) endMessage(o *op) {
	if o.kind != opMessage {
		return
	}
	o.kind = opWrite
	low := s.seq + 1
	kept := s.messages[:0]
	for _, m := range s.messages {
		if m != o {
			kept = append(kept, m)
			low = min(low, m.seq)
		}
	}
	clear(s.messages[len(kept):])
	s.messages, s.low = kept, low
}

// submit cuts o into jobs and posts as many as the endpoints accept.
func (s *session) submit(o *op) error {
	var touched laneSet
	var out []sessions.Ended
	s.Mu.Lock()
	if err := s.BeginLocked(o, s.e.core.Ticks.Load()); err != nil {
		s.Mu.Unlock()
		s.Unreserve(o)
		return err
	}
	out = s.layLocked(o, &touched, out)
	s.Mu.Unlock()
	touched.pump(s)
	sessions.CallAll(out)
	return nil
}

// endLocked ends o. It returns the callback that must be called after the lock is released.
func (s *session) endLocked(o *op, err error) sessions.Ended {
	if o.kind == opMessage && o.slotIndex >= 0 {
		s.e.outbox.give(o.slotIndex)
	}
	return s.EndLocked(o, o.kind == opMessage && !o.empty, err)
}

// byIDLocked returns the operation in flight with that number, or nil.
func (s *session) byIDLocked(id uint64) *op {
	slot := uint32(id)
	if int(slot) >= len(s.Ops) {
		return nil
	}
	if o := s.Ops[slot]; o.ID() == id && o.Submitted {
		return o
	}
	return nil
}

// retryNow ends the pauses of all lanes that wait before they open again.
func (s *session) retryNow() {
	for _, l := range s.lanes {
		l.retryNow()
	}
}

// settleOne records that a lane has come up or failed for the first time.
func (s *session) settleOne() {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if s.unsettled--; s.unsettled == 0 {
		close(s.settled)
	}
}

// Fail begins the end of the session. Only the reason of the first call is kept. The session's own
// goroutines may call Fail.
func (s *session) Fail(why error) {
	s.Mu.Lock()
	first := s.FailLocked(why)
	s.Mu.Unlock()
	if !first {
		return
	}
	close(s.Dying)
	s.e.core.Drop(s)
	s.ctl.close()
	go s.remove()
}

// remove shuts the endpoints. It ends the operations still in flight once no NIC can touch memory
// for the session.
func (s *session) remove() {
	for _, l := range s.lanes {
		l.stop(s.Why)
	}
	s.running.Wait()
	for _, l := range s.lanes {
		l.awaitClosed()
	}
	var out []sessions.Ended
	s.Mu.Lock()
	s.parked = nil
	for _, o := range s.Ops {
		if o.Submitted {
			o.lostGroup = nil
			out = append(out, s.endLocked(o, s.Why))
		}
	}
	s.Mu.Unlock()
	sessions.CallAll(out)
	s.e.core.Remove(s)
}

// idle reports whether this engine has no operation in flight in the session.
func (s *session) idle() bool {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.Active == 0
}
