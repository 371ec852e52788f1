package group

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// lane connects one local NIC to one NIC of a peer, for one traffic class. A lane outlives its
// endpoints: when an endpoint breaks, the lane makes another with the next epoch.
type lane struct {
	s        *session
	index    int
	class    rdma.Class
	nicIndex int

	// up, remoteSerial and load are read without mu to choose a lane. up: the endpoint accepts
	// posts. remoteSerial: the serial number of the peer's NIC, 0 until it is known. load: the sum
	// of the weights of queued and posted Works (job.load).
	up           atomic.Bool
	remoteSerial atomic.Uint32
	load         atomic.Int64
	// touched is true while the lane is in nic.touched. Only the NIC's poller uses it.
	touched bool

	mu sync.Mutex
	// queue[head:] are the jobs to be posted on cur, sorted by rank. It is empty unless cur is up.
	// ranks holds the number of jobs of each rank.
	queue []job
	head  int
	ranks [rankBulk]int
	works []Work
	// cur is the endpoint in use. It stays cur until both engines have closed it and exchanged
	// their counts of arrived immediates. last is the most recent endpoint.
	cur, last *end
	epoch     uint32
	// opening is not nil while an endpoint is being made. The channel is closed when the endpoint
	// is made or has failed.
	opening chan struct{}
	// settled: the lane has come up or failed at least once. stopped: the session has ended.
	settled, stopped bool
	// failures is the number of consecutive failures. It determines the pause before the next
	// attempt. why is the reason of the last failure.
	failures int
	why      error
	pause    *time.Timer
}

// endState is the state of an endpoint.
type endState uint8

const (
	// endOpening: addresses are being exchanged.
	endOpening endState = 0
	endUp      endState = 1
	// endClosing: the endpoint is shut. Remaining completions and arrived immediates are being
	// polled.
	endClosing endState = 2
	// endClosed: the endpoint is closed. Lost payload and immediates have not been sent again yet.
	endClosed endState = 3
)

// record is one posted Work.
type record struct {
	op   *op
	run  uint32
	imm  bool
	tail bool
	used bool
	// immSeq is the index of an immediate among all immediates posted on its endpoint.
	immSeq uint64
	load   int64
	tick   uint64
}

// ahead returns the bytes that the record adds to end.ahead, the posted payload of writes.
func (r *record) ahead() int64 {
	if r.op.kind == opMessage {
		return 0
	}
	return r.load - postCost
}

// end is one endpoint of a lane. Its fields are guarded by lane.mu.
type end struct {
	lane  *lane
	nic   *nic
	ep    Endpoint
	index uint32 // index in nic.ends: the high half of cookies
	epoch uint32

	state endState
	cause error
	// connecting: Connect is running. connected: Connect has succeeded. peerReady: the peer's
	// Connect has succeeded.
	connecting, connected, peerReady bool
	// polled: all completions that had arrived before Shut returned have been polled.
	polled bool
	// closed is closed when the endpoint has been closed.
	closed chan struct{}
	// worked: the target has answered at least one Work.
	worked bool
	tick   uint64 // the engine's tick at which the endpoint was made

	records  []record
	free     []uint32
	inflight int
	// ahead is the payload of the posted writes, in bytes.
	ahead  int64
	broken []record
	// finishing is the number of completions that have not been passed to the session yet.
	finishing int

	// immSent counts the posted immediates, immOK the immediates that completed successfully, and
	// immOut the immediates in flight. okTally counts the successful immediates of each value
	// since the last checkpoint; it is nil if Engine.counted is set. sinceCheck counts the posted
	// immediates since the last checkpoint. checking: a checkpoint is due or requested, so
	// immediates wait.
	immSent, immOK, immOut uint64
	okTally                map[uint32]uint32
	sinceCheck             int
	checking               bool

	// arrived is the number of the peer's immediates that arrived. arrivedTally is the number for
	// each value since the last checkpoint. When arrived reaches check, the tally is cleared as
	// the peer has requested (0: no request).
	arrived      uint64
	arrivedTally map[uint32]uint32
	check        uint64
	reported     bool // arrived was sent to the peer, so no further immediate may be counted

	// down is the peer's report of the immediates that arrived at the peer's endpoint.
	// downComplete: all frames of the report have arrived.
	down         laneDown
	downComplete bool
	resolved     bool
}

// newLane returns a lane that has no endpoint yet.
func newLane(s *session, index int, class rdma.Class, nicIndex int) *lane {
	return &lane{s: s, index: index, class: class, nicIndex: nicIndex}
}

