package dualpath

import (
	"math/bits"
	"slices"
	"time"
)

// A request can have a deadline for its first token (Request.FirstToken). It is refused at
// submission if the estimated time of the first token is after the deadline. While it waits, it is
// refused as soon as even an idle engine would be late.
//
// Inputs of the estimate:
//
//	rate         work of the last prefills divided by the time that their engines took, from the
//	             reports of their ends (Finished). With fewer than measuredMin reports there is no
//	             estimate, and no request is refused because of an estimate
//	engines      for each prefill engine, the work that was started there and has not ended,
//	             minus the work done at that rate since the end of the engine's last prefill
//	queue        the work that is granted before the request (fair.go), divided into pieces of any
//	             size, each of which goes to the engine that is free first
//	request      its own work, at the higher of the rate and Options.PrefillRate
//
// The rule for the queue divides requests into pieces, but one engine prefills a whole request. So
// an engine may be free sooner than by this rule, at most by the time of the largest request in the
// queue. The estimate is reduced by that time. Engines are assumed to prefill in the order of
// arrival, as vLLM does by default. Requests that arrive later, lost engines, decode engines
// without room and slow reads are not predicted, so a request that is not refused may still be
// late.

const (
	// measuredMin is the number of prefills that must have ended before their rate is used.
	measuredMin = 8
	// measuredKeep is the factor by which the weight of earlier prefills shrinks at each end of a
	// prefill, so about the last 32 prefills count.
	measuredKeep = 31.0 / 32
)

// measured has the measured work of busy prefill engines, in prefill tokens, and the time of that
// work in seconds. Their quotient is the rate of an engine. ends is the number of prefills that
// have ended.
type measured struct {
	work, seconds float64
	ends          int
}

// add includes a prefill that took d.
func (m *measured) add(work float64, d time.Duration) {
	m.work = m.work*measuredKeep + work
	m.seconds = m.seconds*measuredKeep + d.Seconds()
	m.ends++
}

// rate returns the work of one busy engine per second, in prefill tokens; 0: unknown.
func (m *measured) rate() float64 {
	if m.ends < measuredMin || m.seconds <= 0 {
		return 0
	}
	return m.work / m.seconds
}

// beginPrefill adds a request's work to its prefill engine.
func (p *Planner) beginPrefill(r *request) {
	p.leavePrefill(r)
	en := r.pe
	if en == nil {
		return
	}
	if en.prefilling == 0 {
		en.begun = p.now
	}
	r.prefillWork, r.prefillingOn = p.cost(r), en
	en.prefilling++
	en.prefillWork += r.prefillWork
}

// leavePrefill undoes beginPrefill when the prefill has ended or the request has left the engine.
func (p *Planner) leavePrefill(r *request) {
	en := r.prefillingOn
	if en == nil {
		return
	}
	r.prefillingOn = nil
	en.begun = p.now
	en.prefilling--
	en.prefillWork -= r.prefillWork
	if en.prefilling == 0 {
		en.prefillWork = 0
	}
}

// endPrefill measures the rate of a prefill that has ended. It skips a request that was restored
// after a restart of the planner, because the start of its prefill is unknown.
func (p *Planner) endPrefill(r *request) {
	if en := r.prefillingOn; en != nil && r.found == [2]*Held{} {
		p.prefills.add(r.prefillWork, p.now-en.begun)
	}
	p.leavePrefill(r)
}

// movePrefill moves the counted prefill work of a request to the new record of its engine, after
// the engine's group has registered again.
func (p *Planner) movePrefill(r *request) {
	if old := r.prefillingOn; old != nil {
		begun := old.begun
		p.leavePrefill(r)
		p.beginPrefill(r)
		r.prefillingOn.begun = begun
	}
}

// own returns the time that the request's own prefill would take on an idle engine; 0: unknown.
func (p *Planner) own(r *request) time.Duration {
	rate := p.prefills.rate()
	if rate == 0 {
		return 0
	}
	return seconds(p.cost(r) / max(rate, p.opts.PrefillRate))
}

