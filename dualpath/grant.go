package dualpath

// A request holds no memory until both its engines have room for the whole request, each of them
// in its device memory and in its buffer. A request that held memory of one engine while it
// waited for the other could deadlock with another request. So every request that
// holds memory can end and return it.

// room is an amount of memory: the memory that a request needs, or the free memory of an engine.
type room struct {
	// hbm is device memory, in tokens; buffer is the buffer in DRAM, in bytes.
	hbm, buffer int
}

// unlimited is the size of a memory for which the engine reports no size.
const unlimited = 1 << 50

// fits reports whether n fits into r.
func (r room) fits(n room) bool { return n.hbm <= r.hbm && n.buffer <= r.buffer }

// minus returns r without n.
func (r room) minus(n room) room { return room{r.hbm - n.hbm, r.buffer - n.buffer} }

// blocks returns the number of blocks for tokens, rounded up: engines store whole blocks.
func (p *Planner) blocks(tokens int) int {
	b := p.opts.BlockTokens
	return (tokens + b - 1) / b
}

// passing returns the number of bytes of an engine's buffer that a request takes if the given
// number of its blocks pass through the buffer.
func (b *Buffer) passing(r *request, blocks int) int {
	return b.Request + blocks*b.Block + r.promptBlocks*b.Sums
}

// least returns the smallest amount of an engine's memory with which the request can be served. On
// a decode engine it includes buffer space for the KV of the whole prompt. On a prefill engine it
// includes no buffer space for cached tokens, because the decode engine may read them all. With
// PrefillOnly the decode engine reads nothing, so a prefill engine needs the result of most.
func (p *Planner) least(en *engine, r *request) room {
	switch {
	case en.group.role == Decode:
		return room{r.allBlocks * p.opts.BlockTokens, en.spec.Buffer.passing(r, r.promptBlocks)}
	case p.opts.Policy == PrefillOnly:
		return p.most(en, r)
	}
	return room{r.promptBlocks * p.opts.BlockTokens, en.spec.Buffer.passing(r, 0)}
}

// most returns the memory that the request needs on a prefill engine that reads all cached tokens.
func (p *Planner) most(en *engine, r *request) room {
	return room{r.promptBlocks * p.opts.BlockTokens, en.spec.Buffer.passing(r, p.blocks(r.Hit))}
}

// takes reports whether the engine could serve the request if it had no other requests.
func (p *Planner) takes(en *engine, r *request) bool { return p.shortfallAt(en, r).why == NoReason }

// accepts reports whether the engine has room for the request now.
func (p *Planner) accepts(en *engine, r *request) bool {
	return en.left.fits(p.least(en, r)) && p.takes(en, r)
}

// takenBy reports whether an engine of the group could serve the request (takes).
func (p *Planner) takenBy(g *group, r *request) bool {
	for _, en := range g.engines {
		if p.takes(en, r) {
			return true
		}
	}
	return false
}

// shortfall is the reason why engines could never serve a request. need is the amount that the
// request needs, most the largest amount that an engine has.
type shortfall struct {
	why        Reason
	need, most int
}

// shortfall returns why no registered engine of a role could ever serve the request. The result is
// zero if each role has an engine that could, or no engine at all.
func (p *Planner) shortfall(r *request) shortfall {
	for _, role := range [...]Role{Decode, Prefill} {
		if s := p.shortfallOf(role, r); s.why != NoReason {
			return s
		}
	}
	return shortfall{}
}

// shortfallOf is shortfall for the engines of one role. Groups that are changing their role do not
// count.
func (p *Planner) shortfallOf(role Role, r *request) (nearest shortfall) {
	for _, g := range p.order {
		if g.role != role || g.switching() {
			continue
		}
		for _, en := range g.engines {
			s := p.shortfallAt(en, r)
			if s.why == NoReason {
				return s
			}
			if nearest.why == NoReason || (s.why == nearest.why && s.most > nearest.most) {
				nearest = s
			}
		}
	}
	return nearest
}

