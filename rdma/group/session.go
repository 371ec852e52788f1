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

// Jobs of an operation that is spread have at most PieceBytes, and this many
// runs.
const pieceRuns = 64

// layLocked cuts o into jobs and hands them to lanes.
//
// An operation that is small, or has one lane to go by, is one job; its
// immediate goes with its last run if that run's arrival tells that the others
// have arrived too, and that none of them was refused. Otherwise pieces go
// wherever there is least to do, and the tail, with the immediate, when they
// are all in place.
func (s *session) layLocked(o *op, touched *laneSet, out []ended) []ended {
	_, withImm := o.imm.Get()
	lanes := s.usableLocked(o.class)
	n := uint32(len(o.runs))
	total := o.runBytes()
	whole := lanes <= 1 || total <= uint64(s.e.opts.PieceBytes) && n <= pieceRuns
	if o.attempts == 0 && whole && (!withImm || n == 1 || s.e.counted) {
		o.left = int(n)
		return s.placeLocked(job{op: o, hi: n, imm: withImm}, touched, out)
	}
	if withImm {
		o.keepBack()
		n = o.final
	}
	o.left = int(n)
	if n == 0 {
		return s.advanceLocked(o, touched, out)
	}
	// left must not reach zero before the last job is placed.
	o.left++
	piece := uint64(s.e.opts.PieceBytes)
	for lo := uint32(0); lo < n; {
		hi, bytes := lo+1, o.runs[lo].n
		for !whole && hi < n && hi-lo < pieceRuns && bytes+o.runs[hi].n <= piece || whole && hi < n {
			bytes += o.runs[hi].n
			hi++
		}
		out = s.placeLocked(job{op: o, lo: lo, hi: hi}, touched, out)
		lo = hi
	}
	o.left--
	return s.advanceLocked(o, touched, out)
}

// usableLocked returns how many lanes of a class are up.
func (s *session) usableLocked(class rdma.Class) int {
	n := 0
	for _, l := range s.lanesOf(class) {
		if l.up.Load() {
			n++
		}
	}
	return n
}

// lanesOf returns the lanes for a class.
func (s *session) lanesOf(class rdma.Class) []*lane {
	if s.classes == 1 {
		return s.lanes
	}
	i := int(class) * s.pairs
	return s.lanes[i : i+s.pairs]
}

// placeLocked queues j on the lane with the least to do; if none is up, until
// one is.
func (s *session) placeLocked(j job, touched *laneSet, out []ended) []ended {
	o := j.op
	lanes := s.lanesOf(o.class)
	for {
		best, stale := s.chooseLocked(o, lanes)
		if stale {
			// Every NIC that the Desc names is gone, and others are there.
			o.left -= int(j.hi - j.lo)
			s.refuseLocked(o, why{op: o.id(), serial: o.keys[0].serial, key: o.keys[0].key, addr: o.base, n: 0}, nil)
			return s.advanceLocked(o, touched, out)
		}
		if best == nil {
			s.parked = append(s.parked, j)
			return out
		}
		if best.push(j) {
			touched.add(best)
			return out
		}
	}
}

// chooseLocked returns the lane for an operation, or nil if none is up; stale
// says that some are up and the Desc knows none of their NICs.
func (s *session) chooseLocked(o *op, lanes []*lane) (best *lane, stale bool) {
	ups := 0
	if o.kind == opMessage {
		for _, l := range s.lanes {
			if l.up.Load() {
				return l, false
			}
		}
		return nil, false
	}
	n := uint32(len(lanes))
	start := s.next.Add(1) % n
	least := int64(0)
	known := false
	for i := range n {
		l := lanes[(start+i)%n]
		serial := l.remoteSerial.Load()
		if _, ok := o.key(serial); serial != 0 && !ok {
			if l.up.Load() {
				ups++
			}
			continue
		}
		known = true
		if !l.up.Load() || o.src != nil && !o.src.on(l.nicIndex) {
			continue
		}
		if load := l.load.Load(); best == nil || load < least {
			best, least = l, load
		}
	}
	return best, !known && ups > 0
}

// refuseLocked notes that the target does not take o; what it is asked about is
// the first refused piece. said is what the NIC said of it, if anything.
func (s *session) refuseLocked(o *op, w why, said error) {
	if o.dead.Swap(true) {
		return
	}
	o.refusal, o.said = w, said
}

