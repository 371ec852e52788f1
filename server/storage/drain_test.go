package storage_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

// three returns the devices of three volumes with the paths a, b and c.
func three() []blockio.Device {
	var devs []blockio.Device
	for _, path := range []string{"a", "b", "c"} {
		devs = append(devs, memio.New(memio.Options{Path: path}))
	}
	return devs
}

// volume returns the state of a volume.
func (r *rig) volume(i uint32) storage.VolumeInfo { return r.node.Volumes()[i] }

// drainLog is a slog.Handler that sends on its channel, of capacity 1, when the node
// logs that a volume is drained. It ignores all other messages.
type drainLog chan struct{}

func (l drainLog) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }
func (l drainLog) WithAttrs([]slog.Attr) slog.Handler               { return l }
func (l drainLog) WithGroup(string) slog.Handler                    { return l }

func (l drainLog) Handle(_ context.Context, rec slog.Record) error {
	if strings.HasPrefix(rec.Message, "volume is drained") {
		select {
		case l <- struct{}{}:
		default:
		}
	}
	return nil
}

// drained waits until no slot of a volume is in use.
func (r *rig) drained(volume uint32) {
	r.t.Helper()
	limit := time.After(24 * time.Hour)
	for r.volume(volume).Slots.UsedBytes() != 0 {
		select {
		case <-r.drains:
		case <-limit:
			r.t.Fatalf("the volume is not drained: %+v", r.volume(volume))
		}
	}
}

// whole fails the test unless every piece of every prompt is delivered with the right
// bytes.
func (r *rig) whole(when string, prompts map[string][][]kv.BlockID) {
	r.t.Helper()
	for name, chains := range prompts {
		ns, err := r.node.Namespace(name)
		if err != nil {
			r.t.Fatal(err)
		}
		for i, ids := range chains {
			result, n := r.load(ns, ids)
			if result.Match.Blocks != len(ids) || n != len(result.Pieces) {
				r.t.Errorf("%s: prompt %d of %s: %d of %d blocks match, %d of %d pieces were delivered%s", when, i, name, result.Match.Blocks, len(ids), n, len(result.Pieces), lostOf(result))
			}
		}
	}
}

// lostOf returns a line for each piece that a Load did not deliver, with the slot that the
// match named.
func lostOf(result storage.LoadResult) string {
	var b strings.Builder
	for i, p := range result.Pieces {
		if p.State != storage.Delivered {
			fmt.Fprintf(&b, "\n\tblock %d, group %d: matched in slot %v, %v: %v", p.Block, p.Group, result.Match.Pieces[i].Ref, p.State, p.Err)
		}
	}
	return b.String()
}

// fillTenants stores prompts in namespaces of several kinds, and returns them by
// namespace.
func (r *rig) fillTenants(each int) map[string][][]kv.BlockID {
	hybrid := kv.Geometry{BlockTokens: 4, Groups: []kv.Group{
		{Kind: kv.Full, Layers: 2, TokenBytes: 300}, {Kind: kv.Window, Layers: 1, TokenBytes: 100, WindowTokens: 6}, {Kind: kv.State, Layers: 1, TokenBytes: 500},
	}}
	prompts := map[string][][]kv.BlockID{}
	for _, ns := range []kv.Namespace{
		r.namespace("full", kv.SingleGroup(3, 4, 700)),
		r.namespace("quota", kv.SingleGroup(3, 4, 700), func(ns *kv.Namespace) { ns.QuotaBytes = 8 << 20 }),
		r.namespace("flat", kv.SingleGroup(1, 4, 1000), func(ns *kv.Namespace) { ns.Index = kv.IndexFlat }),
		r.namespace("hybrid", hybrid),
	} {
		for i := range each {
			ids := chain(ns, 3, i%3, i)
			r.putAll(ns, ids)
			prompts[ns.Name] = append(prompts[ns.Name], ids)
		}
	}
	return prompts
}

// TestDrainBesideLoad: while a volume is drained, no read is a miss, and writes,
// deletions and leases work. Afterwards every block is on the other volumes, unchanged.
// Then the volume is removed and the node starts without it.
func TestDrainBesideLoad(t *testing.T) {
	for _, d := range []blockstore.Durability{blockstore.DurabilityBatch, blockstore.DurabilitySync} {
		t.Run(d.String(), func(t *testing.T) { synctest.Test(t, func(t *testing.T) { drainBesideLoad(t, d) }) })
	}
}

