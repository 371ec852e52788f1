package client_test

import (
	"context"
	"testing"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
)

// TestReadProgress: a Read of several tasks reports its progress, one call at a time. It never
// reports more blocks than the result has, and the last report has all delivered blocks. Bytes
// arrive before their task is verified.
func TestReadProgress(t *testing.T) {
	r := newRig(t, func(o *client.Options) { o.ReadTaskBytes = 8 * 8192 }, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	const stored, size = 28, 8192
	ids := chain(ns, 32, 1)
	r.mustPut(ns, ids[:stored])
	for _, asked := range []int{1, stored, len(ids)} {
		var reports []client.ReadProgress
		got, err := r.store.Read(t.Context(), client.ReadRequest{
			Namespace: ns, IDs: ids[:asked], Into: r.memory(int64(asked) * size),
			Progress: func(p client.ReadProgress) { reports = append(reports, p) },
		})
		if err != nil {
			t.Fatal(err)
		}
		var last client.ReadProgress
		early := false
		for _, p := range reports {
			if p.Blocks < last.Blocks || p.Bytes < last.Bytes || p == last || p.Blocks > got.Blocks {
				t.Errorf("%d blocks: reported %+v after %+v; the read ended with %d", asked, p, last, got.Blocks)
			}
			early = early || p.Bytes > int64(p.Blocks)*size
			last = p
		}
		if want := min(asked, stored); last.Blocks != want || got.Blocks != want || last.Bytes != int64(want)*size {
			t.Errorf("%d blocks: reported %+v last; the read ended with %d", asked, last, got.Blocks)
		}
		if !early {
			t.Errorf("%d blocks: no bytes were reported before they were verified: %v", asked, reports)
		}
	}
}

// TestReadProgressOfWindows: with a window group, the pieces of a Read that has ended early are useless, because a shorter
// prefix needs other pieces. So the Read reports blocks only when it has all pieces. No Read reports more blocks than it has
// read.
func TestReadProgressOfWindows(t *testing.T) {
	g := kv.Geometry{BlockTokens: 4, Groups: []kv.Group{
		{Kind: kv.Full, Layers: 2, TokenBytes: 256},
		{Kind: kv.Window, Layers: 2, TokenBytes: 256, WindowTokens: 10},
	}}
	r := newRig(t, func(o *client.Options) { o.ReadTaskBytes = 8192 }, newHost(t, nil))
	ns := r.namespace("windows", g, kv.IndexTrie)
	ids := chain(ns, 200, 1)
	var pieces []client.Piece
	for b := range ids {
		for group := range g.Groups {
			pieces = append(pieces, client.Piece{Block: b, Group: group, Offset: g.PieceOffset(b, group)})
		}
	}
	w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: r.memory(200 * g.BlockBytes()), Pieces: pieces})
	if err != nil || w.Stored != len(pieces) {
		t.Fatalf("write: %+v, %v", w, err)
	}
	var outside []client.Piece
	for b := range 100 {
		outside = append(outside, client.Piece{Block: b, Offset: g.PieceOffset(b, 0)})
	}
	for _, c := range []struct {
		pieces []client.Piece
		blocks int
		bytes  int64
	}{{nil, 200, g.NeededBytes(200)}, {outside, 100, 100 * g.PieceBytes(0)}} {
		for _, cancelAt := range []int64{c.bytes / 2, c.bytes + 1} {
			ctx, cancel := context.WithCancel(t.Context())
			var reports []client.ReadProgress
			got, err := r.store.Read(ctx, client.ReadRequest{
				Namespace: ns, IDs: ids, Into: r.memory(200 * g.BlockBytes()), Pieces: c.pieces,
				Progress: func(p client.ReadProgress) {
					reports = append(reports, p)
					if p.Bytes >= cancelAt {
						cancel()
					}
				},
			})
			cancel()
			if err != nil && cancelAt > c.bytes {
				t.Fatal(err)
			}
			for _, p := range reports {
				if p.Blocks > got.Blocks || c.pieces == nil && p.Blocks > 0 && p.Bytes < c.bytes {
					t.Errorf("reported %+v; the read of %d bytes ended with %d blocks, %v", p, c.bytes, got.Blocks, err)
				}
			}
			if last := reports[len(reports)-1]; cancelAt > c.bytes && (last.Blocks != c.blocks || got.Blocks != c.blocks) {
				t.Errorf("reported %+v last; the read ended with %d blocks, want %d", last, got.Blocks, c.blocks)
			}
		}
	}
}
