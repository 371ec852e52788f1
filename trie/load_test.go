package trie

import (
	"encoding/binary"
	"runtime"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
)

// TestOpenWithParentsBehind: blocks whose parents come later in the scan are loaded like blocks in
// order, and Open allocates no extra memory for each of them.
func TestOpenWithParentsBehind(t *testing.T) {
	const chains, length = 256, 512
	open := func(place func(chain, block int) int) (allocated uint64) {
		opts := Options{Dir: t.TempDir(), FS: vfs.Default}
		tr := openTest(t, opts)
		ns, err := tr.Create(kv.Namespace{Name: "m", Epoch: 1, Index: kv.IndexTrie, Geometry: kv.SingleGroup(1, 4, 100)})
		if err != nil {
			t.Fatal(err)
		}
		id := func(chain, block int) (id kv.BlockID) {
			binary.BigEndian.PutUint64(id[:], uint64(chain*length+block+1)*0x9e3779b97f4a7c15)
			return id
		}
		entries := make([]Entry, length)
		for c := range chains {
			for b := range length {
				at := place(c, b)
				entries[b] = Entry{ID: id(c, b), Ref: kv.Ref{Extent: kv.MakeExtent(0, uint32(at>>12), uint32(at&4095)), Generation: 1}}
				if b > 0 {
					entries[b].Parent = id(c, b-1)
				}
			}
			if _, err := tr.Put(nil, ns.ID, ns.Epoch, entries, false); err != nil {
				t.Fatal(err)
			}
		}
		closeTest(t, tr)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		tr = openTest(t, opts)
		runtime.ReadMemStats(&after)
		s := tr.Stats()
		if s.Load.Loaded != chains*length {
			t.Errorf("%d of %d blocks were loaded: %+v", s.Load.Loaded, chains*length, s.Load)
		}
		ids := make([]kv.BlockID, length)
		for c := range chains {
			for b := range ids {
				ids[b] = id(c, b)
			}
			if m, err := tr.Match(ns.ID, ids, MatchOptions{}); err != nil || m.Blocks != length {
				t.Fatalf("chain %d: %d blocks match, %v", c, m.Blocks, err)
			}
		}
		closeTest(t, tr)
		return after.TotalAlloc - before.TotalAlloc
	}
	inOrder := open(func(c, b int) int { return c*length + b })
	behind := open(func(c, b int) int { return c*length + length - 1 - b })
	t.Logf("allocated for a block: %.1f B in order, %.1f B with parents behind", float64(inOrder)/(chains*length), float64(behind)/(chains*length))
	if testkit.Race || invariants.Enabled {
		return // in these builds Pebble makes random checks, which allocate
	}
	// A list of ids would need 110 B per block.
	if behind > inOrder+40*chains*length {
		t.Errorf("Open allocated %d bytes for a block more where parents come behind", (behind-inOrder)/(chains*length))
	}
}
