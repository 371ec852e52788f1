package storage

import (
	"container/list"
	"sync"

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
	if h.max <= 0 || p.slotBytes > h.max {
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
	h.shrinkLocked(h.max)
}

// drop gives back the least recently read pieces, at least wantBytes of them if
// there are so many, all if negative, and returns how many bytes it let go of.
// Memory that a reader still needs comes back later.
func (h *hotSet) drop(wantBytes int64) int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	before := h.bytes
	if wantBytes < 0 || wantBytes > before {
		wantBytes = before
	}
	h.shrinkLocked(before - wantBytes)
	return before - h.bytes
}

func (h *hotSet) shrinkLocked(limit int64) {
	for h.bytes > limit {
		e := h.order.Back()
		p := h.order.Remove(e).(*hotPiece)
		delete(h.byRef, p.ref)
		h.bytes -= p.slotBytes
		p.hold.release()
	}
}

// stats returns the bytes kept and the lookups so far.
func (h *hotSet) stats() (bytes int64, hits, queries uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.bytes, h.hits, h.queries
}
