package storage

import (
	"runtime"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
)

// TestHotSetSuspended: while readers add pieces, a caller that waits for memory suspends the set and drops all pieces.
// After that the set has none, so it holds no memory for which the caller waits.
func TestHotSetSuspended(t *testing.T) {
	for round := range 200 {
		h := newHotSet(1 << 20)
		var puts sync.WaitGroup
		for w := range 8 {
			puts.Go(func() {
				for i := range 200 {
					h.put(hotPiece{ref: kv.Ref{Generation: kv.Generation(w*1000 + i + 1)}, hold: newHold(arena.Buffer{}), slotBytes: 1})
				}
			})
		}
		for bytes := int64(0); bytes == 0; bytes, _, _ = h.stats() {
			runtime.Gosched()
		}
		h.suspend()
		h.drop(-1, func(arena.Buffer) bool { return true })
		puts.Wait()
		if bytes, _, _ := h.stats(); bytes != 0 {
			t.Fatalf("round %d: the suspended set has %d bytes", round, bytes)
		}
	}
}
