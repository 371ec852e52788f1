package storage_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// at returns the namespace as an engine with the weights of epoch e uses it.
func at(ns kv.Namespace, e kv.Epoch) kv.Namespace {
	ns.Epoch = e
	return ns
}

// TestLiveEpochs: a reader of a live epoch gets the bytes that were written in that epoch,
// and never those of another epoch.
func TestLiveEpochs(t *testing.T) {
	r := newRig(t, rigOptions{}, memories(2, 1)...)
	ns := r.namespace("m", small)
	long, short := chain(ns, 6, 1), chain(ns, 6, 1)[:2]
	r.mustPut(ns, long)
	bump := func(to kv.Epoch, keep int, live ...kv.Epoch) {
		t.Helper()
		b, err := r.node.BumpEpoch(t.Context(), "m", to, keep)
		if err != nil || !slices.Equal(b.Live, live) {
			t.Fatalf("bump: %+v, %v; want %v live", b, err, live)
		}
	}
	bump(0, 2, 2, 1)
	r.mustPut(at(ns, 2), short)
	r.mustPut(at(ns, 1), chain(ns, 1, 3)) // by an engine that has not loaded the new weights
	for _, c := range []struct {
		newest, oldest, want kv.Epoch
		blocks               int
		cut                  trie.Cut
	}{
		{0, 0, 2, 2, trie.CutAbsent},
		{2, 0, 2, 2, trie.CutAbsent},
		{1, 0, 1, 6, trie.CutComplete},
		{2, 1, 1, 6, trie.CutComplete},
		{9, 2, 2, 2, trie.CutAbsent},
		{9, 3, 2, 0, trie.CutEpoch},
		{3, 0, 2, 0, trie.CutEpoch},
	} {
		_, m, err := r.node.Match(storage.MatchRequest{Namespace: "m", Epoch: c.newest, Oldest: c.oldest, IDs: long})
		if err != nil || m.Epoch != c.want || m.Blocks != c.blocks || m.Cut != c.cut {
			t.Errorf("match of epochs %d to %d: epoch %d, %d blocks, cut %v, %v; want %+v", c.oldest, c.newest, m.Epoch, m.Blocks, m.Cut, err, c)
		}
	}
	if _, _, err := r.node.Match(storage.MatchRequest{Namespace: "m", Epoch: 1, Oldest: 2, IDs: long}); !errors.Is(err, storage.ErrRequest) {
		t.Errorf("a range of no epoch: %v", err)
	}
	read := func(e kv.Epoch, want int) {
		t.Helper()
		res, n := r.load(ns, long, func(q *storage.LoadRequest) { q.Epoch = e })
		if n != want || n > 0 && res.Match.Epoch != e {
			t.Errorf("%d blocks of epoch %d for a reader of epoch %d; want %d", n, res.Match.Epoch, e, want)
		}
	}
	read(1, 6)
	read(2, 2)
	for _, info := range r.node.Stats().Index.Namespaces[0].Live {
		if info.Matches == 0 || info.Hits == 0 || info.Pieces == 0 || info.Bytes == 0 {
			t.Errorf("counted %+v", info)
		}
	}
	// A reservation belongs to the epoch for which it was made, live or retired.
	kept, err := r.reserve(at(ns, 2), chain(ns, 1, 4), 0)
	if err != nil {
		t.Fatal(err)
	}
	over, err := r.reserve(at(ns, 1), chain(ns, 1, 5), 0)
	if err != nil {
		t.Fatal(err)
	}
	bump(5, 2, 5, 2)
	if stored, err := kept(); err != nil || !stored[0].Stored {
		t.Errorf("commit in a live epoch: %+v, %v", stored, err)
	}
	if stored, err := over(); err != nil || stored[0].Stored || stored[0].Reason != "stale_epoch" {
		t.Errorf("commit in a retired epoch: %+v, %v", stored, err)
	}
	read(1, 0)
	read(2, 2)
	read(5, 0)
	if _, err := r.node.BumpEpoch(t.Context(), "m", 0, kv.MaxLive+1); !errors.Is(err, storage.ErrRequest) {
		t.Errorf("keep too many: %v", err)
	}
	for _, to := range []kv.Epoch{math.MaxUint64, kv.MaxEpoch + 1} {
		if _, err := r.node.BumpEpoch(t.Context(), "m", to, 1); !errors.Is(err, storage.ErrRequest) {
			t.Errorf("bump to %d: %v", to, err)
		}
	}
	for e, want := range map[kv.Epoch]error{5: storage.ErrRequest, 1: storage.ErrRequest} {
		if _, err := r.node.RetireEpoch(t.Context(), "m", e, false, false); !errors.Is(err, want) {
			t.Errorf("retire epoch %d: %v", e, err)
		}
	}
	if got, err := r.node.RetireEpoch(t.Context(), "m", 2, false, true); err != nil || got.Blocks != 3 {
		t.Errorf("dry run of a retirement: %+v, %v", got, err)
	}
	read(2, 2)
	if got, err := r.node.RetireEpoch(t.Context(), "m", 2, false, false); err != nil || got.Blocks != 3 {
		t.Errorf("retirement: %+v, %v", got, err)
	}
	read(2, 0)
	bump(0, 1, 6)
	r.mustPut(at(ns, 6), long)
	read(6, 6)
	var cleared []kv.Epoch
	events, err := eventsSince(r, 0)
	for _, e := range events {
		if e.Kind == storage.AllBlocksCleared {
			cleared = append(cleared, e.Epoch)
		}
	}
	if err != nil || !slices.Equal(cleared, []kv.Epoch{1, 2, 5}) {
		t.Errorf("epochs %v were reported as cleared, %v; want 1, 2 and 5", cleared, err)
	}
}

