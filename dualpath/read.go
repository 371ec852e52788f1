package dualpath

import (
	"math"
	"time"
)

// side is the part of a request's cached prefix that one of its two engines (prefill or decode)
// reads.
type side struct {
	part Part
	// All tokens of the part before the index upto are in the engine's buffer. landed is the number
	// of tokens of the part that have arrived, in any order.
	upto, landed int
	state        sideState
	// hedge: the other engine reads this range too.
	hedge bool
	// wasSlow: a read on this side was slow, and the planner cut it. failed: the storage of this
	// side returned an error.
	wasSlow, failed bool
	// begun is the start of the read, predicted its predicted duration.
	begun, predicted time.Duration
	// order is the Seq of the action that ordered the read.
	order uint64
}

// sideState is the state of the storage read of a request at one of its two engines.
type sideState uint8

const (
	idle sideState = iota
	reading
	cutting // Cut was sent, but Stopped has not arrived
)

// sideAt returns the index in request.sides of the engine of a role.
func sideAt(r Role) int { return int(r - Prefill) }

// engineOf returns the request's engine of a role, or nil.
func (r *request) engineOf(s Role) *engine {
	if s == Prefill {
		return r.pe
	}
	return r.de
}

// setEngine sets the request's engine of a role.
func (r *request) setEngine(s Role, en *engine) {
	if s == Prefill {
		r.pe = en
	} else {
		r.de = en
	}
}

// start divides the read of the cached prefix between the two engines of a request and sends Start.
func (p *Planner) start(r *request) {
	r.phase, r.started, r.adopted, r.found = serving, p.now, false, [2]*Held{}
	r.sides = [2]side{}
	r.rest = r.rest[:0]
	r.orders = [2][]Action{r.orders[0][:0], r.orders[1][:0]}
	p.stats.Started++
	p.beginPrefill(r)
	a := Action{Kind: Start, Request: r.ID, Group: r.pe.group.id, PE: r.pe.id, DE: r.de.id, Epoch: r.Epoch}
	x := p.withinBuffer(r, p.divide(r))
	if x > 0 {
		a.Parts[a.NParts] = Part{Prefill, 0, x}
		a.NParts++
	}
	if x < r.Hit {
		a.Parts[a.NParts] = Part{Decode, x, r.Hit}
		a.NParts++
	}
	if a.NParts == 2 {
		p.stats.Splits++
	}
	r.why.note(p.now, "started on engines %d and %d: prefill side reads %d of %d cached tokens", int(r.pe.id), int(r.de.id), x, r.Hit)
	r.why.note(p.now, "read queues: %d tokens on the prefill side, %d on the decode side", r.pe.node.queue, r.de.node.queue)
	if p.opts.Network != nil && r.Hit > 0 {
		w := p.paths(r.pe.node, r.de.node)
		r.why.note(p.now, "both hops, for all cached tokens: %d us on the prefill side, %d us on the decode side", int(w.prefill.at(r.Hit)*1e6), int(w.decode.at(r.Hit)*1e6))
	}
	p.beginTransfers(r, x < r.Hit)
	seq := p.emit(a)
	r.attempt = seq
	p.give(r.pe, assigned{seq: seq, room: room{buffer: r.pe.spec.Buffer.passing(r, p.blocks(x))}})
	p.give(r.de, assigned{seq: seq, room: room{buffer: r.de.spec.Buffer.passing(r, r.promptBlocks)}})
	for _, part := range a.Parts[:a.NParts] {
		p.begin(r, part, false, seq)
	}
	if r.Hit < r.cached {
		p.recompute(r, r.Hit, r.cached, r.unfit)
	}
}

// instruct appends an action for the engine on a.Side of a started request, and keeps the
// action so that it can be sent again. It returns the action's number.
func (p *Planner) instruct(r *request, a Action) uint64 {
	en := r.engineOf(a.Side)
	a.Request, a.Group, a.Engine = r.ID, en.group.id, en.id
	a.Seq = p.emit(a)
	r.orders[sideAt(a.Side)] = append(r.orders[sideAt(a.Side)], a)
	return a.Seq
}

