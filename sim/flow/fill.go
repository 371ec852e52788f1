package flow

// filling is the state of progressive filling, which computes max-min fair rates. It covers the links
// and flows that a change affects. The rates of all flows rise together: at level x a flow has the
// rate x times its weight. A flow's rate becomes final when one of its links is full or the flow
// reaches its cap.
type filling struct {
	pass  uint64
	links []fillLink
	flows []*Flow
	next  []float64 // final rates, by index in flows; negative while the rate is still rising
	heap  []stop
}

// fillLink is the state of a link during the filling.
type fillLink struct {
	id LinkID
	// left is the bandwidth, in bytes per second, that the flows with final rates do not use.
	// weight is the sum of the weights of the flows whose rates still rise. whole is the value of
	// weight when all of these weights were last added up.
	left, weight, whole float64
	// rising is the number of the link's flows whose rates are not final.
	rising int
}

// stop is a level at which rates become final: a link is full (flow < 0), or a flow reaches its cap.
type stop struct {
	level float64
	link  int32
	flow  int32
}

// reallocate computes the max-min fair rate of every flow that a change affects.
func (n *Network) reallocate() {
	fl := &n.fill
	fl.gather(n)
	fl.fill(n)
	for i, f := range fl.flows {
		if f.rate != fl.next[i] {
			f.setRate(fl.next[i])
		}
	}
	for _, l := range n.dirty {
		n.links[l].dirty = false
	}
	n.dirty = n.dirty[:0]
}

// gather collects the links and flows that the dirty links affect.
func (fl *filling) gather(n *Network) {
	fl.pass++
	fl.links, fl.flows, fl.next = fl.links[:0], fl.flows[:0], fl.next[:0]
	add := func(id LinkID) {
		l := &n.links[id]
		if l.mark == fl.pass {
			return
		}
		l.mark, l.at = fl.pass, int32(len(fl.links))
		fl.links = append(fl.links, fillLink{id: id, left: l.rate * (1 - l.background)})
	}
	for _, id := range n.dirty {
		add(id)
	}
	for i := 0; i < len(fl.links); i++ {
		for _, c := range n.links[fl.links[i].id].on {
			f := c.flow
			if f.mark == fl.pass {
				continue
			}
			f.mark, f.at = fl.pass, int32(len(fl.flows))
			fl.flows = append(fl.flows, f)
			fl.next = append(fl.next, -1)
			for _, h := range f.hops {
				add(h.link)
			}
		}
	}
}

// fill computes the final rates of all flows. The level at which a link is full never decreases when
// other rates become final. So the level that a heap entry gives for a link is a lower bound. It is
// computed again when the entry is popped.
func (fl *filling) fill(n *Network) {
	for _, f := range fl.flows {
		for _, h := range f.hops {
			l := &fl.links[n.links[h.link].at]
			l.weight += h.times * f.weight
			l.rising++
		}
	}
	fl.heap = fl.heap[:0]
	for i := range fl.links {
		if l := &fl.links[i]; l.rising > 0 {
			l.whole = l.weight
			fl.push(stop{l.left / l.weight, int32(i), -1})
		}
	}
	for i, f := range fl.flows {
		if f.cap > 0 {
			fl.push(stop{f.cap / f.weight, -1, int32(i)})
		}
	}
	for rising := len(fl.flows); rising > 0; {
		s := fl.pop()
		if s.flow >= 0 {
			if fl.next[s.flow] < 0 {
				fl.stopAt(n, fl.flows[s.flow], s.level)
				rising--
			}
			continue
		}
		l := &fl.links[s.link]
		if l.rising == 0 {
			continue
		}
		if l.weight < 1e-6*l.whole {
			l.weigh(n, fl) // the difference of two large numbers would be imprecise
		}
		if level := max(l.left, 0) / l.weight; level > s.level {
			s.level = level
			fl.push(s)
			continue
		}
		for _, c := range n.links[l.id].on {
			if fl.next[c.flow.at] < 0 {
				fl.stopAt(n, c.flow, s.level)
				rising--
			}
		}
	}
}

// weigh sums the weights of the link's flows whose rates are not final.
func (l *fillLink) weigh(n *Network, fl *filling) {
	l.weight = 0
	for _, c := range n.links[l.id].on {
		if fl.next[c.flow.at] < 0 {
			l.weight += c.flow.hops[c.hop].times * c.flow.weight
		}
	}
	l.whole = l.weight
}

// stopAt makes a flow's rate final at a level.
func (fl *filling) stopAt(n *Network, f *Flow, level float64) {
	rate := max(level, 0) * f.weight
	fl.next[f.at] = rate
	for _, h := range f.hops {
		l := &fl.links[n.links[h.link].at]
		l.left -= rate * h.times
		l.weight -= h.times * f.weight
		l.rising--
	}
}

// less orders stops by level, links before flows, then by index.
func (a stop) less(b stop) bool {
	if a.level != b.level {
		return a.level < b.level
	}
	if a.flow != b.flow {
		return a.flow < b.flow
	}
	return a.link < b.link
}

// push adds a stop to the heap.
func (fl *filling) push(s stop) {
	fl.heap = append(fl.heap, s)
	h := fl.heap
	for i := len(h) - 1; i > 0; {
		parent := (i - 1) / 2
		if !h[i].less(h[parent]) {
			break
		}
		h[i], h[parent] = h[parent], h[i]
		i = parent
	}
}

// pop removes the lowest stop.
func (fl *filling) pop() stop {
	h := fl.heap
	top := h[0]
	last := len(h) - 1
	h[0] = h[last]
	h = h[:last]
	fl.heap = h
	for i := 0; ; {
		least := i
		for c := 2*i + 1; c <= 2*i+2 && c < last; c++ {
			if h[c].less(h[least]) {
				least = c
			}
		}
		if least == i {
			return top
		}
		h[i], h[least] = h[least], h[i]
		i = least
	}
}
