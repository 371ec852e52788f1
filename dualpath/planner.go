package dualpath

import (
	"cmp"
	"container/list"
	"slices"
	"time"
)

// Planner is the scheduler's state. It is not safe for concurrent use: its owner passes
// it one event at a time.
type Planner struct {
	opts Options
	now  time.Duration
	seq  uint64
	out  []Action

	groups  map[GroupID]*group
	engines map[EngineID]*engine
	nodes   map[NodeID]*node
	// order holds the groups by ID, so that nothing depends on a map's order.
	order []*group

	requests map[RequestID]*request
	// unrouted are the requests that wait and have no decode group's queue yet, of
	// *request; what was planned anew comes first. front and back are the orders of
	// its ends, queued counts these and all that wait in groups' queues.
	unrouted    *list.List
	front, back int64
	queued      int
	// loading are the requests with a read under way.
	loading *list.List
	// partial were found with one engine alone after a restart.
	partial []*request
	epochs  map[NamespaceID]uint64
	// expiry is the earliest deadline that may be that of a request in a queue; 0:
	// none. Until then no queue is looked through.
	expiry time.Duration
	// leastTotal are the decode groups by total tokens; oldest are those that offer a
	// request to be granted, by its age.
	leastTotal, oldest groupHeap
	turn               Role // RoundRobin
	// steps counts the calls of Step.
	steps uint64
	// reserve is Options.Network's.
	reserve int
	// candidates and candidateEngines are reused by cheapest.
	candidates       []Candidate
	candidateEngines []*engine
	// avoidUntil is the latest of the engines'.
	avoidUntil time.Duration

	explained explainRing
	stats     Stats
	// samples are the last finished requests.
	samples []sample
}

// Stats counts what the planner did since it was made.
type Stats struct {
	Submitted, Started, Rejected, Replanned, Finished uint64
	// PartsPrefill and PartsDecode are the reads started on each side, Tokens…
	// their lengths; Splits the requests read by both.
	PartsPrefill, PartsDecode, TokensPrefill, TokensDecode, Splits uint64
	Cuts, Hedges, Recomputes                                       uint64
	// Aborted are the requests of older weights that a change of weights has rejected. Switched
	// are the groups that have changed their role, SwitchesFailed the switches that ended
	// without it.
	Aborted, Switched, SwitchesFailed uint64
	// Queued wait for their engines, Loading have a read under way,
	// Serving are all that have not ended. Gauges.
	Queued, Loading, Serving int
}

// engine is one GPU.
type engine struct {
	id    EngineID
	group *group
	node  *node

	spec EngineSpec
	// size is what the engine has of each memory, left what is free of it.
	size, left room
	tok, seq   int
	// strikes are failures since it last served a request; avoidUntil is when they
	// are forgiven.
	strikes    int
	avoidUntil time.Duration
	// since is what was assigned after the group's last report.
	since []assigned
}

// assigned is an amount that a later report will contain.
type assigned struct {
	seq              uint64
	tokens, requests int
	room             room
}

// node is one machine: one storage NIC.
type node struct {
	id    NodeID
	queue int
	rate  float64
	total uint64 // tokens assigned since the planner was made
	since []assigned
	// engines counts those that are up; a node without is not read through.
	engines int
}

// group is a set of engines that fetch together.
type group struct {
	id      GroupID
	role    Role
	engines []*engine
	heard   time.Duration
	// returns and seen come from its GroupUp.
	returns bool
	seen    uint64
	// private is the queue of a decode group, of *request; total the tokens of
	// its engines and of that queue. cursor is the request of the queue that is to be
	// granted next: its head, but for those that this fetch has left. full: no engine
	// had room for that request at the group's last report.
	private *list.List
	total   int
	cursor  *list.Element
	full    bool
	// z and fitting are threshold's, as of the Step zStep.
	z       float64
	fitting int
	zStep   uint64
	// least is the load of a prefill group's least loaded engine after its last
	// fetch, or noEngine.
	least int
	// leaving is the change of its role that is under way.
	leaving leaving
	// totalAt and oldestAt are its places in the planner's heaps.
	totalAt, oldestAt int
}

