package blockstore

import (
	"context"
	"sync"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/io/blockio"
)

// syncer shares the syncs of one volume among concurrent callers. A caller
// joins the run that starts next, since the one that is going on may have begun
// before the caller's write was done:
//
//	time ──►   write A    write B      write C
//	              │          │ join run 2  │ join run 2
//	run 1  ───────┴──────────────────┐     │
//	run 2                            └─────┴────────► both durable
//
// A run that fails takes the one that waits behind it with it: a later sync may
// succeed although the system dropped what the failed one could not write.
type syncer struct {
	dev *watchedDevice
	// spawn runs f on a goroutine that Close waits for.
	spawn func(f func())
	// failed is told of a failed run, before its callers are.
	failed func()

	mu sync.Mutex
	// dirty are the files with completed writes that no run has made durable, but
	// for the files of the running one.
	dirty         map[blockio.File]struct{}
	running, next *syncRun
}

// syncRun is one sync of the device; done is closed when err is set.
type syncRun struct {
	done chan struct{}
	err  error
}

// wrote notes a completed write.
func (y *syncer) wrote(files ...blockio.File) {
	y.mu.Lock()
	defer y.mu.Unlock()
	if y.dirty == nil {
		y.dirty = make(map[blockio.File]struct{})
	}
	for _, f := range files {
		y.dirty[f] = struct{}{}
	}
}

// forget drops a file that is about to be closed and removed, and waits for a
// sync of it that may be going on.
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

// join returns a run after which everything written so far is durable, or nil
// if it is already.
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
		return y.running, nil // which may have picked up the caller's write
	}
	y.next = &syncRun{done: make(chan struct{})}
	run := y.next
	if y.running == nil {
		y.startLocked()
	}
	return run, nil
}

// startLocked makes the next run the running one.
func (y *syncer) startLocked() {
	run := y.next
	y.running, y.next = run, nil
	files := make([]blockio.File, 0, len(y.dirty))
	for f := range y.dirty {
		files = append(files, f)
	}
	clear(y.dirty)
	y.spawn(func() { y.perform(run, files) })
}

func (y *syncer) perform(run *syncRun, files []blockio.File) {
	// The device returns early if the volume fails meanwhile.
	run.err = y.dev.Sync(context.Background(), files...)
	if run.err != nil {
		y.wrote(files...)
		y.failed()
	}
	y.mu.Lock()
	defer y.mu.Unlock()
	y.running = nil
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

// sync waits for a run.
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
