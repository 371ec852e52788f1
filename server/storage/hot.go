package storage

import (
	"container/list"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
)

// hotDropBytes is the minimum size, in bytes, of the pieces that one call of drop removes from the
// hot set, so that one call frees memory for several requests.
const hotDropBytes = 8 << 20

// A hotSet keeps the most recently read pieces in unused arena memory. It drops the least recently
// read pieces first. It needs no invalidation: the key is the Ref, and a generation is never
// reused, so no lookup finds the entry of a piece whose slot was reused.
type hotSet struct {
	max int64
	// suspended counts the callers that wait for memory. While it is positive, put does nothing.
	suspended atomic.Int32

	mu      sync.Mutex
	byRef   map[kv.Ref]*list.Element
	order   list.List // of *hotPiece; the piece read last is at the front
	bytes   int64
	hits    uint64
	queries uint64
}

// hotPiece is one verified slot.
type hotPiece struct {
	ref kv.Ref
	// hold has the buffer with the piece, and payload is the offset of the piece's bytes in that
	// buffer.
	hold      *hold
	payload   int64
	bytes     int64
	slotBytes int64
	sums      []uint64
}

func newHotSet(maxBytes int64) *hotSet {
	return &hotSet{max: maxBytes, byRef: make(map[kv.Ref]*list.Element)}
}

// get returns the piece and retains its hold.
func (h *hotSet) get(ref kv.Ref) (hotPiece, bool) {
	if h.max <= 0 {
		return hotPiece{}, false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.queries++
	e, ok := h.byRef[ref]
	if !ok {
		return hotPiece{}, false
	}
	h.hits++
	h.order.MoveToFront(e)
	p := *e.Value.(*hotPiece)
	p.hold.retain()
	return p, true
}

// put adds the piece and retains its hold, unless the set has the piece already.
func (h *hotSet) put(p hotPiece) {
	if h.max <= 0 || p.slotBytes > h.max {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	// suspended is read under the lock, so that no piece is added after the drop that follows suspend.
	if _, ok := h.byRef[p.ref]; ok || h.suspended.Load() > 0 {
		return
	}
	p.hold.retain()
	h.byRef[p.ref] = h.order.PushFront(&p)
	h.bytes += p.slotBytes
	for h.bytes > h.max {
		h.removeLocked(h.order.Back())
	}
}

// rename changes the slot of a piece that was moved.
func (h *hotSet) rename(from, to kv.Ref) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e, ok := h.byRef[from]
	if !ok {
		return
	}
	if _, ok := h.byRef[to]; ok { // a reader of the new slot has already added the piece
		h.removeLocked(e)
		return
	}
	delete(h.byRef, from)
	e.Value.(*hotPiece).ref = to
	h.byRef[to] = e
}

// suspend makes put do nothing until resume. A caller that waits for memory suspends the set.
func (h *hotSet) suspend() { h.suspended.Add(1) }

func (h *hotSet) resume() { h.suspended.Add(-1) }

// drop removes pieces, the least recently read first, until it has removed wantBytes bytes; a
// negative wantBytes means no limit. It removes only pieces for whose buffer helps returns true. It
// returns the number of bytes removed. If a reader still uses the memory of a piece, the memory is
// freed when that reader releases it.
func (h *hotSet) drop(wantBytes int64, helps func(arena.Buffer) bool) int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	before := h.bytes
	if wantBytes < 0 {
		wantBytes = before
	}
	for e := h.order.Back(); e != nil && before-h.bytes < wantBytes; {
		next := e.Prev()
		if helps(e.Value.(*hotPiece).hold.buf) {
			h.removeLocked(e)
		}
		e = next
	}
	return before - h.bytes
}

func (h *hotSet) removeLocked(e *list.Element) {
	p := h.order.Remove(e).(*hotPiece)
	delete(h.byRef, p.ref)
	h.bytes -= p.slotBytes
	p.hold.release()
}

// stats returns the bytes in the set and the number of lookups and hits.
func (h *hotSet) stats() (bytes int64, hits, queries uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.bytes, h.hits, h.queries
}
