package storage_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var small = kv.SingleGroup(4, 4, 512) // blocks of 8 KiB in slots of 12

func TestPutIsLoaded(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small)
	ids := chain(ns, 8, 1, 2)
	r.mustPut(ns, ids)

	for _, state := range []string{"from the device", "hot"} {
		result, n := r.load(ns, ids)
		if n != 16 || result.Match.Blocks != 16 || result.Match.Cut != trie.CutComplete {
			t.Fatalf("%s: %d pieces, match %+v", state, n, result.Match)
		}
	}
	if s := r.node.Stats(); s.HotHits != 16 {
		t.Errorf("%d of the second load's pieces were hot", s.HotHits)
	}
	if result, n := r.load(ns, chain(ns, 8, 1, 3)); n != 8 || result.Match.Cut != trie.CutAbsent {
		t.Errorf("a prompt that shares half: %d pieces, cut %v", n, result.Match.Cut)
	}
	if result, n := r.load(ns, chain(ns, 8, 9)); n != 0 || result.Match.Blocks != 0 {
		t.Errorf("an unknown prompt: %d pieces", n)
	}
}

func TestLoadOfLayersAndPieces(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small)
	ids := chain(ns, 6, 1)
	r.mustPut(ns, ids)
	_, n := r.load(ns, ids, func(q *storage.LoadRequest) {
		q.Pieces = []storage.PieceRef{{Block: 5}, {Block: 0}, {Block: 3}}
		q.FirstLayer, q.Layers = 1, 2
	})
	if n != 3 {
		t.Fatalf("%d of 3 pieces", n)
	}
	result, n := r.load(ns, append(slices.Clone(ids[:2]), kv.BlockID{9}), func(q *storage.LoadRequest) {
		q.Pieces = []storage.PieceRef{{Block: 1}, {Block: 2}}
	})
	if n != 1 || result.Pieces[1].State != storage.Absent {
		t.Fatalf("%d pieces, %+v", n, result.Pieces)
	}
}

// TestCutThrough: a piece above the threshold is delivered in parts of whole layers.
func TestCutThrough(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 128 << 20, segmentBytes: 32 << 20, arenaBytes: 64 << 20, edit: func(o *storage.Options) {
		o.LoadBytesMax, o.WriteBytesMax = 32<<20, 32<<20
	}})
	ns := r.namespace("m", kv.SingleGroup(10, 64, 16<<10)) // 10 layers of 1 MiB
	ids := chain(ns, 2, 1)
	r.mustPut(ns, ids)
	if _, n := r.load(ns, ids); n != 2 {
		t.Fatalf("%d pieces", n)
	}
	if parts, err := r.parts(ids[:1]); err != nil || parts != 5 {
		t.Fatalf("%d parts, %v; want 5 of 2 MiB", parts, err)
	}
}

// TestStoreAndForward: cut-through can be disabled.
func TestStoreAndForward(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 128 << 20, segmentBytes: 32 << 20, arenaBytes: 64 << 20, edit: func(o *storage.Options) {
		o.LoadBytesMax, o.WriteBytesMax, o.CutThroughBytes = 32<<20, 32<<20, -1
	}})
	ns := r.namespace("m", kv.SingleGroup(10, 64, 16<<10))
	ids := chain(ns, 1, 1)
	r.mustPut(ns, ids)
	if parts, err := r.parts(ids); err != nil || parts != 1 {
		t.Fatalf("%d parts, %v; want the whole piece", parts, err)
	}
}

// parts loads a chain of namespace m and counts its parts.
func (r *rig) parts(ids []kv.BlockID) (parts int, err error) {
	_, err = r.node.Load(r.t.Context(), storage.LoadRequest{Namespace: "m", IDs: ids}, func(_ context.Context, ps []storage.Part) {
		for i := range ps {
			parts++
			ps[i].Done(nil)
		}
	})
	return parts, err
}

func TestRestartKeepsEverything(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small)
	r.mustPut(ns, chain(ns, 20, 1))
	if _, err := r.node.BumpEpoch(t.Context(), "m", 7, 1); err != nil {
		t.Fatal(err)
	}
	ns.Epoch = 7
	r.mustPut(ns, chain(ns, 10, 2))
	if err := r.node.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, d := range r.devices {
		r.devices[i] = d.(*memio.Device).Reopen()
	}
	r.open()
	if got := r.node.Recovered(); got.Blocks != 10 || got.Rejected != 0 {
		t.Errorf("recovered %+v", got)
	}
	again, err := r.node.Namespace("m")
	if err != nil || again.Epoch != 7 {
		t.Fatalf("namespace %+v, %v", again, err)
	}
	if _, n := r.load(again, chain(ns, 10, 2)); n != 10 {
		t.Errorf("%d of 10 blocks after the restart", n)
	}
	if _, n := r.load(again, chain(ns, 20, 1)); n != 0 {
		t.Errorf("%d blocks of an old epoch", n)
	}
}