// TestLastEpoch: after a bump to the highest epoch that a caller may name, further bumps succeed.
// No namespace can be created above that epoch.
func TestLastEpoch(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small)
	for i, to := range []kv.Epoch{kv.MaxEpoch, 0, 0} {
		b, err := r.node.BumpEpoch(t.Context(), "m", to, 2)
		if err != nil || b.Live[0] != kv.MaxEpoch+kv.Epoch(i) {
			t.Fatalf("bump to %d: %+v, %v", to, b, err)
		}
		ids := chain(ns, 1, 1)
		r.mustPut(at(ns, b.Live[0]), ids)
		if _, n := r.load(at(ns, b.Live[0]), ids, func(q *storage.LoadRequest) { q.Epoch = b.Live[0] }); n != 1 {
			t.Errorf("%d blocks of epoch %d", n, b.Live[0])
		}
	}
	above := at(ns, kv.MaxEpoch+1)
	above.Name, above.ID = "above", 0
	if _, err := r.node.CreateNamespace(t.Context(), above); !errors.Is(err, storage.ErrRequest) {
		t.Errorf("created: %v", err)
	}
}

// TestKeysOfAnEpoch: Exists and Delete apply to one epoch, DeleteBlocks to all live epochs. A
// rebuild of the index does not restore the deleted blocks.
func TestKeysOfAnEpoch(t *testing.T) {
	r := newRig(t, rigOptions{}, memories(2, 4)...)
	ns := r.namespace("m", small)
	ids := chain(ns, 3, 1)
	r.mustPut(at(ns, 1), ids)
	if _, err := r.node.BumpEpoch(t.Context(), "m", 0, 3); err != nil {
		t.Fatal(err)
	}
	r.mustPut(at(ns, 2), ids)
	exist := func(e kv.Epoch, want ...trie.GroupSet) {
		t.Helper()
		if got, _, err := r.node.Exists("m", e, ids, true); err != nil || !slices.Equal(got, want) {
			t.Errorf("blocks of epoch %d exist: %v, %v; want %v", e, got, err, want)
		}
	}
	if got, err := r.node.Delete("m", 1, ids[1:2]); err != nil || !got[0] {
		t.Fatal(got, err)
	}
	if got, err := r.node.Delete("m", 7, ids); err != nil || slices.Contains(got, true) {
		t.Errorf("deleted in an epoch that is not live: %v, %v", got, err)
	}
	check := func() {
		t.Helper()
		exist(0, 1, 1, 1)
		exist(1, 1, 0, 0)
		exist(2, 1, 1, 1)
		exist(7, 0, 0, 0)
	}
	check()
	r.loseIndex(4, false)
	check()
	if got, err := r.node.DeleteBlocks("m", ids[0], false); err != nil || got.Blocks != 4 {
		t.Errorf("deleted %+v, %v; want the block and what is below it in both epochs", got, err)
	}
	r.loseIndex(5, true)
	exist(1, 0, 0, 0)
	exist(2, 0, 0, 0)
}

