package agentic

import (
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/sim"
)

// decoder is a decode engine. All of its requests are in its batch. Between two changes of the
// batch all steps have the same duration, so the number of steps is computed, and steps are not
// simulated one by one.
type decoder struct {
	c     *Cluster
	id    dualpath.EngineID
	group *decodeGroup
	node  *node
	cnic  computeNIC
	// tokens is the number of tokens of the assigned, unfinished requests; requests is the number
	// of these requests.
	tokens, requests int
	// buffered is the number of bytes that requests take of the buffer.
	buffered int
	// free is the free HBM in tokens; waiting are the requests that wait for HBM.
	free    int
	waiting []*request

	// batch is a heap by target; joining are the requests that join at the next step.
	batch   []*request
	joining []*request
	// steps is the number of steps done at time base; each later step takes the duration step.
	steps int64
	base  time.Duration
	step  time.Duration
	next  *sim.Timer
	// finish is called with each request that is done.
	finish func(*request)
}

// decodeGroup is a group of decode engines for which work is fetched together.
type decodeGroup struct {
	fetcher
	c       *Cluster
	id      dualpath.GroupID
	engines []*decoder
}

// newDecoder returns an idle engine.
func newDecoder(c *Cluster, g *decodeGroup, n *node, id dualpath.EngineID) *decoder {
	e := &decoder{c: c, id: id, group: g, node: n, free: c.opts.Model.DecodeHBM, finish: c.decoded}
	e.next = c.k.NewTimer(sim.Normal, e.boundary)
	return e
}

// report fills in the group's reports. The free HBM in a report is the engine's capacity minus the
// HBM for all assigned requests.
func (g *decodeGroup) report(nodes int, at []node) {
	g.init(g.c, g.id, len(g.engines), at[:nodes], func(out []dualpath.EngineReport) {
		for i, e := range g.engines {
			out[i] = dualpath.EngineReport{Engine: e.id, Tokens: e.tokens, Requests: e.requests, HBMFree: g.c.opts.Model.DecodeHBM - e.tokens, BufferFree: g.c.buffer.Bytes - e.buffered}
		}
	})
}

// up returns the group's registration.
func (g *decodeGroup) up() dualpath.GroupUp {
	ev := dualpath.GroupUp{Group: g.id, Role: dualpath.Decode}
	for _, e := range g.engines {
		ev.Engines = append(ev.Engines, dualpath.EngineSpec{Engine: e.id, Node: e.node.id, HBMTokens: g.c.opts.Model.DecodeHBM, Buffer: g.c.buffer})
	}
	return ev
}

// await queues a request whose KV is in the node's memory. The KV is moved to the HBM when there is
// room, in the order of the queue.
func (e *decoder) await(r *request) {
	e.waiting = append(e.waiting, r)
	e.admit()
}

// admit moves waiting requests into the HBM while there is room.
func (e *decoder) admit() {
	n := 0
	for n < len(e.waiting) && e.waiting[n].length() <= e.free {
		r := e.waiting[n]
		n++
		e.free -= r.length()
		e.c.k.At(e.c.send(&e.cnic, &e.cnic, r.prompt()), func() {
			e.c.unbuffer(e, r)
			e.join(r)
		})
	}
	e.waiting = shift(e.waiting, n)
}

// arrive adds a request whose KV needs no copy into the HBM.
func (e *decoder) arrive(r *request) {
	e.free -= r.length() // may become negative: arrive does not wait for room
	e.join(r)
}

// join adds a request with its first token to the batch at the next step.
func (e *decoder) join(r *request) {
	e.joining = append(e.joining, r)
	now := e.c.k.Now()
	at := now
	if len(e.batch) > 0 {
		n := (now - e.base + e.step - 1) / e.step
		at = e.base + n*e.step
	}
	if at < e.next.Due() {
		e.next.Set(at)
	}
}

// boundary handles the end of a step at which the batch changes.
func (e *decoder) boundary() {
	now := e.c.k.Now()
	if len(e.batch) > 0 {
		e.steps += int64((now - e.base) / e.step)
	}
	e.base = now
	var done []*request
	for len(e.batch) > 0 && e.batch[0].target <= e.steps {
		done = append(done, e.pop())
	}
	joining := e.joining
	e.joining = nil
	for _, r := range joining {
		if r.gen == 1 {
			done = append(done, r)
			continue
		}
		r.target = e.steps + int64(r.gen-1)
		e.push(r)
	}
	e.step = e.c.opts.Model.StepBase + time.Duration(len(e.batch))*e.c.opts.Model.StepPer
	for _, r := range joining {
		r.second = now + e.step
	}
	if len(e.batch) > 0 {
		e.next.Set(now + time.Duration(e.batch[0].target-e.steps)*e.step)
	}
	for _, r := range done {
		e.free += r.length()
		e.tokens -= r.length()
		e.requests--
		e.finish(r)
	}
	e.admit()
}

// less orders the batch by target, then by ID.
func (e *decoder) less(i, j int) bool {
	a, b := e.batch[i], e.batch[j]
	return a.target < b.target || (a.target == b.target && a.id < b.id)
}

// push adds a request to the batch.
func (e *decoder) push(r *request) {
	e.batch = append(e.batch, r)
	for i := len(e.batch) - 1; i > 0; {
		parent := (i - 1) / 2
		if !e.less(i, parent) {
			return
		}
		e.batch[i], e.batch[parent] = e.batch[parent], e.batch[i]
		i = parent
	}
}

// pop removes the request that is done first.
func (e *decoder) pop() *request {
	b := e.batch
	top := b[0]
	last := len(b) - 1
	b[0], b[last] = b[last], nil
	e.batch = b[:last]
	for i := 0; ; {
		least := i
		for child := 2*i + 1; child <= 2*i+2 && child < last; child++ {
			if e.less(child, least) {
				least = child
			}
		}
		if least == i {
			return top
		}
		b[i], b[least] = b[least], b[i]
		i = least
	}
}