// repeat sends orders again after the session of an engine's group broke: those with a Seq above
// last, which did not reach the engine. If last is 0, the leader has not reported which orders
// arrived. Then the request is planned again, unless it has had no orders or its prefill has ended.
func (p *Planner) repeat(r *request, to Role, last uint64) {
	orders, en, s := r.orders[sideAt(to)], r.engineOf(to), &r.sides[sideAt(to)]
	if last == 0 {
		if len(orders) > 0 && !r.prefilled {
			r.why.note(p.now, "engine %d may not have all orders", int(en.id))
			p.requeue(r, GroupLost)
		}
		return
	}
	for i := range orders {
		a := &orders[i]
		if a.Seq <= last {
			continue
		}
		was := a.Seq
		a.Seq = p.emit(*a)
		r.why.note(p.now, "%s side: sent again: "+a.Kind.String(), int(to))
		if a.Kind != Read {
			continue
		}
		n := a.Parts[0].Len()
		// The work of this order is already part of the load, but under the old number. The group's
		// next report may not include the work, so the work is also recorded under the new number.
		if to == Prefill {
			en.since = append(en.since, assigned{seq: a.Seq, room: room{buffer: p.blocks(n) * en.spec.Buffer.Block}})
		}
		en.node.since = append(en.node.since, assigned{seq: a.Seq, tokens: n})
		if s.order == was {
			s.begun, s.predicted, s.order = p.now, drain(en.node, 0), a.Seq
		}
	}
}

// divide returns x: the prefill side reads the cached tokens [0, x), the decode side [x, Hit).
func (p *Planner) divide(r *request) int {
	pn, dn, hit := r.pe.node, r.de.node, r.Hit
	switch {
	case hit == 0:
		return 0
	case p.opts.Policy == PrefillOnly:
		return hit
	case p.opts.Policy == RoundRobin:
		p.turn = p.turn.Other()
		if p.turn == Decode { // it was Prefill's turn
			return hit
		}
		return 0
	case p.opts.Policy == Split && pn != dn && hit >= 2*p.opts.MinPart:
		x := p.balance(pn, dn, hit)
		switch {
		case x < p.opts.MinPart:
			return 0
		case hit-x < p.opts.MinPart:
			return hit
		}
		return x
	}
	if p.opts.Network != nil && pn != dn {
		if w := p.paths(pn, dn); w.prefill.at(hit) != w.decode.at(hit) {
			if w.prefill.at(hit) < w.decode.at(hit) {
				return hit
			}
			return 0
		}
	}
	if shorter(pn, dn) {
		return hit
	}
	return 0
}

// withinBuffer returns the number of tokens that the prefill side reads: x, or less if the prefill
// engine's buffer has less room. The buffer of the decode engine has room for all cached tokens.
func (p *Planner) withinBuffer(r *request, x int) int {
	b, free := &r.pe.spec.Buffer, r.pe.left.buffer
	if b.passing(r, p.blocks(x)) <= free {
		return x
	}
	x = (free - b.passing(r, 0)) / b.Block * p.opts.BlockTokens
	if p.opts.Policy != Split || x < p.opts.MinPart {
		return 0
	}
	return x
}

// prefillHasRoom reports whether the prefill engine's buffer has room for this number of additional
// tokens.
func (p *Planner) prefillHasRoom(r *request, tokens int) bool {
	return p.blocks(tokens)*r.pe.spec.Buffer.Block <= r.pe.left.buffer
}

// shorter reports whether machine a should read rather than b: the machine with the shorter reading
// queue, then the one with fewer tokens assigned so far, then a.
func shorter(a, b *node) bool {
	if a.queue != b.queue {
		return a.queue < b.queue
	}
	return a.total <= b.total
}

