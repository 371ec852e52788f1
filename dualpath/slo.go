package dualpath

import (
	"math/bits"
	"slices"
	"time"
)

// A request with a deadline of its first token (Request.FirstToken) is refused when the
// deadline cannot be met: when the request is submitted, by an estimate of its first token,
// and while it waits, when even an idle engine would be late.
//
// The estimate is made of:
//
//	rate         work of the last prefills over the time that their engines took, by the
//	             reports of their ends (Finished). Without measuredMin of them there is no
//	             estimate, and no request is refused by one
//	engines      for each prefill engine, the work that was started there and has not ended,
//	             less what the engine has done at that rate since its last end
//	queue        the work that goes before the request in the order of fair.go, given to the
//	             engine that is free first, in any pieces
//	request      its own work, at the rate or at Options.PrefillRate, whichever is more
//
// Requests are not cut into pieces, so an engine may be free sooner than by this rule: by the
// largest request in the queue at most. The estimate is that much sooner. Engines are taken
// to prefill in the order of arrival, as vLLM does by default. Requests that come later, lost
// engines, decode engines without room and slow reads are not foreseen: a request that is not
// refused may be late.

const (
	// measuredMin is how many prefills must have ended before their rate counts.
	measuredMin = 8
	// measuredKeep is the share of the measurement that stays at each end: about the last
	// 32 prefills count.
	measuredKeep = 31.0 / 32
)

// measured is the rate of prefill engines that have work.
type measured struct {
	work, seconds float64
	ends          int
}

// add counts a prefill that ended after d.
func (m *measured) add(work float64, d time.Duration) {
	m.work = m.work*measuredKeep + work
	m.seconds = m.seconds*measuredKeep + d.Seconds()
	m.ends++
}

// rate returns the work of one engine in a second; 0: not known.
func (m *measured) rate() float64 {
	if m.ends < measuredMin || m.seconds <= 0 {
		return 0
	}
	return m.work / m.seconds
}

// beginPrefill counts a request's work as its prefill engine's.
func (p *Planner) beginPrefill(r *request) {
	p.leavePrefill(r)
	en := r.pe
	if en == nil {
		return
	}
	if en.under == 0 {
		en.begun = p.now
	}
	r.under, r.underAt = p.cost(r), en
	en.under++
	en.underWork += r.under
}

// leavePrefill is the inverse, for whatever reason the engine has left the request.
func (p *Planner) leavePrefill(r *request) {
	en := r.underAt
	if en == nil {
		return
	}
	r.underAt = nil
	en.begun = p.now
	en.under--
	en.underWork -= r.under
	if en.under == 0 {
		en.underWork = 0
	}
}

// endPrefill measures a prefill that has ended. The time of a request that was found after a
// restart is not known.
func (p *Planner) endPrefill(r *request) {
	if en := r.underAt; en != nil && r.found == [2]*Held{} {
		p.prefills.add(r.under, p.now-en.begun)
	}
	p.leavePrefill(r)
}

// movePrefill counts a request's work as that of the same engine in the group that has
// registered again.
func (p *Planner) movePrefill(r *request) {
	if old := r.underAt; old != nil {
		begun := old.begun
		p.leavePrefill(r)
		p.beginPrefill(r)
		r.underAt.begun = begun
	}
}

// own is how long the prefill of a request takes at least; 0: not known.
func (p *Planner) own(r *request) time.Duration {
	rate := p.prefills.rate()
	if rate == 0 {
		return 0
	}
	return seconds(p.cost(r) / max(rate, p.opts.PrefillRate))
}

// estimate returns the time until the first token of a request that is at the end of its
// tenant's queue, and false if it is not known.
func (p *Planner) estimate(r *request) (time.Duration, bool) {
	rate := p.prefills.rate()
	if rate == 0 {
		return 0, false
	}
	free := p.enginesFree(rate)
	if len(free) == 0 {
		return 0, false
	}
	wait := fill(free, p.ahead(r)/rate) - p.sizes.largest()/rate
	return seconds(max(wait, free[0])) + p.own(r), true
}

// enginesFree returns when each prefill engine has done its work, in seconds from now, the
// first one first. It is the same for a whole Step.
func (p *Planner) enginesFree(rate float64) []float64 {
	if p.freeStep == p.steps {
		return p.free
	}
	p.free, p.freeStep = p.free[:0], p.steps
	for _, g := range p.order {
		if g.role != Prefill || g.switching() {
			continue
		}
		for _, en := range g.engines {
			left := 0.0
			if en.under > 0 {
				left = max(0, en.underWork/rate-(p.now-en.begun).Seconds())
			}
			p.free = append(p.free, left)
		}
	}
	slices.Sort(p.free)
	return p.free
}