// phase is where a request is.
type phase uint8

const (
	queued  phase = iota // it holds nothing
	serving              // Start was said
)

// request is one that has not ended.
type request struct {
	Request
	// cached is Hit as it was submitted; its engines know it by that. Hit is less
	// where the rest is of no use any more, for the reason unfit.
	cached int
	unfit  Reason
	// promptBlocks and allBlocks are the prompt, and prompt and output, in blocks.
	promptBlocks, allBlocks int
	phase                   phase
	pe                      *engine
	de                      *engine
	// home is the decode group in whose private queue it waits.
	home *group
	// at is its element in unrouted or home.private, nil when it is served; order is
	// its age among those that wait.
	at        *list.Element
	order     int64
	loadingAt *list.Element
	sides     [2]side
	// rest are ranges that a side left unread and that neither side reads yet.
	rest      []Part
	started   time.Duration
	prefilled bool
	// prefilledAt is when the last attempt was prefilled; 0: not known.
	prefilledAt time.Duration
	// transfers are counted with Options.Network.
	transfers []transfer
	// attempt is the number of its Start. orders are the actions after it for each side
	// (instruct).
	attempt uint64
	orders  [2][]Action
	// adopted is set when an engine reports an attempt of another planner, and cleared when
	// the reports of both engines (found) name their reads.
	adopted bool
	found   [2]*Held
	// failures are how often an engine could not do its part.
	failures int
	// avoid are the engines of the attempt that failed last.
	avoid [2]EngineID
	why   *Explanation
}

// New returns a planner without engines.
func New(opts Options) (*Planner, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	p := &Planner{
		opts:   opts,
		groups: make(map[GroupID]*group), engines: make(map[EngineID]*engine), nodes: make(map[NodeID]*node),
		requests: make(map[RequestID]*request), epochs: make(map[NamespaceID]uint64),
		unrouted: list.New(), loading: list.New(), leastTotal: byTotal(), oldest: byAge(),
		turn: Prefill, explained: newExplainRing(opts.MaxExplain),
	}
	if opts.Network != nil {
		p.reserve = opts.Network.Reserve()
	}
	return p, nil
}

// Step takes one event and returns what is to be done, in order. The slice is
// valid until the next Step. Time does not run backwards: an event that is
// older than the last is taken as of now. An event about something that is not
// known (a request that has ended, a group that timed out) is ignored.
func (p *Planner) Step(ev Event) []Action {
	p.out = p.out[:0]
	p.now = max(p.now, ev.at())
	p.steps++
	switch e := ev.(type) {
	case Submit:
		p.submit(&e.Request)
	case GroupUp:
		p.groupUp(&e)
	case GroupDown:
		p.groupDown(p.groups[e.Group])
	case Fetch:
		p.fetch(&e)
	case Progress:
		p.progress(e)
	case Stopped:
		p.stopped(e)
	case Finished:
		p.finished(e)
	case Failed:
		p.failed(e)
	case Cancelled:
		if r := p.requests[e.Request]; r != nil {
			p.end(r, ByGateway)
		}
	case Epoch:
		p.epoch(e)
	case SwitchRole:
		p.switchRole(e)
	case SwitchRefused:
		if g := p.groups[e.Group]; g != nil && g.leaving.ordered {
			p.keep(g, RoleRefused)
		}
	case NetworkReport:
		if p.opts.Network != nil {
			p.opts.Network.Update(&e)
		}
	case Tick:
		p.tick()
	}
	return p.out
}

// about returns the request of an engine's report, or nil if the request has ended or the
// report is about another attempt. After an Abort the attempt is still the request's, until
// the next Start.
func (p *Planner) about(id RequestID, attempt uint64) *request {
	r := p.requests[id]
	if r == nil || (attempt != 0 && attempt != r.attempt) {
		return nil
	}
	return r
}

// say appends an action and returns its number.
func (p *Planner) say(a Action) uint64 {
	p.seq++
	a.Seq = p.seq
	p.out = append(p.out, a)
	return a.Seq
}

