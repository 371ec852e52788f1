package client_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
)

// putPieces writes pieces of an epoch, each with the bytes of its epoch.
func (r *rig) putPieces(ns kv.Namespace, ids []kv.BlockID, epoch kv.Epoch, pieces []client.Piece) {
	r.t.Helper()
	g := ns.Geometry
	m := r.memory(int64(len(ids)) * g.BlockBytes())
	defer m.Close(context.Background())
	for i := range pieces {
		p := &pieces[i]
		p.Offset = g.PieceOffset(p.Block, p.Group)
		fill(m.Bytes()[p.Offset:][:g.PieceBytes(p.Group)], ids[p.Block], p.Group, epoch)
	}
	w, err := r.store.Write(r.t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, Epoch: epoch, From: m, Pieces: pieces})
	if err != nil || w.Stored != len(pieces) {
		r.t.Fatalf("write %d pieces of epoch %d: %+v, %v", len(pieces), epoch, w, err)
	}
}

// readMixed reads a mixed match, and checks that each block has the bytes of its epoch.
func (r *rig) readMixed(ns kv.Namespace, m client.MatchResult) client.ReadResult {
	r.t.Helper()
	g := ns.Geometry
	mem := r.memory(int64(len(m.IDs)) * g.BlockBytes())
	defer mem.Close(context.Background())
	got, err := r.store.Read(r.t.Context(), client.ReadRequest{Namespace: ns, IDs: m.IDs, Epochs: m.Epochs, Into: mem})
	if err != nil {
		r.t.Fatal(err)
	}
	block := 0
	for _, run := range m.Epochs {
		for range min(run.Blocks, got.Blocks-block) {
			for group := range g.Groups {
				if block < g.FirstNeeded(group, len(m.IDs)) {
					continue
				}
				if err := check(mem.Bytes()[g.PieceOffset(block, group):][:g.PieceBytes(group)], m.IDs[block], group, run.Epoch); err != nil {
					r.t.Error(err)
				}
			}
			block++
		}
	}
	return got
}

