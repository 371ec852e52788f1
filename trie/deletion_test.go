package trie

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/kv"
)

// TestRedo compares Redo with a model that walks from every piece up to the root.
func TestRedo(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 3))
		tr, err := Open(Options{Dir: "index", FS: vfs.NewMem(), MemTableBytes: 256 << 10, CacheBytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		ns, err := tr.Create(kv.Namespace{Name: "m", Epoch: 1, Index: kv.IndexTrie, Geometry: kv.SingleGroup(1, 4, 100)})
		if err != nil {
			t.Fatal(err)
		}
		const n = 40
		id := func(i int) (id kv.BlockID) { binary.BigEndian.PutUint32(id[:], uint32(i+1)); return id }
		parent, gen := make([]int, n), make([]kv.Generation, n)
		var entries []Entry
		for i := range n {
			parent[i], gen[i] = rng.IntN(i+1)-1, 1+kv.Generation(rng.IntN(100))
			e := Entry{ID: id(i), Ref: kv.Ref{Extent: kv.MakeExtent(0, 0, uint32(i)), Generation: gen[i]}}
			if parent[i] >= 0 {
				e.Parent = id(parent[i])
			}
			entries = append(entries, e)
		}
		if _, err := tr.Put(nil, ns.ID, ns.Epoch, entries, false); err != nil {
			t.Fatal(err)
		}
		upTo := make([]kv.Generation, n)
		var deletions []Deletion
		for range rng.IntN(6) {
			i, g := rng.IntN(n), kv.Generation(rng.IntN(100))
			upTo[i] = max(upTo[i], g)
			deletions = append(deletions, Deletion{PieceKey{ID: id(i)}, g})
		}
		deletions = append(deletions, Deletion{PieceKey{ID: id(n + 1)}, 1000}) // absent
		if _, err := tr.Redo(ns.ID, ns.Epoch, deletions); err != nil {
			t.Fatal(err)
		}
		for i := range n {
			limit, absent := kv.Generation(0), false
			var chain []int
			for at := i; at >= 0; at = parent[at] {
				chain = append(chain, at)
			}
			for k := len(chain) - 1; k >= 0; k-- {
				limit = max(limit, upTo[chain[k]])
				absent = absent || gen[chain[k]] <= limit
			}
			if _, err := tr.Stat(ns.ID, id(i)); (err != nil) != absent {
				t.Errorf("seed %d: piece %d of generation %d under limit %d: %v", seed, i, gen[i], limit, err)
			}
		}
		if _, err := tr.Evict(nil, 1<<40, 0, time.Time{}); err != nil {
			t.Fatal(err)
		}
		if err := tr.Check(); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
		if err := tr.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
