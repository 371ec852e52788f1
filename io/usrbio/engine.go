//go:build cgo && linux

package usrbio

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/io/blockio"
)

// engine runs batches of requests on two rings, one for reads and one for writes.
type engine struct {
	opts   Options
	lib    *library
	mount  string
	buffer *sharedBuffer
	// read and write are the rings.
	read, write *ring
	budget      *blockio.Budget
	count       *blockio.Counters
	waiters     sync.WaitGroup
}

// newEngine loads the library and makes the rings and the shared memory, for a directory on a mount
// of 3FS.
func newEngine(dir string, o Options, count *blockio.Counters) (_ *engine, err error) {
	e := &engine{opts: o, count: count}
	if e.budget, err = blockio.NewBudget(o.Budget); err != nil {
		return nil, err
	}
	if e.lib, err = load(o.Library); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			e.release()
		}
	}()
	var ok bool
	if e.mount, ok = e.lib.mountPoint(dir); !ok {
		return nil, fmt.Errorf("usrbio: the directory is not on a mount of 3FS (type %s, with a directory 3fs-virt): %w", fsType, blockio.ErrUnsupported)
	}
	rings := [...]**ring{&e.read, &e.write}
	slots := 0
	for _, to := range rings {
		native, err := e.lib.newRing(e.mount, o.Slots, to == &e.read)
		if err != nil {
			return nil, err
		}
		*to = newRing(native, native.entries(), o.Slots)
		slots += len((*to).slots)
	}
	if e.buffer, err = e.lib.newBuffer(e.mount, slots*o.SlotBytes); err != nil {
		return nil, err
	}
	mem := e.buffer.mem
	if !blockio.Aligned(mem) {
		return nil, fmt.Errorf("usrbio: the library's shared memory is not aligned to %d: %w", blockio.Align, blockio.ErrUnsupported)
	}
	// A file below /dev/shm may be larger than the memory that is free there. Its first use would
	// then be a SIGBUS.
	if err := sys.Populate(mem); err != nil {
		return nil, fmt.Errorf("usrbio: %d bytes below /dev/shm, which may be too small: %w", len(mem), err)
	}
	if err := sys.DontDump(mem); err != nil { // the memory contains users' data
		return nil, err
	}
	at := 0
	for _, to := range rings {
		at = (*to).start(e.buffer, at, o.SlotBytes)
		e.waiters.Go((*to).wait)
	}
	return e, nil
}

// detail describes the engine, for Info.
func (e *engine) detail() string {
	return fmt.Sprintf("3FS at %s; rings of %d reads and %d writes, %d bytes each through shared memory", e.mount, len(e.read.slots), len(e.write.slots), e.opts.SlotBytes)
}

// close ends the rings. No batch may be in progress.
func (e *engine) close() {
	for _, r := range [...]*ring{e.read, e.write} {
		close(r.stop)
	}
	e.waiters.Wait()
	e.release()
}

// release returns the memory and the rings to the library, in the reverse order of their creation.
// After a failure of a ring, the daemon may still use the memory of the requests that were in
// flight. Memory and rings then stay until the process ends.
func (e *engine) release() {
	for _, r := range [...]*ring{e.read, e.write} {
		if r != nil && r.lost.Load() {
			return
		}
	}
	if e.buffer != nil {
		e.buffer.close()
	}
	for _, r := range [...]*ring{e.write, e.read} {
		if r != nil {
			r.native.close()
		}
	}
	e.lib.close()
}

// do performs the batch, which the volume has admitted, and returns when each request has its
// outcome. An error means that nothing was submitted.
func (e *engine) do(ctx context.Context, batch []blockio.Request) error {
	err := ctx.Err()
	if err == nil && len(batch) == 0 {
		return nil
	}
	c := newCall(e, batch)
	if err == nil {
		err = e.budget.Acquire(ctx, c.nextBytes())
	}
	if err != nil {
		return fmt.Errorf("usrbio: batch of %d not admitted: %w", len(batch), err)
	}
	c.admitted = true
	c.run()
	return nil
}

// errRing is in the errors of requests on a ring that has failed.
var errRing = errors.New("3FS's ring has failed; restart this process, and look at the log of 3FS's FUSE daemon")