// balance returns the number x of tokens, in [0, hit], for the prefill side so that the reads of
// both sides end at the same time: (q_p + x)/r_p = (q_d + hit - x)/r_d, with the queues q and rates
// r of the two machines. x is rounded to whole blocks. With Options.Network, both hops of each side
// count.
func (p *Planner) balance(pn, dn *node, hit int) int {
	w := p.paths(pn, dn)
	x := (w.decode.at(hit) - w.prefill.fixed) / (w.prefill.perToken + w.decode.perToken)
	if !(x > 0) {
		return 0
	}
	if x >= float64(hit) {
		return hit
	}
	b := float64(p.opts.BlockTokens)
	return min(int(math.Round(x/b)*b), hit)
}

// begin records a storage read that the action with number seq has ordered from one of the
// request's engines.
func (p *Planner) begin(r *request, part Part, hedge bool, seq uint64) {
	n := r.engineOf(part.Side).node
	n.queue += part.Len()
	n.total += uint64(part.Len())
	n.since = append(n.since, assigned{seq: seq, tokens: part.Len()})
	s := &r.sides[sideAt(part.Side)]
	s.part, s.upto, s.landed, s.state, s.hedge = part, part.From, 0, reading, hedge
	s.begun, s.predicted, s.order = p.now, drain(n, 0), seq
	if r.loadingAt == nil {
		r.loadingAt = p.loading.PushBack(r)
	}
	if part.Side == Prefill {
		p.stats.PartsPrefill++
		p.stats.TokensPrefill += uint64(part.Len())
	} else {
		p.stats.PartsDecode++
		p.stats.TokensDecode += uint64(part.Len())
	}
}

// drain returns the time in which a machine reads its queue and then extra tokens from storage.
func drain(n *node, extra int) time.Duration {
	return seconds(float64(n.queue+extra) / n.rate)
}

// seconds converts s seconds to a duration without overflow.
func seconds(s float64) time.Duration {
	return time.Duration(min(s*float64(time.Second), float64(math.MaxInt64)/2))
}

// progress handles a progress report about the storage read of one side (prefill or decode engine)
// of a request.
func (p *Planner) progress(e Progress) {
	r := p.about(e.Request, e.Attempt)
	if r == nil || r.loadingAt == nil || (e.Side != Prefill && e.Side != Decode) {
		return
	}
	s := &r.sides[sideAt(e.Side)]
	if s.state == idle || (e.Read != 0 && e.Read != s.order) {
		return
	}
	s.upto = min(max(s.upto, e.Upto), s.part.To)
	s.landed = min(max(s.landed, e.Landed, s.upto-s.part.From), s.part.Len())
	if s.upto == s.part.To {
		p.read(r, e.Side)
	}
}

// read handles the end of a complete read. by is the side that has read its whole part.
func (p *Planner) read(r *request, by Role) {
	s := &r.sides[sideAt(by)]
	s.state = idle
	r.why.note(p.now, "%s side: read up to %d", int(by), s.part.To)
	if o := &r.sides[sideAt(by.Other())]; s.hedge && o.state != idle {
		o.state, o.hedge = idle, false
		p.instruct(r, Action{Kind: Drop, Side: by.Other()})
	}
	s.hedge = false
	p.place(r)
}

