package trie

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie/evict"
)

// TestMatchDoesNotAllocate: with a buffer for the pieces, a match allocates nothing. A map, an
// escaping closure or an error on this path would allocate.
func TestMatchDoesNotAllocate(t *testing.T) {
	for _, kind := range evict.Kinds() {
		t.Run(kind.String(), func(t *testing.T) {
			tr := openTest(t, Options{Policy: kind})
			defer closeTest(t, tr)
			ns := benchNamespace(t, tr)
			fill(t, tr, ns, 2*benchChain)
			ids := benchIDs(1)
			opts := MatchOptions{Pieces: make([]Piece, 0, benchChain)}
			if n := testing.AllocsPerRun(200, func() {
				if m, err := tr.Match(ns.ID, ids, opts); err != nil || m.Blocks != benchChain {
					t.Fatal(m, err)
				}
			}); n >= 1 {
				t.Errorf("%v allocations a match; want 0", n)
			}
			opts.Mix, opts.Epochs = true, make([]kv.EpochRun, 0, 1)
			if n := testing.AllocsPerRun(200, func() {
				if m, err := tr.Match(ns.ID, ids, opts); err != nil || m.Blocks != benchChain || len(m.Epochs) != 1 {
					t.Fatal(m, err)
				}
			}); n >= 1 {
				t.Errorf("%v allocations a mixed match; want 0", n)
			}
			opts.Mix = false
			opts.Lease, opts.TTL, opts.Now = true, time.Minute, epoch0
			if n := testing.AllocsPerRun(200, func() {
				m, err := tr.Match(ns.ID, ids, opts)
				if err != nil {
					t.Fatal(err)
				}
				if err := tr.Release(m.Lease); err != nil {
					t.Fatal(err)
				}
			}); n >= 1 {
				t.Errorf("%v allocations a leased match; want 0", n)
			}
		})
	}
}

// slots hands out slots as a store does: a slot that an entry refers to, or that was returned, has
// one owner. It fails the test when a slot is returned twice.
type slots struct {
	t    *testing.T
	mu   sync.Mutex
	next uint32
	used map[kv.Ref]bool
	// moves are the targets of the moves from a slot, whether Move succeeded or not.
	moves map[kv.Ref][]kv.Ref
}

// moveFrom allocates a slot as the target of a move. From now on the piece may be in the old slot
// or in the new one.
func (s *slots) moveFrom(from kv.Ref) Moved {
	to := s.get()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.moves[from] = append(s.moves[from], to)
	return Moved{From: from, To: to}
}

// places returns the slots in which a piece, originally in r, can be.
func (s *slots) places(r kv.Ref) []kv.Ref {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := []kv.Ref{r}
	for i := 0; i < len(all); i++ {
		all = append(all, s.moves[all[i]]...)
	}
	return all
}

func (s *slots) get() kv.Ref {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	r := kv.Ref{Extent: kv.Extent(s.next), Generation: kv.Generation(s.next)}
	s.used[r] = true
	return r
}

func (s *slots) put(r kv.Ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.used[r] {
		s.t.Errorf("one-owner: slot %v came back twice", r)
	}
	delete(s.used, r)
}

// TestConcurrent runs writers, readers, evictors, movers, bumps, deletes and relocations
// concurrently. At the end the index refers to exactly the slots that were handed out and not
// returned.
func TestConcurrent(t *testing.T) {
	for _, kind := range evict.Kinds() {
		t.Run(kind.String(), func(t *testing.T) { testConcurrent(t, kind) })
	}
}

