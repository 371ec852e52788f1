package storage_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// memories returns n in-memory volumes.
func memories(n int, seed uint64) (devices []blockio.Device) {
	for i := range n {
		devices = append(devices, memio.New(memio.Options{Path: fmt.Sprint("mem", i), Seed: seed}))
	}
	return devices
}

// loseIndex stops the node, by a power failure or by Close, deletes the index, and opens the node
// with an index rebuilt from the volumes.
func (r *rig) loseIndex(seed uint64, power bool) storage.RebuildReport {
	r.t.Helper()
	if power {
		for i, d := range r.devices {
			r.devices[i] = d.(*memio.Device).Crash(seed)
		}
		r.abandon()
	} else {
		r.close()
		r.reopenDevices()
	}
	fresh := vfs.NewCrashableMem()
	store, index := r.offline(fresh)
	report, err := storage.Rebuild(context.Background(), storage.RebuildOptions{Store: store, Index: index, Verify: seed%2 == 0})
	if err != nil {
		r.t.Fatal(err)
	}
	r.online(store, index, fresh)
	return report
}

// deletionModel holds the blocks that were deleted and not stored again.
type deletionModel struct {
	chains  map[kv.BlockID][]kv.BlockID // the block's chain, including the block
	deleted map[kv.BlockID]bool
}

func (m *deletionModel) stored(ids []kv.BlockID, stored []storage.StoredPiece) {
	for _, s := range stored {
		if s.Stored {
			delete(m.deleted, ids[s.Block])
		}
	}
}

func (m *deletionModel) delete(id kv.BlockID) {
	for other, chain := range m.chains {
		for _, above := range chain {
			if above == id {
				m.deleted[other] = true
			}
		}
	}
}

// TestRebuildResurrectsNothing: a block that was deleted, by any call, before the index was lost is
// not in the rebuilt index. This holds although older copies of the blocks are in free slots of
// several volumes, the power may fail, and the catalogue has room for few tombstones.
func TestRebuildResurrectsNothing(t *testing.T) {
	seeds := uint64(30)
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 9))
		r := newRig(t, rigOptions{
			capacityBytes: 4 << 20, segmentBytes: 128 << 10,
			durability: []blockstore.Durability{blockstore.DurabilitySync, blockstore.DurabilityBatch, blockstore.DurabilityAsync}[seed%3],
			edit:       func(o *storage.Options) { o.SyncEvery = time.Hour },
		}, memories(3, seed)...)
		ns := r.namespace("m", kv.SingleGroup(2, 4, 500))
		other := r.namespace("other", kv.SingleGroup(2, 4, 500))
		r.mustPut(other, chain(other, 1, 1, 2, 3))
		m := deletionModel{chains: map[kv.BlockID][]kv.BlockID{}, deleted: map[kv.BlockID]bool{}}
		// After the power failure no call is acknowledged.
		off := seed%4 == 3
		if off {
			r.devices[rng.IntN(3)].(*memio.Device).PowerOffAfter(50 + rng.Int64N(300))
		}
		failed := func(err error) bool {
			if err != nil && !off {
				t.Fatalf("seed %d: %v", seed, err)
			}
			return err != nil
		}
	life:
		for range 80 {
			ids := chain(ns, 1, rng.IntN(2), rng.IntN(3), rng.IntN(3), rng.IntN(3))
			for i, id := range ids {
				m.chains[id] = ids[:i+1]
			}
			switch rng.IntN(10) {
			case 0, 1:
				id := ids[rng.IntN(len(ids))]
				if _, err := r.node.DeleteBlocks("m", id, false); !errors.Is(err, trie.ErrAbsent) && failed(err) {
					break life
				}
				m.delete(id)
			case 2:
				if _, err := r.node.Evict("m", 1+rng.Int64N(100<<10), false); failed(err) {
					break life
				}
			case 3:
				if rng.IntN(4) > 0 {
					continue
				}
				if _, err := r.node.BumpEpoch(context.Background(), "m", 0, 1); failed(err) {
					break life
				}
				ns, _ = r.node.Namespace("m")
				for id := range m.chains {
					m.deleted[id] = true
				}
			case 4:
				dev := r.devices[rng.IntN(3)]
				if names, err := dev.List(); err != nil || !slices.Contains(names, ondisk.SegmentName(0)) {
					continue
				}
				if off {
					continue // a failure of these calls would be the injected damage
				}
				damage(t, dev)
				var all []kv.BlockID
				for id := range m.chains {
					all = append(all, id)
				}
				pieces, err := r.node.Verify(context.Background(), "m", 0, all)
				if err != nil {
					t.Fatal(err)
				}
				for _, p := range pieces {
					if p.State == storage.Corrupt {
						m.delete(p.ID)
					}
				}
			default:
				stored, err := r.put(ns, ids, 0)
				if failed(err) {
					// Some of the pieces may have reached the index.
					for _, id := range ids {
						delete(m.deleted, id)
					}
					break life
				}
				m.stored(ids, stored)
			}
		}
		if seed%4 == 0 {
			if _, err := r.node.DeleteNamespace(context.Background(), "other", false); err != nil {
				t.Fatal(err)
			}
		}
		report := r.loseIndex(seed, seed%2 == 1)
		back := 0
		for id := range m.deleted {
			if _, _, err := r.node.StatBlock("m", id); !errors.Is(err, trie.ErrAbsent) {
				back++
			}
		}
		if back > 0 {
			t.Errorf("seed %d: %d of %d deleted blocks are back after the rebuild: %+v", seed, back, len(m.deleted), report)
		}
		if _, err := r.node.Namespace("other"); seed%4 == 0 && !errors.Is(err, trie.ErrNamespaceUnknown) {
			t.Errorf("seed %d: the deleted namespace is back: %v", seed, err)
		}
		if next := r.namespace("next", kv.SingleGroup(2, 4, 500)); next.ID <= other.ID {
			t.Errorf("seed %d: namespace id %d was issued before", seed, next.ID)
		}
		r.close()
	}
}