// TestCatalogueOfOneEpoch: a catalogue of version 2 has one epoch for each namespace. Its deletions
// belong to that epoch.
func TestCatalogueOfOneEpoch(t *testing.T) {
	r := newRig(t, rigOptions{}, memories(2, 6)...)
	ns := r.namespace("m", small)
	if _, err := r.node.BumpEpoch(t.Context(), "m", 0, 1); err != nil {
		t.Fatal(err)
	}
	ids := chain(ns, 3, 1)
	r.mustPut(at(ns, 2), ids)
	if got, err := r.node.Delete("m", 2, ids[1:2]); err != nil || !got[0] {
		t.Fatal(got, err)
	}
	r.close()
	r.reopenDevices()
	fresh := vfs.NewCrashableMem()
	store, index := r.offline(fresh)
	var c map[string]any
	if err := json.Unmarshal(store.Catalogue(), &c); err != nil {
		t.Fatal(err)
	}
	c["version"] = 2
	for _, of := range c["deleted"].([]any) {
		delete(of.(map[string]any), "epoch")
	}
	blob, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := store.SetCatalogue(t.Context(), blob); err != nil {
		t.Fatal(err)
	}
	report, err := storage.Rebuild(t.Context(), storage.RebuildOptions{Store: store, Index: index})
	if err != nil || report.Deleted != 1 || report.Orphans != 1 {
		t.Errorf("rebuilt %+v, %v; want one deleted block, and one below it", report, err)
	}
	r.online(store, index, fresh)
	if got, _, err := r.node.Exists("m", 2, ids, false); err != nil || !slices.Equal(got, []trie.GroupSet{1, 0, 0}) {
		t.Errorf("blocks exist: %v, %v; want the first alone", got, err)
	}
}

// awaitCleared waits until the node publishes, after event seq, that an epoch has ended.
func (r *rig) awaitCleared(seq uint64) {
	r.t.Helper()
	for {
		events, err := r.node.Events().After(r.t.Context(), seq, 1000)
		if err != nil {
			r.t.Fatal(err)
		}
		for _, e := range events {
			if e.Kind == storage.AllBlocksCleared {
				return
			}
			seq = e.Sequence
		}
	}
}

