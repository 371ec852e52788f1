package client

import (
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// hotChain returns n blocks, of which the blocks from shared on are those of one sequence.
func hotChain(root byte, shared, n int, sequence byte) []kv.BlockID {
	ids := make([]kv.BlockID, n)
	for i := range ids {
		ids[i] = kv.BlockID{root, byte(i), byte(i >> 8)}
		if i >= shared {
			ids[i][3] = sequence
		}
	}
	return ids
}

// TestHotHints: a hint holds for the blocks that a chain shares with the one of the reply, in its epoch, until its end. A reply with fewer
// blocks of the same prefix shortens it only if the next block of the hint was found too, and so has not all copies.
func TestHotHints(t *testing.T) {
	var h hotHints
	ns, now := kv.Namespace{ID: 7}, time.Unix(1000, 0)
	want := func(ids []kv.BlockID, epoch kv.Epoch, blocks, replicas int) {
		t.Helper()
		if b, r := h.find(ns, epoch, ids, now); b != blocks || b > 0 && r != replicas {
			t.Errorf("%d blocks on %d nodes; want %d on %d", b, r, blocks, replicas)
		}
	}
	h.learn(ns, 3, hotChain(1, 9, 9, 0), &pb.HotPrefix{Blocks: 6, Replicas: 3, TtlMs: 5000}, now)
	want(hotChain(1, 9, 9, 0), 3, 6, 3)
	want(hotChain(1, 4, 9, 1), 3, 4, 3)
	want(hotChain(1, 2, 2, 0), 3, 2, 3)
	want(hotChain(1, 9, 9, 0), 4, 0, 0)
	want(hotChain(2, 9, 9, 0), 3, 0, 0)
	now = now.Add(4 * time.Second)
	h.learn(ns, 3, hotChain(1, 4, 9, 1), &pb.HotPrefix{Blocks: 4, Replicas: 3, TtlMs: 5000}, now)
	now = now.Add(4 * time.Second)
	want(hotChain(1, 9, 9, 0), 3, 6, 3)
	h.learn(ns, 3, hotChain(1, 3, 3, 0), &pb.HotPrefix{Blocks: 3, Replicas: 3, TtlMs: 5000}, now)
	want(hotChain(1, 9, 9, 0), 3, 6, 3)
	h.learn(ns, 3, hotChain(1, 9, 9, 0), &pb.HotPrefix{Blocks: 5, Replicas: 3, TtlMs: 5000}, now)
	want(hotChain(1, 9, 9, 0), 3, 5, 3)
	h.learn(ns, 3, hotChain(1, 9, 9, 0), &pb.HotPrefix{Blocks: 6, Replicas: 3, TtlMs: 5000}, now)
	want(hotChain(1, 9, 9, 0), 3, 6, 3)
	h.learn(ns, 3, hotChain(1, 4, 9, 1), &pb.HotPrefix{Blocks: 5, Replicas: 2, TtlMs: 5000}, now)
	want(hotChain(1, 4, 9, 1), 3, 5, 2)
	want(hotChain(1, 9, 9, 0), 3, 4, 2)
	now = now.Add(5 * time.Second)
	want(hotChain(1, 4, 9, 1), 3, 0, 0)
}

// TestHotHintsRefused: a Store takes no hint with more blocks than the chain has, or with replicas that cannot be.
func TestHotHintsRefused(t *testing.T) {
	var h hotHints
	ns, now := kv.Namespace{ID: 7, Replicas: 2}, time.Unix(1000, 0)
	for _, hot := range []*pb.HotPrefix{
		{Blocks: 5, Replicas: 3, TtlMs: 1000}, {Blocks: 0, Replicas: 3, TtlMs: 1000}, {Blocks: 4, Replicas: 2, TtlMs: 1000},
		{Blocks: 4, Replicas: kv.MaxReplicas + 1, TtlMs: 1000}, {Blocks: 1 << 31, Replicas: 1 << 31, TtlMs: 1 << 63}, {Blocks: 4, Replicas: 3},
	} {
		h.learn(ns, 3, hotChain(1, 4, 4, 0), hot, now)
		if n, _ := h.find(ns, 3, hotChain(1, 4, 4, 0), now); n != 0 {
			t.Errorf("the hint %v gives %d blocks", hot, n)
		}
	}
	h.learn(ns, 3, hotChain(1, 4, 4, 0), &pb.HotPrefix{Blocks: 4, Replicas: 3, TtlMs: 1 << 63}, now)
	if n, _ := h.find(ns, 3, hotChain(1, 4, 4, 0), now.Add(time.Minute)); n != 0 {
		t.Error("a hint lasts longer than a minute")
	}
}

// TestHotHintsBounded: a Store has at most hintsMax hints. The hint that ends first makes room.
func TestHotHintsBounded(t *testing.T) {
	var h hotHints
	ns, now := kv.Namespace{ID: 7}, time.Unix(1000, 0)
	for i := range 3 * hintsMax {
		h.learn(ns, 3, hotChain(byte(i), 2, 2, 0), &pb.HotPrefix{Blocks: 2, Replicas: 2, TtlMs: uint64(1000 + i)}, now)
		if len(h.byKey) > hintsMax {
			t.Fatalf("%d hints", len(h.byKey))
		}
		if n, _ := h.find(ns, 3, hotChain(byte(i), 2, 2, 0), now); n != 2 {
			t.Fatalf("hint %d was not taken", i)
		}
	}
	if n, _ := h.find(ns, 3, hotChain(2*hintsMax, 2, 2, 0), now); n != 2 || len(h.byKey) != hintsMax {
		t.Errorf("a later hint has %d blocks among %d hints", n, len(h.byKey))
	}
}
