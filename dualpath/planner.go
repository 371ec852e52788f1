package dualpath

import (
	"container/list"
	"time"
)

// Planner is the scheduler's state. A Planner is not safe for concurrent use.
type Planner struct {
	opts Options
	now  time.Duration
	seq  uint64
	out  []Action

	groups  map[GroupID]*group
	engines map[EngineID]*engine
	nodes   map[NodeID]*node
	// order holds the groups by ID, so that no decision depends on the iteration order of a map.
	order []*group

	requests map[RequestID]*request
	// unrouted is a list of *request: the waiting requests that are not in a decode group's queue.
	// Requests that are planned again come first. front and back are the values of request.order at
	// the head and at the end of the list. queued counts all waiting requests, in unrouted and in
	// the groups' queues.
	unrouted    *list.List
	front, back int64
	queued      int
	// priorities maps a priority to its level, which has the waiting requests of that priority.
	// levels are the levels with a request that may be granted.
	priorities map[int]*level
	levels     ordered[level]
	// cooling are the waiting requests whose retryAt has not come, the earliest first.
	cooling ordered[request]
	// full is the number of decode groups without room for the request that has reserved them.
	full int
	// shares are the granted and waiting work of each tenant in Options.Weights; others is the sum
	// over all other tenants.
	shares map[string]*Share
	others Share
	// loading is a list of *request: the requests with a storage read in progress.
	loading *list.List
	// partial are the requests that, after a restart of the planner, only one of their two engines
	// has reported.
	partial []*request
	epochs  map[NamespaceID]uint64
	// deadlines are the waiting requests with a deadline, the earliest first. prefills is the
	// measured rate of the prefill engines, sizes a histogram of the work of the waiting requests.
	deadlines ordered[request]
	prefills  measured
	sizes     sizes
	// free is the last result of enginesFree, computed in the Step with number freeStep.
	free     []float64
	freeStep uint64
	// leastTotal are the decode groups by total tokens.
	leastTotal ordered[group]
	turn       Role // the side whose turn is next in RoundRobin
	// steps counts the calls of Step.
	steps uint64
	// reserve is Options.Network.Reserve.
	reserve int
	// candidates and candidateEngines are scratch slices of cheapestOf, kept to avoid allocations.
	candidates       []Candidate
	candidateEngines []*engine
	// avoidUntil is the latest engine.avoidUntil of all engines.
	avoidUntil time.Duration

	explained explainRing
	stats     Stats
	// samples are measurements of the last finished requests.
	samples []sample
}

// Stats counts the planner's work since it was made.
type Stats struct {
	Submitted, Started, Rejected, Replanned, Finished uint64
	// PartsPrefill and PartsDecode are the numbers of reads that were started on prefill and on
	// decode engines, TokensPrefill and TokensDecode the sums of their lengths in tokens. Splits is
	// the number of requests whose prefix was split over both engines at the start.
	PartsPrefill, PartsDecode, TokensPrefill, TokensDecode, Splits uint64
	Cuts, Hedges, Recomputes                                       uint64
	// Aborted is the number of requests of older weights that a change of weights has rejected.
	// Switched is the number of completed role changes of groups, SwitchesFailed the number of
	// attempted role changes that ended without a change.
	Aborted, Switched, SwitchesFailed uint64
	// Late is the number of requests that were rejected because their first token could not be
	// produced by its deadline.
	Late uint64
	// Queued is the number of requests that wait for engines, Loading the number with a storage
	// read in progress, and Serving the number that have not ended. All three are gauges.
	Queued, Loading, Serving int
	// PrefillRate is the measured rate of a busy prefill engine in tokens per second; 0: too few
	// prefills have ended to measure it. It is a gauge.
	PrefillRate float64
}

// phase is the phase of a request.
type phase uint8

const (
	queued  phase = iota // it holds no memory
	serving              // Start has been sent
)

// request is a request that has not ended.
type request struct {
	Request
	// cached is Hit as submitted; the engines use this number. Hit becomes smaller if cached tokens
	// at the end of the prefix cannot be used. unfit is the reason.
	cached int
	unfit  Reason
	// promptBlocks and allBlocks are the lengths of the prompt, and of prompt and output, in
	// blocks.
	promptBlocks, allBlocks int
	phase                   phase
	pe                      *engine
	de                      *engine
	// home is the decode group in whose queue the request waits, or nil.
	home *group
	// at is the request's element in unrouted or home.private; nil when the request is being
	// served. order ranks the waiting requests by age: the oldest has the lowest order.
	at    *list.Element
	order int64
	// flow is the request's queue in fair.go: that of its tenant, or level.replanned. work is the
	// request's cost in that flow, and lane the part of the flow in which the request waits. All
	// are unset when the request is being served.
	flow      *flow
	work      float64
	lane      *lane
	laneAt    int
	loadingAt *list.Element
	// due is the time at which the request's deadlines must be checked, dueAt the request's index
	// in Planner.deadlines.
	due   time.Duration
	dueAt int
	// prefillWork is the request's work that is counted at the engine prefillingOn (beginPrefill).
	// answered: the request's first token has been produced, by this attempt or an earlier one.
	prefillWork  float64
	prefillingOn *engine
	answered     bool
	sides        [2]side
	// rest are ranges of the prefix that an engine has stopped reading and that no engine reads
	// yet.
	rest      []Part
	started   time.Duration
	prefilled bool
	// prefilledAt is the end of the last attempt's prefill; 0: unknown.
	prefilledAt time.Duration
	// transfers are the KV transfers of the request that are counted in Options.Network.
	transfers []transfer
	// attempt is the Seq of the request's last Start. orders are the later actions of this attempt
	// for each side (instruct).
	attempt uint64
	orders  [2][]Action
	// adopted is set when an engine reports an attempt that an earlier planner process started. It
	// is cleared when both engines have reported the attempt. found are their reports.
	adopted bool
	found   [2]*Held
	// failures is the number of the request's attempts that failed at an engine.
	failures int
	// avoid are the engines of the attempt that failed last. The request is not started before
	// retryAt.
	avoid   [2]EngineID
	retryAt time.Duration
	// coolingAt is the request's index in Planner.cooling.
	coolingAt int
	why       *Explanation
}