func drainBesideLoad(t *testing.T, d blockstore.Durability) {
	const gone = 1
	devs := three()
	for i := range devs {
		devs[i] = faultio.Wrap(devs[i], faultio.MustParse(`(Delay 1ms (File "segment-*"))`))
	}
	r := newRig(t, rigOptions{capacityBytes: 48 << 20, segmentBytes: 512 << 10, durability: d, edit: func(o *storage.Options) { o.HotBytes = 1 << 20 }}, devs...)
	prompts := r.fillTenants(16)
	full, err := r.node.Namespace("full")
	if err != nil {
		t.Fatal(err)
	}
	var doomed [][]kv.BlockID
	for i := range 20 {
		ids := chain(full, 2, 1000+i)
		r.mustPut(full, ids)
		doomed = append(doomed, ids)
	}
	before := r.node.Stats()
	_, pinned, err := r.node.Match(storage.MatchRequest{Namespace: "full", IDs: prompts["full"][0], Pin: true})
	if err != nil || pinned.Lease == 0 {
		t.Fatal(pinned, err)
	}
	if r.volume(gone).Slots.Live == 0 {
		t.Fatal("nothing lies on the volume")
	}
	if err := r.node.DrainVolume(t.Context(), gone); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	worker := func(f func(rng *rand.Rand)) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, 2))
			rate := time.NewTicker(time.Millisecond)
			defer rate.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-rate.C:
					f(rng)
				}
			}
		})
	}
	for name, chains := range prompts {
		ns, err := r.node.Namespace(name)
		if err != nil {
			t.Fatal(err)
		}
		worker(func(rng *rand.Rand) {
			i := rng.IntN(len(chains))
			result, n, err := r.tryLoad(context.Background(), ns, chains[i], func(req *storage.LoadRequest) {
				if name == "full" && rng.IntN(2) == 0 {
					req.FirstLayer, req.Layers = 1, 1
					for b := range chains[i] {
						req.Pieces = append(req.Pieces, storage.PieceRef{Block: b})
					}
				}
			})
			if err != nil || result.Match.Blocks != len(chains[i]) || n != len(result.Pieces) {
				t.Errorf("prompt %d of %s during the drain: %d of %d blocks, %d of %d pieces: %v", i, name, result.Match.Blocks, len(chains[i]), n, len(result.Pieces), err)
			}
		})
	}
	written := map[string][][]kv.BlockID{}
	changed := make(chan struct{}, 2) // the writer and the deleter each send when they are done
	repeat := func(n int, f func(i int)) {
		wg.Go(func() {
			rate := time.NewTicker(time.Millisecond)
			defer rate.Stop()
			for i := range n {
				<-rate.C
				f(i)
			}
			changed <- struct{}{}
		})
	}
	repeat(60, func(i int) {
		ids := chain(full, 2, 2000+i)
		r.mustPut(full, ids)
		written["full"] = append(written["full"], ids)
	})
	repeat(len(doomed), func(i int) {
		if _, err := r.node.DeleteBlocks("full", doomed[i][1], false); err != nil {
			t.Error(err)
		}
	})
	worker(func(rng *rand.Rand) {
		for _, v := range must(r.node.Verify(context.Background(), "full", 0, prompts["full"][rng.IntN(4)])) {
			if v.State != storage.Delivered {
				t.Errorf("verify during the drain: %v: %v", v.State, v.Err)
			}
		}
	})
	r.drained(gone)
	<-changed
	<-changed
	cancel()
	wg.Wait()
	r.whole("drained", prompts)
	r.whole("drained, written during the drain", written)
	for i := range 20 {
		if result, _ := r.load(full, chain(full, 2, 1000+i)); result.Match.Blocks != 1 {
			t.Errorf("deleted block %d: %d blocks match; want the one before it", i, result.Match.Blocks)
		}
	}
	after := r.node.Stats()
	if after.Index.Leases != before.Index.Leases+1 {
		t.Errorf("%d leases after the drain, %d before", after.Index.Leases, before.Index.Leases)
	}
	if err := r.node.Release(pinned.Lease); err != nil {
		t.Errorf("release of the lease taken before the drain: %v", err)
	}
	v := r.volume(gone)
	if v.Move.MovedBlocks == 0 || v.Move.MovedBytes < v.Move.MovedBlocks*4096 || v.Move.Failures != 0 || v.Move.BytesPerSecond <= 0 {
		t.Errorf("stats of the moves: %+v", v.Move)
	}
	for _, why := range []string{"evicted", "corrupt", "volume"} {
		if n := testutil.ToFloat64(r.stats.RemovedBlocks.WithLabelValues(why)); n != 0 {
			t.Errorf("%v blocks were removed: %s", n, why)
		}
	}
	if lost, err := r.node.RemoveVolume(t.Context(), gone, false); err != nil || lost.Blocks != 0 {
		t.Fatalf("remove the drained volume: %+v, %v", lost, err)
	}
	r.whole("removed", prompts)
	r.close()
	for i, d := range devs {
		devs[i] = d.(*faultio.Device).Device.(*memio.Device).Reopen()
	}
	r.devices = []blockio.Device{devs[0], devs[2]}
	if v.Path != "b" {
		t.Fatalf("volume %d is %s", gone, v.Path)
	}
	r.open()
	r.whole("after a start without it", prompts)
	if r.volume(gone).Health.State != health.Removed || r.node.Recovered().Rejected != 0 {
		t.Errorf("volume %+v, recovered %+v", r.volume(gone).Health, r.node.Recovered())
	}
	r.close()
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestDrainFaults: with faults on the source or on the targets, readable blocks are
// moved, unreadable ones are dropped and counted, and no read returns wrong bytes.
func TestDrainFaults(t *testing.T) {
	for _, c := range []struct {
		name, path, rules string
		// lost is set if some blocks cannot be read. cleared is set if the drain ends only
		// after the rules are cleared.
		lost, cleared bool
	}{
		{"a bad sector of the source", "a", `(Err EIO (And Reads (File "segment-*") (Offset 8192 32768)))`, true, false},
		{"flipped bits of the source", "a", `(Flip (And Reads (File "segment-*") (Offset 8192 32768)))`, true, false},
		{"a target that fails writes", "b", `(Err EIO (And Writes (File "segment-*")))`, false, false},
		{"a target that fails syncs", "b", `(Err EIO Syncs)`, false, false},
		{"torn writes of a target", "b", `(Short (And Writes (File "segment-*") (Count 3)))`, false, false},
		{"a source that hangs", "a", `(Delay 3600s Reads)`, false, true},
		{"targets that are full", "b c", `(Err ENOSPC (And Writes (File "segment-*") (Offset 4096 1000000)))`, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				devs := three()
				for i := range devs {
					devs[i] = faultio.Wrap(devs[i], nil)
				}
				r := newRig(t, rigOptions{capacityBytes: 48 << 20, segmentBytes: 512 << 10, edit: func(o *storage.Options) { o.HotBytes = -1 }}, devs...)
				prompts := r.fillTenants(8)
				source := must(r.node.VolumeNamed("a"))
				for _, d := range devs {
					if strings.Contains(c.path, d.Info().Path) {
						d.(*faultio.Device).SetRules(faultio.MustParse(c.rules))
					}
				}
				if err := r.node.DrainVolume(t.Context(), source); err != nil {
					t.Fatal(err)
				}
				if c.cleared {
					time.Sleep(time.Minute)
					if v := r.volume(source); v.Slots.Live == 0 || v.Move.Stalled == nil {
						t.Errorf("while the fault lasts: %+v", v)
					}
				}
				if c.cleared {
					for _, d := range devs {
						d.(*faultio.Device).SetRules(nil)
					}
				}
				r.drained(source)
				if c.lost {
					dropped := testutil.ToFloat64(r.stats.UnreadableBlocks.WithLabelValues("drain")) + testutil.ToFloat64(r.stats.CorruptBlocks.WithLabelValues("drain"))
					if dropped == 0 {
						t.Error("no block was dropped")
					}
					r.matches(prompts) // compares every byte
					return
				}
				r.whole("drained", prompts)
			})
		})
	}
}

