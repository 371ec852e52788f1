package group

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/rdma"
)

// waiter is a submitter that waits for room.
type waiter struct {
	bytes int64
	// granted receives the reserved op, or nil when the session died.
	granted chan *op
}

// session is what two engines share: a control connection, the lanes over their
// NICs, and the operations in flight.
type session struct {
	e      *Engine
	peer   rdma.EngineID
	dialed bool
	// where is the address that this side has dialed, token the token that it has proved there. The side that
	// accepted has neither.
	where  string
	token  rdma.Token
	remote string
	ctl    *stream
	// lanes by class and pair of NICs: lane class*pairs+pair.
	lanes   []*lane
	pairs   int
	classes int
	// next rotates over lanes of equal load; ups counts how often one came up
	// whose last endpoint had worked.
	next, ups atomic.Uint32

	// settled is closed when each lane has come up or failed once; dying when
	// the session begins to end, removed when nothing of it is left.
	settled, dying, removed chan struct{}
	// running counts the goroutines of the session.
	running sync.WaitGroup
	// withdrawn are keys that the peer has asked not to use.
	withdrawn withdrawals
	asked     asked
	rx        inbound
	watchState

	mu sync.Mutex
	// why is set when the session begins to end.
	why       error
	freeBytes int64
	// Invariant: active = ops reserved or submitted = len(ops) - len(free).
	active int
	ops    []*op
	free   []*op
	// waiters for writes, and for messages, which have a window besides.
	waiters [2][]*waiter
	// parked are jobs that no lane can take now.
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

// Queues of waiters.
const (
	forWrite   = 0
	forMessage = 1
)

// newSession returns a session whose control connection has been set up.
func newSession(e *Engine, peer rdma.EngineID, dialed bool, ctl *stream, theirs *setup) *session {
	s := &session{
		e: e, peer: peer, dialed: dialed, ctl: ctl, remote: ctl.remoteAddr(),
		settled: make(chan struct{}), dying: make(chan struct{}), removed: make(chan struct{}),
		freeBytes: e.opts.InFlightBytes, seq: 0, low: 1,
		pairs: max(len(e.nics), len(theirs.nics)), classes: 1,
	}
	if e.opts.SeparateClasses || theirs.separate {
		s.classes = rdma.Classes
	}
	for i := range s.pairs * s.classes {
		s.lanes = append(s.lanes, newLane(s, i, rdma.Class(i/s.pairs), i%s.pairs%len(e.nics)))
	}
	s.unsettled = len(s.lanes)
	return s
}

// goneLocked is the error of an operation that finds the session ended.
func (s *session) goneLocked() error {
	if errors.Is(s.why, rdma.ErrClosed) {
		return fmt.Errorf("rdma: %w", rdma.ErrClosed)
	}
	return fmt.Errorf("rdma: session with %v ended (%w): %w", s.peer, s.why, rdma.ErrNoPeer)
}

// roomLocked reports whether an operation of that many bytes may start.
func (s *session) roomLocked(queue int, bytes int64) bool {
	if s.active >= s.e.opts.InFlightOps || s.freeBytes < bytes {
		return false
	}
	return queue == forWrite || len(s.messages) < messageWindow && s.seq+1 < s.low+sequenceWindow
}

// takeLocked reserves an op.
func (s *session) takeLocked(queue int, bytes int64) *op {
	var o *op
	if n := len(s.free); n > 0 {
		o, s.free = s.free[n-1], s.free[:n-1]
	} else {
		o = &op{slot: uint32(len(s.ops)), final: noRun}
		s.ops = append(s.ops, o)
	}
	o.reserved, o.bytes, o.kind = true, bytes, opWrite
	s.active++
	s.freeBytes -= bytes
	if queue == forMessage {
		o.kind = opMessage
		s.seq++
		o.seq = s.seq
		o.slotIndex = -1
		s.messages = append(s.messages, o)
	}
	return o
}

// giveLocked returns an op and what it was charged, and lets waiters in.
func (s *session) giveLocked(o *op) {
	if o.kind == opMessage {
		s.forgetMessageLocked(o)
	}
	s.active--
	s.freeBytes += o.bytes
	o.reset()
	s.free = append(s.free, o)
	for queue := range s.waiters {
		for len(s.waiters[queue]) > 0 && s.roomLocked(queue, s.waiters[queue][0].bytes) {
			w := s.waiters[queue][0]
			s.waiters[queue] = s.waiters[queue][1:]
			w.granted <- s.takeLocked(queue, w.bytes)
		}
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
}

// reserve takes an op for n bytes, waiting for room unless noWait. Waiters are
// served in order.
func (s *session) reserve(ctx context.Context, queue int, n uint64, noWait bool) (*op, error) {
	// An operation larger than the whole budget is charged all of it.
	bytes := int64(min(n, uint64(s.e.opts.InFlightBytes)))
	s.mu.Lock()
	if s.why != nil {
		defer s.mu.Unlock()
		return nil, s.goneLocked()
	}
	if len(s.waiters[queue]) == 0 && s.roomLocked(queue, bytes) {
		o := s.takeLocked(queue, bytes)
		s.mu.Unlock()
		return o, nil
	}
	if noWait {
		defer s.mu.Unlock()
		return nil, fmt.Errorf("rdma: %d operations in flight to %v: %w", s.active, s.peer, rdma.ErrBusy)
	}
	w := &waiter{bytes: bytes, granted: make(chan *op, 1)}
	s.waiters[queue] = append(s.waiters[queue], w)
	s.mu.Unlock()
	return s.await(ctx, queue, w)
}

// await waits for the grant of w.
func (s *session) await(ctx context.Context, queue int, w *waiter) (*op, error) {
	var o *op
	select {
	case o = <-w.granted:
	case <-ctx.Done():
		if !s.leave(queue, w) {
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
func (s *session) leave(queue int, w *waiter) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, x := range s.waiters[queue] {
		if x == w {
			s.waiters[queue] = append(s.waiters[queue][:i], s.waiters[queue][i+1:]...)
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

// beginLocked checks that the session is alive and marks o as submitted; after an
// error o has been given back.
func (s *session) beginLocked(o *op) error {
	if s.why != nil {
		return s.goneLocked()
	}
	o.submitted = true
	o.tick = s.e.ticks.Load()
	return nil
}

// submit cuts o into jobs and posts what there is room for.
func (s *session) submit(o *op) error {
	var touched laneSet
	var out []ended
	s.mu.Lock()
	if err := s.beginLocked(o); err != nil {
		s.mu.Unlock()
		s.unreserve(o)
		return err
	}
	out = s.layLocked(o, &touched, out)
	s.mu.Unlock()
	touched.pump(s)
	callAll(out)
	return nil
}

// endLocked gives o back and returns what is left to do outside of the lock.
func (s *session) endLocked(o *op, err error) ended {
	x := ended{o.done, err, o.src}
	if o.kind == opMessage && !o.empty {
		s.e.stats.SendEnded(err)
	} else {
		s.e.stats.WriteEnded(o.runBytes(), err)
	}
	if o.kind == opMessage && o.slotIndex >= 0 {
		s.e.outbox.give(o.slotIndex)
	}
	s.giveLocked(o)
	return x
}

// byIDLocked returns the operation in flight with that number, or nil.
func (s *session) byIDLocked(id uint64) *op {
	slot := uint32(id)
	if int(slot) >= len(s.ops) {
		return nil
	}
	if o := s.ops[slot]; o.id() == id && o.submitted {
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
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unsettled--; s.unsettled == 0 {
		close(s.settled)
	}
}

// fail begins the end of the session; only the first reason counts. It may be
// called from the session's own goroutines.
func (s *session) fail(why error) {
	s.mu.Lock()
	if s.why != nil {
		s.mu.Unlock()
		return
	}
	s.why = why
	for queue, ws := range s.waiters {
		for _, w := range ws {
			w.granted <- nil
		}
		s.waiters[queue] = nil
	}
	s.mu.Unlock()
	close(s.dying)
	s.e.forget(s)
	s.ctl.close()
	go s.remove()
}

// dead reports whether the session has begun to end.
func (s *session) dead() bool {
	select {
	case <-s.dying:
		return true
	default:
		return false
	}
}

// remove shuts the endpoints, and ends the operations that the session leaves
// behind once nothing of it can touch memory any more.
func (s *session) remove() {
	for _, l := range s.lanes {
		l.kill(s.why)
	}
	s.running.Wait()
	for _, l := range s.lanes {
		l.awaitQuiet()
	}
	var out []ended
	s.mu.Lock()
	s.parked = nil
	for _, o := range s.ops {
		if o.submitted {
			o.tie = nil
			out = append(out, s.endLocked(o, s.why))
		}
	}
	s.mu.Unlock()
	callAll(out)
	s.e.removed(s)
	close(s.removed)
}

// idle reports whether nothing is in flight from here.
func (s *session) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.active == 0
}

// overdue reports whether an operation has waited for its end since before the
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
