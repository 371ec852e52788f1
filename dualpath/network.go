package dualpath

import "time"

// Network chooses decode engines by what moving KV between machines costs, and prices
// the hops of a read; package netcost has one. Without it (Options.Network nil) all
// machines are alike. Its state changes by the calls of one planner alone, so that
// the same events give the same actions.
type Network interface {
	// Update takes what the operator reports. A report that is out of range is
	// ignored, and the last stays.
	Update(*NetworkReport)
	// Reserve is what a decode engine keeps free of its device memory whatever it is
	// given, in tokens. It does not change.
	Reserve() int
	// Choose returns the index of the candidate that would decode the first token
	// soonest, and how long that takes in seconds: the prompt's KV moved there, a
	// place in the batch, the first step. -1: no candidate has the memory. It keeps
	// neither argument.
	Choose(r *Transfer, candidates []Candidate) (index int, seconds float64)
	// Read is how long a cached prefix takes from storage over the buffer of a
	// machine (via) into a prefill engine's memory (to), as a line: so many seconds
	// for what is queued at via, and so many for each token. rate is via's storage
	// NIC's, tokens a second.
	Read(via, to NodeID, queue int, rate float64) (fixed, perToken float64)
	// Begin counts a transfer that the planner ordered, and returns its distance; End,
	// with the same, counts its end.
	Begin(from, to NodeID) (tier uint8)
	End(from NodeID, tier uint8)
}

// Transfer is a prompt whose KV is to be moved to a decode engine.
type Transfer struct {
	Request RequestID
	// From is the machine of the prefill engine, Tokens the length of the prompt.
	From   NodeID
	Tokens int
}

// Candidate is a decode engine that may be chosen.
type Candidate struct {
	Node NodeID
	// Hit is how many leading tokens of the prompt the engine holds.
	Hit int
	// Free is the memory that it has left for the prompt's KV beyond Hit, in tokens,
	// with the reserve.
	Free int
	// Requests are those that it has.
	Requests int
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

// cheapest returns the decode engine with room that would have the request's first
// token soonest, and that time in seconds; nil if none has room. An engine that the
// request should avoid is taken only if there is no other.
func (p *Planner) cheapest(r *request, pe *engine) (best *engine, seconds float64) {
	careful := p.careful(r)
	if best, seconds = p.cheapestOf(r, pe, careful); best == nil && careful {
		return p.cheapestOf(r, pe, false)
	}
	return best, seconds
}

// cheapestOf is cheapest, where careful leaves out the engines to be avoided.
func (p *Planner) cheapestOf(r *request, pe *engine, careful bool) (*engine, float64) {
	p.candidates, p.candidateEngines = p.candidates[:0], p.candidateEngines[:0]
	for _, g := range p.order {
		if g.role != Decode || g.switching() {
			continue
		}
		for _, en := range g.engines {
			if !p.accepts(en, r) || (careful && p.avoids(r, en)) {
				continue
			}
			// An engine keeps room for the output, and for the hit too: its cache may
			// drop what it holds.
			hit := r.residentAt(en.id)
			free := en.left.hbm + p.reserve - (r.allBlocks*p.opts.BlockTokens - r.Prompt) - hit
			p.candidates = append(p.candidates, Candidate{Node: en.node.id, Hit: hit, Free: free, Requests: en.seq})
			p.candidateEngines = append(p.candidateEngines, en)
		}
	}
	i, seconds := p.opts.Network.Choose(&Transfer{Request: r.ID, From: pe.node.id, Tokens: r.Prompt}, p.candidates)
	if i < 0 {
		return nil, 0
	}
	return p.candidateEngines[i], seconds
}

// residentAt is how many leading tokens of the prompt an engine holds.
func (r *request) residentAt(e EngineID) int {
	for _, h := range r.Resident {
		if h.Engine == e {
			return min(max(h.Tokens, 0), r.Prompt)
		}
	}
	return 0
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