func TestEpochBumpMissesAtOnce(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small)
	ids := chain(ns, 16, 1)
	r.mustPut(ns, ids)
	bumped, err := r.node.BumpEpoch(t.Context(), "m", 0, 1)
	if err != nil || bumped.Old != 1 || !slices.Equal(bumped.Live, []kv.Epoch{2}) || !slices.Equal(bumped.Retired, []kv.Epoch{1}) {
		t.Fatalf("bumped: %+v, %v", bumped, err)
	}
	if result, n := r.load(ns, ids); n != 0 || result.Match.Blocks != 0 {
		t.Fatalf("%d blocks after the bump", n)
	}
	if _, err := r.put(kv.Namespace{ID: ns.ID, Name: "m", Geometry: ns.Geometry, Index: ns.Index, Epoch: 9}, ids, 0); !errors.Is(err, storage.ErrMismatch) {
		t.Errorf("a write of a later epoch: %v", err)
	}
	if result, _ := r.load(ns, ids, func(q *storage.LoadRequest) { q.Epoch = 5 }); result.Match.Cut != trie.CutEpoch {
		t.Errorf("a read of another epoch was cut by %v", result.Match.Cut)
	}
	for _, to := range []kv.Epoch{2, 0} {
		if _, err := r.node.BumpEpoch(t.Context(), "m", to, 1); (to == 2) != errors.Is(err, trie.ErrEpoch) {
			t.Errorf("bump to %d: %v", to, err)
		}
	}
	ns.Epoch = 3
	r.mustPut(ns, ids)
	if _, n := r.load(ns, ids); n != 16 {
		t.Errorf("%d of 16 blocks in the new epoch", n)
	}
}

// TestFullStoreEvictsLeafFirst: writing three times the capacity succeeds, leased blocks stay, and
// every remaining prefix is closed.
func TestFullStoreEvictsLeafFirst(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 4 << 20, segmentBytes: 512 << 10})
	ns := r.namespace("m", small)
	pinned := chain(ns, 8, 1)
	r.mustPut(ns, pinned)
	if _, m, err := r.node.Match(storage.MatchRequest{Namespace: "m", IDs: pinned, TTL: time.Hour}); err != nil || m.Lease == 0 {
		t.Fatalf("lease: %+v, %v", m, err)
	}
	for i := range 120 {
		r.mustPut(ns, chain(ns, 8, 100+i))
	}
	if _, n := r.load(ns, pinned); n != 8 {
		t.Errorf("%d of 8 leased blocks", n)
	}
	if s := r.node.Stats().Index; s.Pieces < 100 || s.Pieces > 400 {
		t.Errorf("%d pieces in a store for about 330", s.Pieces)
	}
}

// TestGeometriesShareTheStore: when blocks of one slot size fill the store, writes of another slot
// size repeatedly get room.
func TestGeometriesShareTheStore(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 4 << 20, segmentBytes: 512 << 10})
	a := r.namespace("a", small)
	b := r.namespace("b", kv.SingleGroup(4, 4, 5000))
	for round := range 3 {
		for i := range 60 {
			r.mustPut(a, chain(a, 8, 1000*round+i))
		}
		for i := range 20 {
			r.mustPut(b, chain(b, 2, 1000*round+i))
		}
		if _, n := r.load(b, chain(b, 2, 1000*round+19)); n != 2 {
			t.Errorf("round %d: %d of 2 blocks of the other size", round, n)
		}
	}
}

