package group

import (
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// pieceRuns is the largest number of runs in a job, if the operation is spread over several lanes.
// The job also has at most PieceBytes.
const pieceRuns = 64

// layLocked cuts o into jobs and places them on lanes.
//
// An operation that is small, or for which only one lane is usable, is one job. Any other operation
// is cut into pieces, which go to the least loaded lanes. In a single job the last run carries the
// immediate, if the arrival of the last run implies that the other runs have arrived and were not
// refused. Otherwise the tail of the last run is a job of its own, which carries the immediate
// after all other runs are in place.
func (s *session) layLocked(o *op, touched *laneSet, out []sessions.Ended) []sessions.Ended {
	_, withImm := o.Imm.Get()
	lanes := s.usableLocked(o.Class)
	n := uint32(len(o.Runs))
	total := o.RunBytes()
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
		hi, bytes := lo+1, o.Runs[lo].N
		for !whole && hi < n && hi-lo < pieceRuns && bytes+o.Runs[hi].N <= piece || whole && hi < n {
			bytes += o.Runs[hi].N
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

// placeLocked queues j on the least loaded lane. If no lane is up it adds j to session.parked.
func (s *session) placeLocked(j job, touched *laneSet, out []sessions.Ended) []sessions.Ended {
	o := j.op
	lanes := s.lanesOf(o.Class)
	for {
		best, stale := s.chooseLocked(o, lanes)
		if stale {
			// Lanes are up, but the Desc names none of their NICs: every NIC that it names has
			// been replaced.
			o.left -= int(j.hi - j.lo)
			s.refuseLocked(o, reasonQuery{op: o.ID(), serial: o.keys[0].serial, key: o.keys[0].key, addr: o.base, n: 0}, nil)
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

// chooseLocked returns the least loaded lane for an operation, or nil if no usable lane is up.
// stale: lanes are up, but the Desc names none of their NICs.
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
		if !l.up.Load() || o.src != nil && !o.src.registeredOn(l.nicIndex) {
			continue
		}
		if load := l.load.Load(); best == nil || load < least {
			best, least = l, load
		}
	}
	return best, !known && ups > 0
}

// refuseLocked records that the target refused o. Only the first refused range of o is kept.
// nicErr is the local NIC's error, if any.
func (s *session) refuseLocked(o *op, w reasonQuery, nicErr error) {
	if o.dead.Swap(true) {
		return
	}
	o.refusal, o.nicErr = w, nicErr
}

// advanceLocked takes the next step for o if all its runs are done. It requests the reason of a
// refusal, sends the final run, or ends o.
func (s *session) advanceLocked(o *op, touched *laneSet, out []sessions.Ended) []sessions.Ended {
	if o.left > 0 || !o.Submitted {
		return out
	}
	switch {
	case o.kind == opMessage:
		if !o.acked {
			return out
		}
		var err error
		if o.reason != rdma.ReasonNone {
			err = &rdma.RefusedError{Peer: s.Peer, Reason: o.reason}
		}
		return append(out, s.endLocked(o, err))
	case o.lostGroup != nil:
		return s.groupPlacedLocked(o, touched, out)
	case o.dead.Load():
		if o.reason != rdma.ReasonNone {
			return append(out, s.endLocked(o, &rdma.RefusedError{Peer: s.Peer, Reason: o.reason}))
		}
		if !o.queried {
			o.queried = true
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

// placeParked places the jobs that wait because no lane was up.
func (s *session) placeParked() {
	var touched laneSet
	var out []sessions.Ended
	s.Mu.Lock()
	jobs := s.parked
	s.parked = nil
	for _, j := range jobs {
		out = s.placeLocked(j, &touched, out)
	}
	s.Mu.Unlock()
	touched.pump(s)
	sessions.CallAll(out)
}

// redistribute places jobs that a lane has given up. If a job would have carried the immediate
// after other runs, its last run is held back, because the runs posted before the last run may
// have to be sent again.
func (s *session) redistribute(jobs []job) {
	if len(jobs) == 0 {
		return
	}
	var touched laneSet
	var out []sessions.Ended
	s.Mu.Lock()
	if s.Why != nil {
		s.Mu.Unlock()
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
	s.Mu.Unlock()
	touched.pump(s)
	sessions.CallAll(out)
}
