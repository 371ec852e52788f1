package blockstore

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/io/blockio"
)

// syncer shares the syncs of one volume among concurrent callers. A caller waits for the run that
// starts next, because the run in progress may have begun before the caller's write was done:
//
//	time ──►   write A    write B      write C
//	              │          │ join run 2  │ join run 2
//	run 1  ───────┴──────────────────┐     │
//	run 2                            └─────┴────────► both durable
//
// After a failed run, the next run fails too: a later sync may succeed although the system dropped
// data that the failed sync could not write. For the same reason syncer keeps the error of a failed
// run that covered committed slots until a call of syncAll has returned it, even if the volume
// recovers earlier.
type syncer struct {
	dev *watchedDevice
	// spawn runs f on a goroutine that Close waits for.
	spawn func(f func())
	// failed is called when a sync of the device has failed, before the callers that wait for it
	// return.
	failed func()

	mu sync.Mutex
	// dirty has the files with completed writes that no sync has made durable. It does not have the
	// files of the sync in progress. The value is true if a slot of the file was committed since
	// the file became dirty: a reader may then rely on data that is not durable.
	dirty         map[blockio.File]bool
	running, next *syncRun
	// lost is the error of a failed sync of files with committed slots. When syncAll returns lost,
	// it sets lost to nil.
	lost error
}

// syncRun is one sync of the device. done is closed when err is set.
type syncRun struct {
	done chan struct{}
	err  error
	// files is nil until the run starts; the values are as in syncer.dirty.
	files map[blockio.File]bool
}

// wrote records a completed write.
func (y *syncer) wrote(files ...blockio.File) {
	y.mu.Lock()
	defer y.mu.Unlock()
	for _, f := range files {
		y.markLocked(f, false)
	}
}

func (y *syncer) markLocked(f blockio.File, committed bool) {
	if y.dirty == nil {
		y.dirty = make(map[blockio.File]bool)
	}
	y.dirty[f] = y.dirty[f] || committed
}

// committed records that a slot of the file became live. If the file is neither dirty nor being
// synced, its writes are durable and there is nothing to record.
func (y *syncer) committed(f blockio.File) {
	y.mu.Lock()
	defer y.mu.Unlock()
	if _, ok := y.dirty[f]; ok {
		y.dirty[f] = true
	}
	if y.running == nil {
		return
	}
	if _, ok := y.running.files[f]; ok {
		y.running.files[f] = true
	}
}

// forget removes a file that is about to be closed and removed, and waits for the sync of the file
// if one is in progress.
func (y *syncer) forget(f blockio.File) {
	y.mu.Lock()
	run := y.running
	y.mu.Unlock()
	if run != nil {
		<-run.done
	}
	y.mu.Lock()
	defer y.mu.Unlock()
	delete(y.dirty, f)
}

// join returns a run after which all completed writes are durable, or nil if all of them are
// durable.
func (y *syncer) join() (*syncRun, error) {
	if !y.dev.health().Syncs() {
		return nil, y.dev.failure(health.Sync)
	}
	y.mu.Lock()
	defer y.mu.Unlock()
	if y.next != nil {
		return y.next, nil
	}
	if len(y.dirty) == 0 {
		return y.running, nil // the run may include the caller's write
	}
	y.next = &syncRun{done: make(chan struct{})}
	run := y.next
	if y.running == nil {
		y.startLocked()
	}
	return run, nil
}

// startLocked starts the next run.
func (y *syncer) startLocked() {
	run := y.next
	y.running, y.next = run, nil
	run.files = y.dirty
	y.dirty = nil
	files := slices.Collect(maps.Keys(run.files))
	y.spawn(func() { y.perform(run, files) })
}

func (y *syncer) perform(run *syncRun, files []blockio.File) {
	// The device returns early if the volume fails meanwhile.
	run.err = y.dev.Sync(context.Background(), files...)
	if run.err != nil {
		y.wrote(files...)
		y.failed() // after this, Commit refuses the slots that this run should have made durable
	}
	y.mu.Lock()
	defer y.mu.Unlock()
	y.running = nil
	if run.err != nil {
		for _, committed := range run.files {
			if committed {
				y.lost = run.err
			}
		}
	}
	close(run.done)
	switch {
	case y.next == nil:
	case run.err != nil:
		y.next.err = run.err
		close(y.next.done)
		y.next = nil
	default:
		y.startLocked()
	}
}

// sync joins a run and waits until it has completed or ctx ends.
func (y *syncer) sync(ctx context.Context) error {
	run, err := y.join()
	if run == nil || err != nil {
		return err
	}
	select {
	case <-run.done:
		return run.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// syncAll syncs for a caller that relies on every committed slot. It does not sync a failed volume.
// For a failed volume it returns an error only if committed slots of the volume may not be durable
// and no earlier syncAll has returned an error for them.
func (y *syncer) syncAll(ctx context.Context) error {
	if y.dev.health().Syncs() {
		if err := y.sync(ctx); err != nil {
			if ctx.Err() == nil {
				y.takeLost()
			}
			return err
		}
	}
	return y.takeLost()
}

// takeLost returns the reason why committed slots may not be durable. It returns nil if there are
// no such slots, or if an earlier call has returned the reason.
func (y *syncer) takeLost() error {
	st := y.dev.health()
	y.mu.Lock()
	defer y.mu.Unlock()
	err := y.lost
	y.lost = nil
	if st.Syncs() {
		return err
	}
	for f, committed := range y.dirty {
		if committed && st.State != health.Removed {
			err = cmp.Or(err, y.dev.failure(health.Sync))
		}
		y.dirty[f] = false
	}
	return err
}
