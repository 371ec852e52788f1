package blockstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/io/blockio"
)

// watchEvery is the interval at which the ages of outstanding requests are examined. A hung volume
// is detected at most watchEvery late.
const watchEvery = 250 * time.Millisecond

// watchedDevice is the device of a volume. It reports each request to the volume's health machine,
// including requests that have not completed.
type watchedDevice struct {
	blockio.Device // Lock, Info, Stats and Close are those of the embedded Device
	log            *slog.Logger
	// spawn runs f on a goroutine that Close waits for.
	spawn func(f func())

	// held, if not nil, returns an error if this process may not own the volume any more. It is
	// called before each change of the volume.
	held func() error

	status atomic.Pointer[health.Status]

	mu sync.Mutex
	// onChange, if not nil, is called under mu after each change of the state.
	onChange func(was health.State, is health.Status)
	// down is closed while the volume is failed or removed.
	down    chan struct{}
	machine *health.Machine
	// first and last are the ends of the list of outstanding requests, in the order of their start.
	// spare is a list of elements for reuse, so that a request allocates nothing.
	first, last, spare *outstanding
}

// outstanding is a request that has not completed.
type outstanding struct {
	started    time.Time
	reads      bool
	prev, next *outstanding
}

func watchDevice(dev blockio.Device, o health.Options, log *slog.Logger, spawn func(func())) *watchedDevice {
	w := &watchedDevice{Device: dev, log: log, spawn: spawn, machine: health.New(o), down: make(chan struct{})}
	w.status.Store(new(w.machine.Status()))
	return w
}

// health returns the state of the volume.
func (w *watchedDevice) health() health.Status { return *w.status.Load() }

// whenDown returns a channel that is closed when the volume fails or is removed.
func (w *watchedDevice) whenDown() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.down
}

// begin records the start of a request. reads is set if it contains a read.
func (w *watchedDevice) begin(reads bool) *outstanding {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.spare
	if o == nil {
		o = new(outstanding)
	} else {
		w.spare = o.next
	}
	*o = outstanding{started: time.Now(), reads: reads, prev: w.last}
	if w.last == nil {
		w.first = o
	} else {
		w.last.next = o
	}
	w.last = o
	return o
}

// end removes a completed request from the outstanding requests. It calls report, under mu, with
// the duration of the request.
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
	took := now.Sub(o.started)
	if !o.started.After(w.machine.Horizon()) {
		took = 0 // the request was started before the volume recovered
	}
	if report(w.machine, now, took) {
		w.publishLocked()
	}
	*o = outstanding{next: w.spare}
	w.spare = o
}

// publishLocked publishes a changed status.
func (w *watchedDevice) publishLocked() {
	was, is := w.health(), w.machine.Status()
	w.status.Store(&is)
	switch {
	case was.Syncs() && !is.Syncs():
		close(w.down)
	case !was.Syncs() && is.Syncs():
		w.down = make(chan struct{})
	}
	switch {
	case was.State == is.State:
	case is.State == health.OK:
		w.log.Info("volume is ok again", "was", was.State)
	default:
		w.log.Warn("volume changed its state", "state", is.State, "was", was.State, "cause", is.Cause)
	}
	if was.State != is.State && w.onChange != nil {
		w.onChange(was.State, is)
	}
}

// VolumeChange is a change of the state of a volume.
type VolumeChange struct {
	Volume uint32
	Path   string
	// Was is the state before the change, Is the status after it. Is.Cause is nil if the
	// volume is OK, or if the operator ordered the state.
	Was health.State
	Is  health.Status
}

// OnVolumeChange registers f, which the store calls after each change of the state of a volume. The
// calls for one volume are in the order of its changes. Before OnVolumeChange returns, it calls f
// once for each volume that is not OK. f must not block and must not call the store. A second call
// of OnVolumeChange replaces f.
func (s *Store) OnVolumeChange(f func(VolumeChange)) {
	for _, v := range s.volumes {
		v.dev.onStateChange(func(was health.State, is health.Status) {
			f(VolumeChange{Volume: v.index, Path: v.dev.Device.Info().Path, Was: was, Is: is})
		})
	}
}

