package storage

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/penstock-kv/penstock/internal/arena"
)

// A hold is an arena buffer shared by all who still need its bytes: the parts on
// their way to a reader, the hot set, and loans. The last one to let go releases it.
type hold struct {
	buf  arena.Buffer
	refs atomic.Int32
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
	if h.refs.Add(-1) == 0 {
		h.buf.Release()
	}
}

// alloc lends arena memory. Hot pieces give way first; then it waits for others
// to be done, at most QueueWait, after which the answer is ErrBusy.
func (n *Node) alloc(ctx context.Context, sizeBytes int64) (arena.Buffer, error) {
	for {
		buf, err := n.opts.Arena.TryAlloc(int(sizeBytes))
		if err == nil || !errors.Is(err, arena.ErrBusy) {
			return buf, err
		}
		if n.hot.drop(max(sizeBytes, hotDropBytes)) == 0 {
			break
		}
	}
	wait, cancel := context.WithTimeout(ctx, n.opts.QueueWait)
	defer cancel()
	buf, err := n.opts.Arena.Alloc(wait, int(sizeBytes))
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
