//go:build uring

package uring

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/posixio"
)

// engine runs batches of requests on rings.
type engine struct {
	opts Options
	env  env
	// source is a ring that runs no requests. It holds the registration of the regions with the
	// kernel, which the other rings clone. It is nil if there are no regions, if the regions cannot
	// be registered, or if the kernel cannot clone registrations (before 6.12).
	source *ring
	// own and ownDone are used if source is nil. own counts the rings that tried to register the
	// regions themselves, and ownDone the rings that succeeded.
	own, ownDone atomic.Int32

	callers *pool
	shared  *sharedRing // nil with WaitCaller
	// batches holds unused request tables of the shared mode for reuse.
	batches chan *batch
	// active counts the batches in flight, for WaitAuto.
	active  atomic.Int64
	closing sync.Once
}

// newEngine makes an engine and its first ring, which proves that rings work.
func newEngine(o Options, count *blockio.Counters) (*engine, error) {
	budget, err := blockio.NewBudget(o.Budget)
	if err != nil {
		return nil, err
	}
	e := &engine{opts: o, batches: make(chan *batch, batchesMax)}
	e.env = env{budget: budget, regions: chunks(o.Regions), count: count, hook: o.Hook}
	if len(e.env.regions) > 0 {
		if e.source, err = newSource(e.env.regions); err != nil {
			return nil, err
		}
	}
	e.callers = newPool(o.Rings, e.newCaller)
	first, err := e.callers.get(context.Background())
	if err != nil {
		e.closeSource()
		return nil, err
	}
	e.callers.put(first)
	if o.Wait != WaitCaller {
		if e.shared, err = newShared(o.SharedEntries, &e.env, e.register); err != nil {
			e.callers.close()
			e.closeSource()
			return nil, fmt.Errorf("uring: shared ring: %w", err)
		}
	}
	return e, nil
}

// regionMax is the maximum length of a buffer that the kernel registers: 1 GiB.
const regionMax = 1 << 30

// chunks cuts regions into buffers of at most regionMax.
func chunks(regions [][]byte) (out [][]byte) {
	for _, r := range regions {
		for len(r) > 0 {
			n := min(len(r), regionMax)
			out = append(out, r[:n:n])
			r = r[n:]
		}
	}
	return out
}

// newCaller makes a ring for the pool.
func (e *engine) newCaller() (*caller, error) {
	r, err := newRing(e.opts.Entries)
	if err != nil {
		return nil, err
	}
	return &caller{ring: r, env: &e.env, registered: e.register(r)}, nil
}

// ownMax is the maximum number of rings of a device that register the regions themselves if the
// kernel cannot clone registrations. For such a registration the kernel keeps 16 bytes for each
// page of 4 KiB. With 64 rings that would be a quarter of the arena's size for each volume. The
// pool returns the last used ring first, so the first rings run most batches. For requests on the
// other rings the kernel pins the pages each time.
const ownMax = 4

// newSource makes the ring that holds the registration. It returns nil if the regions cannot be
// registered (RLIMIT_MEMLOCK) or the registration cannot be cloned.
func newSource(regions [][]byte) (*ring, error) {
	r, err := newRing(1)
	if err != nil {
		return nil, err
	}
	clone, err := newRing(1)
	if err != nil {
		r.close()
		return nil, err
	}
	defer clone.close()
	if r.registerBuffers(regions) != nil || clone.cloneBuffers(r) != nil {
		r.close()
		return nil, nil
	}
	return r, nil
}

func (e *engine) closeSource() {
	if e.source != nil {
		e.source.close()
	}
}

// register registers the regions with r and reports whether that succeeded. It clones the
// registration of source. If there is no source, only the first ownMax rings register the regions
// themselves.
func (e *engine) register(r *ring) bool {
	switch {
	case len(e.env.regions) == 0:
		return false
	case e.source != nil:
		return r.cloneBuffers(e.source) == nil
	case e.own.Add(1) > ownMax || r.registerBuffers(e.env.regions) != nil:
		return false
	}
	e.ownDone.Add(1)
	return true
}

