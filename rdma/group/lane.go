package group

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/rdma"
)

// lane is the way from one NIC of ours to one NIC of a peer, for one class. It
// outlives its endpoints: each that breaks is followed by another, of the next
// epoch.
type lane struct {
	s        *session
	index    int
	class    rdma.Class
	nicIndex int

	// up, remoteSerial and load are read without mu to choose a lane: whether
	// the endpoint may be posted on, the peer's NIC (0: not known yet), and the
	// weight of what is queued and posted.
	up           atomic.Bool
	remoteSerial atomic.Uint32
	load         atomic.Int64
	// touched belongs to the poller of the NIC: the lane is in its list.
	touched bool

	mu sync.Mutex
	// queue[head:] are jobs to be posted on cur; empty unless cur is up.
	queue []job
	head  int
	works []Work
	// cur is the endpoint in use, until both sides are through with it; last is
	// the last that there was.
	cur, last *end
	epoch     uint32
	// opening is set while an endpoint is being made; closed when it is there.
	opening chan struct{}
	// settled: the lane has come up or failed once. killed: the session ended.
	settled, killed bool
	// failures in a row, for the pause before the next attempt; why is the last.
	failures int
	why      error
	pause    *time.Timer
}

// endState is where an end is in its life.
type endState uint8

const (
	// endOpening: addresses are being exchanged.
	endOpening endState = 0
	endUp      endState = 1
	// endClosing: shut; completions and what had arrived are being polled.
	endClosing endState = 2
	// endQuiet: closed; nothing of it is left but what may have to be sent again.
	endQuiet endState = 3
)

// record is one Work that was posted.
type record struct {
	op   *op
	run  uint32
	imm  bool
	used bool
	// immSeq is the number of an immediate among those of its end, from 0.
	immSeq uint64
	load   int64
	tick   uint64
}

// end is one endpoint of a lane. Its fields are guarded by lane.mu.
type end struct {
	lane  *lane
	nic   *nic
	ep    Endpoint
	index uint32 // in nic.ends: the high half of cookies
	epoch uint32

	state endState
	cause error
	// connecting: Connect is running; connected: it has succeeded; peerReady:
	// the peer's has too.
	connecting, connected, peerReady bool
	// polled: after Shut everything that had arrived has been polled.
	polled bool
	// quiet is closed when the endpoint has been closed.
	quiet chan struct{}
	// worked: a Work was answered, so that the endpoint did once work.
	worked bool
	tick   uint64 // of the engine's clock, when it was made

	records  []record
	free     []uint32
	inflight int
	broken   []record
	// finishing counts completions that the session has not been told of yet.
	finishing int

	// immSent are immediates posted, immOK those that completed well, immOut
	// those in flight; okTally, of an engine that does not count exactly, is
	// which ones completed well since the last checkpoint.
	immSent, immOK, immOut uint64
	okTally                map[uint32]uint32
	sinceCheck             int
	checking               bool

	// arrived are immediates of the peer, arrivedTally which ones since the
	// last checkpoint; check is the count at which the peer wants to hear that
	// the tally was cleared (0: it does not).
	arrived      uint64
	arrivedTally map[uint32]uint32
	check        uint64
	told         bool // the peer was told arrived: nothing may arrive any more

	// down is what the peer said of its end, once complete.
	down         laneDown
	downComplete bool
	resolved     bool
}

// newLane returns a lane that is not open.
func newLane(s *session, index int, class rdma.Class, nicIndex int) *lane {
	return &lane{s: s, index: index, class: class, nicIndex: nicIndex}
}

// laneSet is the lanes that have something new to post.
type laneSet struct {
	some [4]*lane
	n    int
	all  bool
}

// add notes l.
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

// pump posts on the lanes of the set; the caller holds no lock.
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

// push queues a job; false if the lane is not up.
func (l *lane) push(j job) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cur == nil || l.cur.state != endUp {
		return false
	}
	if l.head > 0 && len(l.queue) == cap(l.queue) {
		// A queue that is never empty must not grow for ever.
		k := copy(l.queue, l.queue[l.head:])
		clear(l.queue[k:])
		l.queue, l.head = l.queue[:k], 0
	}
	l.queue = append(l.queue, j)
	l.load.Add(j.load())
	return true
}