// onStateChange sets onChange, and calls it if the state is not OK.
func (w *watchedDevice) onStateChange(f func(was health.State, is health.Status)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.onChange = f
	if is := w.machine.Status(); is.State != health.OK {
		f(health.OK, is)
	}
}

// tick informs the machine of the time and of the other volumes.
func (w *watchedDevice) tick(now time.Time, others health.Others) (probeDue bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var oldest health.Outstanding
	for o := w.first; o != nil && oldest.Read.IsZero(); o = o.next {
		if !o.started.After(w.machine.Horizon()) {
			continue
		}
		if oldest.Any.IsZero() {
			oldest.Any = o.started
		}
		if o.reads {
			oldest.Read = o.started
		}
	}
	if w.machine.Tick(now, oldest, others) {
		w.publishLocked()
	}
	return w.machine.ProbeDue(now)
}

// probed reports the outcome of a probe that tick requested.
func (w *watchedDevice) probed(started time.Time, late bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	if w.machine.Probed(now, health.Probe{Took: now.Sub(started), Late: late, Err: err}) {
		w.publishLocked()
	}
}

// lost reports to the health machine that this volume did not store a change that every volume must
// store, such as a newer catalogue.
func (w *watchedDevice) lost(cause error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.machine.Lost(time.Now(), cause) {
		w.publishLocked()
	}
}

// order sets the duty that the operator ordered: health.OK, health.Draining or health.Removed.
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

// volumesFault returns err if it is a fault of the volume, and nil if the caller, the process or a
// lack of free space is the cause.
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

// watched calls the device and reports the call to the health machine as one request. The call must
// not use buffers of the caller. If the volume fails during the call, watched returns early with
// ErrVolumeFailed. The call then continues in the background. If it succeeds after that, watched
// passes the result to undo, if undo is not nil. If the volume had failed before the call, watched
// waits for the call: only probes and readers call a failed volume.
func watched[T any](w *watchedDevice, op health.Op, call func() (T, error), undo func(T)) (T, error) {
	if op != health.Read {
		if err := w.checkHeld(); err != nil {
			var none T
			return none, err
		}
	}
	type outcome struct {
		value T
		err   error
	}
	perform := func() outcome {
		o := w.begin(op == health.Read)
		value, err := call()
		w.end(o, func(m *health.Machine, now time.Time, took time.Duration) bool {
			fault := volumesFault(err)
			return (err == nil || fault != nil) && m.Done(now, op, took, fault)
		})
		return outcome{value, err}
	}
	down := w.whenDown()
	if !w.health().Syncs() {
		out := perform()
		return out.value, out.err
	}
	done := make(chan outcome, 1)
	w.spawn(func() { done <- perform() })
	select {
	case out := <-done:
		return out.value, out.err
	case <-down:
	}
	select {
	case out := <-done: // the failure of this call made the volume fail
		return out.value, out.err
	default:
	}
	if undo != nil {
		w.spawn(func() {
			if out := <-done; out.err == nil {
				undo(out.value)
			}
		})
	}
	var none T
	return none, w.failure(op)
}

// failure returns the error of a request that was interrupted because the volume failed.
func (w *watchedDevice) failure(op health.Op) error {
	return fmt.Errorf("%v on volume %s: %w: %w", op, w.Device.Info().Path, ErrVolumeFailed, causeOf(w.health()))
}

// errOrdered is the cause of a state that the operator ordered.
var errOrdered = errors.New("by the operator")

// causeOf returns the cause of a volume's state.
func causeOf(s health.Status) error {
	if s.Cause == nil {
		return errOrdered
	}
	return s.Cause
}

type nothing struct{}

// Create implements blockio.Device. If the volume fails first and the file is created after that,
// the file is removed.
func (w *watchedDevice) Create(name string, sizeBytes int64) (blockio.File, error) {
	return watched(w, health.Write, func() (blockio.File, error) { return w.Device.Create(name, sizeBytes) }, func(f blockio.File) {
		if err := errors.Join(f.Close(), w.Device.Remove(name)); err != nil {
			w.log.Warn("could not remove a file that was created too late; the next start treats it as a blank segment", "file", name, "err", err)
		}
	})
}

// Open implements blockio.Device.
func (w *watchedDevice) Open(name string) (blockio.File, error) {
	return watched(w, health.Read, func() (blockio.File, error) { return w.Device.Open(name) }, func(f blockio.File) {
		if err := f.Close(); err != nil {
			w.log.Warn("could not close a file that was opened too late", "file", name, "err", err)
		}
	})
}