// inform appends an action for the request's gateway, or for the operator.
func (p *Planner) inform(a Action) { p.out = append(p.out, a) }

// Stats returns the counters as of the last Step.
func (p *Planner) Stats() Stats {
	st := p.stats
	st.Serving, st.Loading, st.Queued = len(p.requests), p.loading.Len(), p.queued
	return st
}

// submit admits a request to the queue.
func (p *Planner) submit(q *Request) {
	p.stats.Submitted++
	reason := NoReason
	switch {
	case q.Prompt <= 0 || q.Hit < 0 || q.Hit > q.Prompt || q.Output < 0:
		reason = BadRequest
	case p.requests[q.ID] != nil:
		reason = Duplicate
	case len(p.requests) >= p.opts.MaxQueue:
		reason = QueueFull
	case q.Deadline != 0 && q.Deadline <= p.now:
		reason = PastDeadline
	}
	if reason != NoReason {
		p.stats.Rejected++
		p.say(Action{Kind: Reject, Request: q.ID, Why: reason})
		return
	}
	r := p.newRequest(q)
	p.renew(r)
	p.requests[q.ID] = r
	p.enqueue(r, false)
	p.due(r)
	if s := p.shortfall(r); s.why != NoReason {
		p.refuse(r, s)
	}
}

// newRequest returns a request that is in no list yet.
func (p *Planner) newRequest(q *Request) *request {
	r := p.sized(q)
	r.why = p.explained.next(q.ID, p.now)
	return r
}

// sized returns a request of which nothing but the size is used.
func (p *Planner) sized(q *Request) *request {
	return &request{Request: *q, cached: q.Hit, promptBlocks: p.blocks(q.Prompt), allBlocks: p.blocks(q.decodeLen())}
}

// groupUp makes a group known, and what it holds. What a group that returns
// still holds goes on where it was; the rest of what it had is planned anew.
func (p *Planner) groupUp(e *GroupUp) {
	p.seq = max(p.seq, e.Seen)
	g := &group{id: e.Group, role: e.Role, heard: p.now, returns: e.Returns, seen: e.Seen, least: noEngine, totalAt: -1, oldestAt: -1}
	fresh := make(map[EngineID]*engine, len(e.Engines))
	for _, s := range e.Engines {
		n := p.nodes[s.Node]
		if n == nil {
			n = &node{id: s.Node, rate: p.opts.ReadRate}
			p.nodes[s.Node] = n
		}
		n.engines++
		n.since = nil // the first report contains all that reached the group, or the request is planned anew
		en := &engine{id: s.Engine, group: g, node: n, spec: s, size: s.size()}
		if e.Role == Decode && s.HBMTokens != 0 {
			en.size.hbm = max(en.size.hbm-p.reserve, 0)
		}
		en.left = en.size
		fresh[s.Engine] = en
		g.engines = append(g.engines, en)
	}
	for i := range e.Holding {
		h := &e.Holding[i]
		r, en := p.requests[h.Request.ID], fresh[h.Engine]
		if r == nil || en == nil || (h.Ended && h.Attempt != r.attempt) {
			continue
		}
		if old := r.engineOf(g.role); old != nil && old.id == h.Engine && old.group.id == g.id && old.group.role == g.role {
			r.setEngine(g.role, en)
		}
	}
	old := p.groups[e.Group]
	p.returning(g, old, e)
	p.groupDown(old)
	for _, s := range e.Engines {
		if other := p.engines[s.Engine]; other != nil {
			p.groupDown(other.group)
		}
	}
	for _, en := range g.engines {
		p.engines[en.id] = en
	}
	p.groups[g.id] = g
	at, _ := slices.BinarySearchFunc(p.order, g.id, func(a *group, id GroupID) int { return cmp.Compare(a.id, id) })
	p.order = slices.Insert(p.order, at, g)
	if g.role == Decode {
		g.private = list.New()
		if !g.switching() {
			p.leastTotal.put(g)
		}
	}
	for i := range e.Holding {
		p.hold(g, &e.Holding[i], e.Again)
	}
	p.reconsider()
	p.complete()
}

