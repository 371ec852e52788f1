package client_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
)

// scattered divides pieces into fragments in several memories, in random order, with gaps.
func scattered(rng *rand.Rand, memories []*client.Memory, g kv.Geometry, pieces []client.Piece) [][]client.Fragment {
	out := make([][]client.Fragment, len(pieces))
	used := make([]int64, len(memories))
	for _, i := range rng.Perm(len(pieces)) {
		for left := g.Groups[0].Layers; left > 0; {
			m, n := rng.IntN(len(memories)), 1+rng.IntN(left)
			used[m] += rng.Int64N(3) * 64
			out[i] = append(out[i], client.Fragment{Memory: memories[m], Offset: used[m], Layers: n})
			used[m] += int64(n) * g.LayerBytes(0)
			left -= n
		}
	}
	return out
}

// join returns the bytes of a piece that is in fragments.
func join(g kv.Geometry, fragments []client.Fragment) (piece []byte) {
	for _, f := range fragments {
		piece = append(piece, f.Memory.Bytes()[f.Offset:][:int64(f.Layers)*g.LayerBytes(0)]...)
	}
	return piece
}

// TestFragments writes pieces from fragments in several memories, and reads them into
// other fragments and into one memory. The bytes of the pieces are unchanged, and Read
// writes nothing between the fragments.
func TestFragments(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil), newHost(t, nil))
	for seed, index := range []kv.IndexKind{kv.IndexFlat, kv.IndexTrie} {
		rng := rand.New(rand.NewPCG(uint64(seed), 12))
		g := kv.SingleGroup(6, 4, 512)
		ns := r.namespace(index.String(), g, index)
		ids := keys(24, 3)
		var pieces []client.Piece
		for i := range ids {
			pieces = append(pieces, client.Piece{Block: i})
		}
		memories := []*client.Memory{r.memory(1 << 20), r.memory(1 << 20), r.memory(1 << 20)}
		from := scattered(rng, memories, g, pieces)
		for i := range from {
			piece := make([]byte, g.PieceBytes(0))
			fill(piece, ids[i], 0, 0)
			for _, f := range from[i] {
				piece = piece[copy(f.Memory.Bytes()[f.Offset:][:int64(f.Layers)*g.LayerBytes(0)], piece):]
			}
		}
		existed := make([]bool, len(pieces))
		for turn := range 2 {
			w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, Pieces: pieces, Fragments: from, Existed: existed})
			if err != nil || w.Blocks != len(ids) || (w.Existed == len(ids)) != (turn == 1) || existed[3] != (turn == 1) {
				t.Fatalf("%v: write: %+v, %v", index, w, err)
			}
		}
		if got := r.get(ns, ids); got.Blocks != len(ids) {
			t.Fatalf("%v: read into one memory: %+v", index, got)
		}
		into := []*client.Memory{r.memory(1 << 20), r.memory(1 << 20)}
		for _, m := range into {
			for i := range m.Bytes() {
				m.Bytes()[i] = 0xee
			}
		}
		to := scattered(rng, into, g, pieces)
		sums, arrived := make([][]uint64, len(pieces)), make([]bool, len(pieces))
		for i := range sums {
			sums[i] = make([]uint64, 6)
		}
		got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Pieces: pieces, Fragments: to, Sums: sums, Arrived: arrived})
		if err != nil || got.Blocks != len(ids) {
			t.Fatalf("%v: read into fragments: %+v, %v", index, got, err)
		}
		for i := range to {
			if err := check(join(g, to[i]), ids[i], 0, 0); err != nil || !arrived[i] {
				t.Errorf("%v: piece %d: arrived %v, %v", index, i, arrived[i], err)
			}
			for _, f := range to[i] {
				b := f.Memory.Bytes()[f.Offset:][:int64(f.Layers)*g.LayerBytes(0)]
				copy(b, bytes.Repeat([]byte{0xee}, len(b)))
			}
		}
		for k, m := range into {
			if bytes.Count(m.Bytes(), []byte{0xee}) != len(m.Bytes()) {
				t.Errorf("%v: memory %d was written to between the fragments", index, k)
			}
		}
		// Read layers 3 and 4 of each piece into two fragments of one layer.
		two := make([][]client.Fragment, len(pieces))
		for i := range two {
			two[i] = []client.Fragment{{Memory: into[1], Offset: int64(2*i) * g.LayerBytes(0), Layers: 1}, {Memory: into[0], Offset: int64(i) * g.LayerBytes(0), Layers: 1}}
		}
		if got, err = r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Pieces: pieces, Fragments: two, FirstLayer: 3, Layers: 2}); err != nil || got.Blocks != len(ids) {
			t.Fatalf("%v: read of layers 3 and 4: %+v, %v", index, got, err)
		}
		for i := range two {
			want := make([]byte, g.PieceBytes(0))
			fill(want, ids[i], 0, 0)
			if !bytes.Equal(join(g, two[i]), want[3*g.LayerBytes(0):5*g.LayerBytes(0)]) {
				t.Errorf("%v: layers 3 and 4 of piece %d have wrong bytes", index, i)
			}
		}
		for _, m := range append(into, memories...) {
			if err := m.Close(context.Background()); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestFragmentsRefused: Read and Write refuse fragments that do not add up to the piece,
// that lie outside their memory, or that overlap.
func TestFragmentsRefused(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexFlat)
	ids, m := keys(2, 1), r.memory(16<<10)
	layer := geometry.LayerBytes(0)
	same, err := r.store.Register(m.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	part, err := r.store.Register(m.Bytes()[layer:])
	if err != nil {
		t.Fatal(err)
	}
	for name, fragments := range map[string][][]client.Fragment{
		"too few layers":           {{{m, 0, 3}}, {{m, 8 << 10, 4}}},
		"too many layers":          {{{m, 0, 5}}, {{m, 8 << 10, 4}}},
		"a fragment of 0 layers":   {{{m, 0, 0}, {m, 0, 4}}, {{m, 8 << 10, 4}}},
		"no memory":                {{{nil, 0, 4}}, {{m, 8 << 10, 4}}},
		"an end after the memory":  {{{m, 0, 4}}, {{m, 8<<10 + 1, 4}}},
		"a negative offset":        {{{m, -1, 4}}, {{m, 8 << 10, 4}}},
		"two pieces that overlap":  {{{m, 0, 4}}, {{m, 3 * layer, 4}}},
		"a piece that overlaps":    {{{m, 0, 2}, {m, layer, 2}}, {{m, 8 << 10, 4}}},
		"a piece of no fragment":   {{{m, 0, 4}}, {}},
		"memory registered twice":  {{{m, 0, 4}}, {{same, 0, 4}}},
		"memories that overlap":    {{{m, 0, 4}}, {{part, 2 * layer, 4}}},
		"one entry for two pieces": {{{m, 0, 4}}},
	} {
		if _, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Fragments: fragments}); !errors.Is(err, client.ErrRequest) {
			t.Errorf("read of fragments with %s: %v", name, err)
		}
	}
	for _, fragments := range [][][]client.Fragment{{{{m, 0, 3}}, {{m, 0, 4}}}, {{{m, 0, 4}}}} {
		if _, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, Fragments: fragments}); !errors.Is(err, client.ErrRequest) {
			t.Errorf("write: %v", err)
		}
	}
}

// TestMemoryOfAnotherEngine: Read and Write refuse memory that is registered with another engine than the Store's.
func TestMemoryOfAnotherEngine(t *testing.T) {
	h := newHost(t, nil)
	r, other := newRig(t, nil, h), newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexFlat)
	ids, m, own := keys(1, 1), other.memory(8<<10), r.memory(8<<10)
	for name, fragments := range map[string][][]client.Fragment{"whole": nil, "fragments": {{{own, 0, 2}, {m, 0, 2}}}} {
		if _, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: m, Fragments: fragments}); !errors.Is(err, client.ErrRequest) {
			t.Errorf("read, %s: %v", name, err)
		}
		if w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: m, Fragments: fragments}); !errors.Is(err, client.ErrRequest) {
			t.Errorf("write, %s: %+v, %v", name, w, err)
		}
	}
}
