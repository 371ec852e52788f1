package dualpath

// route empties the decode queue: each request moves to the queue of the group with the least
// total tokens (DualPath section 6.1, "DE scheduling phase 1"). With Options.Network there is
// no such queue: the decode engine is chosen among all engines when the prefill engine has been
// chosen.
func (p *Planner) route() {
	for p.opts.Network == nil && p.unrouted.Len() > 0 && p.leastTotal.first() != nil {
		r := p.unrouted.Front().Value.(*request)
		g := p.decodeGroup(r)
		if g == nil {
			p.refuse(r, p.shortfallOf(Decode, r))
			continue
		}
		p.unlist(&r.at, p.unrouted)
		r.home = g
		if front := g.private.Front(); front != nil && r.order < front.Value.(*request).order {
			r.at = g.private.PushFront(r)
		} else {
			r.at = g.private.PushBack(r)
		}
		g.total += r.decodeLen()
		p.leastTotal.put(g)
		p.offer(r)
		r.why.note(p.now, "decode group %d: least tokens of all groups (%d with this request)", int(g.id), g.total)
	}
}

// unroute returns the requests in the queue of a decode group, which is lost or changes its
// role, to the queue of requests without a group, in their order.
func (p *Planner) unroute(g *group) {
	for el := g.private.Back(); el != nil; el = g.private.Back() {
		r := g.private.Remove(el).(*request)
		p.withdraw(r)
		g.total -= r.decodeLen()
		r.home = nil
		r.at = p.unrouted.PushFront(r)
	}
	for _, l := range p.priorities {
		delete(l.replanned.byHome, g)
		for _, f := range l.flows {
			delete(f.byHome, g)
		}
	}
}

// rehome moves a request whose decode group is full to a group that has room for it and an
// empty queue: of these groups, to the one with the least total. It reports whether there is
// one. Requests of a group may end sooner than expected at routing.
func (p *Planner) rehome(r *request) bool {
	var to *group
	for _, g := range p.order {
		if r.home == nil || g.role != Decode || g.switching() || g.private.Len() > 0 || (to != nil && g.total >= to.total) {
			continue
		}
		for _, en := range g.engines {
			if p.accepts(en, r) && !(p.mayAvoid(r) && p.avoids(r, en)) {
				to = g
				break
			}
		}
	}
	if to == nil {
		return false
	}
	from := r.home
	p.withdraw(r)
	p.unlist(&r.at, from.private)
	from.total -= r.decodeLen()
	p.leastTotal.put(from)
	r.home, r.at = to, to.private.PushBack(r)
	to.total += r.decodeLen()
	p.leastTotal.put(to)
	p.offer(r)
	r.why.note(p.now, "decode group %d is full; group %d has room and no queue", int(from.id), int(to.id))
	return true
}

// decodeGroup returns the group with the least total among the groups with an engine that takes
// the request, or nil. Groups that the request avoids come last.
func (p *Planner) decodeGroup(r *request) *group {
	careful := p.mayAvoid(r)
	if g := p.leastTotal.first(); p.takenBy(g, r) && (!careful || !p.avoidsAll(r, g)) {
		return g
	}
	var best *group
	last := false // the request avoids best
	for _, g := range p.order {
		if g.role != Decode || g.switching() || !p.takenBy(g, r) {
			continue
		}
		avoid := careful && p.avoidsAll(r, g)
		if best == nil || (last && !avoid) || (last == avoid && g.total < best.total) {
			best, last = g, avoid
		}
	}
	return best
}

// decodeChoice is a decode engine and the values of its choice. engine is nil if no engine has
// room.
type decodeChoice struct {
	engine *engine
	// z, high and fitting are those of pickDecode and threshold; seconds is the cost
	// with Options.Network.
	z       float64
	high    bool
	fitting int
	seconds float64
}

// chooseDecode chooses the decode engine of a request that pe prefills: by DualPath section
// 6.1, "DE scheduling phase 2", or by the cost of the network.
func (p *Planner) chooseDecode(r *request, pe *engine) (c decodeChoice) {
	if p.opts.Network != nil {
		c.engine, c.seconds = p.cheapest(r, pe)
		return c
	}
	g := r.home
	if g.zStep != p.steps {
		g.z, g.fitting = p.threshold(g)
		g.zStep = p.steps
	}
	c.z, c.fitting = g.z, g.fitting
	c.engine, c.high = p.pickDecode(r, g, c.z)
	return c
}

// threshold is Z = ZFactor (sum of len_r over R + sum of tok_e) / |E|, where R is the part of
// the queue, from its head, that would fit if the group's HBM were contiguous.
func (p *Planner) threshold(g *group) (z float64, fitting int) {
	free, tok := 0, 0
	for _, en := range g.engines {
		free += max(en.left.hbm, 0)
		tok += en.tok
	}
	sum := 0
	for el := g.private.Front(); el != nil; el = el.Next() {
		n := el.Value.(*request).decodeLen()
		if sum+n > free {
			break
		}
		sum += n
		fitting++
	}
	return p.opts.ZFactor * float64(sum+tok) / float64(len(g.engines)), fitting
}

// pickDecode returns the engine for a request. Among the engines with room that stay at or
// below z it is the one with the fewest requests. If there is none it is the one with the
// fewest tokens, and high is true. It is nil if no engine has room. Ties go to the first
// engine. An engine that the request avoids is chosen only if no other engine of the group
// takes the request.
func (p *Planner) pickDecode(r *request, g *group, z float64) (best *engine, high bool) {
	var fewest, least *engine
	n := r.decodeLen()
	careful := p.mayAvoid(r) && !p.avoidsAll(r, g)
	for _, en := range g.engines {
		switch {
		case (careful && p.avoids(r, en)) || !p.accepts(en, r):
		case float64(en.tok+n) <= z:
			if fewest == nil || en.seq < fewest.seq {
				fewest = en
			}
		default:
			if least == nil || en.tok < least.tok {
				least = en
			}
		}
	}
	if fewest != nil {
		return fewest, false
	}
	return least, true
}

// byTotal orders decode groups by total tokens, then by ID.
func byTotal() ordered[group] {
	return ordered[group]{
		less:  func(a, b *group) bool { return a.total < b.total || (a.total == b.total && a.id < b.id) },
		index: func(g *group) *int { return &g.totalAt },
	}
}