// TestDrainWithoutRoom: blocks without room on the other volume stay readable on the
// draining one. They are moved when there is room. Cancelling the drain moves nothing
// back, and the volume takes new blocks again.
func TestDrainWithoutRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, rigOptions{capacityBytes: 4 << 20, segmentBytes: 256 << 10}, three()[:2]...)
		ns := r.namespace("m", kv.SingleGroup(3, 4, 700))
		prompts := map[string][][]kv.BlockID{}
		for i := range 45 { // 180 blocks of 16 KiB: more than one volume holds
			ids := chain(ns, 4, i)
			r.mustPut(ns, ids)
			prompts["m"] = append(prompts["m"], ids)
		}
		if err := r.node.DrainVolume(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // until the first pass has ended
		v := r.volume(0)
		if v.Slots.Live == 0 || v.Move.MovedBlocks == 0 || !errors.Is(v.Move.Stalled, blockstore.ErrFull) {
			t.Fatalf("volume without room elsewhere: %+v", v)
		}
		r.whole("no room", prompts)
		if n := testutil.ToFloat64(r.stats.RemovedBlocks.WithLabelValues("evicted")); n != 0 {
			t.Errorf("%v blocks were evicted", n)
		}
		if _, err := r.node.RemoveVolume(t.Context(), 0, false); !errors.Is(err, blockstore.ErrVolumeState) {
			t.Fatalf("remove a volume that holds blocks: %v", err)
		}
		if err := r.node.UndrainVolume(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		left := r.volume(0).Slots.Live
		r.mustPut(ns, chain(ns, 4, 100))
		if now := r.volume(0).Slots.Live; now <= left {
			t.Errorf("after the cancel the volume holds %d blocks, before %d", now, left)
		}
		prompts["m"] = append(prompts["m"], chain(ns, 4, 100))
		if err := r.node.DrainVolume(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		for _, ids := range prompts["m"][20:] {
			if _, err := r.node.DeleteBlocks("m", ids[0], false); err != nil {
				t.Fatal(err)
			}
		}
		prompts["m"] = prompts["m"][:20]
		r.drained(0)
		r.whole("after room appeared", prompts)
	})
}

