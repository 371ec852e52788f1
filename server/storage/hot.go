package storage

import (
	"container/list"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
)

// hotDropBytes is how much the hot set gives back at a time when memory is
// short: enough that a run of requests is served by one drop.
const hotDropBytes = 8 << 20

// A hotSet keeps the pieces that were read last in arena memory that nobody else
// needs, least recently read first to go. It is coherent without invalidation:
// its key is the Ref, and a generation is never given out twice, so an entry
// whose piece was replaced is simply never asked for again.
type hotSet struct {
	max int64
	// suspended counts those who wait for memory; while there are any, nothing is
	// put into the set.
	suspended atomic.Int32

	mu      sync.Mutex
	byRef   map[kv.Ref]*list.Element
	order   list.List // of *hotPiece; front: read last
	bytes   int64
	hits    uint64
	queries uint64
}

// hotPiece is one verified slot.
type hotPiece struct {
	ref kv.Ref
	// payload is where the piece lies in hold's buffer.
	hold      *hold
	payload   int64
	bytes     int64
	slotBytes int64
	sums      []uint64
}

func newHotSet(maxBytes int64) *hotSet {
	return &hotSet{max: maxBytes, byRef: make(map[kv.Ref]*list.Element)}
}

// get returns the piece with its hold retained.
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

// put keeps the piece, retaining its hold, if it is not there already.
func (h *hotSet) put(p hotPiece) {
	if h.max <= 0 || p.slotBytes > h.max || h.suspended.Load() > 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.byRef[p.ref]; ok {
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
	if _, ok := h.byRef[to]; ok { // a reader of the new slot has put the piece already
		h.removeLocked(e)
		return
	}
	delete(h.byRef, from)
	e.Value.(*hotPiece).ref = to
	h.byRef[to] = e
}

// suspend makes put do nothing until resume. A caller that waits for memory suspends
// the set.
func (h *hotSet) suspend() { h.suspended.Add(1) }

func (h *hotSet) resume() { h.suspended.Add(-1) }

// drop removes the least recently read pieces whose buffer helps, until it has removed
// wantBytes or, if wantBytes is negative, all of them. It returns how many bytes it
// removed. The memory of a piece that a reader still uses is freed when that reader
// releases it.
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

// stats returns the bytes kept and the lookups so far.
func (h *hotSet) stats() (bytes int64, hits, queries uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.bytes, h.hits, h.queries
}
