package storage

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/fair"
)

// A hold is an arena buffer with a reference count. The references are those of parts that are
// being sent to a reader, of the hot set, of loans, and of writes that the device has not
// completed. The last release frees the buffer.
type hold struct {
	buf  arena.Buffer
	refs atomic.Int32
	// lent counts the parts of this buffer that readers on this host keep (Part.Keep). It is
	// guarded by the loanBook's lock.
	lent int
}

func newHold(buf arena.Buffer) *hold {
	h := &hold{buf: buf}
	h.refs.Store(1)
	return h
}

func (h *hold) retain() { h.refs.Add(1) }

func (h *hold) release() {
	if h.refs.Add(-1) == 0 {
		h.buf.Release()
	}
}

// alloc allocates arena memory for a read. If none is free, it drops pieces from the hot set, and
// then waits up to QueueWait for other reads to release memory. It fails with ErrBusy after
// QueueWait, and earlier if too many calls wait.
func (n *Node) alloc(ctx context.Context, by fair.Caller, sizeBytes int64) (arena.Buffer, error) {
	m := n.opts.Arena
	return n.allocFrom(ctx, by, sizeBytes, m.TryAllocFor, m.AllocFor, func(arena.Buffer) bool { return true })
}

// allocShare is alloc for a write. It allocates from the share of the arena that is reserved for
// writers, so that reads and writes do not wait for each other. From the hot set it drops only
// pieces whose buffers are in that share.
func (n *Node) allocShare(ctx context.Context, by fair.Caller, sizeBytes int64) (arena.Buffer, error) {
	m := n.opts.Arena
	return n.allocFrom(ctx, by, sizeBytes, m.TryAllocShare, m.AllocShare, m.InShare)
}

func (n *Node) allocFrom(ctx context.Context, by fair.Caller, sizeBytes int64, try func(fair.Caller, int) (arena.Buffer, error), alloc func(context.Context, fair.Caller, int) (arena.Buffer, error), helps func(arena.Buffer) bool) (arena.Buffer, error) {
	buf, err := try(by, int(sizeBytes))
	if err == nil || !errors.Is(err, arena.ErrBusy) {
		return buf, err
	}
	// New hot pieces would take the memory that this call waits for.
	n.hot.suspend()
	defer n.hot.resume()
	for n.hot.drop(max(sizeBytes, hotDropBytes), helps) > 0 {
		buf, err := try(by, int(sizeBytes))
		if err == nil || !errors.Is(err, arena.ErrBusy) {
			return buf, err
		}
	}
	within := n.limits.Load().QueueWait
	wait, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	buf, err = alloc(wait, by, int(sizeBytes))
	switch {
	case err == nil:
		return buf, nil
	case ctx.Err() != nil:
		return buf, ctx.Err()
	case errors.Is(err, arena.ErrBusy):
		return buf, fmt.Errorf("%w: too many calls wait for memory of the arena (%d bytes)", ErrBusy, len(n.opts.Arena.Bytes()))
	case wait.Err() != nil:
		return buf, fmt.Errorf("%w: %d bytes of the arena (%[4]d bytes) were not free within %[3]v", ErrBusy, sizeBytes, within, len(n.opts.Arena.Bytes()))
	}
	return buf, err
}