// advanceLocked does what is next for o, if all its runs are done: ask why it
// was refused, send the final run, or end it.
func (s *session) advanceLocked(o *op, touched *laneSet, out []ended) []ended {
	if o.left > 0 || !o.submitted {
		return out
	}
	switch {
	case o.kind == opMessage:
		if !o.acked {
			return out
		}
		var err error
		if o.reason != rdma.ReasonNone {
			err = &rdma.RefusedError{Peer: s.peer, Reason: o.reason}
		}
		return append(out, s.endLocked(o, err))
	case o.tie != nil:
		return s.tiedLocked(o, touched, out)
	case o.dead.Load():
		if o.reason != rdma.ReasonNone {
			return append(out, s.endLocked(o, &rdma.RefusedError{Peer: s.peer, Reason: o.reason}))
		}
		if !o.asked {
			o.asked = true
			w := o.refusal
			s.ctl.send(func(b []byte) []byte { return w.append(b) })
		}
		return out
	case o.final != noRun:
		f := o.final
		o.final, o.left = noRun, 1
		return s.placeLocked(job{op: o, lo: f, hi: f + 1, imm: true, tail: true}, touched, out)
	}
	return append(out, s.endLocked(o, nil))
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

// attemptsMax is how often an operation is begun again whose refusal its target
// can't explain.
const attemptsMax = 3

// doubtLocked keeps jobs of o, which a broken endpoint lost, until the target has
// said that it would take them: where a refusal breaks an endpoint, one of what
// was lost may be what broke it, and would do so again.
func (s *session) doubtLocked(o *op, jobs ...job) {
	if s.doubts == nil {
		s.doubts = make(map[uint64][]job)
	}
	id := o.id()
	kept, asked := s.doubts[id]
	s.doubts[id] = append(kept, jobs...)
	if asked {
		return
	}
	o.left++ // for the answer
	// A window is contiguous: it holds all runs if it holds what spans them.
	lo, hi := o.runs[0].dst, uint64(0)
	for _, r := range o.runs {
		lo, hi = min(lo, r.dst), max(hi, r.dst+r.n)
	}
	k := o.keys[0]
	for _, l := range s.lanesOf(o.class) {
		if serial := l.remoteSerial.Load(); serial != 0 {
			if key, ok := o.key(serial); ok {
				k = remoteKey{serial, key}
				break
			}
		}
	}
	w := why{op: id, serial: k.serial, key: k.key, addr: o.base + lo, n: hi - lo}
	s.ctl.send(func(b []byte) []byte { return w.append(b) })
}

// because takes the target's word on an operation: why it was refused, or that it
// would not be.
func (s *session) because(a because) {
	var touched laneSet
	var out []ended
	s.mu.Lock()
	if o := s.byIDLocked(a.op); o == nil {
		delete(s.doubts, a.op)
	} else if jobs, doubted := s.doubts[a.op]; doubted {
		delete(s.doubts, a.op)
		out = s.resolveLocked(o, jobs, a.reason, &touched, out)
	} else if o.asked {
		out = s.explainLocked(o, a.reason, &touched, out)
	}
	s.mu.Unlock()
	touched.pump(s)
	callAll(out)
	if a.reason != rdma.ReasonNone {
		s.hurry()
	}
}

// resolveLocked ends a doubt.
func (s *session) resolveLocked(o *op, jobs []job, reason rdma.Reason, touched *laneSet, out []ended) []ended {
	o.left--
	if reason != rdma.ReasonNone {
		o.reason = reason
		o.dead.Store(true)
	}
	for _, j := range jobs {
		if o.dead.Load() {
			o.left -= int(j.hi - j.lo)
		} else {
			out = s.placeLocked(j, touched, out)
		}
	}
	return s.advanceLocked(o, touched, out)
}

// explainLocked ends an operation that was refused, or begins it again if its
// target can't tell why.
func (s *session) explainLocked(o *op, reason rdma.Reason, touched *laneSet, out []ended) []ended {
	if reason == rdma.ReasonNone && o.attempts < attemptsMax {
		// The key was good when it was asked about: a withdrawal that ended in
		// between, or a NIC that was replaced.
		o.attempts++
		o.asked = false
		o.final = noRun
		o.dead.Store(false)
		return s.layLocked(o, touched, out)
	}
	err := &rdma.RefusedError{Peer: s.peer, Reason: reason}
	if reason == rdma.ReasonNone {
		if err.Err = o.said; o.said == nil {
			err.Reason = rdma.ReasonKey
		}
	}
	return append(out, s.endLocked(o, err))
}

// hurry opens lanes at once that would wait for a while.
func (s *session) hurry() {
	for _, l := range s.lanes {
		l.hurry()
	}
}

// unpark hands out the jobs that waited for a lane.
func (s *session) unpark() {
	var touched laneSet
	var out []ended
	s.mu.Lock()
	jobs := s.parked
	s.parked = nil
	for _, j := range jobs {
		out = s.placeLocked(j, &touched, out)
	}
	s.mu.Unlock()
	touched.pump(s)
	callAll(out)
}

// replace hands out jobs that a lane has given up. One that would have carried
// the immediate behind others is kept back: what was posted before it may have
// to be sent again.
func (s *session) replace(jobs []job) {
	if len(jobs) == 0 {
		return
	}
	var touched laneSet
	var out []ended
	s.mu.Lock()
	if s.why != nil {
		s.mu.Unlock()
		return
	}
	for _, j := range jobs {
		o := j.op
		if j.imm {
			j.imm = false
			j.hi--
			o.final = j.hi
			o.left--
		}
		if j.hi > j.lo {
			out = s.placeLocked(j, &touched, out)
		} else {
			out = s.advanceLocked(o, &touched, out)
		}
	}
	s.mu.Unlock()
	touched.pump(s)
	callAll(out)
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
