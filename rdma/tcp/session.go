package tcp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/rdma"
)

// run is contiguous both in the source and at the target.
type run struct{ src, dst, n uint64 }

// op is one operation that this side submitted. Ops are recycled: a session has
// as many as were ever in flight at once.
type op struct {
	// slot and generation make the number on the wire, so that an ack of an
	// operation that has ended is recognised.
	slot, generation uint32

	kind uint8
	key  uint64
	imm  rdma.Imm
	done func(error)
	src  *region // nil for messages and empty writes
	mem  []byte  // what runs' src offsets count in
	// runs are cut into frames: frame i is runs[cuts[i-1]:cuts[i]].
	runs  []run
	cuts  []uint32
	msg   []byte // copy of the message, kept for reuse when small
	bytes int64  // what the budget was charged

	// reserved: a submitter is filling it in. submitted: it ends by an ack or
	// with the session. Both guarded by session.mu, as are the fields below.
	reserved, submitted bool
	// unsent counts frames that a writer may still read from. An op ends when
	// it is acked and unsent is 0: an ack that comes early, by a peer's error
	// or because our writer was slow to wake, must not free the source.
	unsent int
	acked  bool
	status rdma.Reason
	tick   uint64 // of the engine's clock, at submission
}

// id returns the operation's number on the wire.
func (o *op) id() uint64 { return uint64(o.generation)<<32 | uint64(o.slot) }

// What an idle op keeps for its next use, at most: a message buffer of 4 KiB,
// and runs of 48 KiB. Larger operations allocate.
const (
	keptMessageBytes = 4 << 10
	keptRuns         = 2 << 10
)

// reset makes o ready for its next use.
func (o *op) reset() {
	o.generation++
	o.done, o.src, o.mem = nil, nil, nil
	o.imm = rdma.Imm{}
	o.runs, o.cuts = o.runs[:0], o.cuts[:0]
	if cap(o.msg) > keptMessageBytes {
		o.msg = nil
	}
	if cap(o.runs) > keptRuns {
		o.runs, o.cuts = nil, nil
	}
	o.msg = o.msg[:0]
	o.reserved, o.submitted, o.acked = false, false, false
	o.unsent, o.status, o.bytes = 0, rdma.ReasonNone, 0
}

// add appends n bytes from src in the source to dst at the target, merging
// neighbours and cutting frames at piece bytes. frame is how many bytes the
// last frame has; add returns its new value.
func (o *op) add(src, dst, n, piece, frame uint64) uint64 {
	for n > 0 {
		first := uint32(0)
		if len(o.cuts) > 0 {
			first = o.cuts[len(o.cuts)-1]
		}
		if frame == piece || uint32(len(o.runs))-first == maxRuns {
			o.cuts = append(o.cuts, uint32(len(o.runs)))
			first, frame = uint32(len(o.runs)), 0
		}
		take := min(n, piece-frame)
		if last := len(o.runs) - 1; last >= int(first) && o.runs[last].src+o.runs[last].n == src && o.runs[last].dst+o.runs[last].n == dst {
			o.runs[last].n += take
		} else {
			o.runs = append(o.runs, run{src, dst, take})
		}
		src, dst, n, frame = src+take, dst+take, n-take, frame+take
	}
	return frame
}

// seal ends the last frame; an operation without bytes has one empty frame.
func (o *op) seal() { o.cuts = append(o.cuts, uint32(len(o.runs))) }

// ended is an operation whose Done is to be called, outside of all locks.
type ended struct {
	done func(error)
	err  error
	src  *region
}

// call runs the callback, if there is one, and then gives up the source: after
// Region.Close no callback is outstanding.
func (x ended) call() {
	if x.done != nil {
		x.done(x.err)
	}
	if x.src != nil {
		x.src.release()
	}
}

// waiter is a submitter that waits for room.
type waiter struct {
	bytes int64
	// granted receives the reserved op, or nil when the session died.
	granted chan *op
}

// inbound is an operation of the peer of which some frames have arrived.
type inbound struct {
	frames, left uint32
	reason       rdma.Reason
}

