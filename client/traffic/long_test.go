package traffic

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
)

// tiny has Layer Blocks of 64 bytes: 2 layers of 16 tokens of 4 bytes.
var tiny = kv.SingleGroup(2, 16, 4)

// longPair returns a shelf of tiny blocks, a prefill engine with peLayers layers in
// device memory and a decode engine.
func longPair(t *testing.T, peLayers, pages int, bufferBytes int64) (ctx context.Context, s *shelf, pe, de *engine) {
	t.Helper()
	testkit.VerifyNone(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	s = newShelf()
	s.geo = tiny
	return ctx, s, newEngine(t, s, peLayers, pages, bufferBytes), newEngine(t, s, 2, pages, bufferBytes)
}

// TestLongPrompts runs prompts of 1 M tokens and of MaxBlocks blocks with scattered
// pages. Either side reads the hit, or both do, and some blocks are recomputed. The test
// compares every byte on both devices and every stored block.
func TestLongPrompts(t *testing.T) {
	testkit.Long(t, "prompts of a million tokens")
	ctx, s, pe, de := longPair(t, 2, 2*MaxBlocks, 32<<20)
	cases := []struct{ blocks, hit, split int }{
		{1 << 16, 1<<16 - 1, 1 << 14}, {MaxBlocks, MaxBlocks - 1, 0}, {MaxBlocks, 1000, 500},
	}
	for i, c := range cases[:testkit.Rounds(len(cases), 1)] {
		t.Run(fmt.Sprintf("%d of %d blocks", c.hit, c.blocks), func(t *testing.T) {
			s.put(i, c.hit)
			r := newRequest(t, pe, de, i, c.blocks, c.hit)
			if err := r.run(ctx, c.split); err != nil {
				t.Fatal(err)
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			want := make([]byte, tiny.PieceBytes(0))
			for b := range r.ids {
				for l := range 2 {
					fill(want[l*64:(l+1)*64], r.ids[b], l)
				}
				if !bytes.Equal(s.blocks[r.ids[b]], want) {
					t.Fatalf("block %d differs from the stored block", b)
				}
			}
			clear(s.blocks)
		})
	}
	for _, blocks := range []int{MaxBlocks + 1, 1 << 30} {
		_, err := pe.Prefill(ctx, PrefillJob{Request: "r", Blocks: blocks})
		if !errors.Is(err, ErrJob) || !strings.Contains(err.Error(), fmt.Sprintf("a prompt of %d blocks; it must have 1 to %d", blocks, MaxBlocks)) {
			t.Errorf("a prompt of %d blocks: %v", blocks, err)
		}
	}
}

// TestLongRecompute recomputes every 64th hit block of a prompt of 1 M tokens. These
// blocks are stored again.
func TestLongRecompute(t *testing.T) {
	const blocks, hit = 1 << 16, 1 << 15
	ctx, s, pe, de := longPair(t, 1, 2*blocks, 16<<20)
	s.put(1, hit)
	r := newRequest(t, pe, de, 1, blocks, hit)
	d, err := de.Decode(ctx, DecodeJob{Request: r.name, IDs: r.ids, Blocks: blocks, Hit: hit, Pages: r.pages, Peer: pe.peer})
	if err != nil {
		t.Fatal(err)
	}
	p, err := pe.Prefill(ctx, PrefillJob{Request: r.name, IDs: r.ids, Blocks: blocks, Hit: hit, Pages: r.pages})
	if err != nil {
		t.Fatal(err)
	}
	for b := 0; b < hit; b += 64 {
		p.Recompute(Part{b, b + 1})
		if b/64%2 == 0 {
			p.Read(Part{b + 1, b + 64})
		} else {
			d.Read(Part{b + 1, b + 64})
		}
		s.drop(1, b)
	}
	if err := errors.Join(r.prefill(ctx, p), d.Finish(ctx), r.check()); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.blocks) != len(r.ids) {
		t.Errorf("%d blocks of %d are stored", len(s.blocks), len(r.ids))
	}
}

// TestVersion: the peer's messages have a version that this manager does not support.
// The job ends with an error that names both versions.
func TestVersion(t *testing.T) {
	ctx, _, pe, de := longPair(t, 2, 8, 1<<20)
	to, err := de.rdma.Connect(ctx, pe.peer.Addr, pe.peer.Token)
	if err != nil {
		t.Fatal(err)
	}
	for _, version := range []uint32{0, wireVersion + 1} {
		p, err := pe.Prefill(ctx, PrefillJob{Request: "r", Blocks: 1, Pages: []uint32{0}})
		if err != nil {
			t.Fatal(err)
		}
		raw, err := proto.Marshal(&pb.TrafficMessage{Request: "r", Version: version, Body: &pb.TrafficMessage_Held{Held: &pb.TrafficHeld{}}})
		if err != nil {
			t.Fatal(err)
		}
		if err := de.rdma.Send(ctx, to, raw, func(error) {}); err != nil {
			t.Fatal(err)
		}
		err = p.Finish(ctx)
		if want := fmt.Sprintf("version %d; this manager supports %d", max(version, 1), wireVersion); !errors.Is(err, ErrJob) || !strings.Contains(err.Error(), want) {
			t.Errorf("version %d: %v", version, err)
		}
	}
}

// FuzzLists: incoming rebuilds the lists of sendsOf from their messages in any order.
// Each message fits in a receive buffer, and a repeated message is refused.
func FuzzLists(f *testing.F) {
	f.Add(uint64(1), uint32(100), uint8(2))
	f.Add(uint64(2), uint32(1<<16), uint8(2))
	f.Add(uint64(3), uint32(MaxBlocks), uint8(1))
	f.Add(uint64(4), uint32(50_000), uint8(255))
	f.Fuzz(func(t *testing.T, seed uint64, blocks uint32, every uint8) {
		rng := rand.New(rand.NewPCG(seed, 1))
		n := int(blocks%MaxBlocks) + 1
		sent, again := map[uint32]bool{}, map[uint32]bool{}
		for b := range uint32(n) {
			if rng.IntN(max(int(every), 1)) == 0 {
				sent[b] = true
				if rng.IntN(2) == 0 {
					again[b] = true
				}
			}
		}
		in := incoming{sent: make([]bool, n), again: make([]bool, n)}
		list := sendsOf(slices.Sorted(maps.Keys(sent)), slices.Sorted(maps.Keys(again)))
		rng.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		for i, m := range list {
			if in.complete() {
				t.Fatalf("complete after %d messages of %d", i, len(list))
			}
			if size := proto.Size(m); size > recvBytes-1024 {
				t.Fatalf("a message of %d bytes", size)
			}
			if err := in.take(m); err != nil {
				t.Fatal(err)
			}
		}
		if !in.complete() || in.any != (len(sent) > 0) {
			t.Fatalf("%+v after all messages", in)
		}
		for b := range uint32(n) {
			if in.sent[b] != sent[b] || in.again[b] != again[b] {
				t.Fatalf("block %d: sent %v, again %v; want %v, %v", b, in.sent[b], in.again[b], sent[b], again[b])
			}
		}
		if err := in.take(list[0]); !errors.Is(err, ErrJob) {
			t.Fatalf("a repeated message: %v", err)
		}
	})
}

// TestBadLists: lists that contradict themselves or the prompt are refused.
func TestBadLists(t *testing.T) {
	for name, list := range map[string][]*pb.TrafficSends{
		"of no message":     {{}},
		"odd":               {{Messages: 1, Blocks: []uint32{1}}},
		"empty range":       {{Messages: 1, Blocks: []uint32{1, 1}}},
		"behind the end":    {{Messages: 1, Recomputed: []uint32{9, 11}}},
		"a block twice":     {{Messages: 2, Blocks: []uint32{1, 3}}, {Messages: 2, Blocks: []uint32{2, 4}}},
		"numbers differ":    {{Messages: 2, Blocks: []uint32{1, 3}}, {Messages: 3, Blocks: []uint32{4, 5}}},
		"more than it says": {{Messages: 1}, {Messages: 1}},
	} {
		in := incoming{sent: make([]bool, 10), again: make([]bool, 10)}
		var err error
		for _, m := range list {
			err = in.take(m)
		}
		if !errors.Is(err, ErrJob) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, list := range map[string][]*pb.TrafficPages{
		"none":           {{First: 1}},
		"behind the end": {{First: 9, Pages: []uint32{1, 2}}},
		"far behind":     {{First: 1<<32 - 1, Pages: []uint32{1}}},
		"a block twice":  {{Pages: []uint32{1, 2}}, {First: 1, Pages: []uint32{3}}},
	} {
		l := newPageList(10)
		var err error
		for _, m := range list {
			err = l.take(m)
		}
		if !errors.Is(err, ErrJob) {
			t.Errorf("pages, %s: %v", name, err)
		}
	}
}