// TestPinnedEpoch: a pin keeps an epoch live. When the pin ends, the node retires the epoch. A
// restart ends pins.
func TestPinnedEpoch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, rigOptions{now: time.Now}, memories(2, 2)...)
		ns := r.namespace("m", small)
		ids := chain(ns, 3, 1)
		r.mustPut(ns, ids)
		lease, e, err := r.node.PinEpoch(t.Context(), "rollout-7", "m", 0, time.Minute)
		if err != nil || e != 1 {
			t.Fatal(e, err)
		}
		for _, bad := range []kv.Epoch{2, 9} {
			if _, _, err := r.node.PinEpoch(t.Context(), "", "m", bad, time.Minute); !errors.Is(err, storage.ErrMismatch) {
				t.Errorf("pin of epoch %d: %v", bad, err)
			}
		}
		if _, _, err := r.node.PinEpoch(t.Context(), "", "m", 1, 0); !errors.Is(err, storage.ErrRequest) {
			t.Errorf("a pin without an end: %v", err)
		}
		bump := func() {
			t.Helper()
			if _, err := r.node.BumpEpoch(t.Context(), "m", 0, 1); err != nil {
				t.Fatal(err)
			}
		}
		live := func(want ...kv.Epoch) {
			t.Helper()
			if got, err := r.node.Namespace("m"); err != nil || !slices.Equal(got.Live(), want) {
				t.Fatalf("live %v, %v; want %v", got.Live(), err, want)
			}
		}
		bump()
		live(2, 1)
		pins, _, err := r.node.Pins(nil, "m", false, 0, 10)
		if err != nil || len(pins) != 1 || !pins[0].OfEpoch || pins[0].Owner != "rollout-7" || pins[0].Epoch != 1 || pins[0].Blocks != 0 {
			t.Errorf("pins %+v, %v", pins, err)
		}
		if _, err := r.node.RetireEpoch(t.Context(), "m", 1, false, false); !errors.Is(err, trie.ErrPinned) {
			t.Errorf("retirement of a pinned epoch: %v", err)
		}
		if _, n := r.load(ns, ids, func(q *storage.LoadRequest) { q.Epoch = 1 }); n != 3 {
			t.Errorf("%d of 3 blocks of the pinned epoch", n)
		}
		renewed, seq := time.Now(), r.node.Events().Last()
		if err := r.node.Renew(lease, 2*time.Minute); err != nil {
			t.Fatal(err)
		}
		r.awaitCleared(seq)
		if d := time.Since(renewed); d < 2*time.Minute {
			t.Errorf("the epoch ended %v after its pin was renewed for 2 minutes", d)
		}
		live(2)
		if err := r.node.Renew(lease, time.Minute); !errors.Is(err, trie.ErrLeaseUnknown) {
			t.Errorf("renewal of a pin that has ended: %v", err)
		}
		// The pin ends by Release, by force, and by a restart.
		if lease, _, err = r.node.PinEpoch(t.Context(), "a", "m", 2, time.Minute); err != nil {
			t.Fatal(err)
		}
		bump()
		live(3, 2)
		seq = r.node.Events().Last()
		if err := r.node.Release(lease); err != nil {
			t.Fatal(err)
		}
		r.awaitCleared(seq)
		live(3)
		if lease, _, err = r.node.PinEpoch(t.Context(), "b", "m", 3, time.Minute); err != nil {
			t.Fatal(err)
		}
		bump()
		live(4, 3)
		if _, err := r.node.RetireEpoch(t.Context(), "m", 3, true, false); err != nil {
			t.Fatal(err)
		}
		live(4)
		if err := r.node.Renew(lease, time.Minute); !errors.Is(err, trie.ErrLeaseUnknown) {
			t.Errorf("renewal of a pin of a retired epoch: %v", err)
		}
		if _, _, err := r.node.PinEpoch(t.Context(), "c", "m", 4, time.Minute); err != nil {
			t.Fatal(err)
		}
		bump()
		live(5, 4)
		r.close()
		r.reopenDevices()
		r.open()
		live(5)
	})
}

// TestOldestEpochIsEvictedFirst: a full store evicts retired epochs first, then the oldest live
// epochs of any tenant. A namespace at its quota evicts its own oldest epoch first.
func TestOldestEpochIsEvictedFirst(t *testing.T) {
	r := newRig(t, rigOptions{}, memories(2, 3)...)
	a, b := r.namespace("a", small), r.namespace("b", small)
	r.mustPut(b, chain(b, 4, 1)) // never bumped, so its epoch is the oldest
	for e := range kv.Epoch(3) {
		if e > 0 {
			if _, err := r.node.BumpEpoch(t.Context(), "a", 0, 3); err != nil {
				t.Fatal(err)
			}
		}
		r.mustPut(at(a, e+1), chain(a, 4, 1))
	}
	holds := func(want string) {
		t.Helper()
		got := ""
		for _, ns := range r.node.Stats().Index.Namespaces {
			for _, e := range ns.Live {
				got += fmt.Sprintf("%s%d:%d ", ns.Name, e.Epoch, e.Pieces)
			}
		}
		if got != want {
			t.Errorf("the index holds %q; want %q", got, want)
		}
	}
	slot := r.node.Stats().Index.Bytes / 16
	evict := func(namespace string, blocks int64) {
		t.Helper()
		if got, err := r.node.Evict(namespace, blocks*slot, false); err != nil || got.Blocks != blocks {
			t.Fatalf("evicted %+v, %v; want %d blocks", got, err, blocks)
		}
	}
	holds("a3:4 a2:4 a1:4 b1:4 ")
	evict("", 5)
	holds("a3:4 a2:3 a1:0 b1:4 ")
	evict("a", 4)
	holds("a3:3 a2:0 a1:0 b1:4 ")
	r.mustPut(at(a, 1), chain(a, 4, 1))
	if _, err := r.node.SetQuota(t.Context(), "a", 7*slot); err != nil {
		t.Fatal(err)
	}
	r.mustPut(at(a, 3), chain(a, 4, 2))
	holds("a3:7 a2:0 a1:0 b1:4 ")
}