// TestMixed: a mixed match names the epoch of each block, its lease keeps the blocks of all
// epochs, and a read loads each block from its epoch. Without Mix all blocks are of one.
func TestMixed(t *testing.T) {
	full := func(blocks ...int) (pieces []client.Piece) {
		for _, b := range blocks {
			pieces = append(pieces, client.Piece{Block: b})
		}
		return pieces
	}
	first := func(n int) []client.Piece {
		var blocks []int
		for b := range n {
			blocks = append(blocks, b)
		}
		return full(blocks...)
	}
	hybrid := kv.Geometry{BlockTokens: 4, DType: "bf16", Groups: []kv.Group{
		{Kind: kv.Full, Layers: 2, TokenBytes: 256},
		{Kind: kv.Window, Layers: 1, TokenBytes: 256, WindowTokens: 8},
		{Kind: kv.State, Layers: 1, TokenBytes: 1024},
	}}
	for _, c := range []struct {
		name  string
		g     kv.Geometry
		index kv.IndexKind
		// epochs has the blocks that each epoch stores, from epoch 1 on.
		epochs [][]client.Piece
		want   []kv.EpochRun
		single int
	}{
		{"tree", geometry, kv.IndexTrie, [][]client.Piece{first(9), first(6), first(2)}, []kv.EpochRun{{Epoch: 3, Blocks: 2}, {Epoch: 2, Blocks: 4}, {Epoch: 1, Blocks: 3}}, 9},
		{
			"flat", geometry, kv.IndexFlat, [][]client.Piece{first(3), full(3, 5, 6), full(0, 1, 4, 6)},
			[]kv.EpochRun{{Epoch: 3, Blocks: 2}, {Epoch: 1, Blocks: 1}, {Epoch: 2, Blocks: 1}, {Epoch: 3, Blocks: 1}, {Epoch: 2, Blocks: 1}, {Epoch: 3, Blocks: 1}}, 3,
		},
		// The window has 2 blocks. Epoch 2 has no state, so it has no prefix.
		{
			"hybrid", hybrid, kv.IndexTrie, [][]client.Piece{append(first(8), []client.Piece{{Block: 6, Group: 1}, {Block: 7, Group: 1}, {Block: 7, Group: 2}}...), first(8)},
			[]kv.EpochRun{{Epoch: 2, Blocks: 6}, {Epoch: 1, Blocks: 2}}, 8,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, nil, newHost(t, nil), newHost(t, nil))
			ns := r.namespace("m", c.g, c.index)
			ids := keys(10, 1)
			if c.index == kv.IndexTrie {
				ids = chain(ns, 10, 1)
			}
			for i, pieces := range c.epochs {
				epoch := kv.Epoch(i + 1)
				if i > 0 {
					if _, err := r.store.BumpEpoch(t.Context(), "m", epoch, kv.MaxLive); err != nil {
						t.Fatal(err)
					}
				}
				last := slices.MaxFunc(pieces, func(a, b client.Piece) int { return a.Block - b.Block }).Block
				r.putPieces(ns, ids[:last+1], epoch, pieces)
			}
			newest := kv.Epoch(len(c.epochs))
			blocks := 0
			for _, run := range c.want {
				blocks += run.Blocks
			}
			req := client.MatchRequest{Namespace: ns, IDs: ids, Epoch: newest, Oldest: 1}
			if m, err := r.store.Match(t.Context(), req); err != nil || c.index == kv.IndexTrie && m.Blocks != c.single || m.Epochs != nil {
				t.Errorf("match of one epoch: %+v, %v", m, err)
			}
			req.Mix, req.Lease = true, time.Hour
			m, err := r.store.Match(t.Context(), req)
			if err != nil || m.Blocks != blocks || !slices.Equal(m.Epochs, c.want) || m.Epoch != newest || m.Lease == nil {
				t.Fatalf("mixed match: %+v, %v; want epochs %v", m, err, c.want)
			}
			if m.Bytes != c.g.NeededBytes(blocks) {
				t.Errorf("%d bytes; want %d", m.Bytes, c.g.NeededBytes(blocks))
			}
			// Eviction removes all blocks without a lease.
			for _, h := range r.hosts {
				h.admin(func(ctx context.Context, a pb.AdminClient) error {
					_, err := a.Evict(ctx, &pb.EvictRequest{Bytes: 1 << 20})
					return err
				})
			}
			if got := r.readMixed(ns, m); got.Blocks != blocks || got.Cut != client.CutComplete || got.Epoch != newest || got.Bytes != m.Bytes {
				t.Errorf("read: %+v", got)
			}
			// If an epoch has ended, the prefix ends before the first block of that epoch.
			if err := r.store.RetireEpoch(t.Context(), "m", 1, true); err != nil {
				t.Fatal(err)
			}
			at := 0
			for _, run := range c.want {
				if run.Epoch == 1 {
					break
				}
				at += run.Blocks
			}
			if c.name == "hybrid" {
				at = 0 // a shorter prefix needs other pieces
			}
			if got := r.readMixed(ns, m); got.Blocks != at || got.Cut != client.CutEpoch {
				t.Errorf("read without epoch 1: %+v; want %d blocks", got, at)
			}
			if err := m.Lease.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestMixedRequests: epochs that do not fit the chain are refused.
func TestMixedRequests(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 4, 1)
	into := r.memory(4 * 8192)
	for _, req := range []client.ReadRequest{
		{Epochs: []kv.EpochRun{}},
		{Epochs: []kv.EpochRun{{Epoch: 1, Blocks: 3}}},
		{Epochs: []kv.EpochRun{{Epoch: 1, Blocks: 4}, {Epoch: 2, Blocks: 0}}},
		{Epochs: []kv.EpochRun{{Epoch: 0, Blocks: 4}}},
		{Epochs: []kv.EpochRun{{Epoch: 1, Blocks: 4}, {Epoch: 1, Blocks: -1}}},
		{Epochs: []kv.EpochRun{{Epoch: 1, Blocks: 4}}, Epoch: 1},
	} {
		req.Namespace, req.IDs, req.Into = ns, ids, into
		if got, err := r.store.Read(t.Context(), req); !errors.Is(err, client.ErrRequest) {
			t.Errorf("epochs %v, epoch %d: %+v, %v", req.Epochs, req.Epoch, got, err)
		}
	}
	if _, err := r.store.ReadLocal(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Epochs: []kv.EpochRun{{Epoch: 1, Blocks: 4}}}); !errors.Is(err, client.ErrRequest) {
		t.Errorf("read local: %v", err)
	}
}
