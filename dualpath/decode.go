package dualpath

// route moves each request in unrouted to the queue of the decode group with the fewest tokens in
// total (DualPath section 6.1, "DE scheduling phase 1"). With Options.Network the groups have no
// queues: the decode engine is chosen among all engines, after the prefill engine.
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

// unroute moves the requests in the queue of a decode group back to unrouted, in their order,
// because the group is lost or changes its role.
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

// rehome moves a request whose decode group is full to a group that has room for it and an empty
// queue: among such groups, to the one with the fewest tokens. It returns false if no group
// qualifies. A group can have room because its requests ended sooner than expected.
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

// decodeGroup returns, among the decode groups with an engine large enough for the request, the
// group with the fewest tokens, or nil. A group whose engines the request avoids is returned only
// if there is no other.
func (p *Planner) decodeGroup(r *request) *group {
	careful := p.mayAvoid(r)
	if g := p.leastTotal.first(); p.takenBy(g, r) && (!careful || !p.avoidsAll(r, g)) {
		return g
	}
	var best *group
	last := false // whether the request avoids best
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

// decodeChoice is the chosen decode engine and the values that led to the choice. engine is nil if
// no engine has room.
type decodeChoice struct {
	engine *engine
	// z and fitting are the results of threshold, high is the result of pickDecode. With
	// Options.Network only seconds is set: the predicted time until the first token.
	z       float64
	high    bool
	fitting int
	seconds float64
}

// chooseDecode chooses the decode engine of a request that pe prefills, by DualPath section 6.1,
// "DE scheduling phase 2". With Options.Network it chooses by the predicted time until the first
// token.
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

// threshold returns Z of the DualPath paper, the number of tokens above which an engine of the
// group E counts as loaded: Z = ZFactor (sum of len_r over R + sum of tok_e over E) / |E|. R are
// the requests at the head of the queue that would fit into the free device memory of all engines
// together; fitting is their number.
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

// pickDecode returns the engine for a request. Among the engines with room whose tokens would stay
// at or below z, it returns the engine with the fewest requests. If there is no such engine, it
// returns the engine with room that has the fewest tokens, and high is true. best is nil if no
// engine has room. Among equals, the first engine is chosen. An engine that the request avoids is
// chosen only if no other engine of the group takes the request.
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
