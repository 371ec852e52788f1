package storage

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/penstock-kv/penstock/internal/arena"
)

// A hold is an arena buffer shared by all who still need its bytes: the parts on
// their way to a reader, the hot set, loans, and writes that the device has not
// completed. The last one to let go releases it.
type hold struct {
	buf  arena.Buffer
	refs atomic.Int32
	// released, if not nil, is called after the buffer was released.
	released func()
	// lent is how many loans keep it; guarded by the loanBook's lock.
	lent int
}

func newHold(buf arena.Buffer) *hold {
	h := &hold{buf: buf}
	h.refs.Store(1)
	return h
}

func (h *hold) retain() { h.refs.Add(1) }

func (h *hold) release() {
	if h.refs.Add(-1) != 0 {
		return
	}
	h.buf.Release()
	if h.released != nil {
		h.released()
	}
}

// alloc lends arena memory to a read. Hot pieces give way first; then it waits
// for others to be done, at most QueueWait, after which the answer is ErrBusy.
func (n *Node) alloc(ctx context.Context, sizeBytes int64) (arena.Buffer, error) {
	m := n.opts.Arena
	return n.allocFrom(ctx, sizeBytes, m.TryAlloc, m.Alloc, func(arena.Buffer) bool { return true })
}

// allocShare is alloc for a write: from the writers' share of the arena, where
// neither reads hold it up nor it them. Only the hot pieces there give way.
func (n *Node) allocShare(ctx context.Context, sizeBytes int64) (arena.Buffer, error) {
	m := n.opts.Arena
	return n.allocFrom(ctx, sizeBytes, m.TryAllocShare, m.AllocShare, m.InShare)
}

func (n *Node) allocFrom(ctx context.Context, sizeBytes int64, try func(int) (arena.Buffer, error), alloc func(context.Context, int) (arena.Buffer, error), helps func(arena.Buffer) bool) (arena.Buffer, error) {
	buf, err := try(int(sizeBytes))
	if err == nil || !errors.Is(err, arena.ErrBusy) {
		return buf, err
	}
	// From here on, what was read is not kept: it would take what this one waits
	// for.
	n.hot.suspend()
	defer n.hot.resume()
	for n.hot.drop(max(sizeBytes, hotDropBytes), helps) > 0 {
		buf, err := try(int(sizeBytes))
		if err == nil || !errors.Is(err, arena.ErrBusy) {
			return buf, err
		}
	}
	wait, cancel := context.WithTimeout(ctx, n.opts.QueueWait)
	defer cancel()
	buf, err = alloc(wait, int(sizeBytes))
	switch {
	case err == nil:
		return buf, nil
	case ctx.Err() != nil:
		return buf, ctx.Err()
	case errors.Is(err, arena.ErrBusy) || wait.Err() != nil:
		return buf, fmt.Errorf("%w: %d bytes of memory for transfers did not come free within %v (arena of %d)", ErrBusy, sizeBytes, n.opts.QueueWait, len(n.opts.Arena.Bytes()))
	}
	return buf, err
}
