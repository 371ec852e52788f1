package client_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
)

// prompt fills memory with whole blocks of a chain, block 0 at base.
func prompt(mem *client.Memory, base int64, ids []kv.BlockID, blockBytes int64) {
	for b, id := range ids {
		fill(mem.Bytes()[base+int64(b)*blockBytes:][:blockBytes], id, 0, 0)
	}
}

// TestSamePlace: Read and Write take every block from the place that its index in
// the prompt gives, whatever the first block and the layers of the call.
func TestSamePlace(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	const blocks, size = 7, 8192
	for seed, c := range []struct {
		hit  int
		base int64
	}{{0, 0}, {3, 0}, {3, 4096}, {6, 0}, {7, 0}} {
		ids := chain(ns, blocks, uint32(seed+1))
		if c.hit > 0 {
			r.mustPut(ns, ids[:c.hit])
		}
		mem := r.memory(c.base + blocks*size)
		m := r.match(ns, ids)
		got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: m.IDs, Into: mem, Base: c.base})
		if err != nil || got.Blocks != c.hit {
			t.Fatalf("%+v: read: %+v, %v", c, got, err)
		}
		prompt(mem, c.base, ids, size) // the engine computes the blocks after the loaded prefix
		w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, First: got.Blocks, From: mem, Base: c.base})
		if err != nil || w.Stored != blocks-c.hit || w.Blocks != blocks {
			t.Fatalf("%+v: write: %+v, %v", c, w, err)
		}

		want := bytes.Clone(mem.Bytes()[c.base:])
		other := r.memory(blocks * size)
		if got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: other}); err != nil || got.Blocks != blocks {
			t.Fatalf("%+v: read of all: %+v, %v", c, got, err)
		}
		if !bytes.Equal(other.Bytes(), want) {
			t.Errorf("%+v: another engine reads bytes that differ from the written bytes", c)
		}
		clear(other.Bytes())
		if got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, First: 2, Into: other}); err != nil || got.Blocks != blocks || got.Bytes != (blocks-2)*size {
			t.Fatalf("%+v: read from block 2: %+v, %v", c, got, err)
		}
		if !bytes.Equal(other.Bytes()[2*size:], want[2*size:]) || !bytes.Equal(other.Bytes()[:2*size], make([]byte, 2*size)) {
			t.Errorf("%+v: a read from block 2 puts the blocks somewhere else", c)
		}
		clear(other.Bytes())
		for layer := range geometry.Groups[0].Layers {
			if got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: other, FirstLayer: layer, Layers: 1}); err != nil || got.Blocks != blocks {
				t.Fatalf("%+v: read of layer %d: %+v, %v", c, layer, got, err)
			}
		}
		if !bytes.Equal(other.Bytes(), want) {
			t.Errorf("%+v: the layers, read one by one, do not make up the blocks", c)
		}
	}
}

// TestTwoBlocksOfOnePlace: pieces that share bytes are refused, because they would
// overwrite each other.
func TestTwoBlocksOfOnePlace(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 4, 1)
	mem := r.memory(4 * 8192)
	r.mustPut(ns, ids[:2])
	for name, pieces := range map[string][]client.Piece{
		"no offsets":       {{Block: 0}, {Block: 1}},
		"partly":           {{Block: 0, Offset: 4096}, {Block: 1, Offset: 4096 + 8191}},
		"not side by side": {{Block: 2, Offset: 3 * 8192}, {Block: 0, Offset: 8192}, {Block: 1, Offset: 2*8192 + 1}},
	} {
		if _, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: mem, Pieces: pieces}); !errors.Is(err, client.ErrRequest) {
			t.Errorf("read, %s: %v", name, err)
		}
		if _, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: mem, Pieces: pieces}); !errors.Is(err, client.ErrRequest) {
			t.Errorf("write, %s: %v", name, err)
		}
	}
	if got := r.get(ns, ids); got.Blocks != 2 {
		t.Errorf("a refused write stored something: %+v", got)
	}
}

// TestEpochOfTheCaller: a call that names no epoch is for the epoch of its
// Namespace value, so an engine that still has the old weights neither reads nor
// stores KV of the new ones.
func TestEpochOfTheCaller(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, nil, h)
	old := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(old, 4, 1)
	r.mustPut(old, ids[:2])
	mem := r.memory(4 * 8192)
	prompt(mem, 0, ids, 8192)
	r.bump("m")
	m, err := r.store.Match(t.Context(), client.MatchRequest{Namespace: old, IDs: ids})
	if err != nil || m.Outcome != client.Miss || m.Cut != client.CutEpoch || m.Epoch != old.Epoch {
		t.Errorf("match under the old weights: %+v, %v", m, err)
	}
	if got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: old, IDs: ids, Into: mem}); err != nil || got.Outcome != client.Miss || got.Cut != client.CutEpoch {
		t.Errorf("read under the old weights: %+v, %v", got, err)
	}
	for _, epoch := range []kv.Epoch{0, m.Epoch} {
		if w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: old, IDs: ids, Epoch: epoch, From: mem}); err != nil || w.Stored != 0 || w.Refused[0].Reason != "stale_epoch" {
			t.Errorf("write of KV of the old weights, epoch %d: %+v, %v", epoch, w, err)
		}
	}
	ns, err := r.store.Namespace(t.Context(), "m")
	if err != nil || ns.Epoch != old.Epoch+1 {
		t.Fatalf("namespace after the weights changed: %+v, %v", ns, err)
	}
	if w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: mem}); err != nil || w.Stored != 4 {
		t.Errorf("write under the new weights: %+v, %v", w, err)
	}
	h.kill()
	if m, err := r.store.Match(t.Context(), client.MatchRequest{Namespace: ns, IDs: ids}); err != nil || m.Cut != client.CutNodeDown || m.Epoch != ns.Epoch {
		t.Errorf("match while the node is down: %+v, %v", m, err)
	}
	ns.Epoch = 0
	if _, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: mem}); !errors.Is(err, client.ErrRequest) {
		t.Errorf("write that names no epoch at all: %v", err)
	}
}
