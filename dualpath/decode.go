package dualpath

// route drains the decode queue: each request goes to the queue of the group with the
// least total tokens. DualPath section 6.1, "DE scheduling phase 1". With
// Options.Network there is no such queue: a request's decode engine is chosen among
// all when its prefill engine is known.
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
		if r.at == g.private.Front() {
			p.rewind(g)
		}
		r.why.note(p.now, "decode group %d: least tokens of all groups (%d with this request)", int(g.id), g.total)
	}
}

// decodeGroup returns the group with the least total among those with an engine
// that takes the request; nil if there is none. Groups that it should avoid come
// last.
func (p *Planner) decodeGroup(r *request) *group {
	careful := p.careful(r)
	if g := p.leastTotal.first(); p.takenBy(g, r) && (!careful || !p.avoidsAll(r, g)) {
		return g
	}
	var best *group
	last := false // best is to be avoided
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

// decodeChoice is a decode engine with what it was chosen by; engine nil: none has
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

// chooseDecode chooses the decode engine of a request that pe prefills: DualPath
// section 6.1, "DE scheduling phase 2", or by what the network costs.
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

// threshold is Z = ZFactor (sum of len_r over R + sum of tok_e) / |E|, where R is
// the head of the queue that would fit if the group's HBM were one piece.
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

// pickDecode returns the engine for a request: among those with room, of the ones
// that stay at or below z the one with the fewest requests, else the one with the
// fewest tokens, and high is true. Nil if none has room. Ties go to the first. An
// engine that the request should avoid is taken only if no other of the group takes
// the request.
func (p *Planner) pickDecode(r *request, g *group, z float64) (best *engine, high bool) {
	var fewest, least *engine
	n := r.decodeLen()
	careful := p.careful(r) && !p.avoidsAll(r, g)
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

// groupHeap is a heap of groups. Each knows its place in it, so that it is found when
// it changes.
type groupHeap struct {
	h    []*group
	less func(a, b *group) bool
	// at returns where a group keeps its place; -1: it is not in the heap.
	at func(*group) *int
}

// byTotal orders decode groups by total tokens, then by ID.
func byTotal() groupHeap {
	return groupHeap{
		less: func(a, b *group) bool { return a.total < b.total || (a.total == b.total && a.id < b.id) },
		at:   func(g *group) *int { return &g.totalAt },
	}
}

// byAge orders decode groups by the age of the requests that they offer.
func byAge() groupHeap {
	age := func(g *group) int64 { return g.cursor.Value.(*request).order }
	return groupHeap{
		less: func(a, b *group) bool { return age(a) < age(b) },
		at:   func(g *group) *int { return &g.oldestAt },
	}
}

// swap exchanges two groups.
func (q *groupHeap) swap(i, j int) {
	q.h[i], q.h[j] = q.h[j], q.h[i]
	*q.at(q.h[i]), *q.at(q.h[j]) = i, j
}

// first returns the first group, or nil.
func (q *groupHeap) first() *group {
	if len(q.h) == 0 {
		return nil
	}
	return q.h[0]
}

// put adds a group, or moves one whose order has changed.
func (q *groupHeap) put(g *group) {
	i := *q.at(g)
	if i < 0 {
		i = len(q.h)
		*q.at(g) = i
		q.h = append(q.h, g)
	}
	q.fix(i)
}

// remove takes a group out, if it is in.
func (q *groupHeap) remove(g *group) {
	i := *q.at(g)
	if i < 0 {
		return
	}
	last := len(q.h) - 1
	q.swap(i, last)
	q.h = q.h[:last]
	*q.at(g) = -1
	if i < last {
		q.fix(i)
	}
}

// fix restores the order around place i.
func (q *groupHeap) fix(i int) {
	for i > 0 && q.less(q.h[i], q.h[(i-1)/2]) {
		q.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		least := i
		for _, c := range [...]int{2*i + 1, 2*i + 2} {
			if c < len(q.h) && q.less(q.h[c], q.h[least]) {
				least = c
			}
		}
		if least == i {
			return
		}
		q.swap(i, least)
		i = least
	}
}