// estimate returns the time until the first token of a request at the end of its tenant's queue. It
// returns false if the time is unknown.
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

// enginesFree returns the time at which each prefill engine is free, in seconds from now, in
// ascending order. The result is computed once in a Step.
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
			if en.prefilling > 0 {
				left = max(0, en.prefillWork/rate-(p.now-en.begun).Seconds())
			}
			p.free = append(p.free, left)
		}
	}
	slices.Sort(p.free)
	return p.free
}

// fill divides work, in seconds of one engine, among engines: each piece goes to the engine that is
// free first. free are the times, ascending, at which the engines become free. fill returns the
// time at which the first engine is free after the work.
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

// ahead returns the queued work that is granted before a request, which counts as the last of its
// tenant. It is all work of higher priorities, of requests that are planned again, and of the
// request's tenant. Of each other tenant, it includes the work until the tenant's counter reaches
// the counter that the request's tenant has when the request is next. The work of each tenant is
// rounded to whole tokens, so that the sum does not depend on the order of addition.
func (p *Planner) ahead(r *request) float64 {
	own, work := r.flow, 0
	for priority, l := range p.priorities {
		switch {
		case priority > r.Priority:
			for _, f := range l.flows {
				work += int(f.work)
			}
			work += int(l.replanned.work)
		case priority == r.Priority && own != l.replanned:
			work += int(l.replanned.work)
		}
	}
	if own == own.level.replanned {
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

// sizes is a histogram of the work of the queued requests. Element i counts the requests whose
// work, in whole tokens, has i significant bits.
type sizes [64]int

// count adds n requests of the given work.
func (s *sizes) count(work float64, n int) { s[bits.Len64(uint64(work))&63] += n }

// largest returns an upper bound for the work of the largest queued request. The bound is at most
// twice that work.
func (s *sizes) largest() float64 {
	for i := len(s) - 1; i >= 0; i-- {
		if s[i] > 0 {
			return float64(uint64(1) << i)
		}
	}
	return 0
}

// late reports whether a queued request cannot have its first token by the deadline. estimate is
// the estimated time until the first token (0: unknown), left the time until the deadline.
func (p *Planner) late(r *request) (estimate, left time.Duration, late bool) {
	if r.FirstToken == 0 {
		return 0, 0, false
	}
	left = r.FirstToken - p.now
	estimate, known := p.estimate(r)
	estimate = max(estimate, p.own(r))
	return estimate, left, (known && estimate > left) || p.own(r) >= left
}

// refuseLate rejects a request whose first token cannot be produced by the deadline.
func (p *Planner) refuseLate(r *request, estimate, left time.Duration) {
	if estimate == 0 {
		r.why.note(p.now, "the deadline of its first token has passed; too few prefills have ended for an estimate")
	} else {
		r.why.note(p.now, "its first token is expected in %d ms at the earliest; its deadline is in %d ms", int(estimate.Milliseconds()), int(left.Milliseconds()))
	}
	p.stats.Late++
	p.refuse(r, shortfall{FirstTokenLate, int(estimate.Microseconds()), int(max(left, 0).Microseconds())})
}

// due returns the time at which the deadlines of a queued request must be checked: Deadline, or the
// latest start of its prefill for FirstToken, whichever is sooner. 0: never.
func (p *Planner) due(r *request) time.Duration {
	due := r.Deadline
	if r.FirstToken != 0 && !r.answered {
		if start := max(1, r.FirstToken-p.own(r)); due == 0 || start < due {
			due = start
		}
	}
	return due
}

// byDue orders requests by due.
func byDue() ordered[request] {
	return ordered[request]{
		less:  func(a, b *request) bool { return a.due < b.due || (a.due == b.due && a.ID < b.ID) },
		index: func(r *request) *int { return &r.dueAt },
	}
}

// watch schedules the next check of a request's deadlines.
func (p *Planner) watch(r *request) {
	if r.due = p.due(r); r.due != 0 {
		p.deadlines.put(r)
	}
}

// expire rejects the queued requests that have passed a deadline or cannot meet it.
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
