package agentic

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/batch"
	"github.com/penstock-kv/penstock/sim"
	"github.com/penstock-kv/penstock/sim/flow"
)

// roundBits is the number of low bits of a request's ID that hold its round. The high bits hold its
// agent.
const roundBits = 16

// Cluster is the state of one run.
type Cluster struct {
	opts Options
	k    *sim.Kernel
	plan *dualpath.Planner
	// quota: the compute quota bounds the attention time of an engine in each step.
	quota     bool
	attention batch.Model
	buffer    dualpath.Buffer // of each engine

	nodes    []node
	prefill  []*prefiller // engine IDs 0 …
	decode   []*decoder   // … and on
	pgroups  []*prefillGroup
	dgroups  []*decodeGroup
	agents   []agent
	inflight map[dualpath.RequestID]*request
	spare    []*request
	seq      uint64 // of the last action
	phases   *rand.Rand

	left   int // agents that are not done
	result Result
	err    error
}

// node is one machine.
type node struct {
	snic *flow.FIFO // in tokens
	id   dualpath.NodeID
}

// agent is the state of an agent that has rounds left: its current round, and the length of its
// context in tokens.
type agent struct {
	round   int
	context int
}

// request is one round of an agent.
type request struct {
	id    dualpath.RequestID
	agent int
	// context, append and gen are the token counts of the round. Of the prompt, hit tokens are read
	// from storage, and compute tokens are computed.
	context, append, gen int
	hit, compute         int
	attempt              uint64
	pe                   *prefiller
	de                   *decoder
	parts                [2]dualpath.Part
	nparts, unread       int
	computed             int
	sent                 time.Duration // time at which the whole prompt is in the decode engine's memory

	submitted, started, loaded, first, second time.Duration
	// target is the decode engine's step count at which the request is done.
	target int64
}

// prompt returns the length of the request's prompt.
func (r *request) prompt() int { return r.context + r.append }

// readBy returns the number of cached tokens that a side reads.
func (r *request) readBy(side dualpath.Role) (tokens int) {
	for _, p := range r.parts[:r.nparts] {
		if p.Side == side {
			tokens += p.Len()
		}
	}
	return tokens
}

// length returns the number of tokens for which the request needs room in a decode engine's HBM.
func (r *request) length() int { return r.prompt() + r.gen }

// New returns a cluster at time 0.
func New(opts Options) (*Cluster, error) {
	opts.ensureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	c := &Cluster{
		opts: opts, k: sim.New(opts.Seed), quota: opts.System != Basic && !opts.NoQuota, attention: opts.Model.Attention(),
		agents: make([]agent, len(opts.Agents)), inflight: make(map[dualpath.RequestID]*request), left: len(opts.Agents),
	}
	c.buffer = opts.buffer()
	if err := c.build(); err != nil {
		return nil, err
	}
	c.result.begin(c)
	return c, nil
}

// build creates nodes, engines, groups and the planner.
func (c *Cluster) build() error {
	o := &c.opts
	c.phases = c.k.Rand("phases of the groups' fetches")
	rate := o.SNIC / float64(o.Model.KVBytes)
	for i := range o.PrefillNodes + o.DecodeNodes {
		nic, err := flow.NewFIFO(c.k, fmt.Sprintf("node %d storage NIC", i), rate)
		if err != nil {
			return err
		}
		nic.Observe(func(from, to time.Duration, tokens int64) { c.result.read(i, from, to, tokens) })
		c.nodes = append(c.nodes, node{nic, dualpath.NodeID(i)})
	}
	for g := range o.PrefillNodes / o.PrefillGroup {
		pg := &prefillGroup{c: c, id: dualpath.GroupID(g)}
		pg.steps = c.k.NewTimer(sim.Settle, pg.begin)
		pg.ends = c.k.NewTimer(sim.Normal, pg.end)
		pg.fetches = c.k.NewTimer(sim.Settle, func() { c.fetch(&pg.fetcher) })
		for n := range o.PrefillGroup {
			for range o.GPUs {
				pe := newPrefiller(c, pg, &c.nodes[g*o.PrefillGroup+n], dualpath.EngineID(len(c.prefill)))
				pg.engines, c.prefill = append(pg.engines, pe), append(c.prefill, pe)
			}
		}
		pg.report(o.PrefillGroup, c.nodes[g*o.PrefillGroup:])
		c.pgroups = append(c.pgroups, pg)
	}
	for g := range o.DecodeNodes / o.DecodeGroup {
		dg := &decodeGroup{c: c, id: dualpath.GroupID(len(c.pgroups) + g)}
		dg.fetches = c.k.NewTimer(sim.Settle, func() { c.fetchDecode(&dg.fetcher) })
		first := o.PrefillNodes + g*o.DecodeGroup
		for n := range o.DecodeGroup {
			for range o.GPUs {
				de := newDecoder(c, dg, &c.nodes[first+n], dualpath.EngineID(len(c.prefill)+len(c.decode)))
				dg.engines, c.decode = append(dg.engines, de), append(c.decode, de)
			}
		}
		dg.report(o.DecodeGroup, c.nodes[first:])
		c.dgroups = append(c.dgroups, dg)
	}
	p, err := dualpath.New(o.plannerOptions())
	c.plan = p
	return err
}

