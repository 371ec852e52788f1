package dualpath

import "container/list"

// enqueue puts a request into the queue: at the end of its tenant's queue, or, if again is set,
// before all others of its priority.
func (p *Planner) enqueue(r *request, again bool) {
	p.queued++
	if again {
		p.front--
		r.order = p.front
		r.at = p.unrouted.PushFront(r)
	} else {
		p.back++
		r.order = p.back
		r.at = p.unrouted.PushBack(r)
	}
	p.join(r, again)
	p.sizes.count(r.work, 1)
	p.watch(r)
	if p.opts.Network != nil {
		p.offer(r)
	}
}

// unqueue removes a request from the queue, if it is queued.
func (p *Planner) unqueue(r *request) {
	if r.at == nil {
		return
	}
	p.queued--
	p.deadlines.remove(r)
	p.sizes.count(r.work, -1)
	p.leave(r)
	g := r.home
	if g == nil {
		p.unlist(&r.at, p.unrouted)
		return
	}
	p.unlist(&r.at, g.private)
	r.home = nil
	g.total -= r.decodeLen()
	p.leastTotal.put(g)
	if g.private.Len() == 0 {
		p.retryAll()
	}
}

// requeue plans a request again from the start. It aborts the request on its engines, except on a
// prefill engine that has prefilled it.
func (p *Planner) requeue(r *request, why Reason) {
	p.stats.Replanned++
	p.stopLoading(r)
	p.leavePrefill(r)
	p.endTransfers(r)
	for _, role := range [...]Role{Prefill, Decode} {
		if en := r.engineOf(role); en != nil && !(role == Prefill && r.prefilled) {
			p.emit(Action{Kind: Abort, Request: r.ID, Group: en.group.id, Engine: en.id, Why: why})
		}
		r.setEngine(role, nil)
	}
	r.phase, r.prefilled, r.prefilledAt, r.rest = queued, false, 0, r.rest[:0]
	p.renew(r)
	p.notify(Action{Kind: Replan, Request: r.ID, Why: why})
	p.enqueue(r, true)
}

// refuse rejects a request, with the reason and the amounts of s in the Reject.
func (p *Planner) refuse(r *request, s shortfall) {
	p.end(r, s.why)
	reject := &p.out[len(p.out)-1]
	reject.Need, reject.Most = s.need, s.most
}

// end rejects a request that will not be served, and aborts it on its engines.
func (p *Planner) end(r *request, why Reason) {
	p.stats.Rejected++
	for _, en := range [...]*engine{r.pe, r.de} {
		if en != nil {
			p.emit(Action{Kind: Abort, Request: r.ID, Group: en.group.id, Engine: en.id, Why: why})
		}
	}
	p.emit(Action{Kind: Reject, Request: r.ID, Why: why})
	r.why.note(p.now, "ended: "+why.String())
	p.forget(r)
}

// forget removes a request from every list.
func (p *Planner) forget(r *request) {
	p.unqueue(r)
	p.leavePrefill(r)
	p.stopLoading(r)
	p.endTransfers(r)
	delete(p.requests, r.ID)
}

// unlist removes an element from a list, if *el is not nil, and sets *el to nil.
func (p *Planner) unlist(el **list.Element, from *list.List) {
	if *el != nil {
		from.Remove(*el)
		*el = nil
	}
}