// size is what an engine has of each memory.
func (s *EngineSpec) size() room {
	r := room{s.HBMTokens, s.Buffer.Bytes}
	if r.hbm == 0 {
		r.hbm = unlimited
	}
	if r.buffer == 0 {
		r.buffer = unlimited
	}
	return r
}

// hold takes over a request that an engine has already. After a restart of the
// planner the two sides of a request come one after the other, in any order, and
// its gateway submits it again before, between or after them. They disagree if the
// planner ended when one of them had its Start and the other did not. If the planner lives
// on (again), it has each request that a group lists, unless the request has ended.
func (p *Planner) hold(g *group, h *Held, again bool) {
	en := p.engines[h.Engine]
	if en == nil || en.group != g {
		return
	}
	p.seq = max(p.seq, h.Attempt, h.Order) // numbers of attempts are never used twice
	r := p.requests[h.Request.ID]
	if h.Ended && (r == nil || r.phase == queued || r.attempt != h.Attempt) {
		return // finished and failed decide whether the report that follows counts
	}
	abort := Action{Kind: Abort, Request: h.Request.ID, Group: g.id, Engine: en.id, Why: GroupLost}
	if r == nil && again {
		p.take(en, p.held(en, p.sized(&h.Request)))
		abort.Why = NoReason
		p.say(abort)
		return
	}
	if r == nil {
		r = p.newRequest(&h.Request)
		r.started = p.now
		r.why.note(p.now, "found with engine %d, as its group reports", int(h.Engine))
		p.requests[r.ID] = r
		p.enqueue(r, false)
		p.due(r)
	}
	if !h.Ended {
		p.take(en, p.held(en, r))
	}
	switch has := r.engineOf(g.role); {
	case has == en && r.phase == serving && h.Attempt != r.attempt:
		// The group was away for a moment, and the Start was lost.
		r.why.note(p.now, "engine %d does not have its start", int(en.id))
		p.requeue(r, GroupLost)
	case has == en:
		// The group was away for a moment.
		p.repeat(r, g.role, h.Order)
	case has != nil, r.phase == queued && (h.Attempt == 0 || r.attempt != 0 || again):
		// Another engine has it by now, or no engine that knows of its start.
		p.say(abort)
	case r.phase == queued:
		p.unqueue(r)
		r.setEngine(g.role, en)
		r.phase, r.attempt, r.started, r.adopted = serving, h.Attempt, p.now, true
		r.found = [2]*Held{}
		p.restore(r, g.role, h)
		p.partial = append(p.partial, r)
	case h.Attempt == r.attempt:
		r.setEngine(g.role, en)
		if r.adopted && !r.prefilled {
			p.restore(r, g.role, h)
			p.adopt(r)
		}
	case again || r.prefilled:
		// The request has left this attempt, and its prefill engine has done its part.
		p.say(abort)
	default:
		r.setEngine(g.role, en)
		r.why.note(p.now, "the two sides work on different attempts")
		p.requeue(r, GroupLost)
	}
}

// restore takes over the read that an engine of a found request has under way.
func (p *Planner) restore(r *request, role Role, h *Held) {
	r.found[sideAt(role)] = h
	part := h.Reading
	part.Side = role
	if h.Ended || part.Len() <= 0 || part.To > min(r.Hit, h.Request.Hit) {
		return
	}
	r.sides[sideAt(role)] = side{
		part: part, upto: part.From, landed: min(h.Landed, part.Len()), state: reading, order: h.Read,
		begun: p.now, predicted: drain(r.engineOf(role).node, part.Len()),
	}
	if r.loadingAt == nil {
		r.loadingAt = p.loading.PushBack(r)
	}
}

// adopt makes a found request, both of whose engines have reported, one that this planner could
// have started.
func (p *Planner) adopt(r *request) {
	if !r.covered() {
		// The planner before this one ended when a read had stopped, and no engine has
		// the order to read or to compute the rest.
		r.why.note(p.now, "its engines do not bring all cached tokens")
		p.requeue(r, GroupLost)
		return
	}
	for _, h := range r.found {
		if h == nil || h.Ended || h.Order == 0 {
			return
		}
	}
	r.adopted = false
	a, b := &r.sides[0], &r.sides[1]
	if a.state == reading && b.state == reading && a.part.From < b.part.To && b.part.From < a.part.To {
		a.hedge, b.hedge = true, true
	}
}

