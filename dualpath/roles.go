package dualpath

import (
	"math"
	"time"
)

// A group changes its role in three steps. First the group is drained: the planner assigns no new
// request to the group, and its requests end there or are planned again. Then the group's leader
// gets the order to switch (a Switch). Then the group registers in its other role, or its leader
// refuses and the group keeps its role.
//
//	SwitchRole ─► drained ─► Switch ─► GroupUp, other role ─► Switched
//	                 │          └────► SwitchRefused ───────► Switched, with the reason
//	                 └── the last other group of its role is lost, or the operator withdraws the
//	                     switch: Switched, with the reason
//
// A switch has no timeout: a group that is being drained still serves its requests, and a leader
// that has the order either answers or is lost, and both end the switch.
//
// The leader of the group holds the state of the switch for later planners. The planner announces
// the switch to the leader when the operator has ordered it (an Announce), and the leader's
// registration names the role of the last Announce or Switch. A restarted planner continues the switch (resume). The
// first group that registers is the only one of its role for a moment, so the planner waits
// Options.GroupTimeout for other groups of the role. Meanwhile the group serves in its present role.
// If the leader ends, the switch ends with it.

// leaving is a group's change of role that is in progress.
type leaving struct {
	// to is the other role; 0: no change is in progress.
	to Role
	// ordered: the leader has the order, which cannot be withdrawn.
	ordered bool
	// resumeBy, if not 0: an earlier planner announced the switch, and this planner has not begun it.
	// If this planner cannot begin it before this time, the group keeps its role.
	resumeBy time.Duration
}

// switching reports whether the group is drained, or is changing its role. Such a group is given no
// request.
func (g *group) switching() bool { return g.leaving.to != 0 && g.leaving.resumeBy == 0 }

// SwitchCheck returns why a group cannot change to a role, or NoReason if it can. GroupLost means
// that no such group is registered. If to is the group's present role, NoReason means that the
// switch in progress can be withdrawn.
func (p *Planner) SwitchCheck(id GroupID, to Role) Reason {
	g := p.groups[id]
	switch {
	case g == nil:
		return GroupLost
	case to != Prefill && to != Decode:
		return BadRequest
	case g.leaving.ordered:
		return Ordered
	case to == g.role && g.leaving.to == 0:
		return SameRole
	case to == g.role:
		return NoReason
	}
	return p.indispensable(g)
}

// indispensable returns why a group must keep its role, or NoReason if the group may change it.
func (p *Planner) indispensable(g *group) Reason {
	others := false
	for _, o := range p.order {
		others = others || (o != g && o.role == g.role && !o.switching())
	}
	if !others {
		return LastOfRole
	}
	was := g.leaving
	g.leaving = leaving{to: g.role.Other()} // shortfallOf then excludes its engines
	defer func() { g.leaving = was }()
	for _, r := range p.requests {
		if p.shortfallOf(g.role, r).why != NoReason {
			return OnlyTaker
		}
	}
	return NoReason
}

// Holding returns, for each group, the number of requests in progress on its engines.
func (p *Planner) Holding() map[GroupID]int {
	held := make(map[GroupID]int, len(p.groups))
	for _, r := range p.requests {
		if r.pe != nil && !r.prefilled {
			held[r.pe.group.id]++
		}
		if r.de != nil {
			held[r.de.group.id]++
		}
	}
	return held
}

// heldBy returns the requests in progress on a group's engines.
func (p *Planner) heldBy(g *group) (held []*request) {
	for _, r := range p.requests {
		if (r.pe != nil && r.pe.group == g && !r.prefilled) || (r.de != nil && r.de.group == g) {
			held = append(held, r)
		}
	}
	return held
}

// switchRole begins the role switch of a group, changes the policy of a switch in progress, or
// withdraws the switch.
func (p *Planner) switchRole(e SwitchRole) {
	if why := p.SwitchCheck(e.Group, e.Role); why != NoReason {
		p.notify(Action{Kind: Switched, Group: e.Group, Side: e.Role, Why: why})
		return
	}
	g := p.groups[e.Group]
	if e.Role == g.role {
		p.keep(g, ByOperator)
		return
	}
	if !g.switching() {
		p.beginSwitch(g, e.Role)
	}
	if e.Drain == DrainRecompute {
		p.evacuate(g)
	}
	if p.orderSwitch(g); !g.leaving.ordered {
		p.announce(g)
	}
}

// beginSwitch stops granting requests to a group.
func (p *Planner) beginSwitch(g *group, to Role) {
	g.leaving = leaving{to: to}
	g.least, g.keptFor = noEngine, nil
	if g.role == Decode {
		p.leastTotal.remove(g)
		p.unroute(g)
	}
}

// announce sends the group's leader the switch that is in progress, or that there is none any more.
func (p *Planner) announce(g *group) {
	a := Action{Kind: Announce, Group: g.id, Side: g.role}
	if g.leaving.to != 0 {
		a.Side = g.leaving.to
	}
	p.emit(a)
}

// resume begins a switch that an earlier planner announced, as soon as the group may leave its role.
func (p *Planner) resume(g *group) {
	why := p.indispensable(g)
	switch {
	case why == NoReason:
		p.beginSwitch(g, g.leaving.to)
		p.orderSwitch(g)
	case p.now >= g.leaving.resumeBy:
		p.keep(g, why)
	}
}

