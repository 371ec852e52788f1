package storage_test

import (
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
)

// TestEveryWriterGetsRoom: on a store that is full all the time, none of many
// writers is told so: what one of them evicts, no other takes from it.
func TestEveryWriterGetsRoom(t *testing.T) {
	const writers, rounds, blocks = 10, 80, 24
	r := newRig(t, rigOptions{capacityBytes: 12 << 20, segmentBytes: 256 << 10, arenaBytes: 32 << 20}, memio.New(memio.Options{}))
	// All writers at once hold a quarter of the store: where they hold most of it, one that finds nothing to evict is told so. Two slot sizes: room for one is not room for the other.
	names := []kv.Namespace{r.namespace("a", small), r.namespace("b", kv.SingleGroup(2, 4, 1500))}
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range rounds {
				ns := names[w%len(names)]
				stored, err := r.put(ns, chain(ns, blocks, 1+w*rounds+i), 0)
				if err != nil {
					t.Errorf("writer %d, round %d: %v", w, i, err)
				}
				for _, s := range stored {
					if !s.Stored {
						t.Errorf("writer %d, round %d, block %d: %s: %v", w, i, s.Block, s.Reason, s.Err)
						break
					}
				}
			}
		})
	}
	wg.Wait()
}