// epochModel has the expected live epochs of one tenant.
type epochModel struct {
	ns   kv.Namespace
	pins map[trie.LeaseID]kv.Epoch
	// chains are the chains of which blocks were written, in any epoch.
	chains [][]kv.BlockID
}

func (m *epochModel) pinned(e kv.Epoch) bool {
	for _, p := range m.pins {
		if p == e {
			return true
		}
	}
	return false
}

func noPin(kv.Epoch) bool { return false }

// TestEpochsUnderPowerLoss: bumps, retirements, pins, writes, evictions and deletions of several
// tenants run in random order, the power fails at a random point, and the index survives or is
// lost. Every byte read is of the requested epoch, no retired epoch is live again, and no
// acknowledged live epoch that needs no pin is lost.
func TestEpochsUnderPowerLoss(t *testing.T) {
	for seed := range testkit.Rounds[uint64](24, 6) {
		epochLife(t, seed)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func epochLife(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 12))
	r := newRig(t, rigOptions{
		capacityBytes: 2 << 20, segmentBytes: 128 << 10, arenaBytes: 2 << 20,
		durability: []blockstore.Durability{blockstore.DurabilitySync, blockstore.DurabilityBatch, blockstore.DurabilityAsync}[seed%3],
		edit:       func(o *storage.Options) { o.SyncEvery = time.Hour; o.WriteBytesMax = 256 << 10 },
	}, memories(3, seed)...)
	var tenants []*epochModel
	for _, name := range []string{"a", "b"} {
		tenants = append(tenants, &epochModel{ns: r.namespace(name, kv.SingleGroup(2, 2, 1000)), pins: map[trie.LeaseID]kv.Epoch{}})
	}
	for round := range 3 {
		off := (seed+uint64(round))%2 == 1
		if off {
			r.devices[rng.IntN(3)].(*memio.Device).PowerOffAfter(20 + rng.Int64N(200))
		}
		// undecided is the tenant whose change the power cut interrupted. maybe is its state after
		// the change.
		var undecided *epochModel
		var maybe kv.Namespace
		for range 40 {
			m := tenants[rng.IntN(len(tenants))]
			want, err := epochStep(r, rng, m)
			if err != nil && !off {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if err != nil {
				undecided, maybe = m, want
				break
			}
			m.ns = want
			if got, err := r.node.Namespace(m.ns.Name); err != nil || !slices.Contains([]string{epochsText(m.ns), epochsText(m.ns.Settle(m.pinned))}, epochsText(got)) {
				t.Fatalf("seed %d: %s, %v; the model has %s", seed, epochsText(got), err, epochsText(m.ns))
			}
			readAll(r, rng, m)
		}
		if lost := rng.IntN(3) == 0; lost {
			r.loseIndex(seed*3+uint64(round), off)
		} else {
			r.crash(seed*3 + uint64(round))
		}
		for _, m := range tenants {
			got, err := r.node.Namespace(m.ns.Name)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			clear(m.pins)
			allowed := []string{epochsText(m.ns.Settle(noPin))}
			if m == undecided {
				allowed = append(allowed, epochsText(maybe.Settle(noPin)))
			}
			if !slices.Contains(allowed, epochsText(got)) {
				t.Fatalf("seed %d, round %d: after the crash %s; want one of %q", seed, round, epochsText(got), allowed)
			}
			m.ns = got
			readAll(r, rng, m)
		}
	}
	for _, m := range tenants {
		ids := chain(m.ns, 2, 99)
		r.mustPut(m.ns, ids)
		if _, n := r.load(m.ns, ids); n != 2 {
			t.Errorf("seed %d: the node does not work after the crashes", seed)
		}
	}
	r.close()
}

func epochsText(ns kv.Namespace) string {
	return fmt.Sprintf("%s: live %d, %d kept", ns.Name, ns.Live(), max(1, ns.Keep))
}

// epochStep makes one change to a tenant. It returns the namespace that is expected after the
// change, even if the power failed during the change.
func epochStep(r *rig, rng *rand.Rand, m *epochModel) (kv.Namespace, error) {
	ctx := context.Background()
	live := m.ns.Live()
	e := live[rng.IntN(len(live))]
	ids := chain(m.ns, 2, rng.IntN(2), rng.IntN(3), rng.IntN(3))
	switch rng.IntN(12) {
	case 0:
		keep := 1 + rng.IntN(4)
		want := m.ns.Bump(m.ns.Epoch+1+kv.Epoch(rng.IntN(2)), keep, m.pinned)
		_, err := r.node.BumpEpoch(ctx, m.ns.Name, want.Epoch, keep)
		return want, err
	case 1:
		if e == m.ns.Epoch {
			return m.ns, nil
		}
		force := rng.IntN(2) == 0
		_, err := r.node.RetireEpoch(ctx, m.ns.Name, e, force, false)
		if m.pinned(e) && !force {
			if !errors.Is(err, trie.ErrPinned) {
				return m.ns, fmt.Errorf("retire pinned epoch %d: %w", e, err)
			}
			return m.ns, nil
		}
		if errors.Is(err, trie.ErrEpoch) && !m.ns.Settle(m.pinned).IsLive(e) {
			err = nil // the node has already retired it
		}
		for id, p := range m.pins {
			if p == e && err == nil {
				delete(m.pins, id)
			}
		}
		return m.ns.Retire(e), err
	case 2:
		e = m.ns.Epoch
		lease, _, err := r.node.PinEpoch(r.t.Context(), "test", m.ns.Name, e, time.Minute)
		if err == nil {
			m.pins[lease] = e
		}
		return m.ns, err
	case 3:
		for id := range m.pins {
			delete(m.pins, id)
			return m.ns, r.node.Release(id)
		}
		return m.ns, nil
	case 4:
		_, err := r.node.Evict(m.ns.Name, 1+rng.Int64N(40<<10), false)
		return m.ns, err
	case 5:
		_, err := r.node.DeleteBlocks(m.ns.Name, ids[rng.IntN(len(ids))], false)
		if errors.Is(err, trie.ErrAbsent) {
			err = nil
		}
		return m.ns, err
	}
	m.chains = append(m.chains, ids)
	_, err := r.put(at(m.ns, e), ids, 0)
	return m.ns, err
}

// readAll reads a few chains in every epoch so far, which checks every byte, and matches ranges of
// epochs.
func readAll(r *rig, rng *rand.Rand, m *epochModel) {
	r.t.Helper()
	for range 2 {
		if len(m.chains) == 0 {
			return
		}
		ids := m.chains[rng.IntN(len(m.chains))]
		blocks := make(map[kv.Epoch]int)
		ns, err := r.node.Namespace(m.ns.Name)
		if err != nil {
			r.t.Fatal(err)
		}
		for e := kv.Epoch(1); e <= ns.Epoch+1; e++ {
			res, n, err := r.tryLoad(context.Background(), ns, ids, func(q *storage.LoadRequest) { q.Epoch = e })
			switch {
			case err != nil:
				return // the power is off
			case n > 0 && (res.Match.Epoch != e || !ns.IsLive(e)):
				r.t.Errorf("%d blocks of epoch %d for a reader of epoch %d; live %d", n, res.Match.Epoch, e, ns.Live())
			}
			// The read may have dropped a block that the power failure damaged.
			_, match, err := r.node.Match(storage.MatchRequest{Namespace: ns.Name, Epoch: e, IDs: ids})
			if err != nil {
				return
			}
			blocks[e] = match.Blocks
		}
		oldest, newest := kv.Epoch(1+rng.IntN(int(ns.Epoch))), ns.Epoch
		_, match, err := r.node.Match(storage.MatchRequest{Namespace: ns.Name, Epoch: newest, Oldest: oldest, IDs: ids})
		if err != nil {
			return
		}
		if now, err := r.node.Namespace(ns.Name); err != nil || len(now.Older) != len(ns.Older) {
			return // the node has retired an epoch whose pins had ended
		}
		best := newest
		for e := newest; e >= oldest; e-- {
			if blocks[e] > blocks[best] {
				best = e
			}
		}
		if match.Epoch != best || match.Blocks != blocks[best] {
			r.t.Errorf("match of epochs %d to %d: %d blocks of epoch %d; epochs by themselves match %v", oldest, newest, match.Blocks, match.Epoch, blocks)
		}
	}
}