// evacuate plans again the requests in progress on a group's engines.
func (p *Planner) evacuate(g *group) {
	held := p.heldBy(g)
	youngestFirst(held)
	for _, r := range held {
		r.why.note(p.now, "planned anew: group %d changes its role", int(g.id))
		p.requeue(r, RoleChange)
	}
}

// orderSwitch sends a Switch to the leader of a group that changes its role, once the group has
// been drained.
func (p *Planner) orderSwitch(g *group) {
	if g.switching() && !g.leaving.ordered && len(p.heldBy(g)) == 0 {
		g.leaving.ordered = true
		p.emit(Action{Kind: Switch, Group: g.id, Side: g.leaving.to})
	}
}

// keep ends a group's change of role without a change: the group keeps its previous role.
func (p *Planner) keep(g *group, why Reason) {
	was := g.leaving
	g.leaving = leaving{}
	if g.role == Decode {
		p.leastTotal.put(g)
		p.retryAll()
	}
	if !was.ordered {
		p.announce(g)
	}
	p.endSwitch(g.id, was.to, why)
}

// endSwitch reports to the operator that a group's change of role has ended. why is the reason if
// the role was not changed.
func (p *Planner) endSwitch(id GroupID, to Role, why Reason) {
	if why == NoReason {
		p.stats.Switched++
	} else {
		p.stats.SwitchesFailed++
	}
	p.notify(Action{Kind: Switched, Group: id, Side: to, Why: why})
}

// returning handles a switch in progress when the group registers again: g is the new registration,
// old the previous one or nil.
func (p *Planner) returning(g, old *group, e *GroupUp) {
	if old != nil && old.leaving.to != 0 {
		was := old.leaving
		old.leaving = leaving{}
		switch {
		case g.role == was.to:
			p.endSwitch(g.id, was.to, NoReason)
		case e.Switching == was.to:
		case e.Again || e.Announced == was.to:
			// The Switch order, or the answer to it, may have been lost with the session, so the
			// order is sent again.
			g.leaving = was
			g.leaving.ordered = false
		default:
			p.endSwitch(g.id, was.to, GroupLost)
		}
	}
	switch {
	case e.Switching == g.role.Other():
		g.leaving = leaving{to: e.Switching, ordered: true}
		return
	case !e.Again && g.leaving.to == 0 && e.Announced == g.role.Other():
		g.leaving = leaving{to: e.Announced, resumeBy: p.now + p.opts.GroupTimeout}
	}
	if e.Announced != g.leaving.to {
		p.announce(g) // the last one was lost with the session
	}
}

// reconsider ends the switch of each group that must keep its role because other groups are gone,
// and resumes switches that an earlier planner announced.
func (p *Planner) reconsider() {
	for _, g := range p.order {
		switch {
		case g.leaving.to == 0 || g.leaving.ordered:
		case !g.switching():
			p.resume(g)
		default:
			if why := p.indispensable(g); why != NoReason {
				p.keep(g, why)
			}
		}
	}
}

// recentMax is the maximum number of finished requests on which Recent is based.
const recentMax = 512

// Recent describes the last finished requests. The planner node computes from it how many prefill
// and decode groups the load needs.
type Recent struct {
	// Uncached has one length per request, in tokens: the prompt without its cached prefix.
	Uncached []int
	// Tokens is the mean length of prompt and expected output together, Output the mean length of
	// the expected output, both in tokens.
	Tokens, Output float64
	// Step is the time per output token in seconds: from the end of prefill to the end of
	// decode, divided by the expected output. 0: no request had an output.
	Step float64
}

// sample is one finished request.
type sample struct {
	uncached, tokens, output int
	decode                   float64 // seconds
}

// observe records a request whose decode ends. It skips a request whose start of decode is unknown
// because the planner has restarted since.
func (p *Planner) observe(r *request) {
	if r.prefilledAt == 0 {
		return
	}
	s := sample{max(r.Prompt-r.Hit, 1), r.decodeLen(), r.Output, (p.now - r.prefilledAt).Seconds()}
	if len(p.samples) < recentMax {
		p.samples = append(p.samples, s)
		return
	}
	p.samples[p.stats.Finished%recentMax] = s
}

// Recent returns a description of the last finished requests.
func (p *Planner) Recent() (r Recent) {
	var output, tokens int
	var decode float64
	for _, s := range p.samples {
		r.Uncached = append(r.Uncached, s.uncached)
		output, tokens = output+s.output, tokens+s.tokens
		if s.output > 0 {
			decode += s.decode
		}
	}
	if n := float64(len(p.samples)); n > 0 {
		r.Tokens, r.Output = float64(tokens)/n, float64(output)/n
	}
	if output > 0 {
		r.Step = decode / float64(output)
	}
	return r
}

// Use returns the utilization of a group, from 0 to 1. For a prefill group it is the mean of
// unfinished tokens divided by Options.Beta, for a decode group the used share of device memory.
func (p *Planner) Use(id GroupID) float64 {
	g := p.groups[id]
	if g == nil {
		return 0
	}
	used, size := 0.0, 0.0
	for _, en := range g.engines {
		if g.role == Prefill {
			used, size = used+math.Min(float64(en.tok), float64(p.opts.Beta)), size+float64(p.opts.Beta)
			continue
		}
		used, size = used+float64(en.size.hbm-max(en.left.hbm, 0)), size+float64(en.size.hbm)
	}
	return min(used/size, 1)
}