// TestRemoveByForce: a removal by force loses the blocks on the volume and their
// descendants, and no others. The node serves afterwards, and starts without the
// volume.
func TestRemoveByForce(t *testing.T) {
	r := newRig(t, rigOptions{}, three()...)
	prompts := r.fillTenants(8)
	holds := r.volume(2).Slots.Live
	lost, err := r.node.RemoveVolume(t.Context(), 2, true)
	if err != nil || lost.Blocks < holds || holds == 0 {
		t.Fatalf("%d blocks are lost of a volume with %d: %v", lost.Blocks, holds, err)
	}
	after := r.matches(prompts)
	full := r.namespace("after", kv.SingleGroup(3, 4, 700))
	r.mustPut(full, chain(full, 2, 1))
	r.close()
	r.reopenDevices()
	r.devices = r.devices[:2]
	r.open()
	r.matchAs(prompts, after)
}

// TestRemoveBesideCommit: a volume is removed by force between the writes of a Commit to
// its slots and the Put. The index refers to no slot of that volume. Neither Commit nor an
// event reports a lost block as stored, and the blocks can be stored again.
func TestRemoveBesideCommit(t *testing.T) {
	syncs := &logSyncs{waiting: make(chan struct{}), release: make(chan struct{})}
	r := newRig(t, rigOptions{durability: blockstore.DurabilitySync, index: errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(syncs.fail))}, three()...)
	m := &mirror{t: t, node: r.node, holds: make(map[string]map[kv.BlockID]bool)}
	ns := r.namespace("m", small)
	ids := chain(ns, 24, 1)
	commit, err := r.reserve(ns, ids, 0)
	if err != nil {
		t.Fatal(err)
	}
	syncs.armed.Store(true)
	type outcome struct {
		stored []storage.StoredPiece
		err    error
	}
	ended := make(chan outcome)
	go func() {
		stored, err := commit()
		ended <- outcome{stored, err}
	}()
	<-syncs.waiting // the slots are written
	volume := uint32(0)
	for i, v := range r.node.Volumes() {
		if v.Slots.Live > 0 {
			volume = uint32(i)
		}
	}
	if _, err := r.node.RemoveVolume(t.Context(), volume, true); err != nil {
		t.Fatal(err)
	}
	close(syncs.release)
	got := <-ended
	if got.err != nil {
		t.Fatal(got.err)
	}
	m.follow()
	for _, s := range got.stored {
		if m.holds["m"][ids[s.Block]] != s.Stored {
			t.Errorf("block %d: stored: %v (%s); the events differ", s.Block, s.Stored, s.Reason)
		}
	}
	r.reclaimed()
	m.compare("m", ids)
	for ref := range r.trie.Refs() {
		if ref.Extent.Volume() == volume {
			t.Errorf("the index refers to slot %v of the removed volume", ref)
		}
	}
	r.mustPut(ns, ids)
	if _, delivered := r.load(ns, ids); delivered != len(ids) {
		t.Errorf("%d of %d blocks are read after they were stored again", delivered, len(ids))
	}
}

var (
	drainSeeds = flag.Uint64("drain.seeds", testkit.Rounds[uint64](60, 15), "number of seeded crash points of TestDrainCrashPoints and of TestDrainCrashRebuild")
	drainFirst = flag.Uint64("drain.first", 0, "first seed of TestDrainCrashPoints and of TestDrainCrashRebuild")
)

