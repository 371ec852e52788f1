package posixio

import (
	"context"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/io/blockio"
)

// Options are the options of a Device. The zero value works.
type Options struct {
	// Workers is the maximum number of concurrent system calls; default 16. More workers do not
	// make an NVMe drive faster, because Budget limits the bytes in flight.
	Workers int
	// Buffered makes the device use the page cache instead of O_DIRECT, for comparisons and for
	// tests. That is slower, and the kernel's memory grows with the data read.
	Buffered bool
	// ReadOnly opens the volume for inspection. Open then writes nothing to test O_DIRECT, so the
	// volume may be on a file system that is mounted read-only. Create, Remove, Lock and writes are
	// refused with blockio.ErrRequest. Reads use the page cache.
	ReadOnly bool
	// Budget limits the bytes in flight.
	Budget blockio.BudgetOptions
	// Hook changes the results of system calls, for tests.
	Hook blockio.ResultHook
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	if o.Workers == 0 {
		o.Workers = 16
	}
	o.Budget.EnsureDefaults()
}

// Validate reports the first invalid field.
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
	// turns has an element for each system call in progress. Its capacity is Workers.
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
	dir, err := opts.openDir(path)
	if err != nil {
		return nil, err
	}
	return &Device{Dir: dir, opts: opts, budget: budget, turns: make(chan struct{}, opts.Workers)}, nil
}

func (o *Options) openDir(path string) (*Dir, error) {
	if o.ReadOnly {
		return openReadOnly(path)
	}
	return OpenDir(path, o.Buffered)
}

// Do implements blockio.Device. Adjacent requests become one system call. The caller's goroutine
// makes the last system call of the batch, which often is the only one. Other goroutines make the
// other calls.
func (d *Device) Do(ctx context.Context, batch []blockio.Request) error {
	if err := d.Admit(batch); err != nil {
		return err
	}
	spans := newSpans(batch, d.budget.LimitBytes())
	first := spans.next()
	err := d.firstBytes(ctx, first)
	if err == nil && len(first) > 0 {
		d.run(first, spans)
	}
	d.Done(batch, err == nil)
	return err
}

// firstBytes waits for the budget of the first span. When it has returned nil, the whole batch is
// admitted, and ctx has no more effect.
func (d *Device) firstBytes(ctx context.Context, first span) error {
	err := ctx.Err()
	if err == nil && len(first) > 0 {
		err = d.budget.Acquire(ctx, first.bytes())
	}
	if err != nil {
		return fmt.Errorf("posixio: batch not admitted: %w", err)
	}
	return nil
}

// run performs the span s, whose bytes are already taken from the budget, and the spans of rest.
// The bytes of each span are taken separately, so that a batch larger than the budget is never in
// flight as a whole.
func (d *Device) run(s span, rest *spans) {
	var wg sync.WaitGroup
	for {
		d.turns <- struct{}{}
		next := rest.next()
		if len(next) == 0 {
			d.perform(s)
			break
		}
		present := s
		wg.Go(func() { d.perform(present) })
		// This cannot fail, because the context never ends.
		_ = d.budget.Acquire(context.Background(), next.bytes())
		s = next
	}
	wg.Wait()
}

// perform transfers one span, and then releases its place among the Workers and its bytes of the
// budget. If a system call for several requests fails, each request is tried alone, so that only
// the faulty requests fail.
func (d *Device) perform(s span) {
	if len(s) == 1 || d.transfer(s[0].Op, s[0].File, s[0].Offset, s.bufs()) != nil {
		for i := range s {
			s[i].Err = d.transfer(s[i].Op, s[i].File, s[i].Offset, s[i].Bufs)
		}
	} else {
		for i := range s {
			s[i].Err = nil
		}
	}
	<-d.turns
	d.budget.Release(s.bytes())
}

// transfer moves the bytes of one call.
func (d *Device) transfer(op blockio.Op, file blockio.File, offset int64, bufs [][]byte) error {
	f := file.(*File)
	t := transfer{op: op, fd: f.FD(), file: f.Name(), hook: d.opts.Hook, resumed: d.counters.Resumed}
	moved, err := t.run(bufs, offset)
	if err != nil {
		if op == blockio.Read {
			for _, b := range bufs {
				invariants.Mangle(b) // a failed read leaves the buffer undefined
			}
		}
		return fmt.Errorf("posixio: %v %d bytes at %d of %s on %s, after %d: %w", op, totalLen(bufs), offset, f.Name(), d.path, moved, sentinel(err))
	}
	return nil
}

// Info implements blockio.Device.
func (d *Device) Info() blockio.Info {
	return blockio.Info{
		Backend: "posix", Path: d.path, Direct: d.direct, Volatile: d.Volatile(),
		Detail: fmt.Sprintf("%s; preadv and pwritev, at most %d at a time", d.detail, d.opts.Workers),
	}
}

// Stats implements blockio.Device.
func (d *Device) Stats() blockio.Stats {
	s := d.counters.Stats()
	s.InFlightBytes, s.InFlightLimitBytes = d.budget.InFlightBytes(), d.budget.LimitBytes()
	return s
}
