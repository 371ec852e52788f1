package agentic

import (
	"math"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/batch"
	"github.com/penstock-kv/penstock/sim"
)

// prefiller is a prefill engine.
type prefiller struct {
	id    dualpath.EngineID
	group *prefillGroup
	node  *node
	cnic  computeNIC
	// tokens is the number of tokens of the unfinished requests, requests the number of these
	// requests: tok_e and seq_e in the DualPath paper.
	tokens, requests int
	// buffered is the number of bytes that requests take of the buffer.
	buffered int
	// ready are the requests whose prefix has been read and that wait for steps, in order of
	// arrival.
	ready []*request
	// chunks are the engine's chunks of prompts in the running step.
	chunks []batch.Chunk

	// free is the free HBM in tokens, used by system Basic; waiting are the requests that wait for
	// HBM.
	free    int
	waiting []*request
}

// prefillGroup is a group of engines that step together.
type prefillGroup struct {
	fetcher
	c       *Cluster
	id      dualpath.GroupID
	engines []*prefiller
	steps   *sim.Timer // begins a step after all other events of the same virtual time
	ends    *sim.Timer
	items   []batch.Item
}

// newPrefiller returns an idle engine.
func newPrefiller(c *Cluster, g *prefillGroup, n *node, id dualpath.EngineID) *prefiller {
	return &prefiller{id: id, group: g, node: n, free: c.opts.Model.PrefillHBM}
}

// report fills in the group's reports.
func (g *prefillGroup) report(nodes int, at []node) {
	g.init(g.c, g.id, len(g.engines), at[:nodes], func(out []dualpath.EngineReport) {
		for i, e := range g.engines {
			out[i] = dualpath.EngineReport{Engine: e.id, Tokens: e.tokens, Requests: e.requests, BufferFree: g.c.buffer.Bytes - e.buffered}
		}
	})
}

// up returns the group's registration.
func (g *prefillGroup) up() dualpath.GroupUp {
	ev := dualpath.GroupUp{Group: g.id, Role: dualpath.Prefill}
	for _, e := range g.engines {
		ev.Engines = append(ev.Engines, dualpath.EngineSpec{Engine: e.id, Node: e.node.id, Buffer: g.c.buffer})
	}
	return ev
}

// admit queues a request until the engine's HBM has room for its prompt, and then starts its read.
// Requests start in the order of the queue.
func (e *prefiller) admit(r *request) {
	e.waiting = append(e.waiting, r)
	e.admitWaiting()
}

// admitWaiting starts the reads of requests from the head of the queue, while the HBM has room for
// their prompts.
func (e *prefiller) admitWaiting() {
	n := 0
	for n < len(e.waiting) && e.waiting[n].prompt() <= e.free {
		r := e.waiting[n]
		n++
		e.free -= r.prompt()
		e.group.c.load(r)
	}
	e.waiting = shift(e.waiting, n)
}

// release frees a request's HBM.
func (e *prefiller) release(r *request) {
	e.free += r.prompt()
	e.admitWaiting()
}

// shift removes the first n elements and keeps the memory of the slice.
func shift(q []*request, n int) []*request {
	if n == 0 {
		return q
	}
	k := copy(q, q[n:])
	clear(q[k:])
	return q[:k]
}

// wakeStep begins a step after all events of the current virtual time, unless a step is running.
func (g *prefillGroup) wakeStep() {
	if g.ends.Due() == sim.Never && g.steps.Due() == sim.Never {
		g.steps.Set(g.c.k.Now())
	}
}

// begin starts a step with the ready requests.
func (g *prefillGroup) begin() {
	c := g.c
	m := &c.opts.Model
	var longest, sum float64
	tokens := 0
	for _, e := range g.engines {
		took := e.pack(c, &g.items)
		longest, sum = max(longest, took), sum+took
		for _, ch := range e.chunks {
			tokens += ch.Compute
		}
	}
	if tokens == 0 {
		return
	}
	rest := float64(tokens) * m.Linear / m.FLOPS / float64(len(g.engines))
	c.result.step(c, longest, sum/float64(len(g.engines)))
	took := time.Duration(math.Ceil((longest + rest) * 1e9))
	c.k.Note(uint64(tokens), uint64(took))
	end := c.k.Now() + c.opts.StepOverhead + took
	if c.opts.System != Basic && c.opts.System != Oracle { // Basic holds all layers in the HBM; Oracle transfers nothing
		for _, e := range g.engines {
			for _, ch := range e.chunks {
				end = max(end, c.stream(e.ready[ch.Index], ch.Compute))
			}
		}
	}
	g.ends.Set(end)
}

// pack chooses the engine's chunks of a step and returns their attention time in seconds.
func (e *prefiller) pack(c *Cluster, items *[]batch.Item) float64 {
	*items = (*items)[:0]
	for _, r := range e.ready {
		*items = append(*items, batch.Item{Cached: r.prompt() - r.compute + r.computed, Compute: r.compute - r.computed})
	}
	if c.quota {
		e.chunks = batch.Pack(*items, c.opts.Quota, c.attention, e.chunks)
		if len(e.chunks) == 0 && len(*items) > 0 {
			// Not even one token fits the quota. The step computes one token nevertheless, to make
			// progress.
			e.chunks = append(e.chunks, batch.Chunk{Index: 0, Compute: min(1, (*items)[0].Compute)})
		}
	} else {
		e.chunks = e.chunks[:0]
		for i, it := range *items {
			e.chunks = append(e.chunks, batch.Chunk{Index: i, Compute: it.Compute})
		}
	}
	seconds := 0.0
	for _, ch := range e.chunks {
		seconds += c.attention.Seconds((*items)[ch.Index].Cached, ch.Compute)
	}
	return seconds
}

// end ends a step, and begins the next.
func (g *prefillGroup) end() {
	for _, e := range g.engines {
		done := 0
		for _, ch := range e.chunks {
			r := e.ready[ch.Index]
			r.computed += ch.Compute
			if r.computed == r.compute {
				done++ // only the last chunk of a batch can be cut
			}
		}
		finished := e.ready[:done:done]
		e.chunks = e.chunks[:0]
		for _, r := range finished {
			g.c.prefilled(r)
		}
		e.ready = shift(e.ready, done)
	}
	g.wakeStep()
}