// stopped handles a read that ended before its part was complete.
func (p *Planner) stopped(e Stopped) {
	r := p.about(e.Request, e.Attempt)
	if r == nil || (e.Side != Prefill && e.Side != Decode) {
		return
	}
	if r.adopted && r.phase == serving && !r.prefilled {
		r.why.note(p.now, "%s side: stopped at %d in a read of the planner before this one; planned anew", int(e.Side), e.Upto)
		p.requeue(r, EngineFailed)
		return
	}
	if r.loadingAt == nil {
		return
	}
	s, o := &r.sides[sideAt(e.Side)], &r.sides[sideAt(e.Side.Other())]
	if s.state == idle || (e.Read != 0 && e.Read != s.order) {
		return
	}
	s.upto = min(max(s.upto, e.Upto), s.part.To)
	s.failed = s.failed || (e.Failed && !e.Gone)
	if s.upto == s.part.To {
		p.read(r, e.Side)
		return
	}
	r.why.note(p.now, "%s side: stopped at %d of %d", int(e.Side), s.upto, s.part.To)
	s.state = idle
	rest := Part{From: s.upto, To: s.part.To}
	switch {
	case e.Gone:
		if s.hedge && o.state != idle {
			o.state, o.hedge = idle, false
			p.instruct(r, Action{Kind: Drop, Side: e.Side.Other()})
		}
		p.recompute(r, rest.From, rest.To, ReadFailed)
	case s.hedge && o.state != idle:
		o.hedge = false // only the other side still reads the range
	default:
		r.rest = append(r.rest, rest)
	}
	s.hedge = false
	p.place(r)
}

// place finds readers for r.rest, the ranges of the prefix that no engine reads. A reader is the
// prefill or the decode engine of the request, if that engine has no read in progress for it. place
// removes the request from loading when neither engine has a read.
func (p *Planner) place(r *request) {
	for len(r.rest) > 0 {
		to, wait := p.reader(r, r.rest[0].Len())
		if wait {
			return
		}
		rest := r.rest[0]
		r.rest = append(r.rest[:0], r.rest[1:]...)
		if to == 0 {
			p.recompute(r, rest.From, rest.To, ReadFailed)
			continue
		}
		rest.Side = to
		p.orderPart(r, rest, false)
	}
	if r.sides[0].state == idle && r.sides[1].state == idle {
		p.stopLoading(r)
	}
}

// reader chooses the side that reads a range of tokens. Among the sides that have no read in
// progress and have not failed, it prefers a side that was not cut for slowness, then the side that
// would end sooner. A prefill engine without room in its buffer is not chosen: a request that
// waited for room would hold memory for which other requests wait. If no side should read the range
// at this time, to is 0, and wait reports whether a side may do so later.
func (p *Planner) reader(r *request, tokens int) (to Role, wait bool) {
	var best Role
	for _, s := range [...]Role{Prefill, Decode} {
		d := &r.sides[sideAt(s)]
		if d.failed || (s == Decode && p.opts.Policy == PrefillOnly) {
			continue
		}
		if d.state != idle {
			wait = true
			continue
		}
		if s == Prefill && !p.prefillHasRoom(r, tokens) {
			continue
		}
		if best == 0 || better(r, s, best) {
			best = s
		}
	}
	if best != 0 && wait && r.sides[sideAt(best)].wasSlow {
		return 0, true
	}
	return best, best == 0 && wait
}

// better reports whether side a should read rather than side b: the side whose reads were not slow
// so far or, if both are equal, the side whose machine would complete its reading queue sooner.
func better(r *request, a, b Role) bool {
	if la, lb := r.sides[sideAt(a)].wasSlow, r.sides[sideAt(b)].wasSlow; la != lb {
		return lb
	}
	return drain(r.engineOf(a).node, 0) < drain(r.engineOf(b).node, 0)
}

// orderPart orders one side of a started request (its prefill or decode engine) to read a part of
// the cached prefix.
func (p *Planner) orderPart(r *request, part Part, hedge bool) {
	en := r.engineOf(part.Side)
	seq := p.instruct(r, Action{Kind: Read, Side: part.Side, Parts: [2]Part{part}, NParts: 1, Hedge: hedge})
	r.why.note(p.now, "%s side: reads [%d, %d) too", int(part.Side), part.From, part.To)
	if part.Side == Prefill {
		p.give(en, assigned{seq: seq, room: room{buffer: p.blocks(part.Len()) * en.spec.Buffer.Block}})
	}
	p.begin(r, part, hedge, seq)
}

