package storage_test

import (
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

// TestEveryWriterGetsRoom: on a store that is always full, every writer gets room. No writer takes
// the slots that another writer evicted.
func TestEveryWriterGetsRoom(t *testing.T) {
	const writers, rounds, blocks = 10, 80, 24
	r := newRig(t, rigOptions{capacityBytes: 12 << 20, segmentBytes: 256 << 10, arenaBytes: 32 << 20}, memio.New(memio.Options{}))
	// All writers together hold a quarter of the store. If they held most of it, a writer might
	// find nothing to evict and fail. There are two slot sizes, because room for one is not room
	// for the other.
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

// TestAnotherSlotSizeKeepsLeased fills two volumes with blocks of one slot size, leases some
// of the prompts, and writes blocks of another size. The writes evict only prompts without a lease.
// No leased block and no ancestor of one is removed.
func TestAnotherSlotSizeKeepsLeased(t *testing.T) {
	const blocks = 8
	r := newRig(t, rigOptions{
		capacityBytes: 8 << 20, segmentBytes: 128 << 10, arenaBytes: 32 << 20,
		edit: func(o *storage.Options) { o.HotBytes = -1 },
	}, memio.New(memio.Options{}), memio.New(memio.Options{}))
	old := r.namespace("old", small)
	var prompts [][]kv.BlockID
	for seed := 1; r.store.Stats().FileBytes < 8<<20-256<<10; seed++ {
		// All prompts share the first blocks, which are in one segment. To empty that segment would
		// remove every prompt.
		ids := chain(old, blocks, 1_000_000, seed)
		r.mustPut(old, ids)
		prompts = append(prompts, ids)
	}
	var held [][]kv.BlockID
	for i, ids := range prompts {
		if i%9 != 0 {
			continue
		}
		_, m, err := r.node.Match(storage.MatchRequest{Namespace: old.Name, IDs: ids, Pin: true})
		if err != nil {
			t.Fatal(err)
		}
		if m.Blocks != len(ids) {
			continue // evicted while the store was filled
		}
		defer func() {
			if err := r.node.Release(m.Lease); err != nil {
				t.Error(err)
			}
		}()
		held = append(held, ids)
	}
	if len(held) < 8 {
		t.Fatalf("%d of %d prompts are held; the test wants 8", len(held), len(prompts))
	}
	other := r.namespace("other", kv.SingleGroup(2, 4, 4000))
	for seed := range 40 {
		stored, err := r.put(other, chain(other, blocks, 1+seed), 0)
		if err != nil {
			t.Fatalf("prompt %d of the other size: %v", seed, err)
		}
		for _, s := range stored {
			if !s.Stored {
				t.Errorf("prompt %d of the other size, block %d: %s: %v", seed, s.Block, s.Reason, s.Err)
			}
		}
		for i, ids := range held {
			if _, m, err := r.node.Match(storage.MatchRequest{Namespace: old.Name, IDs: ids}); err != nil || m.Blocks != len(ids) {
				t.Fatalf("prompt %d of the other size cost held prompt %d: %d of %d blocks match: %v", seed, i, m.Blocks, len(ids), err)
			}
		}
	}
}

// TestAnotherSlotSizeWithEverythingHeld leases every prompt. A write of another slot size is
// refused and evicts nothing.
func TestAnotherSlotSizeWithEverythingHeld(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 4 << 20, segmentBytes: 128 << 10}, memio.New(memio.Options{}))
	old := r.namespace("old", small)
	var prompts [][]kv.BlockID
	for seed := 1; r.store.Stats().FileBytes < 4<<20-256<<10; seed++ {
		ids := chain(old, 8, seed)
		r.mustPut(old, ids)
		_, m, err := r.node.Match(storage.MatchRequest{Namespace: old.Name, IDs: ids, Pin: true})
		if err != nil || m.Blocks != len(ids) {
			t.Fatalf("%d blocks match: %v", m.Blocks, err)
		}
		defer func() {
			if err := r.node.Release(m.Lease); err != nil {
				t.Error(err)
			}
		}()
		prompts = append(prompts, ids)
	}
	other := r.namespace("other", kv.SingleGroup(2, 4, 12000))
	stored := 0
	for seed := range 12 {
		outcomes, err := r.put(other, chain(other, 4, 1+seed), 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range outcomes {
			if s.Stored {
				stored++
			} else if s.Reason != "full" && s.Reason != "parent_absent" {
				t.Errorf("block %d of prompt %d: %s: %v", s.Block, seed, s.Reason, s.Err)
			}
		}
	}
	for i, ids := range prompts {
		if _, m, err := r.node.Match(storage.MatchRequest{Namespace: old.Name, IDs: ids}); err != nil || m.Blocks != len(ids) {
			t.Errorf("leased prompt %d: %d of %d blocks match: %v", i, m.Blocks, len(ids), err)
		}
	}
	if stored == 12*4 {
		t.Error("every block of the other size was stored: the store was not full")
	}
}
