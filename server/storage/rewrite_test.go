package storage_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

// slotsOf returns the number of slots in use with a key; "": plain ones.
func (r *rig) slotsOf(key string) (n int64) {
	for _, u := range r.node.KeyUse() {
		if u.ID == key {
			n += u.Slots
		}
	}
	return n
}

// rewritten waits until at most left blocks need the key.
func (r *rig) rewritten(key string, left int64) {
	r.t.Helper()
	limit, tick := time.After(time.Hour), time.NewTicker(time.Second)
	defer tick.Stop()
	for r.slotsOf(key) > left {
		select {
		case <-tick.C:
		case <-limit:
			r.t.Fatalf("%d slots still have the key %q: %+v", r.slotsOf(key), key, r.node.KeyUse())
		}
	}
}

// rewriteAt changes the rate at which blocks are rewritten. The movers begin a pass then.
func (r *rig) rewriteAt(bytesPerSecond int64) {
	r.node.SetLimits(storage.Limits{
		ReadsMax: 1, ReservationsMax: 2, LeasesMax: 2, LeaseTTLMax: time.Minute, ReservationTTL: time.Minute, QueueWait: time.Second, ReadWait: time.Second,
		RewriteBytesPerSecond: bytesPerSecond,
	})
}

// rotate gives the node another keyring, also for later starts.
func (r *rig) rotate(ids ...string) {
	r.t.Helper()
	ring := keyring(r.t, ids...)
	if err := r.node.SetKeys(context.Background(), ring); err != nil {
		r.t.Fatal(err)
	}
	r.opts.keys = ring
}

// rewriting sets the rate at which blocks are rewritten.
func rewriting(bytesPerSecond int64) func(*storage.Options) {
	return func(o *storage.Options) { o.RewriteBytesPerSecond = bytesPerSecond }
}

// TestRewrite: after a rotation, all blocks get the new key while they are read, and none is a miss. The old key can then
// be removed, and the blocks need the new one only, also for a new index. Plain blocks of a node that gets keys are encrypted.
func TestRewrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		memory := three()
		devs := slices.Clone(memory)
		for i := range devs {
			devs[i] = faultio.Wrap(devs[i], faultio.MustParse(`(Delay 1ms (File "segment-*"))`))
		}
		r := newRig(t, rigOptions{capacityBytes: 48 << 20, segmentBytes: 512 << 10, durability: blockstore.DurabilityBatch, keys: keyring(t, "a"), edit: rewriting(1 << 20)}, devs...)
		prompts := r.fillTenants(16)
		before := r.slotsOf("a")
		ctx, cancel := context.WithCancel(t.Context())
		var readers sync.WaitGroup
		for name, chains := range prompts {
			ns := must(r.node.Namespace(name))
			readers.Go(func() {
				rng := rand.New(rand.NewPCG(1, 2))
				for rate := time.NewTicker(time.Millisecond); ctx.Err() == nil; <-rate.C {
					i := rng.IntN(len(chains))
					result, n, err := r.tryLoad(context.Background(), ns, chains[i])
					if err != nil || result.Match.Blocks != len(chains[i]) || n != len(result.Pieces) {
						t.Errorf("prompt %d of %s: %d of %d blocks, %d of %d pieces: %v", i, name, result.Match.Blocks, len(chains[i]), n, len(result.Pieces), err)
					}
				}
			})
		}
		began := time.Now()
		r.rotate("a", "b")
		r.rewritten("a", 0)
		if took := time.Since(began); took < 2*time.Second {
			t.Errorf("%d blocks were rewritten in %v, at 1 MiB/s for each of three volumes", before, took)
		}
		cancel()
		readers.Wait()
		if n := r.slotsOf("b"); n != before {
			t.Errorf("%d slots have the new key; %d had the old one", n, before)
		}
		for i := range uint32(3) {
			if m := r.volume(i).Move; m.MovedBlocks != 0 || m.Stalled != nil {
				t.Errorf("volume %d counts the blocks as drained: %+v", i, m)
			}
		}
		r.rotate("b")
		r.whole("without the old key", prompts)
		r.close()
		r.devices = memory
		r.reopenDevices()
		r.open()
		r.whole("after a restart", prompts)
		r.close()
		r.reopenDevices()
		r.rebuild()
		r.whole("after a rebuild of the index", prompts)
	})
}

// TestRewritePlain: blocks that were stored before the node had keys are encrypted. Blocks with too many layers for that stay plain and are
// served, the log names the reason, and they keep no other block plain.
func TestRewritePlain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &testkit.Log{}
		r := newRig(t, rigOptions{edit: func(o *storage.Options) {
			o.RewriteBytesPerSecond, o.Logger = 1<<20, slog.New(slog.NewTextHandler(log, nil))
		}})
		deep := r.namespace("deep", kv.SingleGroup(163, 16, 4))
		deepIDs := chain(deep, 1, 1, 2)
		r.mustPut(deep, deepIDs)
		prompts := r.fillTenants(4)
		r.close()
		r.reopenDevices()
		r.opts.keys = keyring(t, "a")
		r.open()
		r.rewritten("", 2)
		for i := range int64(3) {
			r.rewriteAt(1<<20 + i)
			synctest.Wait() // until the pass has ended
		}
		if n := r.slotsOf(""); n != 2 {
			t.Errorf("%d slots are plain; want the two that cannot be encrypted", n)
		}
		if _, n := r.load(deep, deepIDs); n != 2 {
			t.Errorf("%d blocks that cannot be encrypted are delivered; want 2", n)
		}
		r.whole("encrypted", prompts)
		const want = "block of 163 layers"
		if text := log.String(); strings.Count(text, "some blocks keep an older encryption key") != 1 || !strings.Contains(text, want) {
			t.Errorf("the log has not once %q:\n%s", want, text)
		}
	})
}