// covered reports whether the engines of a request that were found bring every cached token.
// It is also true if an engine does not report its parts, or has ended its part.
func (r *request) covered() bool {
	var parts []Part
	upto := 0
	for _, h := range r.found {
		if h == nil || h.Ended || h.Order == 0 {
			return true
		}
		parts = append(parts, h.Parts...)
		upto = max(upto, h.Request.Hit)
	}
	slices.SortFunc(parts, func(a, b Part) int { return cmp.Compare(a.From, b.From) })
	at := 0
	for _, part := range parts {
		if part.From <= at {
			at = max(at, part.To)
		}
	}
	return at >= upto
}

// held returns the room that a request in a registration takes of an engine. It counts until
// the group's first report, which contains it.
func (p *Planner) held(en *engine, r *request) assigned {
	if en.group.role == Prefill {
		return assigned{tokens: r.Prompt, requests: 1, room: p.most(en, r)}
	}
	return assigned{tokens: r.decodeLen(), requests: 1, room: p.least(en, r)}
}

// requeue plans a request again from the start. It aborts the request on its engines,
// unless they have done their part.
func (p *Planner) requeue(r *request, why Reason) {
	p.stats.Replanned++
	p.due(r)
	p.stopLoading(r)
	p.endTransfers(r)
	for _, role := range [...]Role{Prefill, Decode} {
		if en := r.engineOf(role); en != nil && !(role == Prefill && r.prefilled) {
			p.say(Action{Kind: Abort, Request: r.ID, Group: en.group.id, Engine: en.id, Why: why})
		}
		r.setEngine(role, nil)
	}
	r.phase, r.prefilled, r.prefilledAt, r.rest = queued, false, 0, r.rest[:0]
	p.renew(r)
	p.inform(Action{Kind: Replan, Request: r.ID, Why: why})
	p.enqueue(r, true)
}

// complete plans the requests again that one engine alone holds after a restart, because the
// engine on the other side lacks the attempt: its Start was lost with the planner before this
// one, or the attempt has ended there. An engine whose group does not come back within the time
// in which it must reconnect lacks every attempt.
func (p *Planner) complete() {
	p.partial = slices.DeleteFunc(p.partial, func(r *request) bool {
		if p.requests[r.ID] != r || r.phase != serving || !r.adopted || (r.pe == nil) == (r.de == nil) {
			return true
		}
		role := Prefill
		if r.pe == nil {
			role = Decode
		}
		h := r.found[sideAt(role)]
		back := p.engines[h.Peer]
		if h.Peer == 0 {
			back = nil
		}
		if back == nil && p.now-r.started <= p.opts.GroupTimeout {
			return false
		}
		// Prefill may have ended. Then the decode engine reads nothing, and the prefill engine
		// had the Start.
		had := h.Reading.Len() <= 0 && (back == nil || !back.group.returns || back.group.seen >= r.attempt)
		if role == Decode && (had || r.prefilled) {
			return true
		}
		r.why.note(p.now, "no "+role.Other().String()+" engine has it; planned anew")
		p.requeue(r, GroupLost)
		return true
	})
}

// groupDown plans anew what the group had, and forgets it.
func (p *Planner) groupDown(g *group) {
	if g == nil {
		return
	}
	delete(p.groups, g.id)
	if at := slices.Index(p.order, g); at >= 0 {
		p.order = slices.Delete(p.order, at, at+1)
	}
	p.leastTotal.remove(g)
	p.oldest.remove(g)
	for _, en := range g.engines {
		delete(p.engines, en.id)
		en.node.engines--
		if en.node.engines == 0 {
			delete(p.nodes, en.node.id)
		}
	}
	if g.private != nil {
		p.unroute(g)
	}
	if g.switching() {
		p.endSwitch(g.id, g.leaving.to, GroupLost)
	}
	p.reconsider()
	var lost []*request
	for _, r := range p.requests {
		if (r.pe != nil && r.pe.group == g) || (r.de != nil && r.de.group == g) {
			lost = append(lost, r)
		}
	}
	youngestFirst(lost)
	for _, r := range lost {
		p.replan(r, g)
	}
}

