package evict

import "sync/atomic"

const (
	// maxTouches is the maximum of a counter of two bits. S3-FIFO needs no more: a node with three
	// touches passes through the main queue three more times.
	maxTouches     = 3
	touchesPerWord = 16
)

// touches counts the hits of each node, in two bits per node and sixteen nodes per word. Several
// calls of add may run concurrently; if two change one word at the same time, one touch is lost.
type touches struct {
	words chunked[atomic.Uint32]
}

func (t *touches) grow(n Node) { t.words.grow(n / touchesPerWord) }

func (t *touches) bytes() int64 { return t.words.bytes() }

func (t *touches) word(n Node) (w *atomic.Uint32, shift uint32) {
	return t.words.at(n / touchesPerWord), n % touchesPerWord * 2
}

func (t *touches) add(n Node) {
	w, shift := t.word(n)
	v := w.Load()
	// A counter at its maximum is only read, so the cache line of a hot node stays shared between
	// CPUs.
	if v>>shift&maxTouches == maxTouches {
		return
	}
	w.CompareAndSwap(v, v+1<<shift)
}

func (t *touches) get(n Node) int {
	if !t.words.has(n / touchesPerWord) {
		return 0
	}
	w, shift := t.word(n)
	return int(w.Load() >> shift & maxTouches)
}

func (t *touches) clear(n Node) {
	w, shift := t.word(n)
	w.And(^uint32(maxTouches << shift))
}

// take removes one touch and reports whether the node had one. It needs exclusive access.
func (t *touches) take(n Node) bool {
	if t.get(n) == 0 {
		return false
	}
	w, shift := t.word(n)
	w.Store(w.Load() - 1<<shift)
	return true
}