// Run simulates until all agents are done, Options.Until is reached, or ctx ends, and returns the
// measurements.
func (c *Cluster) Run(ctx context.Context) (*Result, error) {
	for _, g := range c.pgroups {
		c.step(g.up())
	}
	for _, g := range c.dgroups {
		c.step(g.up())
	}
	for i := range c.agents {
		c.k.At(c.arrival(i), func() { c.submit(i) })
	}
	until := c.opts.Until
	if until == 0 {
		until = sim.Never
	}
	err := c.k.RunUntil(ctx, until)
	if c.err != nil {
		err = c.err
	}
	if err == nil && until == sim.Never && c.left > 0 {
		err = fmt.Errorf("agentic: no event is left at %v and %d agents are not done: %d requests in flight; this is a defect of the simulator", c.k.Now(), c.left, len(c.inflight))
	}
	if err != nil {
		return nil, err
	}
	c.result.end(c)
	res := c.result // a copy, so that the result does not keep the cluster in memory
	return &res, nil
}

// arrival returns the time at which an agent begins.
func (c *Cluster) arrival(i int) time.Duration {
	if c.opts.Arrivals == nil {
		return 0
	}
	return c.opts.Arrivals[i]
}

// step passes an event to the planner and performs its actions.
func (c *Cluster) step(ev dualpath.Event) {
	actions := c.plan.Step(ev)
	if c.opts.Record != nil {
		c.opts.Record(ev, actions)
	}
	for i := range actions {
		c.perform(&actions[i])
	}
}

// perform performs one action.
func (c *Cluster) perform(a *dualpath.Action) {
	c.seq = max(c.seq, a.Seq)
	r := c.inflight[a.Request]
	if r == nil {
		c.fail(fmt.Errorf("agentic: %v of request %d, which is not in flight", a.Kind, a.Request))
		return
	}
	switch a.Kind {
	case dualpath.Assign:
		if a.Side == dualpath.Prefill {
			c.givePrefill(r, c.prefill[a.Engine])
		} else {
			c.giveDecode(r, c.decode[int(a.Engine)-len(c.prefill)])
		}
	case dualpath.Start:
		c.givePrefill(r, c.prefill[a.PE])
		c.giveDecode(r, c.decode[int(a.DE)-len(c.prefill)])
		c.start(r, a)
	case dualpath.Prefilled, dualpath.Done: // the simulated gateway waits for the engines themselves
	default:
		c.fail(fmt.Errorf("agentic: %v of request %d (%v); nothing here should be slow, lost or too long", a.Kind, a.Request, a.Why))
	}
}

// fail ends the run.
func (c *Cluster) fail(err error) {
	if c.err == nil {
		c.err = err
	}
	c.k.Stop()
}

// givePrefill adds a request to the load of a prefill engine, unless the request already has a
// prefill engine.
func (c *Cluster) givePrefill(r *request, pe *prefiller) {
	if r.pe == nil {
		r.pe = pe
		pe.tokens += r.prompt()
		pe.requests++
	}
}

// giveDecode adds a request to the load of a decode engine, unless the request already has a decode
// engine.
func (c *Cluster) giveDecode(r *request, de *decoder) {
	if r.de == nil {
		r.de = de
		de.tokens += r.length()
		de.requests++
	}
}

// submit begins an agent's round.
func (c *Cluster) submit(i int) {
	a := &c.agents[i]
	round := c.opts.Agents[i].Rounds[a.round]
	r := c.newRequest()
	*r = request{
		id: dualpath.RequestID(i)<<roundBits | dualpath.RequestID(a.round), agent: i,
		context: a.context, append: round.Append, gen: round.Gen, submitted: c.k.Now(),
	}
	r.hit = r.context / c.opts.BlockTokens * c.opts.BlockTokens
	r.compute = r.append
	if c.opts.RecomputeTail {
		r.compute += r.context - r.hit
	}
	c.inflight[r.id] = r
	c.step(dualpath.Submit{At: c.k.Now(), Request: dualpath.Request{ID: r.id, Prompt: r.prompt(), Hit: r.hit, Output: r.gen}})
	c.wake()
}

// wake schedules a fetch of work for every group.
func (c *Cluster) wake() {
	for _, g := range c.pgroups {
		g.wake(c)
	}
	for _, g := range c.dgroups {
		g.wake(c)
	}
}

// fetchDecode passes a decode group's report to the planner. Requests that wait for the memory of a
// decode engine are assigned at the next fetch of a prefill group.
func (c *Cluster) fetchDecode(f *fetcher) {
	c.fetch(f)
	if c.plan.Stats().Queued > 0 {
		for _, g := range c.pgroups {
			g.wake(c)
		}
	}
}