// Remove implements blockio.Device.
func (w *watchedDevice) Remove(name string) error {
	_, err := watched(w, health.Write, func() (nothing, error) { return nothing{}, w.Device.Remove(name) }, nil)
	return err
}

// List implements blockio.Device.
func (w *watchedDevice) List() ([]string, error) {
	return watched(w, health.Read, w.Device.List, nil)
}

// Stat implements blockio.Device.
func (w *watchedDevice) Stat() (blockio.SpaceStat, error) {
	return watched(w, health.Read, w.Device.Stat, nil)
}

// Sync implements blockio.Device.
func (w *watchedDevice) Sync(ctx context.Context, files ...blockio.File) error {
	_, err := watched(w, health.Sync, func() (nothing, error) { return nothing{}, w.Device.Sync(ctx, files...) }, nil)
	return err
}

// checkHeld returns an error, and makes the volume fail, if this process may not own the volume any
// more. When the ownership is back, a probe makes the volume ok again.
func (w *watchedDevice) checkHeld() error {
	if w.held == nil {
		return nil
	}
	err := w.held()
	if err == nil {
		return nil
	}
	err = fmt.Errorf("volume %s: %w: %w: %w", w.Device.Info().Path, ErrVolumeFailed, ErrNotOwner, err)
	w.lost(err)
	return err
}

// doDetached is Do for one request whose buffers are on the Go heap. It returns early when the
// volume fails; the garbage collector keeps the buffers until the request completes. pending, if
// not nil, counts the request until it has completed.
func (w *watchedDevice) doDetached(ctx context.Context, r blockio.Request, pending *atomic.Int32) error {
	if pending != nil {
		pending.Add(1)
	}
	_, err := watched(w, opOf(r.Op), func() (nothing, error) {
		if pending != nil {
			defer pending.Add(-1)
		}
		batch := []blockio.Request{r}
		if err := w.Device.Do(ctx, batch); err != nil {
			return nothing{}, err
		}
		return nothing{}, batch[0].Err
	}, nil)
	return err
}

// Do implements blockio.Device. In the volume's health a batch counts as at most one read and one
// write, because the errors of one batch often have one cause.
func (w *watchedDevice) Do(ctx context.Context, batch []blockio.Request) error {
	if slices.ContainsFunc(batch, func(r blockio.Request) bool { return r.Op == blockio.Write }) {
		if err := w.checkHeld(); err != nil {
			return err
		}
	}
	o := w.begin(slices.ContainsFunc(batch, func(r blockio.Request) bool { return r.Op == blockio.Read }))
	err := w.Device.Do(ctx, batch)
	w.end(o, func(m *health.Machine, now time.Time, took time.Duration) bool {
		if err != nil {
			return reportFault(m, now, took, batch, err)
		}
		return reportBatch(m, now, took, batch)
	})
	return err
}

// reportFault reports to the health machine that Do failed with err for the whole batch. It returns
// whether the volume's state changed.
func reportFault(m *health.Machine, now time.Time, took time.Duration, batch []blockio.Request, err error) bool {
	if err = volumesFault(err); err == nil || len(batch) == 0 {
		return false
	}
	return m.Done(now, opOf(batch[0].Op), took, err)
}

// reportBatch reports the outcomes of a batch to the health machine. For reads, and then for writes,
// it reports one success if any request succeeded, and one error if any request failed. It returns
// whether the volume's state changed.
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

// watch examines the outstanding requests of all volumes until ctx ends. It does no I/O, so a hung
// volume cannot stop it.
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

// look calls tick for the device of each volume, and starts the probes that are due.
func (s *Store) look(now time.Time) {
	means := make([]time.Duration, len(s.volumes))
	for i, v := range s.volumes {
		means[i] = v.dev.mean()
	}
	for i, v := range s.volumes {
		if v.dev.tick(now, health.Others{Mean: othersMean(means, i), Suffice: s.sufficeWithout(v)}) {
			s.background.Go(v.probe)
		}
	}
}

// othersMean returns the median of the known mean latencies of the other volumes; 0 if none is
// known.
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
