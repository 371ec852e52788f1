package dualpath

import "time"

// Network chooses decode engines by the cost of moving KV between machines, and estimates the
// duration of a read from storage over both its hops. Package netcost implements Network. If
// Options.Network is nil, all machines count as equally close. Each planner must have a Network of
// its own, so that the same events give the same actions.
type Network interface {
	// Update applies the operator's report. A report that is out of range is ignored, and the
	// previous one stays in force.
	Update(*NetworkReport)
	// Reserve is the amount of device memory that a decode engine always keeps free, in tokens.
	// It is constant.
	Reserve() int
	// Choose returns the index of the candidate that would produce the first token soonest, and the
	// time in seconds until then: the transfer of the prompt's KV, the wait until the engine's
	// batch takes the request, and the first decode step. index is -1 if no candidate has enough
	// memory. Choose keeps neither argument.
	Choose(r *Transfer, candidates []Candidate) (index int, seconds float64)
	// Read estimates the time to read a cached prefix from storage into the buffer of a machine
	// (via) and from there into the memory of a prefill engine on the same or another machine (to).
	// queue is the number of tokens that via reads first, rate the rate of via's storage NIC in
	// tokens per second. The result is a fixed time, which includes the queue, and the additional
	// time for each token of the prefix, both in seconds.
	Read(via, to NodeID, queue int, rate float64) (fixed, perToken float64)
	// Begin adds a KV transfer between two machines to the transfers in progress and returns the
	// distance of the machines (a tier below Tiers). End removes the transfer; tier is the result
	// of Begin.
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
	// Hit is the number of leading tokens of the prompt that the engine holds.
	Hit int
	// Free is the engine's free memory for the KV of the prompt after Hit, in tokens. It includes
	// the reserve (Network.Reserve).
	Free int
	// Requests is the number of unfinished requests of the engine.
	Requests int
}

// Tiers is the number of distances between two machines: the same machine, the same rack, the
// same pod, and farther.
const Tiers = 4

// NetworkReport is the operator's description of the network. Each array is indexed by distance
// (tier).
type NetworkReport struct {
	At time.Duration
	// Bandwidth is the bandwidth of one network path in bytes per second, Latency the latency of an
	// idle path.
	Bandwidth [Tiers]float64
	Latency   [Tiers]time.Duration
	// Congestion is the share of the bandwidth that other traffic uses, in [0, 1). Measured is the
	// time of its measurement.
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

// transfer is a KV transfer in progress between the machines of a request's engines: the machine
// that sends, and the distance.
type transfer struct {
	from NodeID
	tier uint8
}

// beginTransfers counts the KV transfers of a request that is started: the prompt's KV to the
// decode engine and, if the decode engine reads cached tokens from storage, these tokens to the
// prefill engine.
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

// endTransfers counts the end of the request's transfers. It is called when the prompt has been
// computed or the attempt has ended.
func (p *Planner) endTransfers(r *request) {
	for _, t := range r.transfers {
		p.opts.Network.End(t.from, t.tier)
	}
	r.transfers = r.transfers[:0]
}

// cheapest returns the decode engine with room that would produce the request's first token
// soonest, and the time until that token in seconds. best is nil if no engine has room. An engine
// that the request avoids is chosen only if no other engine has room.
func (p *Planner) cheapest(r *request, pe *engine) (best *engine, seconds float64) {
	careful := p.mayAvoid(r)
	if best, seconds = p.cheapestOf(r, pe, careful); best == nil && careful {
		return p.cheapestOf(r, pe, false)
	}
	return best, seconds
}

// cheapestOf is cheapest over all engines with room. If careful is set, it leaves out the engines
// that the request avoids.
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
			// The engine must have room for the output, and also for the tokens of the prompt that
			// it holds, because its cache may drop these tokens before the request starts.
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

// paths are the times to read a cached prefix over the prefill side and over the decode side.
type paths struct{ prefill, decode line }

// line is a time in seconds as a linear function of tokens.
type line struct{ fixed, perToken float64 }

// at is the time for n tokens.
func (l line) at(n int) float64 { return l.fixed + l.perToken*float64(n) }

// paths returns the read times for the machine pn of a prefill engine and the machine dn of a
// decode engine. Without a Network they include only the first hop, from storage to the machine's
// buffer.
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
