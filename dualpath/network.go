package dualpath

import "time"

// Network is what moving KV between machines costs, as the planner asks it;
// package netcost has one. Without it (Options.Network nil) all machines are alike.
// Its state changes by the calls of one planner alone, so that the same events
// give the same actions.
type Network interface {
	// Update takes what the operator says. What is out of range is ignored, and
	// the last stays.
	Update(*NetworkReport)
	// Decode is how long it takes, in seconds, until a prompt's first token can be
	// decoded on another machine's engine: its KV moved there, a place in the batch
	// of an engine that has so many requests, the first step.
	Decode(from, to NodeID, tokens, requests int) float64
	// Read is how long a cached prefix takes from storage over the buffer of a
	// machine (via) into a prefill engine's memory (to), as a line: so many seconds
	// for what is queued at via, and so many for each token. rate is via's storage
	// NIC's, tokens a second.
	Read(via, to NodeID, queue int, rate float64) (fixed, perToken float64)
	// Begin counts a transfer that the planner ordered, and says at which distance
	// it is; End, with the same, that it is over.
	Begin(from, to NodeID) (tier uint8)
	End(from NodeID, tier uint8)
}

// Tiers are the distances between two machines: the same one, the same rack, the
// same pod, and farther.
const Tiers = 4

// NetworkReport is what the operator says of the network. Each list is by tier.
type NetworkReport struct {
	At time.Duration
	// Bandwidth of one path, bytes a second, and its base latency.
	Bandwidth [Tiers]float64
	Latency   [Tiers]time.Duration
	// Congestion is the share that others take, in [0, 1), measured at Measured.
	Congestion [Tiers]float64
	Measured   time.Duration
	// Places are where the machines stand; one that is not named is far from all.
	Places []NodePlace
}

// NodePlace is where a machine stands, in the operator's names.
type NodePlace struct {
	Node            NodeID
	Pod, Rack, Host string
}

func (e NetworkReport) at() time.Duration { return e.At }

// transfer is one that the request has under way between its engines' machines.
type transfer struct {
	from NodeID
	tier uint8
}

// beginTransfers counts what a start lets move: the prompt's KV to the decode side
// and, if that reads, its part to the prefill side.
func (p *Planner) beginTransfers(r *request, decodeReads bool) {
	p.endTransfers(r)
	if p.opts.Network == nil || r.pe.node == r.de.node {
		return
	}
	pn, dn := r.pe.node.id, r.de.node.id
	r.transfers = append(r.transfers, transfer{pn, p.opts.Network.Begin(pn, dn)})
	if decodeReads {
		r.transfers = append(r.transfers, transfer{dn, p.opts.Network.Begin(dn, pn)})
	}
}

// endTransfers counts their end: the prompt is computed, or given up.
func (p *Planner) endTransfers(r *request) {
	for _, t := range r.transfers {
		p.opts.Network.End(t.from, t.tier)
	}
	r.transfers = r.transfers[:0]
}

// cheapestGroup returns the decode group with the engine that would have the
// first token soonest, by NetKV's cost, and that engine's cost in seconds. Of
// engines that cost the same, the group with the least total goes first. Nil if no
// engine could hold the request were it empty.
func (p *Planner) cheapestGroup(r *request) (best *group, cost float64) {
	careful, last := p.careful(r), false // last: best is to be avoided
	var like costLike
	for _, g := range p.order {
		if g.role != Decode || !g.holds(r.decodeLen()) {
			continue
		}
		for _, en := range g.engines {
			avoid := careful && p.avoids(r, en)
			c := like.decodeCost(p, r, en)
			if best == nil || (last && !avoid) || (last == avoid && (c < cost || (c == cost && g.total < best.total))) {
				best, cost, last = g, c, avoid
			}
		}
	}
	return best, cost
}

// cheapestEngine returns the engine of g with the HBM for the request that would
// have its first token soonest; of equals the one with the fewest tokens. Nil if
// none has the HBM.
func (p *Planner) cheapestEngine(r *request, g *group) (best *engine, cost float64) {
	careful := p.careful(r) && !p.avoidsAll(r, g)
	var like costLike
	for _, en := range g.engines {
		if en.hbm < r.decodeLen() || (careful && p.avoids(r, en)) {
			continue
		}
		c := like.decodeCost(p, r, en)
		if best == nil || c < cost || (c == cost && en.tok < best.tok) {
			best, cost = en, c
		}
	}
	return best, cost
}

// costLike is the cost of the engine that was asked about last: its neighbours on the
// machine often have as many requests, and then cost the same.
type costLike struct {
	node *node
	seq  int
	cost float64
}

// decodeCost is what it costs to decode the request on an engine, in seconds.
func (l *costLike) decodeCost(p *Planner, r *request, en *engine) float64 {
	if l.node != en.node || l.seq != en.seq {
		*l = costLike{en.node, en.seq, p.opts.Network.Decode(r.pe.node.id, en.node.id, r.Prompt, en.seq)}
	}
	return l.cost
}

// paths are the two ways of a cached prefix, as lines over its tokens.
type paths struct{ prefill, decode line }

// line is a time in seconds: fixed, and for each token.
type line struct{ fixed, perToken float64 }

// at is the time for n tokens.
func (l line) at(n int) float64 { return l.fixed + l.perToken*float64(n) }

// paths returns the two ways between a pair of machines. Without a Network both
// end in the buffers.
func (p *Planner) paths(pn, dn *node) paths {
	way := func(n *node) (l line) {
		if p.opts.Network == nil {
			return line{float64(n.queue) / n.rate, 1 / n.rate}
		}
		l.fixed, l.perToken = p.opts.Network.Read(n.id, pn.id, n.queue, n.rate)
		return l
	}
	return paths{way(pn), way(dn)}
}