// TestReservationHoldsItsParent: eviction between Reserve and Commit does not remove the parent of
// the new blocks.
func TestReservationHoldsItsParent(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small)
	ids := chain(ns, 4, 1, 2)
	r.mustPut(ns, ids[:4])
	r.mustPut(ns, chain(ns, 4, 9))
	res, err := r.node.Reserve(t.Context(), storage.ReserveRequest{Namespace: "m", Geometry: small.Digest(), Parent: ids[3], IDs: ids[4:]})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.node.Evict("m", 1<<30, false); err != nil {
		t.Fatal(err)
	}
	var sums []storage.PieceSums
	for _, g := range res.Grants {
		payload := res.Bytes()[g.Offset:][:small.PieceBytes(0)]
		content(ids[4+g.Block], ns.Epoch, 0, payload)
		sums = append(sums, storage.PieceSums{PieceRef: g.PieceRef, LayerSums: ondisk.AppendLayerSums(nil, payload, 4)})
	}
	if _, err := r.node.Commit(t.Context(), res.ID, sums, nil); err != nil {
		t.Fatal(err)
	}
	if _, n := r.load(ns, ids); n != 8 {
		t.Errorf("%d of 8 blocks", n)
	}
	if s := r.node.Stats().Index; s.Leases != 0 || s.Pieces != 8 {
		t.Errorf("%d leases, %d pieces are left", s.Leases, s.Pieces)
	}
}

// TestQuota: a namespace over its quota loses only its own blocks. A call that exceeds the whole
// quota is stored in part.
func TestQuota(t *testing.T) {
	r := newRig(t, rigOptions{})
	other := r.namespace("other", small)
	r.mustPut(other, chain(other, 20, 1))
	ns := r.namespace("m", small, func(n *kv.Namespace) { n.QuotaBytes = 100 << 10 }) // 8 slots of 12 KiB
	for i := range 10 {
		r.mustPut(ns, chain(ns, 5, i))
		if _, n := r.load(ns, chain(ns, 5, i)); n != 5 {
			t.Errorf("prompt %d: %d of 5 blocks that were just put", i, n)
		}
	}
	stored, err := r.put(ns, chain(ns, 20, 99), 0)
	if err != nil {
		t.Fatal(err)
	}
	kept := 0
	for _, s := range stored {
		if s.Stored {
			kept++
		}
	}
	if kept == 0 || kept > 8 {
		t.Errorf("%d slots of 12 KiB in a quota of 100 KiB", kept)
	}
	if _, n := r.load(other, chain(other, 20, 1)); n != 20 {
		t.Errorf("%d of 20 blocks of the namespace beside it", n)
	}
}

func TestHybridGroups(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", kv.Geometry{BlockTokens: 4, Groups: []kv.Group{
		{Kind: kv.Full, Layers: 2, TokenBytes: 300},
		{Kind: kv.Window, Layers: 3, TokenBytes: 100, WindowTokens: 8},
		{Kind: kv.State, Layers: 1, TokenBytes: 9000},
	}})
	ids := chain(ns, 10, 1)
	var pieces []storage.PieceRef
	for b := range ids {
		pieces = append(pieces, storage.PieceRef{Block: b}, storage.PieceRef{Block: b, Group: 1})
		if b == 3 || b == 7 {
			pieces = append(pieces, storage.PieceRef{Block: b, Group: 2})
		}
	}
	stored, err := r.put(ns, ids, 0, pieces...)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range stored {
		if !s.Stored {
			t.Fatalf("%+v", s)
		}
	}
	result, n := r.load(ns, ids)
	if result.Match.Blocks != 8 || result.Match.Cut != trie.CutStateMissing {
		t.Fatalf("matched %d blocks, cut %v; the last state is at 8", result.Match.Blocks, result.Match.Cut)
	}
	if want := 8 + 2 + 1; n != want {
		t.Errorf("%d pieces; want %d", n, want)
	}
}

func TestFlatNamespace(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small, func(n *kv.Namespace) { n.Index = kv.IndexFlat })
	keys := []kv.BlockID{{1}, {2}, {3}, {4}}
	r.mustPut(ns, []kv.BlockID{keys[0], keys[1], keys[3]})
	if result, n := r.load(ns, keys); n != 2 || result.Match.Blocks != 2 {
		t.Errorf("%d pieces, match %+v", n, result.Match)
	}
	if _, n := r.load(ns, keys[3:]); n != 1 {
		t.Errorf("%d pieces of the last key", n)
	}
}

