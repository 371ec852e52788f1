package dualpath

// routeDecode drains the decode queue: each request goes to the group with the
// least total tokens. DualPath section 6.1, "DE scheduling phase 1". With
// Options.Network it goes where it costs least, once it has a prefill engine.
func (p *Planner) routeDecode() {
	for p.unrouted.Len() > 0 && p.decodeFirst.first() != nil {
		r := p.unrouted.Front().Value.(*request)
		if p.opts.Network != nil && r.pe == nil {
			return // the order is the prefill queue's, so the next has none either
		}
		g, cost := p.decodeGroup(r), 0.0
		if g != nil && p.opts.Network != nil {
			g, cost = p.cheapestGroup(r)
		}
		if g == nil {
			p.end(r, TooLong)
			continue
		}
		p.unlist(&r.decodeAt, p.unrouted)
		r.home = g
		r.decodeAt = g.private.PushBack(r)
		g.total += r.decodeLen()
		p.decodeFirst.fix(g)
		if p.opts.Network != nil {
			r.why.note(p.now, "decode group %d: its best engine has the first token %d us after prefill on node %d, sooner than others'",
				int(g.id), int(cost*1e6), int(r.pe.node.id))
			continue
		}
		r.why.note(p.now, "decode group %d: least tokens of all groups (%d with this request)", int(g.id), g.total)
	}
}

// decodeGroup returns the group with the least total among those with an engine
// that could hold the request were it empty; nil if there is none. Groups that it
// should avoid come last.
func (p *Planner) decodeGroup(r *request) *group {
	n, careful := r.decodeLen(), p.careful(r)
	if g := p.decodeFirst.first(); g.holds(n) && (!careful || !p.avoidsAll(r, g)) {
		return g
	}
	var best *group
	last := false // best is to be avoided
	for _, g := range p.order {
		if g.role != Decode || !g.holds(n) {
			continue
		}
		avoid := careful && p.avoidsAll(r, g)
		if best == nil || (last && !avoid) || (last == avoid && g.total < best.total) {
			best, last = g, avoid
		}
	}
	return best
}

// holds reports whether an engine of the group could hold n tokens.
func (g *group) holds(n int) bool { return g.hbmMax == 0 || g.hbmMax >= n }

// fetchDecode gives the engines of g requests from its queue until the head
// finds no HBM. DualPath section 6.1, "DE scheduling phase 2".
func (p *Planner) fetchDecode(g *group) {
	if g.private.Len() == 0 {
		return
	}
	z, fitting := p.threshold(g)
	for el := g.private.Front(); el != nil; el = g.private.Front() {
		r := el.Value.(*request)
		n := r.decodeLen()
		var en *engine
		if p.opts.Network != nil && r.pe != nil {
			var cost float64
			if en, cost = p.cheapestEngine(r, g); en == nil {
				return
			}
			r.why.note(p.now, "decode engine %d on node %d: transfer from node %d, wait and first step take %d us, the least in its group",
				int(en.id), int(en.node.id), int(r.pe.node.id), int(cost*1e6))
		} else {
			var high bool
			if en, high = p.pickDecode(r, g, n, z); en == nil {
				return
			}
			p.explainDecode(r, en, n, z, high, fitting)
		}
		p.unlist(&r.decodeAt, g.private)
		r.home, r.de = nil, en
		seq := p.say(Action{Kind: Assign, Request: r.ID, Group: g.id, Engine: en.id, Side: Decode})
		p.give(en, seq, n, n)
		if r.pe != nil {
			p.start(r)
		}
	}
}

// threshold is Z = ZFactor (sum of len_r over R + sum of tok_e) / |E|, where R is
// the head of the queue that would fit if the group's HBM were one piece.
func (p *Planner) threshold(g *group) (z float64, fitting int) {
	free, tok := 0, 0
	for _, en := range g.engines {
		free += max(en.hbm, 0)
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

// pickDecode returns the engine for a request of n tokens: among those with
// enough HBM, of the ones that stay at or below z the one with the fewest
// requests, else the one with the fewest tokens, which high then tells. Nil if
// none has the HBM. Ties go to the first. One that the request should avoid is
// taken only if no other of the group ever could.
func (p *Planner) pickDecode(r *request, g *group, n int, z float64) (best *engine, high bool) {
	var fewest, least *engine
	careful := p.careful(r) && !p.avoidsAll(r, g)
	for _, en := range g.engines {
		switch {
		case en.hbm < n || (careful && p.avoids(r, en)):
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

// groupHeap holds the decode groups, the one with the least total first.
type groupHeap struct{ h []*group }

// less orders groups by total tokens, then by ID.
func (q *groupHeap) less(i, j int) bool {
	a, b := q.h[i], q.h[j]
	return a.total < b.total || (a.total == b.total && a.id < b.id)
}

// swap exchanges two groups.
func (q *groupHeap) swap(i, j int) {
	q.h[i], q.h[j] = q.h[j], q.h[i]
	q.h[i].heapAt, q.h[j].heapAt = i, j
}

// first returns the group with the least total, or nil.
func (q *groupHeap) first() *group {
	if len(q.h) == 0 {
		return nil
	}
	return q.h[0]
}

// push adds a group.
func (q *groupHeap) push(g *group) {
	g.heapAt = len(q.h)
	q.h = append(q.h, g)
	q.fix(g)
}

// remove takes a group out, if it is in.
func (q *groupHeap) remove(g *group) {
	i := g.heapAt
	if i < 0 || i >= len(q.h) || q.h[i] != g {
		return
	}
	last := len(q.h) - 1
	q.swap(i, last)
	q.h = q.h[:last]
	g.heapAt = -1
	if i < last {
		q.fix(q.h[i])
	}
}

// fix restores the order around a group whose total has changed.
func (q *groupHeap) fix(g *group) {
	i := g.heapAt
	if i < 0 || i >= len(q.h) || q.h[i] != g {
		return
	}
	for i > 0 && q.less(i, (i-1)/2) {
		q.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		least := i
		for _, c := range [...]int{2*i + 1, 2*i + 2} {
			if c < len(q.h) && q.less(c, least) {
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