// replan sends a request back to the queue because lost is gone, unless the decode
// engine has all of the prompt.
func (p *Planner) replan(r *request, lost *group) {
	if r.pe != nil && r.pe.group == lost && r.prefilled {
		r.pe = nil // its work was done
		return
	}
	r.why.note(p.now, "planned anew: group %d is gone", int(lost.id))
	for _, role := range [...]Role{Prefill, Decode} {
		if en := r.engineOf(role); en != nil && en.group == lost {
			r.setEngine(role, nil)
		}
	}
	p.requeue(r, GroupLost)
}

// fetch takes a group's report. A prefill group is given work, with the decode engines
// as they reported last.
func (p *Planner) fetch(e *Fetch) {
	g := p.groups[e.Group]
	if g == nil {
		return
	}
	g.heard = p.now
	for i := range e.Nodes {
		p.reportNode(&e.Nodes[i], e.Seen)
	}
	for i := range e.Engines {
		rep := &e.Engines[i]
		en := p.engines[rep.Engine]
		if en == nil || en.group != g {
			continue
		}
		en.since = unseen(en.since, e.Seen)
		g.total -= en.tok
		en.tok, en.seq, en.left = max(rep.Tokens, 0), max(rep.Requests, 0), en.size
		if en.spec.HBMTokens != 0 {
			en.left.hbm = max(rep.HBMFree-(en.spec.HBMTokens-en.size.hbm), 0)
		}
		if en.spec.Buffer.Bytes != 0 {
			en.left.buffer = max(rep.BufferFree, 0)
		}
		g.total += en.tok
		for i := range en.since {
			p.take(en, en.since[i])
		}
	}
	switch {
	case g.switching():
	case g.role == Decode:
		p.leastTotal.put(g)
		p.rewind(g)
	default:
		p.grant(g)
	}
}

// reportNode takes a node's report.
func (p *Planner) reportNode(rep *NodeReport, seen uint64) {
	n := p.nodes[rep.Node]
	if n == nil {
		return
	}
	n.since = unseen(n.since, seen)
	n.queue = max(rep.ReadQueue, 0)
	for _, a := range n.since {
		n.queue += a.tokens
	}
	if rep.Rate > 0 {
		n.rate = rep.Rate
	}
}

// unseen drops what the report contains.
func unseen(list []assigned, seen uint64) []assigned {
	i := 0
	for i < len(list) && list[i].seq <= seen {
		i++
	}
	return slices.Delete(list, 0, i)
}

// give counts what an action assigns to an engine until its group reports it.
func (p *Planner) give(en *engine, a assigned) {
	p.take(en, a)
	en.since = append(en.since, a)
}

// take counts an amount as the engine's.
func (p *Planner) take(en *engine, a assigned) {
	en.tok += a.tokens
	en.seq += a.requests
	en.left = en.left.minus(a.room)
	g := en.group
	g.total += a.tokens
	if g.totalAt >= 0 {
		p.leastTotal.put(g)
	}
}

// refuse ends a request that no engine could ever serve.
func (p *Planner) refuse(r *request, s shortfall) {
	p.end(r, s.why)
	reject := &p.out[len(p.out)-1]
	reject.Need, reject.Most = s.need, s.most
}

// end removes a request that is not served any more, and aborts it on its engines.
func (p *Planner) end(r *request, why Reason) {
	p.stats.Rejected++
	for _, en := range [...]*engine{r.pe, r.de} {
		if en != nil {
			p.say(Action{Kind: Abort, Request: r.ID, Group: en.group.id, Engine: en.id, Why: why})
		}
	}
	p.say(Action{Kind: Reject, Request: r.ID, Why: why})
	r.why.note(p.now, "ended: "+why.String())
	p.forget(r)
}