// newRequest returns a spare request, or a new one.
func (c *Cluster) newRequest() *request {
	if n := len(c.spare); n > 0 {
		r := c.spare[n-1]
		c.spare = c.spare[:n-1]
		return r
	}
	return new(request)
}

// start begins the read of a request that has both engines assigned.
func (c *Cluster) start(r *request, a *dualpath.Action) {
	c.k.Note(uint64(r.id), uint64(a.PE), uint64(a.DE), uint64(a.Parts[0].Side), uint64(a.Parts[0].To))
	r.attempt, r.started = a.Seq, c.k.Now()
	r.parts, r.nparts = a.Parts, a.NParts
	r.unread = r.nparts
	r.pe.buffered += c.bytes(r.readBy(dualpath.Prefill))
	r.de.buffered += c.bytes(r.prompt())
	if max(r.pe.buffered, r.de.buffered) > c.buffer.Bytes {
		c.fail(fmt.Errorf("agentic: request %d: the buffers of engines %d and %d hold %d and %d bytes of %d; the planner must not start it", r.id, r.pe.id, r.de.id, r.pe.buffered, r.de.buffered, c.buffer.Bytes))
		return
	}
	if c.opts.System == Basic {
		r.pe.admit(r)
		return
	}
	c.load(r)
}

// bytes returns the bytes of an engine's buffer that tokens take.
func (c *Cluster) bytes(tokens int) int { return bytesOf(c.buffer, tokens, c.opts.BlockTokens) }

// unbuffer returns the buffer space of a prompt whose KV is in the decode engine's HBM.
func (c *Cluster) unbuffer(e *decoder, r *request) {
	if c.buffer.Bytes != 0 {
		e.buffered -= c.bytes(r.prompt())
		e.group.wake(c)
	}
}

// load queues the reads of the request's cached prefix at the storage NICs: one read for each part
// of the prefix.
func (c *Cluster) load(r *request) {
	if r.unread == 0 {
		c.loaded(r)
		return
	}
	for _, p := range r.parts[:r.nparts] {
		if c.opts.System == Oracle {
			c.k.After(0, func() { c.readDone(r, p) })
			continue
		}
		at := r.pe.node
		if p.Side == dualpath.Decode {
			at = r.de.node
		}
		at.snic.Put(int64(p.Len()), func() { c.readDone(r, p) })
	}
}

// readDone handles the end of the read of a part of the cached prefix.
func (c *Cluster) readDone(r *request, p dualpath.Part) {
	if r.unread--; r.unread == 0 {
		c.loaded(r)
	}
	c.step(dualpath.Progress{At: c.k.Now(), Request: r.id, Attempt: r.attempt, Side: p.Side, Upto: p.To})
	// A shorter reading queue may move engines into the planner's preferred class. It also affects
	// whether the prefill node or the decode node reads the next prefix.
	r.pe.group.wake(c)
	if p.Side == dualpath.Decode {
		r.de.group.wake(c)
	}
}

// loaded marks a request as ready for prefill.
func (c *Cluster) loaded(r *request) {
	r.loaded = c.k.Now()
	r.pe.ready = append(r.pe.ready, r)
	r.pe.group.wakeStep()
}

// prefilled handles the first token of a request.
func (c *Cluster) prefilled(r *request) {
	r.first = c.k.Now()
	pe := r.pe
	pe.tokens -= r.prompt()
	pe.requests--
	pe.buffered -= c.bytes(r.readBy(dualpath.Prefill))
	c.step(dualpath.Finished{At: c.k.Now(), Request: r.id, Attempt: r.attempt, Role: dualpath.Prefill})
	pe.group.wake(c)
	switch c.opts.System {
	case Oracle:
		r.de.arrive(r)
	case Basic:
		// The KV of all layers is sent at once, from HBM to HBM.
		c.k.At(c.send(&pe.cnic, &r.de.cnic, r.prompt()), func() {
			pe.release(r)
			r.de.arrive(r)
		})
	default:
		// The KV is sent to the memory of the decode engine's node layer by layer, and then to the
		// engine's HBM.
		if r.sent > c.k.Now() {
			c.k.At(r.sent, func() { r.de.await(r) })
			return
		}
		r.de.await(r)
	}
}

// decoded ends a request, and begins the next round of its agent.
func (c *Cluster) decoded(r *request) {
	c.result.round(c, r)
	c.step(dualpath.Finished{At: c.k.Now(), Request: r.id, Attempt: r.attempt, Role: dualpath.Decode})
	r.de.group.wake(c)
	delete(c.inflight, r.id)
	i := r.agent
	a := &c.agents[i]
	a.context += r.append + r.gen
	a.round++
	c.spare = append(c.spare, r)
	if a.round < len(c.opts.Agents[i].Rounds) {
		c.submit(i)
		return
	}
	c.left--
	c.result.agentDone(c.k.Now(), c.arrival(i))
	if c.left == 0 {
		c.k.Stop()
	}
}