// postBatch is the largest number of Works of one Post; firstBatch that of the
// first on an idle endpoint, which should not wait for the others to be made.
const (
	postBatch  = 32
	firstBatch = 4
)

// skipped are runs that are not posted, because their operation was refused or
// its key withdrawn.
type skipped struct {
	op      *op
	runs    int
	refusal why
}

// pump posts what is queued while there is room.
func (l *lane) pump() {
	var skips []skipped
	var failed error
	var away []job
	l.mu.Lock()
	en := l.cur
	for failed == nil && en != nil && en.state == endUp && l.head < len(l.queue) && len(en.free) > 0 && !en.held(l.queue[l.head]) {
		l.works = l.works[:0]
		skips, away = l.fill(en, skips, away)
		if len(l.works) == 0 {
			continue
		}
		n, err := en.ep.Post(l.works)
		if n < len(l.works) {
			l.takeBack(en, n)
			en.checkpointLocked()
			failed = err
			if err == nil {
				break // full before its limit: the next completion comes back here
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
	l.s.replace(away)
}

// held reports whether j has to wait for a checkpoint.
func (en *end) held(j job) bool { return en.checking && j.imm && j.hi == j.lo+1 }

// fill moves runs from the queue to works, until one of them is used up or full.
// The caller has made sure that there is a free record.
func (l *lane) fill(en *end, skips []skipped, away []job) ([]skipped, []job) {
	most := postBatch
	if en.inflight == 0 {
		most = firstBatch
	}
	for l.head < len(l.queue) && len(l.works) < most && len(en.free) > 0 {
		j := &l.queue[l.head]
		if en.held(*j) {
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
		*r = record{op: j.op, run: j.lo, used: true, load: job{op: j.op, lo: j.lo, hi: j.lo + 1}.load(), tick: l.s.e.ticks.Load()}
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

// pop drops the head of the queue.
func (l *lane) pop() {
	l.queue[l.head] = job{}
	if l.head++; l.head == len(l.queue) {
		l.queue, l.head = l.queue[:0], 0
	}
}

// work makes the Work of the first run of j. A refusal says that it must not be
// posted; !ok that it can't be posted on this NIC.
func (l *lane) work(en *end, j *job) (w Work, refusal *why, ok bool) {
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
		return w, &why{}, false
	}
	r := o.runs[j.lo]
	serial := l.remoteSerial.Load()
	key, known := o.key(serial)
	if !known {
		return w, nil, false
	}
	if key == 0 || en.nic.tooWide(key) || l.s.withdrawn.has(remoteKey{serial, key}) {
		return w, &why{op: o.id(), serial: serial, key: key, addr: o.base + r.dst, n: r.n}, false
	}
	w = Work{Op: OpWrite, Len: r.n, RemoteAddr: o.base + r.dst, RemoteKey: key}
	if r.n > 0 {
		if w.Src = o.src.memory(l.nicIndex, en.nic.serial); w.Src == nil {
			return w, nil, false
		}
		w.SrcOff = r.src
	}
	if j.imm && j.lo+1 == j.hi {
		w.Op = OpWriteImm
		w.Imm, _ = o.imm.Get()
	}
	return w, nil, true
}

// takeBack undoes what fill did for the works from n on, which were not taken.
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
		back = append(back, job{op: r.op, lo: r.run, hi: r.run + 1, imm: r.imm})
		en.drop(slot)
	}
	l.queue = append(back, l.queue[l.head:]...)
	l.head = 0
}

// drop frees a record.
func (en *end) drop(slot uint32) {
	en.records[slot] = record{}
	en.free = append(en.free, slot)
	en.inflight--
}

// checkpointEvery is how many immediates pass before tallies are cleared, which
// bounds them.
const checkpointEvery = maxTallies

// noteSent counts an immediate towards the next checkpoint.
func (en *end) noteSent() {
	if en.okTally == nil {
		return
	}
	if en.sinceCheck++; en.sinceCheck >= checkpointEvery {
		en.checking = true
	}
}

// done takes the completion of a Work that was posted; the poller calls it.
func (l *lane) done(en *end, c *Completion, out []ended) []ended {
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
				v, _ := r.op.imm.Get()
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
	// What is lost is decided only when the session knows what is not.
	closing := en.state == endClosing
	if closing {
		en.finishing++
	}
	en.checkpointLocked()
	serial := l.remoteSerial.Load()
	l.mu.Unlock()
	if c.Status != StatusBroken {
		out = l.s.finished(r, c.Status, serial, out)
	}
	if closing {
		l.mu.Lock()
		en.finishing--
		l.mu.Unlock()
		l.progress(en)
	} else if breaks {
		l.breakEnd(en, because0(c.Err, "a work came back broken"))
	}
	return out
}

// because0 returns err, or a new error with text if there is none.
func because0(err error, text string) error {
	if err != nil {
		return err
	}
	return errors.New(text)
}

// checkpointLocked asks for the tallies to be cleared once no immediate is in
// flight.
func (en *end) checkpointLocked() {
	if !en.checking || en.immOut > 0 || en.state != endUp || en.sinceCheck == 0 {
		return
	}
	en.sinceCheck = 0
	c := checkpoint{lane: uint16(en.lane.index), epoch: en.epoch, sent: en.immOK}
	en.lane.s.ctl.send(func(b []byte) []byte { return c.append(b, frameCheckpoint) })
}

// checkpoint takes the peer's wish to clear the tallies.
func (l *lane) checkpoint(c checkpoint) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if en := l.cur; en != nil && en.epoch == c.epoch {
		en.check = c.sent
		en.clearLocked()
	}
}

// clearLocked clears the tallies of what arrived, if the peer wants that and
// everything it sent is in them.
func (en *end) clearLocked() {
	if en.check == 0 || en.arrived < en.check {
		return
	}
	c := checkpoint{lane: uint16(en.lane.index), epoch: en.epoch, sent: en.check}
	en.check = 0
	clear(en.arrivedTally)
	en.lane.s.ctl.send(func(b []byte) []byte { return c.append(b, frameChecked) })
}

// checked takes the peer's word that it cleared its tallies.
func (l *lane) checked(c checkpoint) {
	l.mu.Lock()
	if en := l.cur; en != nil && en.epoch == c.epoch && en.checking && c.sent == en.immOK {
		en.checking = false
		clear(en.okTally)
	}
	l.mu.Unlock()
	l.pump()
}

// immediate counts an immediate of the peer; false if it must not count, since
// the peer has been told how many there were.
func (l *lane) immediate(en *end, imm uint32) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if en.told {
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

// open makes a new endpoint and tells the peer of it: the dialer's part, at the
// beginning and after each break.
func (l *lane) open() {
	if !l.s.dialed {
		return
	}
	l.mu.Lock()
	if l.killed || l.cur != nil || l.opening != nil {
		l.mu.Unlock()
		return
	}
	l.epoch++
	epoch := l.epoch
	l.opening = make(chan struct{})
	l.mu.Unlock()
	en, err := l.makeEnd(epoch)
	if l.install(en, err) != nil {
		l.retry(true)
	}
}

// makeEnd makes an endpoint on the lane's NIC.
func (l *lane) makeEnd(epoch uint32) (*end, error) {
	n := l.s.e.nics[l.nicIndex].Load()
	en := &end{lane: l, nic: n, epoch: epoch, quiet: make(chan struct{}), tick: l.s.e.ticks.Load()}
	if err := n.adopt(en); err != nil {
		return nil, err
	}
	ep, err := n.dom.NewEndpoint(uint64(en.index), l.class)
	if err == nil && len(ep.Local()) > MaxEndpointAddr {
		err = fmt.Errorf("endpoint address of %d bytes, at most %d", len(ep.Local()), MaxEndpointAddr)
		ep.Shut()
		_ = ep.Close()
	}
	if err != nil {
		n.release(en)
		return nil, err
	}
	en.ep = ep
	depth := min(n.lim.QueueDepth, maxDepth)
	en.records = make([]record, depth)
	en.free = make([]uint32, depth)
	for i := range en.free {
		en.free[i] = uint32(depth - 1 - i)
	}
	if !l.s.e.counted {
		en.okTally, en.arrivedTally = make(map[uint32]uint32), make(map[uint32]uint32)
	}
	return en, nil
}

// maxDepth bounds what is posted on one endpoint.
const maxDepth = 4096

// install makes en the lane's endpoint and sends its address. An error, en's or
// that the session ended meanwhile, means that there is none.
func (l *lane) install(en *end, err error) error {
	l.mu.Lock()
	close(l.opening)
	l.opening = nil
	if err == nil && l.killed {
		err = rdma.ErrClosed
	}
	if err == nil && en.nic.dead.Load() {
		err = en.nic.reason()
	}
	if err != nil {
		l.why = err
		l.mu.Unlock()
		if en != nil {
			en.ep.Shut()
			_ = en.ep.Close()
			en.nic.release(en)
		}
		l.settle()
		return err
	}
	l.cur, l.last = en, en
	a := laneAddr{lane: uint16(l.index), epoch: en.epoch, serial: en.nic.serial, addr: en.ep.Local()}
	l.s.ctl.send(func(b []byte) []byte { return a.append(b) })
	l.mu.Unlock()
	// A NIC that died before the lane was in sight of its poller.
	if en.nic.dead.Load() {
		l.breakEnd(en, en.nic.reason())
	}
	return nil
}

// settle notes that the lane has come up on both sides, or failed, once: Connect
// returns when all have.
func (l *lane) settle() {
	l.mu.Lock()
	first := !l.settled
	l.settled = true
	l.mu.Unlock()
	if first {
		l.s.settleOne()
	}
}

// address takes the address of the peer's endpoint: at the acceptor it asks for
// one of ours, at the dialer it answers. The session's reader calls it.
func (l *lane) address(a laneAddr) error {
	if l.s.dialed {
		l.mu.Lock()
		en := l.cur
		if en == nil || en.epoch != a.epoch || en.state >= endClosing {
			l.mu.Unlock()
			return nil // of an epoch that has ended here: the peer is being told
		}
		if en.connecting || en.connected {
			l.mu.Unlock()
			return fmt.Errorf("second address for lane %d, epoch %d: %w", l.index, a.epoch, errFrame)
		}
		l.connectLocked(en, a)
		l.mu.Unlock()
		return nil
	}
	l.mu.Lock()
	if l.killed {
		l.mu.Unlock()
		return nil
	}
	if l.cur != nil || l.opening != nil || a.epoch <= l.epoch {
		l.mu.Unlock()
		return fmt.Errorf("address for lane %d, epoch %d, during epoch %d: %w", l.index, a.epoch, l.epoch, errFrame)
	}
	l.epoch = a.epoch
	l.opening = make(chan struct{})
	l.mu.Unlock()
	en, err := l.makeEnd(a.epoch)
	if err = l.install(en, err); err != nil {
		d := laneDown{lane: uint16(l.index), epoch: a.epoch}
		l.s.ctl.send(func(b []byte) []byte { return d.append(b) })
		return nil
	}
	l.mu.Lock()
	if en.state == endOpening {
		l.connectLocked(en, a)
	}
	l.mu.Unlock()
	return nil
}

// connectLocked begins to connect en to the peer's endpoint.
func (l *lane) connectLocked(en *end, a laneAddr) {
	l.remoteSerial.Store(a.serial)
	en.connecting = true
	l.s.running.Go(func() {
		err := en.ep.Connect(a.addr)
		l.mu.Lock()
		en.connecting = false
		closing := en.state == endClosing
		if err == nil && !closing {
			en.connected = true
			r := laneReady{lane: uint16(l.index), epoch: en.epoch}
			l.s.ctl.send(func(b []byte) []byte { return r.append(b, frameLaneReady) })
		}
		l.mu.Unlock()
		switch {
		case closing:
			l.progress(en)
		case err != nil:
			l.breakEnd(en, fmt.Errorf("connect: %w", err))
		default:
			l.raise(en)
		}
	})
}

// ready takes the peer's word that its endpoint is connected.
func (l *lane) ready(r laneReady) {
	l.mu.Lock()
	en := l.cur
	if en == nil || en.epoch != r.epoch {
		l.mu.Unlock()
		return
	}
	en.peerReady = true
	l.mu.Unlock()
	l.raise(en)
}

// raise lets operations use en, if both sides are connected.
func (l *lane) raise(en *end) {
	l.mu.Lock()
	if en.state != endOpening || !en.connected || !en.peerReady {
		l.mu.Unlock()
		return
	}
	en.state = endUp
	l.why = nil
	l.up.Store(true)
	if l.failures == 0 {
		l.s.ups.Add(1)
	}
	if !l.s.dialed {
		r := laneReady{lane: uint16(l.index), epoch: en.epoch}
		l.s.ctl.send(func(b []byte) []byte { return r.append(b, frameLaneUp) })
	}
	l.mu.Unlock()
	l.s.unpark()
}

// breakEnd begins the end of an endpoint; only the first reason counts. What is
// queued goes to other lanes at once; what was posted, when both sides know how
// far it came. Any goroutine may call it, the poller too.
func (l *lane) breakEnd(en *end, cause error) {
	if l.giveUp(en, cause) {
		l.shut(en)
	}
}

// broke is breakEnd for an endpoint that its NIC reports broken. It is shut only
// when what the NIC has to say has been polled: that a Work was refused would be
// lost otherwise, and the Work tried again and again.
func (l *lane) broke(en *end, cause error) {
	if l.giveUp(en, cause) {
		en.nic.drain(func() { l.shut(en) })
	}
}

// giveUp takes an endpoint out of use; false if it is already.
func (l *lane) giveUp(en *end, cause error) bool {
	l.mu.Lock()
	if en.state >= endClosing {
		l.mu.Unlock()
		return false
	}
	en.state, en.cause = endClosing, cause
	l.up.Store(false)
	l.why = cause
	jobs := append([]job(nil), l.queue[l.head:]...)
	for _, j := range jobs {
		l.load.Add(-j.load())
	}
	clear(l.queue)
	l.queue, l.head = l.queue[:0], 0
	quietly := l.killed
	l.mu.Unlock()
	if !quietly {
		l.s.e.log.info(logLane, "endpoint ended", "peer", l.s.peer.String(), "nic", en.nic.name, "why", cause)
	}
	l.settle()
	l.s.replace(jobs)
	return true
}

// shut cuts an endpoint off that has been given up.
func (l *lane) shut(en *end) {
	en.ep.Shut()
	en.nic.drain(func() {
		l.mu.Lock()
		en.polled = true
		l.mu.Unlock()
		l.progress(en)
	})
}

// abandon ends what is left of en on a NIC that is dead: no completion comes any
// more.
func (l *lane) abandon(en *end) {
	l.mu.Lock()
	for slot := range en.records {
		if r := en.records[slot]; r.used {
			en.broken = append(en.broken, r)
			l.load.Add(-r.load)
			en.drop(uint32(slot))
		}
	}
	l.mu.Unlock()
	l.progress(en)
}

// progress takes an endpoint that is closing as far as it goes: when nothing of
// it is in flight it is closed and the peer told what arrived; when the peer has
// told the same, what was lost is sent again and the lane reopened.
func (l *lane) progress(en *end) {
	l.mu.Lock()
	closes := en.state == endClosing && en.polled && en.inflight == 0 && en.finishing == 0 && !en.connecting
	if closes {
		en.state = endQuiet
		en.told = true
		if !l.killed {
			l.tellLocked(en)
		}
	}
	resolves := en.state == endQuiet && en.downComplete && !en.resolved && !l.killed
	if resolves {
		// The peer, once told, may ask for the next epoch at any time.
		en.resolved = true
		l.cur = nil
	}
	l.mu.Unlock()
	if closes {
		_ = en.ep.Close()
		en.nic.release(en)
		close(en.quiet)
	}
	if !resolves {
		return
	}
	if err := l.reconcile(en); err != nil {
		l.s.malformed(err)
		return
	}
	if l.s.withdrawn.pending.Load() > 0 {
		l.s.confirm()
	}
	l.retry(!en.worked && !en.down.worked)
}

// tellLocked tells the peer what arrived on an end that is quiet.
func (l *lane) tellLocked(en *end) {
	d := laneDown{lane: uint16(l.index), epoch: en.epoch, arrived: en.arrived, worked: en.worked}
	for imm, n := range en.arrivedTally {
		d.tallies = append(d.tallies, tally{imm, n})
		if len(d.tallies) == maxTallies {
			d.more = true
			part := d
			l.s.ctl.send(func(b []byte) []byte { return part.append(b) })
			d.more, d.tallies = false, nil
		}
	}
	l.s.ctl.send(func(b []byte) []byte { return d.append(b) })
}

// talliesMax bounds what a peer may tell of one endpoint: immediates since the
// last checkpoint and those that were in flight then.
const talliesMax = 2*checkpointEvery + maxDepth

// ended takes what the peer says of its end.
func (l *lane) ended(d laneDown) error {
	l.mu.Lock()
	en := l.cur
	if en == nil || en.epoch != d.epoch {
		l.mu.Unlock()
		return nil
	}
	if en.downComplete || len(en.down.tallies)+len(d.tallies) > talliesMax {
		l.mu.Unlock()
		return fmt.Errorf("lane %d, epoch %d: it ended twice, or with more than %d tallies: %w", l.index, d.epoch, talliesMax, errFrame)
	}
	en.down.arrived, en.down.worked = d.arrived, d.worked
	en.down.tallies = append(en.down.tallies, d.tallies...)
	en.downComplete = !d.more
	l.mu.Unlock()
	if !d.more {
		l.breakEnd(en, errors.New("the peer ended it"))
		l.progress(en)
	}
	return nil
}

// retry opens the lane again: at once if it had worked, after a pause that grows
// if not. Only the dialer does.
func (l *lane) retry(failed bool) {
	l.mu.Lock()
	if !failed {
		l.failures = 0
	} else {
		l.failures++
	}
	n := l.failures
	wait := !l.killed && l.s.dialed && n > 0
	if wait {
		l.pause = time.AfterFunc(l.s.e.opts.RetryInterval<<min(n-1, 6), l.open)
	}
	l.mu.Unlock()
	if !wait {
		l.open()
	}
}

// hurry ends the pause before the next attempt: what broke the lane is known, and
// not the fault of its NICs.
func (l *lane) hurry() {
	l.mu.Lock()
	hurries := l.pause != nil && l.pause.Stop()
	if hurries {
		l.failures = 0
	}
	l.mu.Unlock()
	if hurries {
		l.open()
	}
}

// kill ends the lane with its session.
func (l *lane) kill(why error) {
	l.mu.Lock()
	l.killed = true
	if l.pause != nil {
		l.pause.Stop()
	}
	en := l.cur
	l.mu.Unlock()
	if en != nil {
		l.breakEnd(en, why)
		l.progress(en)
	}
}

// awaitQuiet returns when a killed lane has no endpoint any more.
func (l *lane) awaitQuiet() {
	l.mu.Lock()
	opening := l.opening
	l.mu.Unlock()
	if opening != nil {
		<-opening
	}
	l.mu.Lock()
	en := l.last
	l.mu.Unlock()
	if en != nil {
		<-en.quiet
	}
}

// reconcile sends again what was lost with en, and nothing that was not: which
// immediates arrived decides it.
func (l *lane) reconcile(en *end) error {
	delivered, ties, err := l.verdicts(en)
	if err != nil {
		return err
	}
	s := l.s
	var touched laneSet
	var out []ended
	whole := make(map[*op]bool)
	s.mu.Lock()
	if s.why != nil {
		s.mu.Unlock()
		return nil
	}
	// First the immediates: where one arrived, its operation is in place as a
	// whole, and must not be written again: its owner may be using the memory.
	for i, r := range en.broken {
		if !r.imm {
			continue
		}
		switch t := ties[i]; {
		case delivered[i]:
			r.op.left--
			whole[r.op] = true
		case t != nil:
			r.op.tie, r.op.final = t, r.run
			if j := (job{r.op, r.run, r.run + 1, false}); en.nic.lim.RefusalBreaks {
				s.doubtLocked(r.op, j)
			} else {
				out = s.placeLocked(j, &touched, out)
			}
		default:
			r.op.left--
			r.op.final = r.run
			if en.nic.lim.RefusalBreaks {
				s.doubtLocked(r.op)
			}
		}
	}
	for _, r := range en.broken {
		switch {
		case r.imm:
		case whole[r.op] || r.op.landed || r.op.dead.Load() || r.op.kind == opMessage && r.op.acked:
			r.op.left--
		case en.nic.lim.RefusalBreaks && r.op.kind == opWrite:
			s.doubtLocked(r.op, job{r.op, r.run, r.run + 1, false})
		default:
			out = s.placeLocked(job{r.op, r.run, r.run + 1, false}, &touched, out)
		}
	}
	for _, r := range en.broken {
		out = s.advanceLocked(r.op, &touched, out)
	}
	s.mu.Unlock()
	touched.pump(s)
	callAll(out)
	return nil
}

// verdicts decides for each broken record whether its immediate arrived, or is
// one of several that can't be told apart.
func (l *lane) verdicts(en *end) (delivered []bool, ties []*tie, _ error) {
	delivered, ties = make([]bool, len(en.broken)), make([]*tie, len(en.broken))
	d := &en.down
	if d.arrived < en.immOK || d.arrived > en.immSent {
		return nil, nil, fmt.Errorf("lane %d: %d immediates arrived, of %d sent and %d confirmed: %w", l.index, d.arrived, en.immSent, en.immOK, errFrame)
	}
	if l.s.e.counted {
		// The endpoint is ordered and stops at a refusal: the first arrived did.
		for i, r := range en.broken {
			delivered[i] = r.imm && r.immSeq < d.arrived
		}
		return delivered, ties, nil
	}
	lost := make(map[uint32][]int)
	for i, r := range en.broken {
		if r.imm {
			v, _ := r.op.imm.Get()
			lost[v] = append(lost[v], i)
		}
	}
	arrived := make(map[uint32]uint32)
	for _, t := range d.tallies {
		arrived[t.imm] += t.count
	}
	for v, which := range lost {
		n := int(arrived[v]) - int(en.okTally[v])
		if n < 0 || n > len(which) {
			return nil, nil, fmt.Errorf("lane %d: immediate %d arrived %d times; %d are confirmed and %d lost: %w", l.index, v, arrived[v], en.okTally[v], len(which), errFrame)
		}
		var t *tie
		if n > 0 && n < len(which) {
			t = &tie{left: len(which), lost: len(which) - n}
		}
		for _, i := range which {
			delivered[i], ties[i] = n == len(which), t
		}
	}
	return delivered, ties, nil
}

// tiedLocked notes that o's payload is in place again, or was refused.
func (s *session) tiedLocked(o *op, touched *laneSet, out []ended) []ended {
	t := o.tie
	o.tie = nil
	if o.dead.Load() {
		t.refused = append(t.refused, o)
	} else {
		t.placed = append(t.placed, o)
	}
	if t.left--; t.left > 0 {
		return out
	}
	// As many end well as immediates were counted, or will be. Of those that are
	// refused now, the first are taken for the ones that were lost.
	lost := t.lost
	for _, m := range t.refused {
		if lost > 0 {
			lost--
			out = s.advanceLocked(m, touched, out)
		} else {
			out = append(out, s.endLocked(m, nil))
		}
	}
	for _, m := range t.placed {
		if lost > 0 {
			lost--
		} else {
			m.final = noRun
		}
		out = s.advanceLocked(m, touched, out)
	}
	return out
}
