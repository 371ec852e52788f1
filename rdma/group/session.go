package group

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// session is what two engines share: a control connection, the lanes over their
// NICs, and the operations in flight.
type session struct {
	sessions.Session[*op]
	e   *Engine
	ctl *stream
	// lanes by class and pair of NICs: lane class*pairs+pair.
	lanes   []*lane
	pairs   int
	classes int
	// next rotates over lanes of equal load; ups counts how often one came up
	// whose last endpoint had worked.
	next, ups atomic.Uint32

	// settled is closed when each lane has come up or failed once.
	settled chan struct{}
	// running counts the goroutines of the session.
	running sync.WaitGroup
	// withdrawn are keys that the peer has asked not to use.
	withdrawn withdrawals
	asked     asked
	rx        inbound
	watchState

	// Guarded by Mu, as are the fields below: parked are jobs that no lane can take
	// now.
	parked []job
	// doubts are jobs of operations that are asked about before they are sent
	// again, by the operation's number.
	doubts map[uint64][]job
	// unsettled counts lanes that have neither come up nor failed yet.
	unsettled int
	// messages are those in flight; seq is the last one's number, low the lowest
	// that is in flight.
	messages []*op
	seq, low uint64
}

// Queues of waiters: for writes, and for messages, which have a window besides.
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
		Room: s.messageRoom, Taken: s.beginMessage, Given: s.endMessage,
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

// gone is the error of an operation that finds the session ended for why.
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

// beginMessage makes a message of o.
func (s *session) beginMessage(o *op) {
	s.seq++
	o.kind, o.seq, o.slotIndex = opMessage, s.seq, -1
	s.messages = append(s.messages, o)
}

// endMessage takes o out of the messages in flight, if it is one.
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

// submit cuts o into jobs and posts what there is room for.
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

// endLocked gives o back and returns what is left to do outside of the lock.
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

// hurry opens lanes at once that would wait for a while.
func (s *session) hurry() {
	for _, l := range s.lanes {
		l.hurry()
	}
}

// settleOne notes that a lane has come up, or failed, for the first time.
func (s *session) settleOne() {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if s.unsettled--; s.unsettled == 0 {
		close(s.settled)
	}
}

// Fail begins the end of the session; only the first reason counts. It may be
// called from the session's own goroutines.
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

// remove shuts the endpoints, and ends the operations that the session leaves
// behind once nothing of it can touch memory any more.
func (s *session) remove() {
	for _, l := range s.lanes {
		l.kill(s.Why)
	}
	s.running.Wait()
	for _, l := range s.lanes {
		l.awaitQuiet()
	}
	var out []sessions.Ended
	s.Mu.Lock()
	s.parked = nil
	for _, o := range s.Ops {
		if o.Submitted {
			o.tie = nil
			out = append(out, s.endLocked(o, s.Why))
		}
	}
	s.Mu.Unlock()
	sessions.CallAll(out)
	s.e.core.Remove(s)
}

// idle reports whether nothing is in flight from here.
func (s *session) idle() bool {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.Active == 0
}
