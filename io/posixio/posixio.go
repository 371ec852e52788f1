package posixio

import (
	"context"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/io/blockio"
)

// Options of a Device. The zero value works.
type Options struct {
	// Workers bounds the system calls at one time; default 16. More do not help
	// an NVMe drive beyond what the budget allows in flight.
	Workers int
	// Buffered uses the page cache instead of O_DIRECT: for comparisons and for
	// tests; slower, and the kernel's memory then grows with what is read.
	Buffered bool
	// Budget bounds the bytes in flight.
	Budget blockio.BudgetOptions
	// Hook bends the outcomes of system calls, for tests.
	Hook blockio.ResultHook
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	if o.Workers == 0 {
		o.Workers = 16
	}
	o.Budget.EnsureDefaults()
}

// Validate says which field cannot be used.
func (o *Options) Validate() error {
	if o.Workers < 1 || o.Workers > 4096 {
		return fmt.Errorf("posixio: %d workers; want 1 to 4096", o.Workers)
	}
	return o.Budget.Validate()
}

// Device is an open volume.
type Device struct {
	*Dir
	opts   Options
	budget *blockio.Budget
	// turns bounds the system calls at one time: one element each.
	turns chan struct{}
}

var _ blockio.Device = (*Device)(nil)

// Open opens an existing directory as a volume.
func Open(path string, opts Options) (*Device, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	budget, err := blockio.NewBudget(opts.Budget)
	if err != nil {
		return nil, err
	}
	dir, err := OpenDir(path, opts.Buffered)
	if err != nil {
		return nil, err
	}
	return &Device{Dir: dir, opts: opts, budget: budget, turns: make(chan struct{}, opts.Workers)}, nil
}

// Do implements blockio.Device. The last request, which often is the only one,
// runs in the caller's goroutine; the others run beside it.
func (d *Device) Do(ctx context.Context, batch []blockio.Request) error {
	if err := d.Admit(batch); err != nil {
		return err
	}
	err := d.firstBytes(ctx, batch)
	if err == nil && len(batch) > 0 {
		d.run(batch)
	}
	d.Done(batch, err == nil)
	return err
}

// firstBytes waits for the bytes of the first request: with them the whole batch
// is admitted, and ctx has had its say.
func (d *Device) firstBytes(ctx context.Context, batch []blockio.Request) error {
	err := ctx.Err()
	if err == nil && len(batch) > 0 {
		err = d.budget.Acquire(ctx, batch[0].Len())
	}
	if err != nil {
		return fmt.Errorf("posixio: batch of %d not admitted: %w", len(batch), err)
	}
	return nil
}

// run performs the batch; the bytes of its first request are taken already. The
// budget bounds each request on its own, so that a batch larger than the budget
// does not put all of itself in flight.
func (d *Device) run(batch []blockio.Request) {
	var wg sync.WaitGroup
	last := len(batch) - 1
	for i := range batch {
		r := &batch[i]
		if i > 0 {
			// Cannot fail: this context never ends.
			_ = d.budget.Acquire(context.Background(), r.Len())
		}
		d.turns <- struct{}{}
		if i == last {
			d.perform(r)
		} else {
			wg.Go(func() { d.perform(r) })
		}
	}
	wg.Wait()
}

// perform moves one request's bytes and gives back its turn and its bytes.
func (d *Device) perform(r *blockio.Request) {
	f := r.File.(*File)
	t := transfer{op: r.Op, fd: f.FD(), file: f.Name(), hook: d.opts.Hook, resumed: d.counters.Resumed}
	moved, err := t.run(r.Bufs, r.Offset)
	<-d.turns
	d.budget.Release(r.Len())
	r.Err = nil
	if err != nil {
		r.Err = fmt.Errorf("posixio: %v %d bytes at %d of %s on %s, after %d: %w", r.Op, r.Len(), r.Offset, f.Name(), d.path, moved, sentinel(err))
	}
}

// Info implements blockio.Device.
func (d *Device) Info() blockio.Info {
	return blockio.Info{
		Backend: "posix", Path: d.path, Direct: d.direct,
		Detail: fmt.Sprintf("%s; preadv and pwritev, at most %d at a time", d.detail, d.opts.Workers),
	}
}

// Stats implements blockio.Device.
func (d *Device) Stats() blockio.Stats {
	s := d.counters.Stats()
	s.InFlightBytes, s.InFlightLimitBytes = d.budget.InFlightBytes(), d.budget.LimitBytes()
	return s
}