// New returns a planner without engines.
func New(opts Options) (*Planner, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	p := &Planner{
		opts: opts, seq: opts.FirstSeq,
		groups: make(map[GroupID]*group), engines: make(map[EngineID]*engine), nodes: make(map[NodeID]*node),
		requests: make(map[RequestID]*request), epochs: make(map[NamespaceID]uint64),
		unrouted: list.New(), loading: list.New(), leastTotal: byTotal(),
		shares: make(map[string]*Share), priorities: make(map[int]*level), levels: byPriority(), deadlines: byDue(), cooling: byRetry(),
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

// Step handles one event and returns the actions, in order. The slice is valid until the next Step.
// The planner's time never decreases: an event with an earlier time than the previous event is
// handled at the time of the previous event. An event about an unknown object (a request that has
// ended, a group that timed out) is ignored.
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

// about returns the request of an engine's report. It returns nil if the request has ended or the
// report is about another attempt. An aborted attempt remains the request's attempt until the next
// Start.
func (p *Planner) about(id RequestID, attempt uint64) *request {
	r := p.requests[id]
	if r == nil || (attempt != 0 && attempt != r.attempt) {
		return nil
	}
	return r
}

// emit appends an action and returns its number.
func (p *Planner) emit(a Action) uint64 {
	p.seq++
	a.Seq = p.seq
	p.out = append(p.out, a)
	return a.Seq
}

// notify appends an action for the request's gateway or for the operator.
func (p *Planner) notify(a Action) { p.out = append(p.out, a) }

// Stats returns the counters as of the last Step.
func (p *Planner) Stats() Stats {
	st := p.stats
	st.Serving, st.Loading, st.Queued, st.PrefillRate = len(p.requests), p.loading.Len(), p.queued, p.prefills.rate()
	return st
}

// submit adds a new request to the queue, or rejects it.
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
		p.emit(Action{Kind: Reject, Request: q.ID, Why: reason})
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

// newRequest returns a request with an explanation; the request is in no list yet.
func (p *Planner) newRequest(q *Request) *request {
	r := p.sized(q)
	r.why = p.explained.next(q.ID, p.now)
	return r
}

// sized returns a request for calculations that use only its size.
func (p *Planner) sized(q *Request) *request {
	return &request{Request: *q, cached: q.Hit, promptBlocks: p.blocks(q.Prompt), allBlocks: p.blocks(q.decodeLen())}
}

// finished handles the end of prefill or of decode. The end of decode ends the request even if the
// planner has just aborted the attempt, because the group may have finished before the Abort
// arrived.
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
		p.notify(Action{Kind: Prefilled, Request: r.ID})
		if r.pe != nil { // nil if the engine's group was lost after the report
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
		p.emit(Action{Kind: Abort, Request: r.ID, Group: r.pe.group.id, Engine: r.pe.id})
	}
	p.observe(r)
	p.notify(Action{Kind: Done, Request: r.ID})
	p.forget(r)
}

// failed plans a request again because one of its engines failed. From the second failure on, the
// cached tokens that have not been verified are recomputed, and the request waits for
// Options.Cooldown.
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
		r.retryAt = p.now + p.opts.Cooldown
	}
	r.why.note(p.now, "the %s engine failed (failure %d); planned anew with %d cached tokens", int(e.Role), r.failures, r.Hit)
	// The failed engine has dropped the request, so it gets no Abort.
	if en := r.engineOf(e.Role); en != nil {
		r.setEngine(e.Role, nil)
	}
	p.requeue(r, EngineFailed)
}

// tick handles timeouts and deadlines.
func (p *Planner) tick() {
	for i := len(p.order) - 1; i >= 0; i-- {
		if g := p.order[i]; p.now-g.heard > p.opts.GroupTimeout {
			p.groupDown(g)
		}
	}
	p.expire()
	p.complete()
	p.checkReads()
	for _, g := range p.order {
		if p.orderSwitch(g); g.leaving.resumeBy != 0 {
			p.resume(g)
		}
	}
}
