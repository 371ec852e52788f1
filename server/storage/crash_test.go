package storage_test

import (
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

var crashSeeds = flag.Int("crash.seeds", testkit.Rounds(400, 60), "number of seeded crash points of TestCrashPoints")
var crashFirst = flag.Uint64("crash.first", 1, "first seed of TestCrashPoints")

// crash cuts the power and opens the node on the remaining devices and index.
func (r *rig) crash(seed uint64) {
	r.t.Helper()
	r.powerCut(seed)
	r.open()
}

// powerCut cuts the power of the volumes and of the index's disk at the same moment. Each keeps a
// state that is possible after a power failure, chosen by seed.
func (r *rig) powerCut(seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 0xC7A5))
	index := r.index.(*vfs.MemFS).CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(101), RNG: rng})
	for i, d := range r.devices {
		r.devices[i] = d.(*memio.Device).Crash(rng.Uint64())
	}
	r.abandon()
	r.index = index
}

// TestCrashPoints: the power fails at an arbitrary write. Afterwards every read returns the right
// bytes or a miss, no block acknowledged under durability sync is lost, index and store agree, and
// the node continues to work.
func TestCrashPoints(t *testing.T) {
	testkit.Long(t, "a whole node crashes 400 times")
	for seed := *crashFirst; seed < *crashFirst+uint64(*crashSeeds); seed++ {
		if !crashOnce(t, seed) {
			t.Fatalf("seed %d: go test -run TestCrashPoints -crash.first=%d -crash.seeds=1 ./server/storage", seed, seed)
		}
	}
}

func crashOnce(t *testing.T, seed uint64) bool {
	rng := rand.New(rand.NewPCG(seed, 1))
	durability := []blockstore.Durability{blockstore.DurabilitySync, blockstore.DurabilityBatch, blockstore.DurabilityAsync}[seed%3]
	opts := rigOptions{
		capacityBytes: 1 << 20, segmentBytes: 128 << 10, arenaBytes: 2 << 20, durability: durability,
		edit: func(o *storage.Options) { o.SyncEvery = time.Hour; o.WriteBytesMax = 256 << 10 },
	}
	if seed%4 == 1 {
		opts.keys, opts.epochKeys = keyring(t, "k"), new(bool)
		*opts.epochKeys = true
	}
	r := newRig(t, opts)
	ns := r.namespace("m", kv.SingleGroup(2, 2, 1000))
	mem := r.devices[0].(*memio.Device)
	mem.PowerOffAfter(int64(rng.IntN(200)))
	acked := map[kv.BlockID]bool{}
	var order []kv.BlockID
	work := func() {
		for range 12 {
			ids := chain(ns, 2, rng.IntN(3), rng.IntN(4), rng.IntN(4))
			switch rng.IntN(10) {
			case 0:
				if removed, err := r.node.Evict("m", 30<<10, false); err != nil || removed.Blocks > 0 {
					acked, order = map[kv.BlockID]bool{}, nil // the removed blocks are no loss; counting starts again
				}
			case 1:
				if err := r.node.Sync(context.Background()); err != nil {
					return
				}
			case 2:
				if _, err := r.node.BumpEpoch(context.Background(), "m", 0, 1); err != nil {
					// Either outcome is possible: the new epoch may or may not be live.
					acked, order = map[kv.BlockID]bool{}, nil
					return
				}
				ns, _ = r.node.Namespace("m")
				acked, order = map[kv.BlockID]bool{}, nil
			default:
				stored, err := r.put(ns, ids, 0)
				if err != nil {
					return
				}
				for _, s := range stored {
					if s.Stored && !acked[ids[s.Block]] {
						acked[ids[s.Block]] = true
						order = append(order, ids[s.Block])
					}
				}
			}
		}
	}
	evictedBefore := r.node.Events().Last()
	work()
	// Eviction also removes acknowledged blocks, which is no loss.
	if events, err := eventsSince(r, evictedBefore); err == nil {
		for _, e := range events {
			if e.Kind == storage.BlockRemoved {
				for _, id := range e.IDs {
					delete(acked, id)
				}
			}
		}
	}
	r.crash(seed)
	again, err := r.node.Namespace("m")
	if err != nil {
		t.Errorf("seed %d: the namespace is gone: %v", seed, err)
		return false
	}
	if again.Epoch < ns.Epoch {
		t.Errorf("seed %d: epoch %d came back after %d was acknowledged", seed, again.Epoch, ns.Epoch)
	}
	// tryLoad checks every byte of every block that may exist.
	for a := range 3 {
		for b := range 4 {
			for c := range 4 {
				if _, _, err := r.tryLoad(context.Background(), again, chain(again, 2, a, b, c)); err != nil {
					t.Errorf("seed %d: load after the crash: %v", seed, err)
				}
			}
		}
	}
	if durability == blockstore.DurabilitySync && again.Epoch == ns.Epoch {
		for _, id := range order {
			if !acked[id] {
				continue
			}
			if _, _, err := r.node.StatBlock("m", id); err != nil {
				t.Errorf("seed %d: acknowledged block %v is lost: %v", seed, id, err)
			}
		}
	}
	r.mustPut(again, chain(again, 2, 77))
	if _, n := r.load(again, chain(again, 2, 77)); n != 2 {
		t.Errorf("seed %d: the node does not work after the crash", seed)
	}
	r.close()
	return !t.Failed()
}

func eventsSince(r *rig, after uint64) ([]storage.Event, error) {
	if r.node.Events().Last() == after {
		return nil, errors.New("none")
	}
	return r.node.Events().After(context.Background(), after, 1<<20)
}