// recompute orders the prefill engine to compute a range of tokens that no side can read.
func (p *Planner) recompute(r *request, from, to int, why Reason) {
	p.stats.Recomputes++
	r.why.note(p.now, "tokens [%d, %d) are recomputed: "+why.String(), from, to)
	p.instruct(r, Action{Kind: Recompute, Side: Prefill, Parts: [2]Part{{Prefill, from, to}}, NParts: 1, Why: why})
}

// stopLoading removes the request from the list loading, and marks its prefill and its decode side
// as not reading.
func (p *Planner) stopLoading(r *request) {
	p.unlist(&r.loadingAt, p.loading)
	r.sides[0].state, r.sides[1].state = idle, idle
}

// checkReads checks every read in progress. It cuts a read if the other side would be far faster;
// the unread tokens then move to the other side. If a read is overdue and few tokens remain, both
// sides read these tokens.
func (p *Planner) checkReads() {
	for el := p.loading.Front(); el != nil; {
		r := el.Value.(*request)
		el = el.Next()
		p.checkReadsOf(r)
	}
}

// checkReadsOf is checkReads for one request.
func (p *Planner) checkReadsOf(r *request) {
	if p.opts.Policy == PrefillOnly || r.adopted || r.pe == nil || r.de == nil || r.pe.node == r.de.node {
		return
	}
	for _, role := range [...]Role{Prefill, Decode} {
		s, o := &r.sides[sideAt(role)], &r.sides[sideAt(role.Other())]
		other := r.engineOf(role.Other()).node
		elapsed := p.now - s.begun
		if s.state != reading || s.hedge || o.state != idle || o.failed || o.wasSlow || elapsed < p.opts.Patience {
			continue
		}
		rest := Part{Side: role.Other(), From: s.upto, To: s.part.To}
		if role == Decode && !p.prefillHasRoom(r, rest.Len()) {
			continue
		}
		stay, move := s.remaining(r.engineOf(role).node, elapsed), drain(other, rest.Len())
		switch late := float64(elapsed) > p.opts.HedgeFactor*float64(s.predicted); {
		case rest.Len() >= p.opts.MinPart && float64(stay) > p.opts.SlowFactor*float64(move) && stay-move > p.opts.Patience:
			p.stats.Cuts++
			s.state, s.wasSlow = cutting, true
			r.why.note(p.now, "%s side is slow: %d ms left there, %d ms on the other side; the read is cut", int(role), int(stay.Milliseconds()), int(move.Milliseconds()))
			p.instruct(r, Action{Kind: Cut, Side: role})
		case late && rest.Len() <= p.opts.MaxHedge && move < stay:
			p.stats.Hedges++
			s.hedge = true
			p.orderPart(r, rest, true)
		}
	}
}

// remaining predicts the time until the part is read. If tokens have arrived and the machine reads
// nothing else, the prediction is the time at the read's own rate so far. Otherwise that rate is
// unknown or was measured on a shared NIC. Then the prediction is the shorter of the time at the
// read's own rate, if known, and the time by the machine's rate. The latter is the rest of the
// machine's queue time, but at least the time of the missing tokens. For an overdue read it is the
// machine's whole queue time, but at least the elapsed time.
func (s *side) remaining(n *node, elapsed time.Duration) time.Duration {
	left := s.part.Len() - s.landed
	bySpeed := time.Duration(math.MaxInt64)
	if s.landed > 0 {
		bySpeed = seconds(elapsed.Seconds() * float64(left) / float64(s.landed))
		if n.queue <= s.part.Len() {
			return bySpeed
		}
	}
	byRate := drain(n, 0)
	if elapsed > s.predicted {
		return min(bySpeed, max(byRate, elapsed))
	}
	return min(bySpeed, max(byRate-elapsed, seconds(float64(left)/n.rate)))
}