// TestRewriteRate: with the rate 0 no block is rewritten. A rate that is set later takes effect.
func TestRewriteRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, rigOptions{keys: keyring(t, "a")})
		prompts := r.fillTenants(2)
		before := r.slotsOf("a")
		r.rotate("a", "b")
		synctest.Wait() // until the movers are idle
		if n := r.slotsOf("a"); n != before {
			t.Errorf("%d of %d blocks have the old key, although none is to be rewritten", n, before)
		}
		r.rewriteAt(1 << 30)
		r.rewritten("a", 0)
		r.whole("rewritten", prompts)
	})
}

// TestRewriteFull: in a full store, a few of the coldest blocks are evicted to make room for the first batch, and all others get the
// new key.
func TestRewriteFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, rigOptions{keys: keyring(t, "a"), edit: rewriting(1 << 30)})
		ns := r.namespace("m", kv.SingleGroup(3, 4, 700))
		evicted := func() float64 { return testutil.ToFloat64(r.stats.RemovedBlocks.WithLabelValues("evicted")) }
		for i := 0; evicted() == 0; i++ {
			r.mustPut(ns, chain(ns, 4, i))
		}
		// Take the slots that the eviction has freed.
		for i := 0; r.volume(0).Slots.FreeBytes > 0 && i < 1000; i++ {
			was := evicted()
			if r.mustPut(ns, chain(ns, 1, 1_000_000+i)); evicted() > was {
				break
			}
		}
		was, slots := evicted(), r.slotsOf("a")
		r.rotate("a", "b")
		r.rewritten("a", 0)
		if lost := evicted() - was; lost > float64(slots)/4 {
			t.Errorf("%v of %d blocks were evicted", lost, slots)
		}
		if n := r.slotsOf("b"); n < slots*3/4 {
			t.Errorf("%d of %d blocks have the new key", n, slots)
		}
	})
}

// TestRewriteBesideDrain: a volume drains while the others are rewritten. The drain ends, and all blocks have the new key.
func TestRewriteBesideDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, rigOptions{capacityBytes: 48 << 20, segmentBytes: 512 << 10, keys: keyring(t, "a"), edit: rewriting(256 << 10)}, three()...)
		prompts := r.fillTenants(16)
		r.rotate("a", "b")
		synctest.Wait() // until the movers wait after their first batches
		if r.slotsOf("b") == 0 {
			t.Error("no block is rewritten before the drain")
		}
		if err := r.node.DrainVolume(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		r.drained(1)
		r.rewritten("a", 0)
		r.whole("drained and rewritten", prompts)
		if _, err := r.node.RemoveVolume(t.Context(), 1, false); err != nil {
			t.Fatal(err)
		}
		r.rotate("b")
		r.whole("removed, without the old key", prompts)
	})
}

// TestRewriteCrashPoints: the power fails at some point of a rewriting. After the restart every block is served with the right bytes,
// deleted blocks do not return, the rewriting goes on, and a rebuilt index has the same blocks.
func TestRewriteCrashPoints(t *testing.T) {
	eachDrainSeed(t, func(t *testing.T, seed uint64) {
		rng := rand.New(rand.NewPCG(seed, 4))
		devs := []blockio.Device{memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"})}
		r := newRig(t, rigOptions{capacityBytes: 24 << 20, segmentBytes: 512 << 10, durability: blockstore.DurabilitySync, keys: keyring(t, "a"), edit: func(o *storage.Options) {
			o.SyncEvery, o.RewriteBytesPerSecond = time.Hour, 1<<20
		}}, devs...)
		c := &drainedByHalf{rig: r, prompts: r.fillTenants(8)}
		full := must(r.node.Namespace("full"))
		c.deleted = chain(full, 1, 500, 501, 502)
		r.mustPut(full, c.deleted)
		if err := r.node.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		r.rotate("a", "b")
		devs[seed%2].(*memio.Device).PowerOffAfter(int64(rng.IntN(60)))
		// The rewriting ends early if the power fails before.
		moment, tick := rng.Int64N(r.slotsOf("a")+1), time.NewTicker(100*time.Millisecond)
		for i := 0; i < 30 && r.slotsOf("b") < moment; i++ {
			<-tick.C
		}
		tick.Stop()
		_, c.deletion = r.node.DeleteBlocks("full", c.deleted[1], false)
		if seed%3 == 0 {
			r.powerCut(seed)
			r.rebuild()
		} else {
			r.crash(seed)
		}
		c.check(fmt.Sprintf("after the crash with %d slots of the old key", r.slotsOf("a")))
		r.rewritten("a", 0)
		c.check("rewritten")
		r.rotate("b")
		r.close()
		r.reopenDevices()
		r.rebuild()
		c.check("after a rebuild of the index, without the old key")
	})
}
