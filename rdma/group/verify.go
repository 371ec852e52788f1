package group

import (
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// attemptsMax is the largest number of times that a refused operation is started again because its
// target finds no reason for the refusal.
const attemptsMax = 3

// verifyLocked keeps jobs of o that were lost with a broken endpoint, until the target has
// answered that it would accept them. Where a refusal breaks an endpoint, one of the lost jobs may
// be the refused job and would break the next endpoint too.
func (s *session) verifyLocked(o *op, jobs ...job) {
	if s.unverified == nil {
		s.unverified = make(map[uint64][]job)
	}
	id := o.ID()
	kept, asked := s.unverified[id]
	s.unverified[id] = append(kept, jobs...)
	if asked {
		return
	}
	o.left++ // released by verifiedLocked
	// A window is contiguous. It contains all runs if it contains the range from the first run to
	// the last.
	lo, hi := o.Runs[0].Dst, uint64(0)
	for _, r := range o.Runs {
		lo, hi = min(lo, r.Dst), max(hi, r.Dst+r.N)
	}
	k := o.keys[0]
	for _, l := range s.lanesOf(o.Class) {
		if serial := l.remoteSerial.Load(); serial != 0 {
			if key, ok := o.key(serial); ok {
				k = remoteKey{serial, key}
				break
			}
		}
	}
	w := reasonQuery{op: id, serial: k.serial, key: k.key, addr: o.base + lo, n: hi - lo}
	s.ctl.send(func(b []byte) []byte { return w.append(b) })
}

// takeReason handles the target's answer about an operation: the reason of a refusal, or none.
func (s *session) takeReason(a reasonReply) {
	var touched laneSet
	var out []sessions.Ended
	s.Mu.Lock()
	if o := s.byIDLocked(a.op); o == nil {
		delete(s.unverified, a.op)
	} else if jobs, doubted := s.unverified[a.op]; doubted {
		delete(s.unverified, a.op)
		out = s.verifiedLocked(o, jobs, a.reason, &touched, out)
	} else if o.queried {
		out = s.explainLocked(o, a.reason, &touched, out)
	}
	s.Mu.Unlock()
	touched.pump(s)
	sessions.CallAll(out)
	if a.reason != rdma.ReasonNone {
		s.retryNow()
	}
}

// verifiedLocked handles the peer's answer whether it would refuse the operation, whose jobs
// verifyLocked has kept until then.
func (s *session) verifiedLocked(o *op, jobs []job, reason rdma.Reason, touched *laneSet, out []sessions.Ended) []sessions.Ended {
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

// explainLocked ends an operation that was refused, or starts it again if the target finds no
// reason.
func (s *session) explainLocked(o *op, reason rdma.Reason, touched *laneSet, out []sessions.Ended) []sessions.Ended {
	if reason == rdma.ReasonNone && o.attempts < attemptsMax {
		// The key was valid when the target looked it up. So a withdrawal may have ended between
		// the refusal and the query, or a NIC may have been replaced.
		o.attempts++
		o.queried = false
		o.final = noRun
		o.dead.Store(false)
		return s.layLocked(o, touched, out)
	}
	err := &rdma.RefusedError{Peer: s.Peer, Reason: reason}
	if reason == rdma.ReasonNone {
		if err.Err = o.nicErr; o.nicErr == nil {
			err.Reason = rdma.ReasonKey
		}
	}
	return append(out, s.endLocked(o, err))
}
