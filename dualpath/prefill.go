package dualpath

import "math"

// class is one of the three categories (C1 to C3) of prefill engines in DualPath section 6.1.
type class uint8

const (
	shortQueue class = iota // C2: tokens <= Beta, reading queue <= Alpha: the storage NIC may become idle
	longQueue               // C3: tokens <= Beta, reading queue > Alpha
	overloaded              // C1: unfinished tokens > Beta: takes no request
)

// String returns the category's name.
func (c class) String() string {
	return [...]string{"short reading queue", "long reading queue", "overloaded"}[c]
}

// classOf returns the category of an engine.
func (p *Planner) classOf(en *engine) class {
	switch {
	case en.tok > p.opts.Beta:
		return overloaded
	case en.node.queue <= p.opts.Alpha:
		return shortQueue
	}
	return longQueue
}

// noEngine is the value of group.least for a group that takes no request.
const noEngine = math.MaxInt

// noteLeast sets group.least: the number of unfinished tokens of the group's least loaded engine,
// which grant compares with the engines of other groups. If the group is full, the value is
// noEngine, so that no other group leaves a request to this group.
func (g *group) noteLeast(p *Planner, full bool) {
	g.least = noEngine
	if full {
		return
	}
	for _, en := range g.engines {
		if p.classOf(en) != overloaded {
			g.least = min(g.least, en.tok)
		}
	}
}

// leastElsewhere returns the number of unfinished tokens of the least loaded engine in the other
// prefill groups that sent a Fetch within Options.Patience. It returns noEngine if there is none.
func (p *Planner) leastElsewhere(g *group) int {
	least := noEngine
	for _, o := range p.order {
		if o != g && o.role == Prefill && p.now-o.heard <= p.opts.Patience {
			least = min(least, o.least)
		}
	}
	return least
}

// pools are the engines of one group that take work, by category. Each category is a heap
// ordered by unfinished tokens, then by ID.
type pools struct {
	g     *group
	heaps [2][]*engine
	// stale: engines may have changed their category, so the heaps must be built again before the
	// next use.
	stale bool
}

// pools sorts the group's engines into categories.
func (p *Planner) pools(g *group) *pools {
	ps := &pools{g: g}
	ps.build(p)
	return ps
}

// build fills the heaps.
func (ps *pools) build(p *Planner) {
	ps.heaps[0], ps.heaps[1] = ps.heaps[0][:0], ps.heaps[1][:0]
	for _, en := range ps.g.engines {
		if c := p.classOf(en); c != overloaded {
			ps.heaps[c] = append(ps.heaps[c], en)
		}
	}
	for c := range ps.heaps {
		h := ps.heaps[c]
		for i := len(h)/2 - 1; i >= 0; i-- {
			sink(h, i)
		}
	}
	ps.stale = false
}

// least returns the engine for the next request: the least loaded engine of the best category, or
// nil if all engines are overloaded.
func (ps *pools) least(p *Planner) *engine {
	if ps.stale {
		ps.build(p)
	}
	for _, h := range ps.heaps {
		if len(h) > 0 {
			return h[0]
		}
	}
	return nil
}

// leastFor returns the least loaded engine with room for the request, from the best category that
// has one, or nil. It returns an engine that the request avoids only if no other engine has room.
func (ps *pools) leastFor(p *Planner, r *request) *engine {
	first := ps.least(p)
	if first == nil {
		return nil
	}
	careful := p.mayAvoid(r)
	if p.accepts(first, r) && !(careful && p.avoids(r, first)) {
		return first
	}
	var avoided *engine
	for _, h := range ps.heaps {
		var best *engine
		for _, en := range h {
			switch {
			case !p.accepts(en, r):
			case careful && p.avoids(r, en):
				if avoided == nil {
					avoided = en
				}
			case best == nil || lessLoaded(en, best):
				best = en
			}
		}
		if best != nil {
			return best
		}
	}
	return avoided
}

// root reports whether en is the root of a heap.
func (ps *pools) root(en *engine) bool {
	for _, h := range ps.heaps {
		if len(h) > 0 && h[0] == en {
			return true
		}
	}
	return false
}

// moved restores the heap order after the tokens of en, the root of its heap, have changed. It
// removes en if en is overloaded.
func (ps *pools) moved(p *Planner, en *engine) {
	for c := range ps.heaps {
		h := ps.heaps[c]
		if len(h) == 0 || h[0] != en {
			continue
		}
		if p.classOf(en) == overloaded {
			h[0] = h[len(h)-1]
			h = h[:len(h)-1]
			ps.heaps[c] = h
		}
		sink(h, 0)
		return
	}
}

// lessLoaded orders engines by unfinished tokens, then by ID.
func lessLoaded(a, b *engine) bool {
	return a.tok < b.tok || (a.tok == b.tok && a.id < b.id)
}

// sink restores the heap order below i.
func sink(h []*engine, i int) {
	for {
		least := i
		for _, c := range [...]int{2*i + 1, 2*i + 2} {
			if c < len(h) && lessLoaded(h[c], h[least]) {
				least = c
			}
		}
		if least == i {
			return
		}
		h[i], h[least] = h[least], h[i]
		i = least
	}
}
