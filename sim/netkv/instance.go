package netkv

import (
	"time"

	"github.com/penstock-kv/penstock/sim"
)

// instance is a decode instance.
type instance struct {
	c  *cluster
	id int // endpoint of the fat-tree
	// dispatched is the number of requests in transfer or waiting for the end of a step. landed are
	// the waiting requests.
	dispatched int
	landed     []*request
	batch      []*request
	stepping   bool
	step       *sim.Timer
	// reserved is the memory of dispatched and batched requests, in bytes.
	reserved int64
	cache    prefixes
}

// free returns the number of bytes that a new request could reserve. Cached prefixes count as free,
// because the cache drops them when requests need the memory.
func (d *instance) free() int64 { return d.c.o.Memory - d.reserved }

// reserve reserves the memory of a request. If the unused memory does not suffice, the cache
// shrinks.
func (d *instance) reserve(bytes int64) {
	d.reserved += bytes
	d.cache.shrink(int(d.free() / d.c.o.KVToken))
}

// land adds a request whose KV has arrived. It joins the batch at the end of the current step.
func (d *instance) land(r *request) {
	d.cache.add(r.group, r.shared)
	d.cache.shrink(int(d.free() / d.c.o.KVToken))
	d.landed = append(d.landed, r)
	if !d.stepping {
		d.beginStep()
	}
}

// beginStep adds the arrived requests to the batch, and computes one token of each.
func (d *instance) beginStep() {
	n := min(len(d.landed), d.c.chooser.model.MaxBatch-len(d.batch))
	joined := d.landed[:n]
	d.batch = append(d.batch, joined...)
	d.dispatched -= n
	d.stepping = len(d.batch) > 0
	if !d.stepping {
		return
	}
	took := time.Duration(d.c.chooser.model.Iteration(len(d.batch)) * float64(time.Second))
	for _, r := range joined {
		r.tbt = took
	}
	d.landed = append(d.landed[:0], d.landed[n:]...)
	d.step.SetAfter(took)
}

// endStep counts one generated token for each request of the batch. Requests with all their tokens
// leave the batch.
func (d *instance) endStep() {
	left := d.batch[:0]
	for _, r := range d.batch {
		if r.tokens++; r.tokens == 1 {
			r.ttft = d.c.k.Now() - r.arrived
		}
		if r.tokens < r.output {
			left = append(left, r)
			continue
		}
		d.reserved -= r.memory
		d.c.finished(r)
	}
	clear(d.batch[len(left):])
	d.batch = left
	d.beginStep()
}