// do performs the batch, which the volume has admitted, and returns when each
// request has its outcome. An error means that nothing was submitted.
func (e *engine) do(ctx context.Context, batch []blockio.Request) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("uring: batch of %d not admitted: %w", len(batch), err)
	}
	if len(batch) == 0 {
		return nil
	}
	active := e.active.Add(1)
	defer e.active.Add(-1)
	// The kernel has only the addresses of the buffers. KeepAlive prevents the Go runtime from
	// freeing the buffers before the requests have completed.
	defer runtime.KeepAlive(batch)
	if e.useShared(active) {
		return e.doShared(ctx, batch)
	}
	return e.doCaller(ctx, batch)
}

// useShared reports whether a batch uses the shared ring. active is the number of batches in
// flight. If the kernel has refused the shared ring, the pool is used instead, which replaces
// broken rings.
func (e *engine) useShared(active int64) bool {
	if e.shared == nil || e.shared.refused.Load() {
		return false
	}
	return e.opts.Wait == WaitShared || active > int64(e.opts.AutoThreshold)
}

// doCaller performs a batch on a ring of the pool. It takes the ring before the bytes of the
// budget: a batch that holds bytes must be able to proceed. In the other order, one batch could
// hold bytes and wait for a ring while another holds a ring and waits for bytes.
func (e *engine) doCaller(ctx context.Context, batch []blockio.Request) error {
	c, err := e.callers.get(ctx)
	if err != nil {
		return err
	}
	defer e.callers.put(c)
	if err := e.start(ctx, c.start(len(batch)), batch); err != nil {
		forget(c.ops)
		return err
	}
	c.run()
	return nil
}

func (e *engine) doShared(ctx context.Context, reqs []blockio.Request) error {
	b := e.takeBatch()
	defer e.keepBatch(b)
	b.start(len(reqs))
	defer forget(b.ops)
	if err := e.start(ctx, b.ops, reqs); err != nil {
		return err
	}
	e.shared.run(b)
	return nil
}

// batchesMax is the number of unused request tables that are kept, about the usual number of
// goroutines in doShared.
const batchesMax = 64

func (e *engine) takeBatch() *batch {
	select {
	case b := <-e.batches:
		return b
	default:
		return &batch{last: make(chan struct{}, 1)}
	}
}

func (e *engine) keepBatch(b *batch) {
	select {
	case e.batches <- b:
	default:
	}
}

// start initialises ops for reqs and waits for the budget of the first op. When it has returned
// nil, the whole batch is admitted, and ctx has no more effect.
func (e *engine) start(ctx context.Context, ops []op, reqs []blockio.Request) error {
	for i := range ops {
		ops[i].start(&reqs[i], reqs[i].File.(*posixio.File).FD())
	}
	if err := e.env.budget.Acquire(ctx, ops[0].want); err != nil {
		return fmt.Errorf("uring: batch of %d not admitted: %w", len(ops), err)
	}
	ops[0].admitted = true
	return nil
}

// close closes the rings, once; nothing may be in flight. Every call waits.
func (e *engine) close() error {
	var err error
	e.closing.Do(func() {
		e.callers.close()
		if e.shared != nil {
			err = e.shared.close()
		}
		e.closeSource()
	})
	return err
}

// detail describes the mode of the engine, for Info.
func (e *engine) detail() string {
	s := fmt.Sprintf("wait=%v", e.opts.Wait)
	switch {
	case len(e.env.regions) == 0:
		return s
	case e.source != nil:
		return s + ", buffers registered"
	case e.ownDone.Load() > 0:
		return s + fmt.Sprintf(", buffers registered with at most %d of %d rings (this kernel cannot clone a registration, 6.12 can)", ownMax, e.opts.Rings)
	}
	return s + ", buffers not registered (raise ulimit -l)"
}