// shortfallAt is shortfall for one engine.
func (p *Planner) shortfallAt(en *engine, r *request) shortfall {
	n := p.least(en, r)
	switch {
	case en.spec.PromptTokens != 0 && r.Prompt > en.spec.PromptTokens:
		return shortfall{PromptTooLong, r.Prompt, en.spec.PromptTokens}
	case n.hbm > en.size.hbm && en.group.role == Decode:
		return shortfall{TooLong, n.hbm, en.size.hbm}
	case n.hbm > en.size.hbm:
		return shortfall{TooLongToPrefill, n.hbm, en.size.hbm}
	case n.buffer > en.size.buffer:
		return shortfall{TooLarge, n.buffer, en.size.buffer}
	}
	return shortfall{}
}

// grant assigns requests to the engines of a prefill group that sent a Fetch, and a decode engine
// to each of these requests, until the prefill engines are overloaded or full. Requests are granted
// in the order of fair.go. A request that waits for a full decode group blocks only the requests
// that are routed to that group.
//
// The DualPath paper has one queue for all prefill groups. It does not say what prevents the first
// group that fetches from taking requests until all its engines have reached the limit beta. Here a
// group skips a request if an engine of another group would be less loaded even with the request's
// tokens. Only groups with a Fetch within the last Options.Patience count.
func (p *Planner) grant(g *group) {
	full := false // whether an engine that is not overloaded lacks room for the next request
	defer func() { g.noteLeast(p, full) }()
	if p.queued == 0 {
		return
	}
	p.route()
	for r := p.cooling.first(); r != nil && r.retryAt <= p.now; r = p.cooling.first() {
		p.cooling.remove(r)
		p.offer(r)
	}
	elsewhere := p.leastElsewhere(g)
	pool := p.pools(g)
	var left []*request
	defer func() {
		for _, r := range left {
			if p.offer(r); r.home != nil {
				p.endReservation(r.home)
			}
		}
	}()
	for r := p.nextOf(g); r != nil; r = p.next() {
		pe := pool.leastFor(p, r)
		if pe == nil && p.takenBy(g, r) {
			full = pool.least(p) != nil
			g.keptFor = r
			return
		}
		if pe == nil {
			if s := p.shortfallOf(Prefill, r); s.why != NoReason {
				p.refuse(r, s)
				continue
			}
		}
		careful := p.mayAvoid(r)
		lessElsewhere := pe != nil && elsewhere != noEngine && elsewhere+r.Prompt <= pe.tok
		if lessElsewhere && !careful {
			return
		}
		if pe == nil || lessElsewhere || (careful && p.avoids(r, pe) && p.othersTake(r, g)) {
			// Another group will take this request. A later request may still be given to an
			// engine of this group, because it need not avoid the same engines.
			p.withdraw(r)
			left = append(left, r)
			continue
		}
		de := p.chooseDecode(r, pe)
		if de.engine == nil && p.rehome(r) {
			de = p.chooseDecode(r, pe)
		}
		if de.engine == nil {
			if r.home == nil {
				return
			}
			p.reserveGroup(r)
			continue
		}
		p.explainOrder(r)
		p.charge(r)
		p.unqueue(r)
		p.explainPrefill(r, g, pe, p.classOf(pe), pool)
		p.explainDecode(r, pe, &de)
		r.pe, r.de = pe, de.engine
		moves := pool.root(pe)
		// The new read may lengthen the reading queue of the machine past Alpha, and so change the
		// category of all engines of the machine.
		short := pe.node.queue <= p.opts.Alpha
		p.assign(r)
		p.start(r)
		if moves {
			pool.moved(p, pe)
		}
		pool.stale = pool.stale || !moves || short != (pe.node.queue <= p.opts.Alpha)
	}
}

// assign sends an Assign to the groups of both engines of a request, and adds the request to the
// load of both engines.
func (p *Planner) assign(r *request) {
	for _, en := range [...]*engine{r.pe, r.de} {
		role := en.group.role
		seq := p.emit(Action{Kind: Assign, Request: r.ID, Group: en.group.id, Engine: en.id, Side: role})
		n, tokens := p.least(en, r), r.Prompt
		if role == Decode {
			tokens = r.decodeLen()
		}
		p.give(en, assigned{seq: seq, tokens: tokens, requests: 1, room: room{hbm: n.hbm}})
	}
}