func TestDeleteAndVerify(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small)
	trunk, left, right := chain(ns, 4, 1), chain(ns, 4, 1, 2), chain(ns, 4, 1, 3)
	r.mustPut(ns, left)
	r.mustPut(ns, right)
	verified, err := r.node.Verify(t.Context(), "m", 0, append(slices.Clone(left), kv.BlockID{9}))
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range verified {
		if want := map[bool]storage.PieceState{true: storage.Delivered, false: storage.Absent}[i < 8]; v.State != want {
			t.Errorf("piece %d is %v; want %v", i, v.State, want)
		}
	}
	for _, dry := range []bool{true, false} {
		removed, err := r.node.DeleteBlocks("m", left[5], dry)
		if err != nil || removed.Blocks != 3 {
			t.Fatalf("dry run %v: %+v, %v", dry, removed, err)
		}
	}
	if _, n := r.load(ns, left); n != 5 {
		t.Errorf("%d of 5 blocks above the cut", n)
	}
	if _, n := r.load(ns, right); n != 8 {
		t.Errorf("%d of 8 blocks of the other branch", n)
	}
	if _, err := r.node.DeleteBlocks("m", kv.BlockID{1}, false); !errors.Is(err, trie.ErrAbsent) {
		t.Errorf("deleting what is not there: %v", err)
	}
	if removed, err := r.node.DeleteNamespace(t.Context(), "m", true); err != nil || removed.Blocks == 0 {
		t.Errorf("dry run: %+v, %v", removed, err)
	}
	if _, err := r.node.DeleteNamespace(t.Context(), "m", false); err != nil {
		t.Fatal(err)
	}
	if _, err := r.node.Namespace("m"); !errors.Is(err, trie.ErrNamespaceUnknown) {
		t.Errorf("after the deletion: %v", err)
	}
	// A new namespace of the same name shows no data of the deleted one.
	again := r.namespace("m", small)
	if _, n := r.load(again, trunk); n != 0 || again.ID == ns.ID {
		t.Errorf("%d blocks of a namespace that was deleted", n)
	}
}

func TestEventsTellOfEveryChange(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small)
	ids := chain(ns, 3, 1)
	r.mustPut(ns, ids)
	if _, err := r.node.Evict("m", 1, false); err != nil {
		t.Fatal(err)
	}
	if _, err := r.node.BumpEpoch(t.Context(), "m", 0, 1); err != nil {
		t.Fatal(err)
	}
	events, err := r.node.Events().After(t.Context(), 0, 10)
	if err != nil || len(events) != 3 {
		t.Fatalf("%d events, %v", len(events), err)
	}
	if e := events[0]; e.Kind != storage.BlockStored || len(e.IDs) != 3 || !e.Parent.IsZero() {
		t.Errorf("stored: %+v", e)
	}
	if e := events[1]; e.Kind != storage.BlockRemoved || e.Reason != "evicted" || e.IDs[0] != ids[2] {
		t.Errorf("removed: %+v", e)
	}
	if e := events[2]; e.Kind != storage.AllBlocksCleared || e.Reason != "epoch" {
		t.Errorf("cleared: %+v", e)
	}
}