func testConcurrent(t *testing.T, kind evict.Kind) {
	tr := openTest(t, Options{Policy: kind, MaxLeases: 32, SlotBytes: func(kv.Geometry, int) int64 { return 1 }})
	s := &slots{t: t, used: make(map[kv.Ref]bool), moves: make(map[kv.Ref][]kv.Ref)}
	geometry := kv.Geometry{BlockTokens: 2, Groups: []kv.Group{
		{Kind: kv.Full, Layers: 1, TokenBytes: 1}, {Kind: kv.State, Layers: 1, TokenBytes: 1},
	}}
	def, err := tr.Create(kv.Namespace{Name: "ns", Index: kv.IndexTrie, Geometry: geometry, Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	take := func(gone []Evicted, err error) {
		if err != nil {
			t.Error(err)
		}
		for _, g := range gone {
			s.put(g.Ref)
		}
	}
	chain := func(rng *rand.Rand) (ids []kv.BlockID) {
		c := rng.IntN(8)
		for i := range rng.IntN(24) + 1 {
			// Chains share their first blocks.
			ids = append(ids, benchID(c%(i+1), i))
		}
		return ids
	}
	const rounds = 400
	work := func(seed uint64, f func(rng *rand.Rand)) func() {
		return func() {
			rng := rand.New(rand.NewPCG(seed, 1))
			for range rounds {
				f(rng)
			}
		}
	}
	put := func(rng *rand.Rand) {
		now, err := tr.Namespace("ns")
		if err != nil {
			t.Error(err)
			return
		}
		var entries []Entry
		var parent kv.BlockID
		for _, id := range chain(rng) {
			entries = append(entries, Entry{ID: id, Parent: parent, Ref: s.get()})
			parent = id
		}
		entries = append(entries, Entry{ID: parent, Group: 1, Ref: s.get()})
		status, err := tr.Put(nil, def.ID, now.Epoch, entries, rng.IntN(4) == 0)
		if err != nil {
			t.Error(err)
			return
		}
		for i, st := range status {
			if st != Added {
				s.put(entries[i].Ref)
			}
		}
	}
	match := func(rng *rand.Rand) {
		ids := chain(rng)
		m, err := tr.Match(def.ID, ids, MatchOptions{Lease: rng.IntN(2) == 0, TTL: time.Duration(rng.IntN(3)) * time.Second, Now: epoch0})
		if err != nil || m.Blocks > len(ids) || m.Stored < m.Blocks {
			t.Error(m, err)
		}
		if m.Lease == 0 {
			return
		}
		// pinned-stays: every piece that the lease pins is still indexed.
		indexed := make(map[kv.Ref]bool)
		for ref := range tr.Refs() {
			indexed[ref] = true
		}
		for _, p := range m.Pieces {
			if !slices.ContainsFunc(s.places(p.Ref), func(r kv.Ref) bool { return indexed[r] }) {
				t.Errorf("pinned-stays: %v left the index under a lease", p)
			}
		}
		if rng.IntN(8) != 0 {
			if err := tr.Release(m.Lease); err != nil && !errors.Is(err, ErrLeaseUnknown) {
				t.Error(err)
			}
		}
	}
	var wg sync.WaitGroup
	for i := range uint64(2) {
		wg.Go(work(10+i, put))
		wg.Go(work(20+i, match))
	}
	wg.Go(work(30, func(rng *rand.Rand) { take(tr.Evict(nil, int64(rng.IntN(8)), 0, epoch0)) }))
	wg.Go(work(31, func(rng *rand.Rand) { take(tr.Evict(nil, int64(rng.IntN(4)), def.ID, epoch0)) }))
	wg.Go(work(32, func(*rand.Rand) {
		gone, _, err := tr.ReclaimStep(nil, 16)
		take(gone, err)
	}))
	wg.Go(work(33, func(rng *rand.Rand) {
		var err error
		switch rng.IntN(20) {
		case 0:
			_, err = bumpEpoch(tr, "ns", 0, 1)
		case 1, 2, 3:
			ids := chain(rng)
			if err = tr.Delete(def.ID, ids[len(ids)-1]); errors.Is(err, ErrAbsent) {
				err = nil
			}
		case 4:
			tr.Stats()
			_, _, err = tr.List(def.ID, 0, 10)
		}
		if err != nil {
			t.Error(err)
		}
	}))
	wg.Go(work(34, func(rng *rand.Rand) {
		var moves []Moved
		for ref := range tr.Refs() {
			if len(moves) < 4 && rng.IntN(3) == 0 {
				moves = append(moves, s.moveFrom(ref))
			}
		}
		moved, err := tr.Move(moves)
		if err != nil {
			t.Error(err)
			return
		}
		for i, mv := range moves {
			if moved[i] {
				s.put(mv.From)
			} else {
				s.put(mv.To)
			}
		}
	}))
	wg.Go(func() {
		for i := range 8 {
			if err := tr.Relocate(t.Context(), fmt.Sprint("index", i), func() error { return nil }); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	if dir := tr.Dir(); dir != "index7" {
		t.Errorf("the index is in %s", dir)
	}
	for ref := range tr.Refs() {
		if !s.used[ref] {
			t.Errorf("one-owner: the index refers to %v, which came back", ref)
		}
		delete(s.used, ref)
	}
	for ref := range s.used {
		t.Errorf("slot %v is lost: neither indexed nor given back", ref)
	}
	closeTest(t, tr)
}

// TestCrash crashes at random points. Durable pieces are in the index afterwards, in the same
// slots. Every matchable piece was put before, below the same ancestors.
func TestCrash(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { testCrash(t, seed) })
	}
}

func testCrash(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 5))
	fs := vfs.NewCrashableMem()
	opts := Options{FS: fs, MemTableBytes: 256 << 10, SlotBytes: func(kv.Geometry, int) int64 { return 1 }}
	tr := openTest(t, opts)
	ns := benchNamespace(t, tr)
	// refs has all pieces ever put; durable has the pieces that must survive.
	refs, durable := make(map[kv.BlockID]map[kv.Ref]bool), make(map[kv.BlockID]bool)
	slot := 0
	for range 4 {
		for range rng.IntN(60) {
			ids := benchIDs(rng.IntN(12))[:rng.IntN(60)+1]
			entries := benchEntries(ids, slot)
			slot += len(ids)
			sync := rng.IntN(3) == 0
			status, err := tr.Put(nil, ns.ID, ns.Epoch, entries, sync)
			if err != nil {
				t.Fatal(err)
			}
			for i, e := range entries {
				if refs[e.ID] == nil {
					refs[e.ID] = make(map[kv.Ref]bool)
				}
				refs[e.ID][e.Ref] = true
				durable[e.ID] = durable[e.ID] || sync && (status[i] == Added || status[i] == Exists)
			}
			if rng.IntN(10) == 0 {
				gone, err := tr.Evict(nil, int64(rng.IntN(30)), 0, epoch0)
				if err != nil {
					t.Fatal(err)
				}
				for _, g := range gone {
					delete(durable, g.ID)
				}
			}
		}
		clone := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(101), RNG: rng})
		closeTest(t, tr)
		fs, opts.FS = clone, clone
		tr = openTest(t, opts)
		if err := tr.Check(); err != nil {
			t.Fatal(err)
		}
		for c := range 12 {
			ids := benchIDs(c)[:60]
			m, err := tr.Match(ns.ID, ids, MatchOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range m.Pieces {
				if !refs[ids[p.Block]][p.Ref] {
					t.Errorf("exact-or-miss: block %d of chain %d lies in %v, where it never was", p.Block, c, p.Ref)
				}
			}
			if m.Blocks < len(ids) && durable[ids[m.Blocks]] {
				t.Errorf("block %d of chain %d was durable and is gone", m.Blocks, c)
			}
		}
	}
	closeTest(t, tr)
}