// laneSet collects the lanes that have new jobs to post.
type laneSet struct {
	some [4]*lane
	n    int
	all  bool
}

// add adds l to the set.
func (t *laneSet) add(l *lane) {
	for _, x := range t.some[:t.n] {
		if x == l {
			return
		}
	}
	if t.n == len(t.some) {
		t.all = true
		return
	}
	t.some[t.n] = l
	t.n++
}

// pump posts queued jobs on each lane of the set. The caller holds no lock.
func (t *laneSet) pump(s *session) {
	if t.all {
		for _, l := range s.lanes {
			l.pump()
		}
		return
	}
	for _, l := range t.some[:t.n] {
		l.pump()
	}
}

// push queues a job. It returns false if the lane is not up.
func (l *lane) push(j job) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cur == nil || l.cur.state != endUp {
		return false
	}
	if l.head > 0 && len(l.queue) == cap(l.queue) {
		// Without this copy, a queue that always holds a job would grow without bound.
		k := copy(l.queue, l.queue[l.head:])
		clear(l.queue[k:])
		l.queue, l.head = l.queue[:k], 0
	}
	if rank := j.rank(); rank == rankBulk {
		l.queue = append(l.queue, j)
	} else {
		at := l.head
		for _, n := range l.ranks[:rank+1] {
			at += n
		}
		l.queue = slices.Insert(l.queue, at, j)
		l.ranks[rank]++
	}
	l.load.Add(j.load())
	return true
}

// postBatch is the largest number of Works of one Post. firstBatch is the largest number for the
// first Post on an idle endpoint. firstBatch is small so that the NIC starts before the other
// Works are made.
const (
	postBatch  = 32
	firstBatch = 4
)

// skipped are runs that are not posted because their operation was refused or the operation's key
// was withdrawn.
type skipped struct {
	op      *op
	runs    int
	refusal reasonQuery
}

// pump posts queued jobs while the endpoint has room.
func (l *lane) pump() {
	var skips []skipped
	var failed error
	var away []job
	l.mu.Lock()
	en := l.cur
	for failed == nil && en != nil && en.state == endUp && l.head < len(l.queue) && len(en.free) > 0 && !en.mustWait(l.queue[l.head]) {
		l.works = l.works[:0]
		skips, away = l.fill(en, skips, away)
		if len(l.works) == 0 {
			continue
		}
		if on := l.s.e.opts.OnPost; on != nil {
			on()
		}
		n, err := en.ep.Post(l.works)
		if n < len(l.works) {
			l.takeBack(en, n)
			en.checkpointLocked()
			failed = err
			if err == nil {
				break // the queue was full before its stated depth; the next completion calls pump again
			}
		}
	}
	l.mu.Unlock()
	if failed != nil {
		l.breakEnd(en, fmt.Errorf("post: %w", failed))
	}
	for _, k := range skips {
		l.s.skip(k)
	}
	l.s.redistribute(away)
}

// aheadPieces is the number of pieces of writes that are posted on one endpoint at a time. A
// message that is sent later waits for at most the payload of these pieces, whatever the order in
// which the NIC performs its Works. The bound rarely leaves a NIC idle before its completions are
// polled: over shm the rate of 16 MiB writes is 0.89 to 1.01 of the rate without a bound (median
// 0.95), and that of 1 MiB writes 0.93 to 1.04 (0.96). With 8 pieces the rate of 1 MiB writes is
// 0.98 to 1.04, but a message after writes of 1 MiB takes 1.7 ms instead of 0.9 ms. Without a
// bound such a message takes 8 to 10 ms. Measured on a busy machine with two cores.
// BenchmarkPieces of rdma/shm repeats the first two measurements.
const aheadPieces = 4

// mustWait reports whether the first run of j must wait. An immediate waits while a checkpoint is
// due or requested. A part of a write waits while too much payload is posted before it. The wait
// always ends, because completions or the peer's confirmation of the checkpoint are outstanding.
func (en *end) mustWait(j job) bool {
	if en.checking && j.imm && j.hi == j.lo+1 {
		return true
	}
	aheadMax := aheadPieces * int64(en.lane.s.e.opts.PieceBytes)
	return en.ahead > 0 && j.op.kind == opWrite && en.ahead+int64(j.op.Runs[j.lo].N) > aheadMax
}