// forget removes a request from every list.
func (p *Planner) forget(r *request) {
	p.unqueue(r)
	p.stopLoading(r)
	p.endTransfers(r)
	delete(p.requests, r.ID)
}

// unlist removes an element, if there is one.
func (p *Planner) unlist(el **list.Element, from *list.List) {
	if *el != nil {
		from.Remove(*el)
		*el = nil
	}
}

// finished handles the end of prefill or of decode. A request that was decoded has
// ended, even if the planner has just aborted the attempt: the group may have been faster
// than the Abort.
func (p *Planner) finished(e Finished) {
	r := p.about(e.Request, e.Attempt)
	if r == nil || (e.Role == Prefill && (r.phase != serving || r.prefilled)) {
		return
	}
	p.stopLoading(r)
	p.endTransfers(r)
	if e.Role == Prefill {
		r.prefilled = true
		r.prefilledAt = p.now
		p.inform(Action{Kind: Prefilled, Request: r.ID})
		if r.pe != nil { // it may have said so before its group was lost
			r.pe.served()
		}
		r.why.note(p.now, "prefill done")
		return
	}
	if r.de != nil {
		r.de.served()
	}
	p.stats.Finished++
	r.why.note(p.now, "decode done")
	if r.pe != nil && !r.prefilled {
		p.say(Action{Kind: Abort, Request: r.ID, Group: r.pe.group.id, Engine: r.pe.id})
	}
	p.observe(r)
	p.inform(Action{Kind: Done, Request: r.ID})
	p.forget(r)
}

// failed plans a request anew that an engine could not serve. The second time,
// what is suspect of the hit is recomputed.
func (p *Planner) failed(e Failed) {
	r := p.about(e.Request, e.Attempt)
	if r == nil || r.phase != serving || (e.Role != Prefill && e.Role != Decode) {
		return
	}
	for i, en := range [...]*engine{r.pe, r.de} {
		if en != nil {
			r.avoid[i] = en.id
			p.strike(en)
		}
	}
	if r.failures++; r.failures >= p.opts.MaxAttempts {
		p.end(r, EngineFailed)
		return
	}
	if r.failures > 1 {
		r.Hit, r.unfit = min(r.Hit, max(e.Upto, 0)/p.opts.BlockTokens*p.opts.BlockTokens), EngineFailed
	}
	r.why.note(p.now, "the %s engine failed (failure %d); planned anew with %d cached tokens", int(e.Role), r.failures, r.Hit)
	// The side that failed has left it.
	if en := r.engineOf(e.Role); en != nil {
		r.setEngine(e.Role, nil)
	}
	p.requeue(r, EngineFailed)
}

// tick looks for what time alone changes.
func (p *Planner) tick() {
	for i := len(p.order) - 1; i >= 0; i-- {
		if g := p.order[i]; p.now-g.heard > p.opts.GroupTimeout {
			p.groupDown(g)
		}
	}
	if p.expiry != 0 && p.expiry <= p.now {
		p.expireAll()
	}
	p.complete()
	p.rescue()
	for _, g := range p.order {
		p.leave(g)
	}
}

// expireAll rejects what is past its deadline in every queue, and finds the next
// deadline.
func (p *Planner) expireAll() {
	p.expire(p.unrouted)
	for _, g := range p.order {
		if g.private != nil {
			p.expire(g.private)
		}
	}
	p.expiry = 0
	for _, r := range p.requests {
		if r.Deadline > p.now {
			p.due(r)
		}
	}
}

// due notes the deadline of a request that waits, or may have to again.
func (p *Planner) due(r *request) {
	if r.Deadline != 0 && (p.expiry == 0 || r.Deadline < p.expiry) {
		p.expiry = r.Deadline
	}
}

// expire rejects what has waited in a queue beyond its deadline.
func (p *Planner) expire(queue *list.List) {
	for el := queue.Front(); el != nil; {
		r := el.Value.(*request)
		el = el.Next()
		if r.Deadline != 0 && r.Deadline <= p.now {
			p.end(r, PastDeadline)
		}
	}
}
