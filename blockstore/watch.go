package blockstore

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/io/blockio"
)

// watchEvery is how often outstanding requests are looked at. It bounds how late
// a hung volume is noticed, and needs no I/O.
const watchEvery = 250 * time.Millisecond

// watchedDevice is the device of a volume. It reports each request, also one that
// has not completed, to the volume's health machine.
type watchedDevice struct {
	blockio.Device // Lock, Info, Stats, Close: unchanged
	log            *slog.Logger
	// onChange is called with each new status, under mu.
	onChange func(health.Status)

	status atomic.Pointer[health.Status]

	mu      sync.Mutex
	machine *health.Machine
	// first and last are the outstanding requests in the order of their start;
	// spare are list elements for reuse, so that a request allocates nothing.
	first, last, spare *outstanding
}

// outstanding is a request that has not completed.
type outstanding struct {
	started    time.Time
	prev, next *outstanding
}

func watchDevice(dev blockio.Device, o health.Options, log *slog.Logger, onChange func(health.Status)) *watchedDevice {
	w := &watchedDevice{Device: dev, log: log, onChange: onChange, machine: health.New(o)}
	w.status.Store(new(w.machine.Status()))
	return w
}

// health returns the state of the volume.
func (w *watchedDevice) health() health.Status { return *w.status.Load() }

// begin notes a request.
func (w *watchedDevice) begin() *outstanding {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.spare
	if o == nil {
		o = new(outstanding)
	} else {
		w.spare = o.next
	}
	*o = outstanding{started: time.Now(), prev: w.last}
	if w.last == nil {
		w.first = o
	} else {
		w.last.next = o
	}
	w.last = o
	return o
}

// end notes that a request has completed. report is called with the time that it
// took, under mu.
func (w *watchedDevice) end(o *outstanding, report func(m *health.Machine, now time.Time, took time.Duration) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if o.prev == nil {
		w.first = o.next
	} else {
		o.prev.next = o.next
	}
	if o.next == nil {
		w.last = o.prev
	} else {
		o.next.prev = o.prev
	}
	now := time.Now()
	if report(w.machine, now, now.Sub(o.started)) {
		w.publishLocked()
	}
	*o = outstanding{next: w.spare}
	w.spare = o
}

// publishLocked makes a changed status known.
func (w *watchedDevice) publishLocked() {
	was, is := w.health(), w.machine.Status()
	w.status.Store(&is)
	switch {
	case was.State == is.State:
	case is.State == health.OK:
		w.log.Info("volume is ok again", "was", was.State)
	default:
		w.log.Warn("volume changed its state", "state", is.State, "was", was.State, "cause", is.Cause)
	}
	if w.onChange != nil {
		w.onChange(is)
	}
}

// tick lets the machine see the time. others is the mean latency of the other
// volumes.
func (w *watchedDevice) tick(now time.Time, others time.Duration) (probeDue bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var oldest time.Time
	for o := w.first; o != nil; o = o.next {
		if o.started.After(w.machine.Horizon()) {
			oldest = o.started
			break
		}
	}
	if w.machine.Tick(now, oldest, others) {
		w.publishLocked()
	}
	return w.machine.ProbeDue(now)
}

// probed reports the outcome of a probe that tick said was due.
func (w *watchedDevice) probed(started time.Time, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	if w.machine.Probed(now, now.Sub(started), err) {
		w.publishLocked()
	}
}

// order sets what the operator wants of the volume: health.OK, health.Draining or
// health.Removed.
func (w *watchedDevice) order(duty health.State) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.machine.Order(time.Now(), duty) {
		w.publishLocked()
	}
}

func (w *watchedDevice) mean() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.machine.Mean()
}

// volumesFault returns err if the volume is to blame for it, and nil if it says
// something about the caller, the process or free space.
func volumesFault(err error) error {
	if err == nil {
		return nil
	}
	for _, other := range []error{
		context.Canceled, context.DeadlineExceeded, blockio.ErrClosed, blockio.ErrAlign, blockio.ErrRange, blockio.ErrRequest,
		blockio.ErrNoSpace, blockio.ErrNotExist, blockio.ErrExist, blockio.ErrOpen, blockio.ErrUnsupported,
		syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM,
	} {
		if errors.Is(err, other) {
			return nil
		}
	}
	return err
}

