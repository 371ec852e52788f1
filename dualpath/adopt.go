package dualpath

import (
	"cmp"
	"slices"
)

// hold takes over a request that an engine already has. After a restart of the planner, the groups
// of the request's two engines register in any order, and the gateway may submit the request
// before, between or after these registrations. The reports of the two groups disagree if the
// previous planner ended when only one of them had received the Start. If again is set, only the
// group's session broke: the planner then has each request that the group lists, unless the request
// has ended.
func (p *Planner) hold(g *group, h *Held, again bool) {
	en := p.engines[h.Engine]
	if en == nil || en.group != g {
		return
	}
	p.seq = max(p.seq, h.Attempt, h.Order) // attempt numbers are never reused
	r := p.requests[h.Request.ID]
	if h.Ended && (r == nil || r.phase == queued || r.attempt != h.Attempt) {
		return // a Finished or Failed follows and is ignored
	}
	abort := Action{Kind: Abort, Request: h.Request.ID, Group: g.id, Engine: en.id, Why: GroupLost}
	if r == nil && again {
		p.take(en, p.held(en, p.sized(&h.Request)))
		abort.Why = NoReason
		p.emit(abort)
		return
	}
	if r == nil {
		r = p.newRequest(&h.Request)
		r.started = p.now
		r.why.note(p.now, "found with engine %d, as its group reports", int(h.Engine))
		p.requests[r.ID] = r
		p.enqueue(r, false)
	}
	if !h.Ended {
		p.take(en, p.held(en, r))
	}
	switch has := r.engineOf(g.role); {
	case has == en && r.phase == serving && h.Attempt != r.attempt:
		// The Start was lost when the group's session broke.
		r.why.note(p.now, "engine %d does not have its start", int(en.id))
		p.requeue(r, GroupLost)
	case has == en:
		// The group's session broke; orders may have been lost.
		p.repeat(r, g.role, h.Order)
	case has != nil, r.phase == queued && (h.Attempt == 0 || r.attempt != 0 || again):
		// Another engine has the request, or no engine has its Start.
		p.emit(abort)
	case r.phase == queued:
		p.unqueue(r)
		// The engines have the prefix and the weights of the request as it was assigned. The gateway may
		// have submitted it again with another prefix, or newer weights may have begun since.
		r.Hit, r.cached, r.Epoch, r.unfit = h.Request.Hit, h.Request.Hit, h.Request.Epoch, NoReason
		r.setEngine(g.role, en)
		r.phase, r.attempt, r.started, r.adopted = serving, h.Attempt, p.now, true
		r.found = [2]*Held{}
		p.beginPrefill(r)
		p.restore(r, g.role, h)
		p.partial = append(p.partial, r)
	case h.Attempt == r.attempt:
		r.setEngine(g.role, en)
		if g.role == Prefill && !r.prefilled {
			p.beginPrefill(r)
		}
		if r.adopted && !r.prefilled {
			p.restore(r, g.role, h)
			p.adopt(r)
		}
	case again || r.prefilled:
		// The request has had a later attempt, or its prefill has ended.
		p.emit(abort)
	default:
		r.setEngine(g.role, en)
		r.why.note(p.now, "the two sides work on different attempts")
		p.requeue(r, GroupLost)
	}
}

// restore records the storage read that the engine in the given role has in progress for r. The
// engine has reported the read to this planner, which did not order it.
func (p *Planner) restore(r *request, role Role, h *Held) {
	r.found[sideAt(role)] = h
	part := h.Reading
	part.Side = role
	if h.Ended || part.Len() <= 0 || part.To > min(r.Hit, h.Request.Hit) {
		return
	}
	r.sides[sideAt(role)] = side{
		part: part, upto: part.From, landed: min(h.Landed, part.Len()), state: reading, order: h.Read,
		begun: p.now, predicted: drain(r.engineOf(role).node, part.Len()),
	}
	if r.loadingAt == nil {
		r.loadingAt = p.loading.PushBack(r)
	}
}

// adopt completes the state of a request that both engines have reported, as if this planner had
// started the request. If the engines do not have all cached tokens, the request is planned again.
func (p *Planner) adopt(r *request) {
	if !r.covered() {
		// The previous planner ended between the end of an incomplete read and the order to read or
		// compute the missing tokens.
		r.why.note(p.now, "its engines do not have all cached tokens")
		p.requeue(r, GroupLost)
		return
	}
	for _, h := range r.found {
		if h == nil || h.Ended || h.Order == 0 {
			return
		}
	}
	r.adopted = false
	a, b := &r.sides[0], &r.sides[1]
	if a.state == reading && b.state == reading && a.part.From < b.part.To && b.part.From < a.part.To {
		a.hedge, b.hedge = true, true
	}
}

// covered reports whether the engines of a restored request together have every cached token. It
// also returns true if an engine does not report its parts or has completed its work.
func (r *request) covered() bool {
	var parts []Part
	upto := 0
	for _, h := range r.found {
		if h == nil || h.Ended || h.Order == 0 {
			return true
		}
		parts = append(parts, h.Parts...)
		upto = max(upto, h.Request.Hit)
	}
	slices.SortFunc(parts, func(a, b Part) int { return cmp.Compare(a.From, b.From) })
	at := 0
	for _, part := range parts {
		if part.From <= at {
			at = max(at, part.To)
		}
	}
	return at >= upto
}

// held returns the work and the memory of a request that the engine's group lists in its
// registration. The planner counts this amount until the group's first report, which includes it.
func (p *Planner) held(en *engine, r *request) assigned {
	if en.group.role == Prefill {
		return assigned{tokens: r.Prompt, requests: 1, room: p.most(en, r)}
	}
	return assigned{tokens: r.decodeLen(), requests: 1, room: p.least(en, r)}
}

// complete plans again each request that, after a restart of the planner, only one of its two
// engines holds. The other engine does not have the attempt, because the Start was lost with the
// previous planner or because the attempt has ended there. If the other engine's group does not
// register within Options.GroupTimeout, that engine counts as not having the attempt.
func (p *Planner) complete() {
	p.partial = slices.DeleteFunc(p.partial, func(r *request) bool {
		if p.requests[r.ID] != r || r.phase != serving || !r.adopted || (r.pe == nil) == (r.de == nil) {
			return true
		}
		role := Prefill
		if r.pe == nil {
			role = Decode
		}
		h := r.found[sideAt(role)]
		back := p.engines[h.Peer]
		if h.Peer == 0 {
			back = nil
		}
		if back == nil && p.now-r.started <= p.opts.GroupTimeout {
			return false
		}
		// had: the other engine may have had the request and ended its part. That is impossible if
		// this engine still reads, or if the other engine's group has registered again and had not
		// received the Start.
		had := h.Reading.Len() <= 0 && (back == nil || !back.group.returns || back.group.seen >= r.attempt)
		if role == Decode && (had || r.prefilled) {
			return true
		}
		r.why.note(p.now, "no "+role.Other().String()+" engine has it; planned anew")
		p.requeue(r, GroupLost)
		return true
	})
}