// fill returns the time at which the first of several engines is free that are free at given
// times, in order, and share an amount of work.
func fill(free []float64, work float64) float64 {
	sum := 0.0
	for i, at := range free {
		sum += at
		level := (sum + work) / float64(i+1)
		if i+1 == len(free) || level <= free[i+1] {
			return level
		}
	}
	return 0
}

// ahead returns the work in the queue that goes before a request in the queue, taken as the
// last one of its tenant: that of higher priorities, that of requests that are planned anew,
// that of its tenant, and that of other tenants until their counters have reached its
// tenant's. It is in whole tokens of each tenant, so that the order of the sum does not matter.
func (p *Planner) ahead(r *request) float64 {
	own, work := r.flow, 0
	for priority, l := range p.priorities {
		switch {
		case priority > r.Priority:
			for _, f := range l.flows {
				work += int(f.work)
			}
			work += int(l.anew.work)
		case priority == r.Priority && own != l.anew:
			work += int(l.anew.work)
		}
	}
	if own == own.level.anew {
		return float64(work)
	}
	before := own.work - r.work
	until := own.served + before/own.weight
	work += int(before)
	for _, f := range own.level.flows {
		if f != own && f.waiting > 0 {
			work += int(min(f.work, max(0, (until-f.served)*f.weight)))
		}
	}
	return float64(work)
}

// sizes counts the requests in the queue by the power of two above their work.
type sizes [64]int

// count adds n requests of a size.
func (s *sizes) count(work float64, n int) { s[bits.Len64(uint64(work))&63] += n }

// largest returns an upper bound for the work of the largest one, at most twice as much.
func (s *sizes) largest() float64 {
	for i := len(s) - 1; i >= 0; i-- {
		if s[i] > 0 {
			return float64(uint64(1) << i)
		}
	}
	return 0
}

// late reports whether a request in the queue cannot have its first token by the deadline. It
// returns the estimate and the time left, and whether there is an estimate.
func (p *Planner) late(r *request) (estimate, left time.Duration, late bool) {
	if r.FirstToken == 0 {
		return 0, 0, false
	}
	left = r.FirstToken - p.now
	estimate, known := p.estimate(r)
	estimate = max(estimate, p.own(r))
	return estimate, left, (known && estimate > left) || p.own(r) >= left
}

// refuseLate ends a request that cannot have its first token by the deadline.
func (p *Planner) refuseLate(r *request, estimate, left time.Duration) {
	if estimate == 0 {
		r.why.note(p.now, "the deadline of its first token has come; too few prefills have ended for an estimate")
	} else {
		r.why.note(p.now, "its first token comes in %d ms at the earliest; its deadline is in %d ms", int(estimate.Milliseconds()), int(left.Milliseconds()))
	}
	p.stats.Late++
	p.refuse(r, shortfall{FirstTokenLate, int(estimate.Microseconds()), int(max(left, 0).Microseconds())})
}

// due returns when a request in the queue must be looked at: when its deadline comes, and when
// its prefill must begin. 0: never.
func (p *Planner) due(r *request) time.Duration {
	due := r.Deadline
	if r.FirstToken != 0 && !r.answered {
		if start := max(1, r.FirstToken-p.own(r)); due == 0 || start < due {
			due = start
		}
	}
	return due
}

// byDue orders requests by when they must be looked at.
func byDue() ordered[request] {
	return ordered[request]{
		less: func(a, b *request) bool { return a.due < b.due || (a.due == b.due && a.ID < b.ID) },
		at:   func(r *request) *int { return &r.dueAt },
	}
}

// watch looks at a request when it is due.
func (p *Planner) watch(r *request) {
	if r.due = p.due(r); r.due != 0 {
		p.deadlines.put(r)
	}
}

// expire ends the requests in the queue that are past a deadline, or that cannot meet it.
func (p *Planner) expire() {
	for r := p.deadlines.first(); r != nil && r.due <= p.now; r = p.deadlines.first() {
		switch estimate, left, _ := p.late(r); {
		case r.Deadline != 0 && r.Deadline <= p.now:
			p.end(r, PastDeadline)
		case p.due(r) <= p.now:
			p.refuseLate(r, estimate, left)
		default: // engines have become faster
			p.watch(r)
		}
	}
}