func TestBadRequestsAreNamed(t *testing.T) {
	r := newRig(t, rigOptions{edit: func(o *storage.Options) { o.ChainBlocksMax = 32; o.WriteBytesMax = 128 << 10 }})
	ns := r.namespace("m", small)
	ids := chain(ns, 4, 1)
	reserve := func(edit func(*storage.ReserveRequest)) error {
		q := storage.ReserveRequest{Namespace: "m", Geometry: small.Digest(), IDs: ids}
		edit(&q)
		res, err := r.node.Reserve(t.Context(), q)
		if err == nil && res.ID != 0 {
			err = r.node.Abort(res.ID)
		}
		return err
	}
	load := func(edit func(*storage.LoadRequest)) error {
		_, _, err := r.tryLoad(t.Context(), ns, ids, edit)
		return err
	}
	flat := r.namespace("flat", small, func(n *kv.Namespace) { n.Index = kv.IndexFlat })
	suffixOfFlat := func(q *storage.LoadRequest) { q.Namespace, q.Suffix = flat.Name, true }
	nothing := func(*storage.ReserveRequest) {}
	if err := reserve(nothing); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		err  error
		want error
	}{
		"unknown namespace":    {reserve(func(q *storage.ReserveRequest) { q.Namespace = "x" }), trie.ErrNamespaceUnknown},
		"wrong geometry":       {reserve(func(q *storage.ReserveRequest) { q.Geometry[0]++ }), storage.ErrMismatch},
		"no blocks":            {reserve(func(q *storage.ReserveRequest) { q.IDs = nil }), storage.ErrRequest},
		"chain too long":       {reserve(func(q *storage.ReserveRequest) { q.IDs = make([]kv.BlockID, 33) }), storage.ErrRequest},
		"zero id":              {reserve(func(q *storage.ReserveRequest) { q.IDs = []kv.BlockID{{}} }), storage.ErrRequest},
		"too many bytes":       {reserve(func(q *storage.ReserveRequest) { q.IDs = chain(ns, 20, 1) }), storage.ErrRequest},
		"piece out of range":   {reserve(func(q *storage.ReserveRequest) { q.Pieces = []storage.PieceRef{{Block: 4}} }), storage.ErrRequest},
		"group out of range":   {reserve(func(q *storage.ReserveRequest) { q.Pieces = []storage.PieceRef{{Group: 1}} }), storage.ErrRequest},
		"read of no namespace": {load(func(q *storage.LoadRequest) { q.Namespace = "x" }), trie.ErrNamespaceUnknown},
		"read of no blocks":    {load(func(q *storage.LoadRequest) { q.IDs = nil }), storage.ErrRequest},
		"read of layer 4":      {load(func(q *storage.LoadRequest) { q.Pieces = []storage.PieceRef{{}}; q.FirstLayer = 4 }), storage.ErrRequest},
		"read of 5 layers":     {load(func(q *storage.LoadRequest) { q.Pieces = []storage.PieceRef{{}}; q.Layers = 5 }), storage.ErrRequest},
		"read of block -1":     {load(func(q *storage.LoadRequest) { q.Pieces = []storage.PieceRef{{Block: -1}} }), storage.ErrRequest},
		"suffix of keys":       {load(suffixOfFlat), storage.ErrRequest},
		"suffix alone":         {load(func(q *storage.LoadRequest) { q.Suffix, q.Alone = true, true }), storage.ErrRequest},
		"unknown reservation":  {r.node.Abort(99), storage.ErrReservation},
		"unknown lease":        {r.node.Release(99), trie.ErrLeaseUnknown},
		"negative quota":       {func() error { _, err := r.node.SetQuota(t.Context(), "m", -1); return err }(), storage.ErrRequest},
		"evict nothing":        {func() error { _, err := r.node.Evict("", 0, false); return err }(), storage.ErrRequest},
		"another definition": {func() error {
			_, err := r.node.CreateNamespace(t.Context(), kv.Namespace{Name: "m", Geometry: kv.SingleGroup(1, 1, 1), Index: kv.IndexTrie})
			return err
		}(), trie.ErrNamespaceExists},
		"block beyond segments": {func() error {
			_, err := r.node.CreateNamespace(t.Context(), kv.Namespace{Name: "huge", Geometry: kv.SingleGroup(64, 64, 1<<14), Index: kv.IndexTrie})
			return err
		}(), storage.ErrRequest},
	} {
		if !errors.Is(tc.err, tc.want) {
			t.Errorf("%s: %v; want %v", name, tc.err, tc.want)
		}
	}
}

// TestCommitVerifies: bytes that differ from the writer's checksums are refused, with all
// descendants.
func TestCommitVerifies(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small)
	ids := chain(ns, 4, 1)
	res, err := r.node.Reserve(t.Context(), storage.ReserveRequest{Namespace: "m", Geometry: small.Digest(), IDs: ids})
	if err != nil {
		t.Fatal(err)
	}
	var sums []storage.PieceSums
	for _, g := range res.Grants {
		payload := res.Bytes()[g.Offset:][:small.PieceBytes(0)]
		content(ids[g.Block], ns.Epoch, 0, payload)
		sums = append(sums, storage.PieceSums{PieceRef: g.PieceRef, LayerSums: ondisk.AppendLayerSums(nil, payload, 4)})
		if g.Block == 2 {
			payload[5000] ^= 1
		}
	}
	stored, err := r.node.Commit(t.Context(), res.ID, sums, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"", "", "corrupt", "parent_absent"} {
		if stored[i].Reason != want || stored[i].Stored != (want == "") {
			t.Errorf("block %d: %+v; want reason %q", i, stored[i], want)
		}
	}
	if _, n := r.load(ns, ids); n != 2 {
		t.Errorf("%d blocks are matchable", n)
	}
	if _, err := r.node.Commit(t.Context(), res.ID, sums, nil); !errors.Is(err, storage.ErrReservation) {
		t.Errorf("a second commit: %v", err)
	}
}