// session is what two engines share: N connections, and the operations in
// flight in both directions.
type session struct {
	e      *Engine
	peer   rdma.EngineID
	id     [16]byte
	dialed bool
	conns  []*conn
	// ready is closed when all connections have proved the token, dying when
	// the session begins to end, buried when nothing of it is left.
	ready, dying, buried chan struct{}
	// running counts readers and writers.
	running sync.WaitGroup

	mu sync.Mutex
	// why is set when the session begins to end.
	why       error
	freeBytes int64
	// Invariant: active = ops reserved or submitted = len(ops) - len(free).
	active  int
	ops     []*op
	free    []*op
	waiters []*waiter
	// nextConn breaks ties between equally loaded connections.
	nextConn int

	inbound map[uint64]inbound
	// acksOwed are operations of the peer that have landed and whose ack is not
	// written yet.
	acksOwed int
	// joined counts the connections that proved the token; armed is set when
	// all have.
	joined int
	armed  bool
}

// inboundMax bounds what the peer can make us remember. The peer may have MaxOps
// in flight; it may see an ack before our writer has noted that it was written.
const inboundMax = 4 * MaxOps

// newSession returns a session without connections.
func newSession(e *Engine, peer rdma.EngineID, id [16]byte, conns int, dialed bool) *session {
	return &session{
		e: e, peer: peer, id: id, dialed: dialed,
		conns: make([]*conn, conns),
		ready: make(chan struct{}), dying: make(chan struct{}), buried: make(chan struct{}),
		freeBytes: e.opts.InFlightBytes,
		inbound:   make(map[uint64]inbound),
	}
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
		o = &op{slot: uint32(len(s.ops))}
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
		src.release()
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
	lo := uint32(0)
	for _, hi := range o.cuts {
		n := int64(len(o.msg))
		for _, r := range o.runs[lo:hi] {
			n += int64(r.n)
		}
		c := s.conns[0] // messages: one connection, so that they mostly keep their order
		if o.kind == frameWrite {
			c = s.idlestLocked()
		}
		c.push(frame{o, lo, hi, n})
		lo = hi
	}
	s.mu.Unlock()
	return nil
}

// idlestLocked returns the connection with the fewest bytes queued.
func (s *session) idlestLocked() *conn {
	n := len(s.conns)
	best := s.conns[s.nextConn%n]
	least := best.queued.Load()
	for i := 1; i < n && least > 0; i++ {
		if c := s.conns[(s.nextConn+i)%n]; c.queued.Load() < least {
			best, least = c, c.queued.Load()
		}
	}
	s.nextConn = best.index + 1
	return best
}

// endLocked gives o back and returns what is left to do outside of the lock.
func (s *session) endLocked(o *op, err error) ended {
	x := ended{o.done, err, o.src}
	st := &s.e.stats
	switch {
	case o.kind == frameMessage && err == nil:
		st.sendsOut.Add(1)
	case o.kind == frameMessage:
		st.sendFailuresOut.Add(1)
	case err == nil:
		st.writesOut.Add(1)
		for _, r := range o.runs {
			st.writeBytesOut.Add(r.n)
		}
	default:
		st.writeFailuresOut.Add(1)
	}
	s.giveLocked(o)
	return x
}

// settleLocked ends o, appending to out, if it is acked and no writer needs it.
func (s *session) settleLocked(o *op, out []ended) []ended {
	if !o.acked || o.unsent > 0 {
		return out
	}
	var err error
	if o.status != rdma.ReasonNone {
		err = &rdma.RefusedError{Peer: s.peer, Reason: o.status}
	}
	return append(out, s.endLocked(o, err))
}

// acked takes a batch of acks of the peer and appends what ended to out.
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
		if o.id() != a.op || !o.submitted || o.acked {
			return out, fmt.Errorf("ack of operation %#x, which is not in flight: %w", a.op, errFrame)
		}
		o.acked, o.status = true, a.status
		out = s.settleLocked(o, out)
	}
	return out, nil
}