// TestDeletedChildrenOfAReputBlock: a deleted block is stored again, and the node stops before the
// slots of the deleted descendants are free. The descendants stay deleted. A lease keeps the slots
// from being freed.
func TestDeletedChildrenOfAReputBlock(t *testing.T) {
	r := newRig(t, rigOptions{durability: blockstore.DurabilitySync}, memories(2, 1)...)
	ns := r.namespace("m", kv.SingleGroup(2, 4, 500))
	ids, branch := chain(ns, 1, 1, 2, 3, 4), chain(ns, 1, 1, 2, 5, 6)
	r.mustPut(ns, ids)
	r.mustPut(ns, branch)
	if _, _, err := r.node.Match(storage.MatchRequest{Namespace: "m", IDs: branch, TTL: time.Minute}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.node.DeleteBlocks("m", ids[1], false); err != nil {
		t.Fatal(err)
	}
	r.mustPut(ns, ids[:2])
	r.crash(1)
	for _, ids := range [][]kv.BlockID{ids, branch} {
		if _, match, err := r.node.Match(storage.MatchRequest{Namespace: "m", IDs: ids}); err != nil || match.Blocks != 2 {
			t.Errorf("%d blocks match, %v; want the two that were stored after the deletion", match.Blocks, err)
		}
	}
}

// TestTombstonesBecomeAFloor: when the catalogue has no room for more tombstones, deletions
// succeed, no deleted block returns, and the newest blocks are still found.
func TestTombstonesBecomeAFloor(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 1 << 20, segmentBytes: 64 << 10}, memories(2, 1)...)
	ns := r.namespace("m", kv.SingleGroup(1, 4, 100))
	kept := chain(ns, 1, 7)
	r.mustPut(ns, kept)
	var deleted []kv.BlockID
	for i := range 400 {
		ids := chain(ns, 1, 1000+i)
		r.mustPut(ns, ids)
		if _, err := r.node.DeleteBlocks("m", ids[0], false); err != nil {
			t.Fatalf("deletion %d: %v", i, err)
		}
		deleted = append(deleted, ids[0])
	}
	last := chain(ns, 1, 9)
	r.mustPut(ns, last)
	report := r.loseIndex(1, false)
	for i, id := range deleted {
		if _, _, err := r.node.StatBlock("m", id); !errors.Is(err, trie.ErrAbsent) {
			t.Errorf("deleted block %d is back", i)
		}
	}
	if _, _, err := r.node.StatBlock("m", last[0]); err != nil {
		t.Errorf("the newest block is lost: %v; %+v", err, report)
	}
	if _, _, err := r.node.StatBlock("m", kept[0]); !errors.Is(err, trie.ErrAbsent) {
		t.Errorf("all tombstones were stored, so nothing was tested: %v", err)
	}
}

// TestConcurrentDeletions: concurrent deletions may share a write of the catalogue. Each is durable
// when its call returns.
func TestConcurrentDeletions(t *testing.T) {
	devices := memories(1, 1)
	r := newRig(t, rigOptions{}, devices...)
	ns := r.namespace("m", kv.SingleGroup(1, 4, 100))
	var wg sync.WaitGroup
	const n = 64
	for i := range n {
		r.mustPut(ns, chain(ns, 1, i))
	}
	for i := range n {
		wg.Go(func() {
			if _, err := r.node.DeleteBlocks("m", chain(ns, 1, i)[0], false); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	r.loseIndex(3, true)
	for i := range n {
		if _, _, err := r.node.StatBlock("m", chain(ns, 1, i)[0]); !errors.Is(err, trie.ErrAbsent) {
			t.Errorf("block %d is back: %v", i, err)
		}
	}
}

// TestNamespaceIDsOutliveTheIndex: all namespaces were deleted and the index was lost. No id is
// assigned again, because slots of the deleted namespaces may still be on the volumes.
func TestNamespaceIDsOutliveTheIndex(t *testing.T) {
	r := newRig(t, rigOptions{})
	old := r.namespace("m", kv.SingleGroup(1, 4, 100))
	r.mustPut(old, chain(old, 1, 1, 2))
	if _, err := r.node.DeleteNamespace(context.Background(), "m", false); err != nil {
		t.Fatal(err)
	}
	r.close()
	r.reopenDevices()
	r.index = vfs.NewCrashableMem()
	r.open()
	if next := r.namespace("m", kv.SingleGroup(1, 4, 100)); next.ID <= old.ID {
		t.Errorf("namespace id %d was issued before", next.ID)
	}
}