// fill moves runs from the queue to works until the queue is empty, works is full, or no record is
// free. The caller ensures that a record is free. fill appends to skips the runs that must not be
// posted, and to away the jobs that this NIC cannot post, and returns both slices.
func (l *lane) fill(en *end, skips []skipped, away []job) ([]skipped, []job) {
	batchMax := postBatch
	if en.inflight == 0 {
		batchMax = firstBatch
	}
	for l.head < len(l.queue) && len(l.works) < batchMax && len(en.free) > 0 {
		j := &l.queue[l.head]
		if en.mustWait(*j) {
			break
		}
		w, refusal, ok := l.work(en, j)
		if refusal != nil {
			skips = append(skips, skipped{j.op, int(j.hi - j.lo), *refusal})
			l.load.Add(-j.load())
			l.pop()
			continue
		}
		if !ok {
			l.load.Add(-j.load())
			away = append(away, *j)
			l.pop()
			continue
		}
		slot := en.free[len(en.free)-1]
		en.free = en.free[:len(en.free)-1]
		en.inflight++
		r := &en.records[slot]
		*r = record{op: j.op, run: j.lo, tail: j.tail, used: true, load: job{op: j.op, lo: j.lo, hi: j.lo + 1}.load(), tick: l.s.e.core.Ticks.Load()}
		en.ahead += r.ahead()
		if w.Op == OpWriteImm {
			r.imm, r.immSeq = true, en.immSent
			en.immSent++
			en.immOut++
			en.noteSent()
		}
		w.Cookie = uint64(en.index)<<32 | uint64(slot)
		l.works = append(l.works, w)
		if j.lo++; j.lo == j.hi {
			l.pop()
		}
	}
	return skips, away
}

// pop removes the head of the queue.
func (l *lane) pop() {
	if rank := l.queue[l.head].rank(); rank < rankBulk {
		l.ranks[rank]--
	}
	l.queue[l.head] = job{}
	if l.head++; l.head == len(l.queue) {
		l.queue, l.head = l.queue[:0], 0
	}
}

// work makes the Work of the first run of j. If refusal is not nil, the run must not be posted at
// all. If ok is false, the run cannot be posted on this NIC.
func (l *lane) work(en *end, j *job) (w Work, refusal *reasonQuery, ok bool) {
	o := j.op
	if o.kind == opMessage {
		m := l.s.e.outbox.region.memory(l.nicIndex, en.nic.serial)
		if m == nil {
			return w, nil, false
		}
		off, n := l.s.e.outbox.place(o)
		return Work{Op: OpSend, Src: m, SrcOff: off, Len: n}, nil, true
	}
	if o.dead.Load() {
		return w, &reasonQuery{}, false
	}
	r := o.Runs[j.lo]
	serial := l.remoteSerial.Load()
	key, known := o.key(serial)
	if !known {
		return w, nil, false
	}
	if key == 0 || en.nic.tooWide(key) || l.s.withdrawn.has(remoteKey{serial, key}) {
		return w, &reasonQuery{op: o.ID(), serial: serial, key: key, addr: o.base + r.Dst, n: r.N}, false
	}
	w = Work{Op: OpWrite, Len: r.N, RemoteAddr: o.base + r.Dst, RemoteKey: key}
	if r.N > 0 {
		if w.Src = o.src.memory(l.nicIndex, en.nic.serial); w.Src == nil {
			return w, nil, false
		}
		w.SrcOff = r.Src
	}
	if j.imm && j.lo+1 == j.hi {
		w.Op = OpWriteImm
		w.Imm, _ = o.Imm.Get()
	}
	return w, nil, true
}

// takeBack undoes fill for works[n:], because the endpoint accepted only works[:n].
func (l *lane) takeBack(en *end, n int) {
	back := make([]job, 0, len(l.works)-n)
	for i := n; i < len(l.works); i++ {
		slot := uint32(l.works[i].Cookie)
		r := en.records[slot]
		if r.imm {
			en.immSent--
			en.immOut--
			en.sinceCheck--
		}
		back = append(back, job{op: r.op, lo: r.run, hi: r.run + 1, imm: r.imm, tail: r.tail})
		en.drop(slot)
	}
	l.queue = append(back, l.queue[l.head:]...)
	l.head, l.ranks = 0, [rankBulk]int{}
	for _, j := range l.queue {
		if rank := j.rank(); rank < rankBulk {
			l.ranks[rank]++
		}
	}
}

// drop frees a record.
func (en *end) drop(slot uint32) {
	en.ahead -= en.records[slot].ahead()
	en.records[slot] = record{}
	en.free = append(en.free, slot)
	en.inflight--
}