// eachDrainSeed runs f in a subtest for each seed.
func eachDrainSeed(t *testing.T, f func(t *testing.T, seed uint64)) {
	for seed := *drainFirst; seed < *drainFirst+*drainSeeds; seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { f(t, seed) })
		})
	}
}

// TestDrainCrashPoints: the power fails at some point of a drain. After the restart
// every block is served with the right bytes, the drain continues, and a rebuilt index
// has the same blocks.
func TestDrainCrashPoints(t *testing.T) {
	eachDrainSeed(t, func(t *testing.T, seed uint64) {
		c := drainUntilPowerFails(t, seed)
		if c == nil {
			return
		}
		c.crash(seed)
		c.check("after the crash")
		if c.volume(c.gone).Health.Duty != health.Draining {
			t.Fatalf("the volume is no longer draining: %+v", c.volume(c.gone))
		}
		if seed%2 == 0 {
			c.drained(c.gone)
			c.check("drained")
		}
		c.close()
		c.reopenDevices()
		c.rebuild()
		c.check("after a rebuild of the index")
		c.drained(c.gone)
		c.check("drained with the rebuilt index")
	})
}

// drainedByHalf is a node in which a volume is draining, shortly before its power fails.
type drainedByHalf struct {
	*rig
	prompts map[string][][]kv.BlockID
	// gone is the draining volume.
	gone uint32
	// deleted are the ids of a prompt whose second block was deleted. deletion is the
	// outcome of that call.
	deleted  []kv.BlockID
	deletion error
}

// drainUntilPowerFails fills a node, begins to drain a volume, and lets the power of a
// volume fail after some writes. It returns nil if the power failed before the drain was
// acknowledged.
func drainUntilPowerFails(t *testing.T, seed uint64) *drainedByHalf {
	rng := rand.New(rand.NewPCG(seed, 3))
	r := newRig(t, rigOptions{capacityBytes: 24 << 20, segmentBytes: 512 << 10, durability: blockstore.DurabilitySync, edit: func(o *storage.Options) { o.SyncEvery = time.Hour }}, three()...)
	c := &drainedByHalf{rig: r, prompts: r.fillTenants(8)}
	full, err := r.node.Namespace("full")
	if err != nil {
		t.Fatal(err)
	}
	// Deleted blocks must not be matchable again after the crash.
	c.deleted = chain(full, 1, 500, 501, 502)
	r.mustPut(full, c.deleted)
	r.mustPut(full, chain(full, 1, 600, 601))
	if err := r.node.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.gone = uint32(rng.IntN(3))
	for i, d := range r.devices {
		if n := rng.IntN(40); i == int(seed%3) {
			d.(*memio.Device).PowerOffAfter(int64(n))
		}
	}
	if err := r.node.DrainVolume(t.Context(), c.gone); err != nil {
		return nil
	}
	time.Sleep(time.Duration(rng.IntN(3)) * time.Second)
	_, c.deletion = r.node.DeleteBlocks("full", c.deleted[1], false)
	return c
}

// check loads all prompts.
func (c *drainedByHalf) check(when string) {
	c.t.Helper()
	c.whole(when, c.prompts)
	full, err := c.node.Namespace("full")
	if err != nil {
		c.t.Fatal(err)
	}
	if result, _ := c.load(full, c.deleted); c.deletion == nil && result.Match.Blocks != 1 {
		c.t.Errorf("%s: %d blocks match of a chain whose second was deleted", when, result.Match.Blocks)
	}
}

// rebuild makes a new index from the volumes of a node that is closed, and opens the node.
func (r *rig) rebuild() {
	r.t.Helper()
	fresh := vfs.NewCrashableMem()
	store, index := r.offline(fresh)
	if _, err := storage.Rebuild(context.Background(), storage.RebuildOptions{Store: store, Index: index}); err != nil {
		r.t.Fatal(err)
	}
	r.online(store, index, fresh)
}

// TestDrainCrashRebuild: the power fails at some point of a drain, and the index is lost.
// The rebuilt index serves every block with the right bytes, also if a copy that the drain
// was writing is torn.
func TestDrainCrashRebuild(t *testing.T) {
	eachDrainSeed(t, func(t *testing.T, seed uint64) {
		c := drainUntilPowerFails(t, seed)
		if c == nil {
			return
		}
		c.powerCut(seed)
		c.rebuild()
		c.check("after a rebuild of the index")
	})
}