func TestReservationsAreBounded(t *testing.T) {
	var clock atomic.Int64
	r := newRig(t, rigOptions{now: func() time.Time { return time.Unix(1000+clock.Load(), 0) }, edit: func(o *storage.Options) {
		o.ReservationsMax, o.QueueWait = 3, time.Millisecond
	}})
	ns := r.namespace("m", small)
	reserve := func(i int) (*storage.Reservation, error) {
		return r.node.Reserve(t.Context(), storage.ReserveRequest{Namespace: "m", Geometry: small.Digest(), IDs: chain(ns, 1, i)})
	}
	ended := make(chan storage.ReservationID, 8)
	for i := range 3 {
		res, err := reserve(i)
		if err != nil {
			t.Fatal(err)
		}
		res.OnEnd(func() { ended <- res.ID })
	}
	if _, err := reserve(3); !errors.Is(err, storage.ErrBusy) {
		t.Fatalf("a fourth reservation: %v", err)
	}
	clock.Add(3600)
	for range 3 {
		<-ended // the expiry loop ends them
	}
	if _, err := reserve(4); err != nil {
		t.Fatalf("after the others expired: %v", err)
	}
	r.node.Drain()
	if _, err := reserve(5); !errors.Is(err, storage.ErrDraining) {
		t.Fatalf("while draining: %v", err)
	}
}

// TestEverythingAtOnce: writers, readers, eviction, epochs and deletions run concurrently. tryLoad
// checks every byte.
func TestEverythingAtOnce(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 3 << 20, segmentBytes: 256 << 10}, memio.New(memio.Options{}), memio.New(memio.Options{}))
	names := []kv.Namespace{r.namespace("a", small), r.namespace("b", kv.SingleGroup(3, 4, 1000))}
	const rounds = 150
	var wg sync.WaitGroup
	for w := range 6 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 1))
			for range rounds {
				ns, err := r.node.Namespace(names[rng.IntN(2)].Name)
				if err != nil {
					t.Error(err)
					return
				}
				ids := chain(ns, 4, rng.IntN(6), rng.IntN(6), rng.IntN(6))
				if rng.IntN(2) == 0 {
					if _, err := r.put(ns, ids, 0); err != nil && !errors.Is(err, storage.ErrBusy) {
						t.Errorf("put: %v", err)
					}
				} else if _, _, err := r.tryLoad(context.Background(), ns, ids); err != nil && !errors.Is(err, storage.ErrBusy) {
					t.Errorf("load: %v", err)
				}
			}
		})
	}
	wg.Go(func() {
		rng := rand.New(rand.NewPCG(9, 9))
		for i := range rounds {
			ns := names[rng.IntN(2)]
			switch {
			case i%30 == 29:
				if _, err := r.node.BumpEpoch(context.Background(), ns.Name, 0, 1); err != nil {
					t.Error(err)
				}
			case i%3 == 0:
				if _, err := r.node.Evict("", 200<<10, false); err != nil {
					t.Error(err)
				}
			default:
				ns, _ = r.node.Namespace(ns.Name)
				_, err := r.node.DeleteBlocks(ns.Name, chain(ns, 4, rng.IntN(6), rng.IntN(6))[rng.IntN(8)], false)
				if err != nil && !errors.Is(err, trie.ErrAbsent) {
					t.Error(err)
				}
			}
		}
	})
	wg.Wait()
}

func TestDurabilitySyncSurvivesPowerLoss(t *testing.T) {
	r := newRig(t, rigOptions{durability: blockstore.DurabilitySync})
	ns := r.namespace("m", small)
	ids := chain(ns, 12, 1)
	r.mustPut(ns, ids)
	r.crash(1)
	if _, n := r.load(ns, ids); n != 12 {
		t.Fatalf("%d of 12 acknowledged blocks after the power failed", n)
	}
}

// A reduced capacity applies from the next start on: the start drops the surplus, and writers get
// room.
func TestSmallerCapacity(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 16 << 20})
	ns := r.namespace("m", small)
	var chains [][]kv.BlockID
	for i := range 20 {
		chains = append(chains, chain(ns, 64, i+1))
		r.mustPut(ns, chains[i])
	}
	if err := r.node.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	const capacity = 6 << 20
	r.opts.capacityBytes = capacity
	r.reopenDevices()
	r.open()
	stats := r.store.Stats()
	if used := stats.Slots.UsedBytes(); used > capacity || used < capacity/2 {
		t.Errorf("%d bytes in slots after the start; want at most %d, and not much less", used, capacity)
	}
	if refs := r.store.Surplus(); len(refs) > 0 {
		t.Errorf("%d live slots in surplus segments", len(refs))
	}
	for _, ids := range chains {
		r.load(ns, ids) // load checks every byte
	}
	for i := range 20 {
		r.mustPut(ns, chain(ns, 64, 100+i))
	}
}
