package blockstore

import (
	"context"
	"fmt"
	"sync"

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
type syncer struct {
	dev blockio.Device
	// spawn runs f on a goroutine that Close waits for.
	spawn func(f func())
	// report is told of a failure; it calls fail.
	report func(err error)

	mu sync.Mutex
	// dirty are the files with completed writes that no run has picked up.
	dirty         map[blockio.File]struct{}
	running, next *syncRun
	// failed is the first failure. Invariant: once set, no write to the volume
	// is accepted and no sync of it succeeds.
	failed error
}

// syncRun is one sync of the device; done is closed when err is set.
type syncRun struct {
	done chan struct{}
	err  error
}

// wrote notes a completed write.
func (y *syncer) wrote(f blockio.File) {
	y.mu.Lock()
	defer y.mu.Unlock()
	if y.dirty == nil {
		y.dirty = make(map[blockio.File]struct{})
	}
	y.dirty[f] = struct{}{}
}

// forget drops a file that is about to be closed and removed, and waits for a
// sync of it that may be going on.
func (y *syncer) forget(f blockio.File) {
	y.mu.Lock()
	delete(y.dirty, f)
	run := y.running
	y.mu.Unlock()
	if run != nil {
		<-run.done
	}
}

// failure returns why the volume takes no more writes, or nil.
func (y *syncer) failure() error {
	y.mu.Lock()
	defer y.mu.Unlock()
	return y.failed
}

// fail notes the first failure and reports whether this was it.
func (y *syncer) fail(err error) bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	first := y.failed == nil
	if first {
		y.failed = err
	}
	return first
}

// join returns a run after which everything written so far is durable, or nil
// if it is already.
func (y *syncer) join() (*syncRun, error) {
	y.mu.Lock()
	defer y.mu.Unlock()
	if y.failed != nil {
		return nil, fmt.Errorf("%w: an earlier sync failed: %w", ErrFloor, y.failed)
	}
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
	// After a failure a sync may succeed although pages were dropped: the run
	// that waited behind the failed one fails with it.
	if run.err = y.failure(); run.err == nil {
		if run.err = y.dev.Sync(context.Background(), files...); run.err != nil {
			y.report(run.err)
		}
	}
	y.mu.Lock()
	y.running = nil
	if y.next != nil {
		y.startLocked()
	}
	y.mu.Unlock()
	close(run.done)
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
