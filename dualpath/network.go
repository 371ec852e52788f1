package dualpath

import "time"

// Network chooses decode engines by the cost of moving KV between machines, and estimates the
// hops of a read. Package netcost implements it. Without it (Options.Network nil) all machines
// are equally close. Only the calls of one planner may change its state, so that the same
// events give the same actions.
type Network interface {
	// Update applies the operator's report. A report that is out of range is ignored, and the
	// previous one stays in force.
	Update(*NetworkReport)
	// Reserve is the amount of device memory that a decode engine always keeps free, in tokens.
	// It is constant.
	Reserve() int
	// Choose returns the index of the candidate that would produce the first token soonest, and
	// the time in seconds until then: the transfer of the prompt's KV, the wait for a place in
	// the batch, and the first step. It returns -1 if no candidate has the memory. It keeps
	// neither argument.
	Choose(r *Transfer, candidates []Candidate) (index int, seconds float64)
	// Read estimates the time in which a cached prefix is read from storage over the buffer of a
	// machine (via) into a prefill engine's memory (to): fixed seconds for the tokens queued at
	// via, and perToken seconds for each token. rate is the rate of via's storage NIC in tokens
	// per second.
	Read(via, to NodeID, queue int, rate float64) (fixed, perToken float64)
	// Begin counts a transfer that the planner ordered and returns its distance. End, called
	// with the same distance, counts its end.
	Begin(from, to NodeID) (tier uint8)
	End(from NodeID, tier uint8)
}

// Transfer is a prompt whose KV must be moved to a decode engine.
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
	// Free is its memory for the prompt's KV beyond Hit, in tokens, including the reserve.
	Free int
	// Requests is the number of its requests.
	Requests int
}

// Tiers is the number of distances between two machines: the same machine, the same rack, the
// same pod, and farther.
const Tiers = 4

// NetworkReport is the operator's description of the network. Each list is indexed by tier.
type NetworkReport struct {
	At time.Duration
	// Bandwidth of one path in bytes per second, and its base latency.
	Bandwidth [Tiers]float64
	Latency   [Tiers]time.Duration
	// Congestion is the share of other traffic, in [0, 1), measured at Measured.
	Congestion [Tiers]float64
	Measured   time.Duration
	// Places are the positions of machines. A machine that is not listed is at the largest
	// distance from all others.
	Places []NodePlace
}

// NodePlace is the position of a machine, in the operator's names.
type NodePlace struct {
	Node            NodeID
	Pod, Rack, Host string
}

func (e NetworkReport) at() time.Duration { return e.At }

// transfer is a transfer of a request in progress between its engines' machines.
type transfer struct {
	from NodeID
	tier uint8
}

// beginTransfers counts the transfers of a start: the prompt's KV to the decode side and, if
// the decode side reads, its part to the prefill side.
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

// endTransfers counts their end: the prompt has been computed, or the attempt has ended.
func (p *Planner) endTransfers(r *request) {
	for _, t := range r.transfers {
		p.opts.Network.End(t.from, t.tier)
	}
	r.transfers = r.transfers[:0]
}

// cheapest returns the decode engine with room that would produce the request's first token
// soonest, and that time in seconds. It is nil if none has room. An engine that the request
// avoids is chosen only if there is no other.
func (p *Planner) cheapest(r *request, pe *engine) (best *engine, seconds float64) {
	careful := p.mayAvoid(r)
	if best, seconds = p.cheapestOf(r, pe, careful); best == nil && careful {
		return p.cheapestOf(r, pe, false)
	}
	return best, seconds
}

// cheapestOf is cheapest. With careful it excludes engines that the request avoids.
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
			// An engine keeps room for the output, and for the hit too, because its cache may drop
			// the tokens that it holds.
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

// residentAt returns the number of leading tokens of the prompt that an engine holds.
func (r *request) residentAt(e EngineID) int {
	for _, h := range r.Resident {
		if h.Engine == e {
			return min(max(h.Tokens, 0), r.Prompt)
		}
	}
	return 0
}

// paths are the costs of the two paths of a cached prefix.
type paths struct{ prefill, decode line }

// line is a time in seconds as a linear function of tokens.
type line struct{ fixed, perToken float64 }

// at is the time for n tokens.
func (l line) at(n int) float64 { return l.fixed + l.perToken*float64(n) }

// paths returns the two paths between a pair of machines. Without a Network both end in the
// buffers.
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
