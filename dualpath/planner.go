package dualpath

import (
	"container/list"
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
	// priorities are the levels of the requests that wait; levels are those that offer a
	// request to be granted.
	priorities map[int]*level
	levels     ordered[level]
	// full counts the decode groups that are.
	full int
	// shares are those of the tenants in Options.Weights, others the sum of all others'.
	shares map[string]*Share
	others Share
	// loading are the requests with a read under way.
	loading *list.List
	// partial were found with one engine alone after a restart.
	partial []*request
	epochs  map[NamespaceID]uint64
	// deadlines are the requests that wait and have one. prefills is the rate of prefill
	// engines, sizes those of the requests that wait.
	deadlines ordered[request]
	prefills  measured
	sizes     sizes
	// free is enginesFree's, as of the Step freeStep.
	free     []float64
	freeStep uint64
	// leastTotal are the decode groups by total tokens.
	leastTotal ordered[group]
	turn       Role // RoundRobin
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
	// Late are those of Rejected whose first token could not come by its deadline.
	Late uint64
	// Queued wait for their engines, Loading have a read under way,
	// Serving are all that have not ended. Gauges.
	Queued, Loading, Serving int
	// PrefillRate is what a prefill engine with work computes, as measured, tokens a second; 0:
	// too few prefills have ended. A gauge.
	PrefillRate float64
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
	at    *list.Element
	order int64
	// flow is its tenant's or level.anew, work its cost there; lane is where it is offered.
	// All are unset when it is served.
	flow      *flow
	work      float64
	lane      *lane
	laneAt    int
	loadingAt *list.Element
	// due is when it must be looked at, dueAt its place in Planner.deadlines.
	due   time.Duration
	dueAt int
	// under is its work on the engine underAt (beginPrefill). answered: it has had its first
	// token, by this attempt or an earlier one.
	under    float64
	underAt  *engine
	answered bool
	sides    [2]side
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
		unrouted: list.New(), loading: list.New(), leastTotal: byTotal(),
		shares: make(map[string]*Share), priorities: make(map[int]*level), levels: byPriority(), deadlines: byDue(),
		turn: Prefill, explained: newExplainRing(opts.MaxExplain),
	}
	for tenant := range opts.Weights {
		p.shares[tenant] = new(Share)
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
	st.Serving, st.Loading, st.Queued, st.PrefillRate = len(p.requests), p.loading.Len(), p.queued, p.prefills.rate()
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
	case q.FirstToken < 0:
		reason = BadRequest
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
	if s := p.shortfall(r); s.why != NoReason {
		p.refuse(r, s)
	} else if estimate, left, late := p.late(r); late {
		p.refuseLate(r, estimate, left)
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
	r.answered = true
	if e.Role == Prefill {
		p.endPrefill(r)
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
	p.expire()
	p.complete()
	p.rescue()
	for _, g := range p.order {
		p.orderSwitch(g)
	}
}