// checkpointEvery is the number of posted immediates after which the tallies are cleared. It
// bounds the size of the tallies.
const checkpointEvery = maxTallies

// noteSent counts an immediate that was posted since the last checkpoint (at a checkpoint both
// engines clear their counts per immediate value).
func (en *end) noteSent() {
	if en.okTally == nil {
		return
	}
	if en.sinceCheck++; en.sinceCheck >= checkpointEvery {
		en.checking = true
	}
}

// done processes the completion of a posted Work. The poller calls it.
func (l *lane) done(en *end, c *Completion, out []sessions.Ended) []sessions.Ended {
	slot := uint32(c.Cookie)
	l.mu.Lock()
	if int(slot) >= len(en.records) || !en.records[slot].used {
		l.mu.Unlock()
		invariants.Assert(!invariants.Enabled, "completion of work %#x, which is not in flight", c.Cookie)
		return out
	}
	r := en.records[slot]
	en.drop(slot)
	l.load.Add(-r.load)
	if r.imm {
		en.immOut--
	}
	breaks := c.Status == StatusBroken
	switch c.Status {
	case StatusOK:
		en.worked = true
		if r.op.kind == opWrite {
			en.nic.bytesOut.Add(uint64(r.load - postCost))
		}
		if r.imm {
			en.immOK++
			if en.okTally != nil {
				v, _ := r.op.Imm.Get()
				en.okTally[v]++
			}
		}
	case StatusRefused:
		en.worked = true
		breaks = en.nic.lim.RefusalBreaks
	case StatusBroken:
		en.broken = append(en.broken, r)
	}
	breaks = breaks && en.state < endClosing
	// Which operations were lost is decided only after the session has processed the completions.
	closing := en.state == endClosing
	if closing {
		en.finishing++
	}
	en.checkpointLocked()
	serial := l.remoteSerial.Load()
	l.mu.Unlock()
	if c.Status != StatusBroken {
		out = l.s.finished(r, c, serial, out)
	}
	if closing {
		l.mu.Lock()
		en.finishing--
		l.mu.Unlock()
		l.progress(en)
	} else if breaks {
		l.breakEnd(en, orElse(c.Err, "a work failed with the endpoint"))
	}
	return out
}

// orElse returns err, or a new error with text if there is none.
func orElse(err error, text string) error {
	if err != nil {
		return err
	}
	return errors.New(text)
}

// checkpointLocked requests a checkpoint if a checkpoint is due and no immediate is in flight.
func (en *end) checkpointLocked() {
	if !en.checking || en.immOut > 0 || en.state != endUp || en.sinceCheck == 0 {
		return
	}
	en.sinceCheck = 0
	c := checkpoint{lane: uint16(en.lane.index), epoch: en.epoch, sent: en.immOK}
	en.lane.s.ctl.send(func(b []byte) []byte { return c.append(b, frameCheckpoint) })
}

// checkpoint handles the peer's request to clear the tallies.
func (l *lane) checkpoint(c checkpoint) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if en := l.cur; en != nil && en.epoch == c.epoch {
		en.check = c.sent
		en.clearLocked()
	}
}

// clearLocked clears the tallies of arrived immediates, if the peer has requested a checkpoint and
// all immediates that the peer sent before it have arrived.
func (en *end) clearLocked() {
	if en.check == 0 || en.arrived < en.check {
		return
	}
	c := checkpoint{lane: uint16(en.lane.index), epoch: en.epoch, sent: en.check}
	en.check = 0
	clear(en.arrivedTally)
	en.lane.s.ctl.send(func(b []byte) []byte { return c.append(b, frameChecked) })
}

// checked handles the peer's confirmation that the peer has cleared its tallies.
func (l *lane) checked(c checkpoint) {
	l.mu.Lock()
	if en := l.cur; en != nil && en.epoch == c.epoch && en.checking && c.sent == en.immOK {
		en.checking = false
		clear(en.okTally)
	}
	l.mu.Unlock()
	l.pump()
}

// immediate counts an immediate of the peer. It returns false if the immediate must not be
// counted because the count has already been reported to the peer.
func (l *lane) immediate(en *end, imm uint32) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if en.reported {
		invariants.Assert(!invariants.Enabled, "an immediate arrived on an endpoint that was shut and drained")
		return false
	}
	en.arrived++
	if en.arrivedTally != nil {
		en.arrivedTally[imm]++
	}
	en.clearLocked()
	return true
}
