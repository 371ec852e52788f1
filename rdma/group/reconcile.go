package group

import (
	"fmt"

	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// reconcile sends again exactly the operations that were lost with the endpoint en. The peer's
// count of arrived immediates determines which operations were lost.
func (l *lane) reconcile(en *end) error {
	delivered, groups, err := l.verdicts(en)
	if err != nil {
		return err
	}
	s := l.s
	var touched laneSet
	var out []sessions.Ended
	whole := make(map[*op]bool)
	s.Mu.Lock()
	if s.Why != nil {
		s.Mu.Unlock()
		return nil
	}
	// Immediates are handled first. If an immediate arrived, its whole operation is in place and
	// must not be written again: the owner may already use the memory.
	for i, r := range en.broken {
		if !r.imm {
			continue
		}
		switch t := groups[i]; {
		case delivered[i]:
			r.op.left--
			whole[r.op] = true
		case t != nil:
			r.op.lostGroup, r.op.final = t, r.run
			if j := (job{op: r.op, lo: r.run, hi: r.run + 1}); en.nic.lim.RefusalBreaks {
				s.verifyLocked(r.op, j)
			} else {
				out = s.placeLocked(j, &touched, out)
			}
		default:
			r.op.left--
			r.op.final = r.run
			if en.nic.lim.RefusalBreaks {
				s.verifyLocked(r.op)
			}
		}
	}
	for _, r := range en.broken {
		switch {
		case r.imm:
		case whole[r.op] || r.op.landed || r.op.dead.Load() || r.op.kind == opMessage && r.op.acked:
			r.op.left--
		case en.nic.lim.RefusalBreaks && r.op.kind == opWrite:
			s.verifyLocked(r.op, job{op: r.op, lo: r.run, hi: r.run + 1})
		default:
			out = s.placeLocked(job{op: r.op, lo: r.run, hi: r.run + 1}, &touched, out)
		}
	}
	for _, r := range en.broken {
		out = s.advanceLocked(r.op, &touched, out)
	}
	s.Mu.Unlock()
	touched.pump(s)
	sessions.CallAll(out)
	return nil
}

// verdicts returns, for each lost Work in en.broken, whether its immediate arrived. If the Work's
// immediate is one of several that cannot be distinguished, it returns their group instead.
func (l *lane) verdicts(en *end) (delivered []bool, groups []*lostGroup, _ error) {
	delivered, groups = make([]bool, len(en.broken)), make([]*lostGroup, len(en.broken))
	d := &en.down
	if d.arrived < en.immOK || d.arrived > en.immSent {
		return nil, nil, fmt.Errorf("lane %d: %d immediates arrived, of %d sent and %d confirmed: %w", l.index, d.arrived, en.immSent, en.immOK, errFrame)
	}
	if l.s.e.counted {
		// The endpoint is ordered and stops at a refusal, so exactly the first d.arrived
		// immediates arrived.
		for i, r := range en.broken {
			delivered[i] = r.imm && r.immSeq < d.arrived
		}
		return delivered, groups, nil
	}
	lost := make(map[uint32][]int)
	for i, r := range en.broken {
		if r.imm {
			v, _ := r.op.Imm.Get()
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
		var t *lostGroup
		if n > 0 && n < len(which) {
			t = &lostGroup{left: len(which), lost: len(which) - n}
		}
		for _, i := range which {
			delivered[i], groups[i] = n == len(which), t
		}
	}
	return delivered, groups, nil
}

// groupPlacedLocked records that o's payload is in place again or was refused.
func (s *session) groupPlacedLocked(o *op, touched *laneSet, out []sessions.Ended) []sessions.Ended {
	t := o.lostGroup
	o.lostGroup = nil
	if o.dead.Load() {
		t.refused = append(t.refused, o)
	} else {
		t.placed = append(t.placed, o)
	}
	if t.left--; t.left > 0 {
		return out
	}
	// The number of operations that succeed is the number of immediates that were counted or will
	// be counted. Members that were refused this time are assumed to be among the lost operations.
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
