package storage_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// offline opens store and index of a closed rig, as the offline commands do. The index is fresh if
// fs is fresh.
func (r *rig) offline(fs vfs.FS) (*blockstore.Store, *trie.Trie) {
	r.t.Helper()
	store, err := blockstore.Open(context.Background(), blockstore.Options{
		Devices: r.devices, Identity: "offline", CapacityBytes: r.opts.capacityBytes, Keys: r.opts.keys,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	index, err := trie.Open(trie.Options{Dir: "index", FS: fs, MemTableBytes: 256 << 10, CacheBytes: 1 << 20})
	if err != nil {
		r.t.Fatal(err)
	}
	return store, index
}

// online closes the store and index of offline, and opens the node with the index in fs.
func (r *rig) online(store *blockstore.Store, index *trie.Trie, fs vfs.FS) {
	r.t.Helper()
	if err := index.Close(); err != nil {
		r.t.Fatal(err)
	}
	if err := store.Close(context.Background()); err != nil {
		r.t.Fatal(err)
	}
	r.reopenDevices()
	r.index = fs
	r.open()
}

func (r *rig) reopenDevices() {
	for i, d := range r.devices {
		if d, ok := d.(*memio.Device); ok {
			r.devices[i] = d.Reopen()
		}
	}
}

// TestRebuildFromDataAlone: of every prompt that was matchable, the rebuilt index matches at least
// as many blocks, with the same bytes. It matches no block of old epochs and deleted namespaces,
// and no namespace id is assigned twice.
func TestRebuildFromDataAlone(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		r := newRig(t, rigOptions{})
		full := r.namespace("full", kv.SingleGroup(3, 4, 700))
		flat := r.namespace("flat", kv.SingleGroup(1, 4, 1000), func(ns *kv.Namespace) { ns.Index = kv.IndexFlat })
		hybrid := r.namespace("hybrid", kv.Geometry{BlockTokens: 4, Groups: []kv.Group{
			{Kind: kv.Full, Layers: 2, TokenBytes: 300}, {Kind: kv.Window, Layers: 1, TokenBytes: 100, WindowTokens: 6}, {Kind: kv.State, Layers: 1, TokenBytes: 500},
		}})
		old := r.namespace("old", kv.SingleGroup(3, 4, 700))
		gone := r.namespace("gone", kv.SingleGroup(3, 4, 700))
		prompts := map[string][][]kv.BlockID{}
		for _, ns := range []kv.Namespace{full, flat, hybrid, old, gone} {
			for range 6 {
				ids := chain(ns, 1+rng.IntN(4), rng.IntN(3), rng.IntN(3), rng.IntN(50))
				prompts[ns.Name] = append(prompts[ns.Name], ids)
				r.putAll(ns, ids)
			}
		}
		ctx := context.Background()
		if _, err := r.node.BumpEpoch(ctx, "old", 0, 1); err != nil {
			t.Fatal(err)
		}
		if _, err := r.node.DeleteNamespace(ctx, "gone", false); err != nil {
			t.Fatal(err)
		}
		if _, err := r.node.Evict("", 20_000, false); err != nil {
			t.Fatal(err)
		}
		before := r.matches(prompts)
		r.close()
		r.reopenDevices()

		fresh := vfs.NewCrashableMem()
		store, index := r.offline(fresh)
		if lost, err := storage.IndexLost(store, index); err != nil || !lost {
			t.Fatalf("seed %d: IndexLost = %v, %v", seed, lost, err)
		}
		dry, err := storage.Rebuild(ctx, storage.RebuildOptions{Store: store})
		if err != nil {
			t.Fatal(err)
		}
		var done, total int64
		report, err := storage.Rebuild(ctx, storage.RebuildOptions{Store: store, Index: index, Verify: seed%2 == 0, Progress: func(d, n, _ int64) { done, total = d, n }})
		if err != nil {
			t.Fatal(err)
		}
		if report.Indexed != dry.Indexed || report.Indexed != index.Stats().Pieces || report.Orphans != 0 || report.Refused != 0 || report.Namespaces != 4 || done != total || total == 0 {
			t.Errorf("seed %d: %+v, dry %+v, progress %d of %d", seed, report, dry, done, total)
		}
		if _, err := storage.Rebuild(ctx, storage.RebuildOptions{Store: store, Index: index}); err == nil {
			t.Error("an index that is not fresh was rebuilt into")
		}
		r.online(store, index, fresh)
		after := r.matches(prompts)
		for name, want := range before {
			for i, blocks := range want {
				if got := after[name][i]; got < blocks || (name == "old" || name == "gone") && got != 0 {
					t.Errorf("seed %d: prompt %d of %s: %d blocks; before the rebuild %d", seed, i, name, got, blocks)
				}
			}
		}
		if next := r.namespace("next", kv.SingleGroup(3, 4, 700)); next.ID <= gone.ID {
			t.Errorf("seed %d: namespace id %d was issued before", seed, next.ID)
		}
		r.close()
	}
}

// putAll stores every group of every block.
func (r *rig) putAll(ns kv.Namespace, ids []kv.BlockID) {
	r.t.Helper()
	var pieces []storage.PieceRef
	for group := range ns.Geometry.Groups {
		for block := range ids {
			pieces = append(pieces, storage.PieceRef{Block: block, Group: group})
		}
	}
	if _, err := r.put(ns, ids, 0, pieces...); err != nil {
		r.t.Fatal(err)
	}
}

// matches loads every prompt, which checks every byte, and returns how many blocks of each prompt
// are reusable.
func (r *rig) matches(prompts map[string][][]kv.BlockID) map[string][]int {
	r.t.Helper()
	out := make(map[string][]int)
	for name, all := range prompts {
		ns, err := r.node.Namespace(name)
		for _, ids := range all {
			if err != nil {
				out[name] = append(out[name], 0)
				continue
			}
			result, _ := r.load(ns, ids)
			for _, p := range result.Pieces {
				if p.State != storage.Delivered {
					r.t.Errorf("%s: block %d matched and is %v: %v", name, p.Block, p.State, p.Err)
				}
			}
			out[name] = append(out[name], result.Match.Blocks)
		}
	}
	return out
}

// matchAs checks that after a restart each prompt has the number of blocks that matches
// returned before.
func (r *rig) matchAs(prompts map[string][][]kv.BlockID, before map[string][]int) {
	r.t.Helper()
	for name, blocks := range r.matches(prompts) {
		for i := range blocks {
			if blocks[i] != before[name][i] {
				r.t.Errorf("prompt %d of %s: %d blocks after the restart, %d before", i, name, blocks[i], before[name][i])
			}
		}
	}
}

// TestRebuildKeepsTheNewestCopy: a block was stored, dropped and stored again. The rebuilt index
// has it once, in its newest slot.
func TestRebuildKeepsTheNewestCopy(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", kv.SingleGroup(2, 4, 500))
	ids := chain(ns, 3, 1)
	r.mustPut(ns, ids)
	if _, err := r.node.DeleteBlocks("m", ids[0], false); err != nil {
		t.Fatal(err)
	}
	r.mustPut(ns, ids)
	r.close()
	r.reopenDevices()
	fresh := vfs.NewCrashableMem()
	store, index := r.offline(fresh)
	report, err := storage.Rebuild(context.Background(), storage.RebuildOptions{Store: store, Index: index})
	if err != nil || report.Indexed != 3 {
		t.Fatalf("%+v, %v", report, err)
	}
	r.online(store, index, fresh)
	if got := r.matches(map[string][][]kv.BlockID{"m": {ids}}); got["m"][0] != 3 {
		t.Fatalf("matches %v", got)
	}
}

// TestCheck: an intact store has no findings. A store whose index refers to a slot with damaged
// bytes has one finding, with the name of the invariant, and only with Verify.
func TestCheck(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", kv.SingleGroup(2, 4, 500))
	r.mustPut(ns, chain(ns, 3, 1, 2))
	r.mustPut(ns, chain(ns, 3, 1, 3))
	r.close()
	memory, err := arena.New(arena.Options{SizeBytes: 32 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	check := func(verify *arena.Arena) storage.CheckReport {
		t.Helper()
		r.reopenDevices()
		store, index := r.offline(r.index)
		defer func() {
			if err := index.Close(); err != nil {
				t.Error(err)
			}
			if err := store.Close(context.Background()); err != nil {
				t.Error(err)
			}
		}()
		report, err := storage.Check(context.Background(), storage.CheckOptions{Store: store, Index: index, Verify: verify})
		if err != nil {
			t.Fatal(err)
		}
		return report
	}
	if got := check(nil); got.Pieces != 9 || got.Verified != 0 || got.Stale != 0 || len(got.Findings) != 0 {
		t.Errorf("in order: %+v", got)
	}
	if got := check(memory); got.Verified != 9 || got.VerifiedBytes != 9*4000 || len(got.Findings) != 0 {
		t.Errorf("in order, verified: %+v", got)
	}
	r.reopenDevices()
	damage(t, r.devices[0])
	if got := check(nil); len(got.Findings) != 0 {
		t.Errorf("damaged, not checked: %v", got.Findings)
	}
	got := check(memory)
	if got.Verified != 8 || len(got.Findings) != 1 || got.Findings[0].Invariant != storage.ExactOrMiss || !strings.Contains(got.Findings[0].Detail, `namespace "m"`) {
		t.Errorf("damaged: %+v", got)
	}
}

// damage changes one byte of the payload of the first slot of the first segment.
func damage(t *testing.T, dev blockio.Device) {
	t.Helper()
	flip(t, dev, kv.MakeExtent(0, 0, 0), ondisk.Page) // slot 0 has the same offset for every slot size
}

// flip changes one byte in the second page of a slot, which is payload if the piece has few layers.
func flip(t *testing.T, dev blockio.Device, slot kv.Extent, slotBytes int64) {
	t.Helper()
	f, err := dev.Open(ondisk.SegmentName(slot.Segment()))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page := testkit.AlignedBuffer(t, ondisk.Page)
	at := ondisk.SegmentHeader{SlotBytes: slotBytes}.SlotOffset(slot.Slot()) + ondisk.Page
	req := []blockio.Request{{Op: blockio.Read, File: f, Offset: at, Bufs: [][]byte{page}}}
	for _, op := range []blockio.Op{blockio.Read, blockio.Write} {
		req[0].Op = op
		if err := dev.Do(context.Background(), req); err != nil {
			t.Fatal(err)
		}
		if req[0].Err != nil {
			t.Fatal(req[0].Err)
		}
		page[7] ^= 1
	}
}

// damageWhere changes the payload of each slot of a closed node for whose header pick returns true.
// It returns the number of changed slots.
func (r *rig) damageWhere(pick func(ref kv.Ref, h *ondisk.SlotHeader) bool) int {
	r.t.Helper()
	store, index := r.offline(r.index)
	slots := make(map[kv.Extent]int64)
	if _, err := store.Scan(context.Background(), blockstore.ScanOptions{}, func(ref kv.Ref, h *ondisk.SlotHeader) error {
		if pick(ref, h) {
			l, err := h.Layout()
			slots[ref.Extent] = l.SlotBytes()
			return err
		}
		return nil
	}); err != nil {
		r.t.Fatal(err)
	}
	if err := errors.Join(index.Close(), store.Close(context.Background())); err != nil {
		r.t.Fatal(err)
	}
	r.reopenDevices()
	for e, slotBytes := range slots {
		flip(r.t.(*testing.T), r.devices[e.Volume()], e, slotBytes)
	}
	r.reopenDevices()
	return len(slots)
}

// TestRebuildFromIntactCopies: a slot with a header and a damaged payload, as after a power failure
// during a write, is not indexed if another slot holds the piece.
func TestRebuildFromIntactCopies(t *testing.T) {
	t.Run("a move", func(t *testing.T) {
		r := newRig(t, rigOptions{capacityBytes: 48 << 20, segmentBytes: 512 << 10}, three()...)
		prompts := r.fillTenants(8)
		for _, volume := range []uint32{1, 2} { // some blocks are moved twice
			if err := r.node.DrainVolume(t.Context(), volume); err != nil {
				t.Fatal(err)
			}
			r.drained(volume)
		}
		r.close()
		r.reopenDevices()
		if n := r.damageWhere(func(ref kv.Ref, h *ondisk.SlotHeader) bool { return h.Origin() != ref.Generation }); n < 20 {
			t.Fatalf("%d blocks were moved", n)
		}
		r.rebuild()
		r.whole("after a rebuild of the index", prompts)
	})
	t.Run("two writers", func(t *testing.T) {
		r := newRig(t, rigOptions{durability: blockstore.DurabilitySync})
		ns := r.namespace("m", small)
		ids := chain(ns, 6, 1)
		var commits []func() ([]storage.StoredPiece, error)
		for range 2 {
			commits = append(commits, must(r.reserve(ns, ids, 0)))
		}
		for i, commit := range commits {
			for _, s := range must(commit()) {
				if s.Stored != (i == 0) {
					t.Fatalf("writer %d, block %d: stored: %v (%s)", i, s.Block, s.Stored, s.Reason)
				}
			}
		}
		stored := make(map[kv.Ref]bool)
		for ref := range r.trie.Refs() {
			stored[ref] = true
		}
		r.close()
		r.reopenDevices()
		if n := r.damageWhere(func(ref kv.Ref, _ *ondisk.SlotHeader) bool { return !stored[ref] }); n != len(ids) {
			t.Fatalf("%d of %d slots of the second writer are found", n, len(ids))
		}
		r.rebuild()
		r.whole("after a rebuild of the index", map[string][][]kv.BlockID{"m": {ids}})
	})
}

// TestRebuildBesideSecondWriter: two writers stored the beginning of a prompt, and one of them also
// its end. The rebuilt index has the whole prompt, although the unused slots of the beginning were
// written after the end.
func TestRebuildBesideSecondWriter(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small)
	ids := chain(ns, 6, 1)
	whole := must(r.reserve(ns, ids, 0))
	beginning := must(r.reserve(ns, ids[:2], 0))
	for _, commit := range []func() ([]storage.StoredPiece, error){whole, beginning} {
		must(commit())
	}
	r.close()
	r.reopenDevices()
	r.rebuild()
	r.whole("after a rebuild of the index", map[string][][]kv.BlockID{"m": {ids}})
}