// wrote notes that a writer is through with a batch, and appends what ended to
// out.
func (s *session) wrote(batch []frame, acks int, out []ended) []ended {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.acksOwed -= acks
	for _, f := range batch {
		f.op.unsent--
		out = s.settleLocked(f.op, out)
	}
	return out
}

// landed notes that one frame of a write of the peer has been placed, or
// refused with a reason. It reports whether the operation is complete, and how
// it ended.
func (s *session) landed(h *header, reason rdma.Reason) (complete bool, _ rdma.Reason, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.inbound)+s.acksOwed >= inboundMax {
		return false, 0, fmt.Errorf("more than %d operations in flight: %w", inboundMax, errFrame)
	}
	in, known := s.inbound[h.op]
	if h.frames == 1 && !known {
		s.acksOwed++
		return true, reason, nil
	}
	if !known {
		in = inbound{frames: h.frames, left: h.frames}
	}
	if in.frames != h.frames {
		return false, 0, fmt.Errorf("operation %#x has %d frames, then %d: %w", h.op, in.frames, h.frames, errFrame)
	}
	in.left--
	if in.reason == rdma.ReasonNone {
		in.reason = reason
	}
	if in.left > 0 {
		s.inbound[h.op] = in
		return false, 0, nil
	}
	delete(s.inbound, h.op)
	s.acksOwed++
	return true, in.reason, nil
}

// owe notes that an ack is due for a message.
func (s *session) owe() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.inbound)+s.acksOwed >= inboundMax {
		return fmt.Errorf("more than %d operations in flight: %w", inboundMax, errFrame)
	}
	s.acksOwed++
	return nil
}

// join adds an authenticated connection while the session is being assembled,
// and reports whether it was the last one that was missing.
func (s *session) join(c *conn) (complete bool, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.why != nil {
		return false, s.goneLocked()
	}
	if c.index >= len(s.conns) || s.conns[c.index] != nil {
		return false, fmt.Errorf("connection %d of %d joined twice: %w", c.index, len(s.conns), errFrame)
	}
	s.conns[c.index] = c
	s.joined++
	return s.joined == len(s.conns), nil
}

// arm makes the session wait, when it ends, for the readers and writers that
// start will begin: two for each connection. False if it has ended already.
func (s *session) arm() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.why != nil {
		return false
	}
	s.armed = true
	s.running.Add(2 * len(s.conns))
	return true
}

// abandon ends the session for a connection that start will not see, and takes
// back what arm counted for it.
func (s *session) abandon(why error) {
	s.fail(why)
	s.mu.Lock()
	defer s.mu.Unlock()
	// The session has ended, so that arm does nothing from here.
	if s.armed {
		s.running.Add(-2)
	}
}

// start begins the reader and the writer of connection c, which arm counted.
func (s *session) start(c *conn) {
	go func() {
		defer s.running.Done()
		c.read()
	}()
	go func() {
		defer s.running.Done()
		c.write()
	}()
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
	for _, w := range s.waiters {
		w.granted <- nil
	}
	s.waiters = nil
	conns := slices.Clone(s.conns)
	s.mu.Unlock()
	close(s.dying)
	s.e.forget(s)
	for _, c := range conns {
		if c != nil {
			_ = c.nc.Close()
		}
	}
	go s.bury()
}

// bury ends the operations that the session leaves behind, once no reader or
// writer of it can touch memory any more.
func (s *session) bury() {
	s.running.Wait()
	var out []ended
	s.mu.Lock()
	for _, o := range s.ops {
		if o.submitted {
			out = append(out, s.endLocked(o, s.why))
		}
	}
	s.mu.Unlock()
	for _, x := range out {
		x.call()
	}
	s.e.buried(s)
	close(s.buried)
}

// idle reports whether no operation is in flight in either direction.
func (s *session) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.active == 0 && len(s.inbound) == 0
}

// hungUp reports whether the session ended because the peer was through.
func (s *session) hungUp() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Is(s.why, errHungUp)
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