// one reports a call that is one request.
func (w *watchedDevice) one(op health.Op, call func() error) error {
	o := w.begin()
	err := call()
	w.end(o, func(m *health.Machine, now time.Time, took time.Duration) bool {
		fault := volumesFault(err)
		if err != nil && fault == nil {
			return false
		}
		return m.Done(now, op, took, fault)
	})
	return err
}

// Create implements blockio.Device.
func (w *watchedDevice) Create(name string, sizeBytes int64) (f blockio.File, err error) {
	err = w.one(health.Write, func() error {
		f, err = w.Device.Create(name, sizeBytes)
		return err
	})
	return f, err
}

// Open implements blockio.Device.
func (w *watchedDevice) Open(name string) (f blockio.File, err error) {
	err = w.one(health.Read, func() error {
		f, err = w.Device.Open(name)
		return err
	})
	return f, err
}

// Remove implements blockio.Device.
func (w *watchedDevice) Remove(name string) error {
	return w.one(health.Write, func() error { return w.Device.Remove(name) })
}

// List implements blockio.Device.
func (w *watchedDevice) List() (names []string, err error) {
	err = w.one(health.Read, func() error {
		names, err = w.Device.List()
		return err
	})
	return names, err
}

// Stat implements blockio.Device.
func (w *watchedDevice) Stat() (st blockio.SpaceStat, err error) {
	err = w.one(health.Read, func() error {
		st, err = w.Device.Stat()
		return err
	})
	return st, err
}

// Sync implements blockio.Device.
func (w *watchedDevice) Sync(ctx context.Context, files ...blockio.File) error {
	return w.one(health.Sync, func() error { return w.Device.Sync(ctx, files...) })
}

// Do implements blockio.Device. A batch counts as one request of each direction:
// the errors of one batch often have one cause.
func (w *watchedDevice) Do(ctx context.Context, batch []blockio.Request) error {
	o := w.begin()
	err := w.Device.Do(ctx, batch)
	w.end(o, func(m *health.Machine, now time.Time, took time.Duration) bool {
		if err != nil {
			return reportFault(m, now, took, batch, err)
		}
		return reportBatch(m, now, took, batch)
	})
	return err
}

// reportFault reports a batch that was not admitted.
func reportFault(m *health.Machine, now time.Time, took time.Duration, batch []blockio.Request, err error) bool {
	if err = volumesFault(err); err == nil || len(batch) == 0 {
		return false
	}
	return m.Done(now, opOf(batch[0].Op), took, err)
}

// reportBatch reports the outcomes of a batch: for each direction a success, if
// there was one, and then an error, if there was one.
func reportBatch(m *health.Machine, now time.Time, took time.Duration, batch []blockio.Request) (changed bool) {
	var succeeded [2]bool
	var fault [2]error
	for i := range batch {
		op := opOf(batch[i].Op)
		switch err := batch[i].Err; {
		case err == nil:
			succeeded[op] = true
		case fault[op] == nil:
			fault[op] = volumesFault(err)
		}
	}
	for _, op := range []health.Op{health.Read, health.Write} {
		if succeeded[op] {
			changed = m.Done(now, op, took, nil) || changed
		}
		if fault[op] != nil {
			changed = m.Done(now, op, took, fault[op]) || changed
		}
	}
	return changed
}

func opOf(op blockio.Op) health.Op {
	if op == blockio.Write {
		return health.Write
	}
	return health.Read
}

// watch looks at the outstanding requests of all volumes until ctx ends. It does
// no I/O, so that a hung volume cannot stop it.
func (s *Store) watch(ctx context.Context) {
	ticker := time.NewTicker(watchEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticker.C:
			s.look(now)
		}
	}
}

// look lets each volume's machine see the time.
func (s *Store) look(now time.Time) {
	means := make([]time.Duration, len(s.volumes))
	for i, v := range s.volumes {
		means[i] = v.dev.mean()
	}
	for i, v := range s.volumes {
		v.dev.tick(now, othersMean(means, i))
	}
}

// othersMean is the median of the mean latencies of the other volumes, of those
// that are known; 0 if none is.
func othersMean(means []time.Duration, except int) time.Duration {
	var known []time.Duration
	for i, m := range means {
		if i != except && m > 0 {
			known = append(known, m)
		}
	}
	if len(known) == 0 {
		return 0
	}
	slices.SortFunc(known, cmp.Compare)
	return known[len(known)/2]
}
