package client_test

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/storage"
)

func TestWriteMatchRead(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 20, 1)
	if m := r.match(ns, ids); m.Outcome != client.Miss || m.Blocks != 0 || m.Cut != client.CutAbsent {
		t.Fatalf("match before the write: %+v", m)
	}
	if got := r.get(ns, ids); got.Outcome != client.Miss || got.Cut != client.CutAbsent || len(got.Lost) != 0 {
		t.Fatalf("read before the write: %+v", got)
	}
	r.mustPut(ns, ids[:12])
	m := r.match(ns, ids)
	if m.Outcome != client.Hit || m.Blocks != 12 || m.Tokens != 48 || len(m.IDs) != 12 || m.Cut != client.CutAbsent || m.Bytes != 12*8192 || m.Lease != nil {
		t.Fatalf("match: %+v", m)
	}
	if got := r.get(ns, ids); got.Outcome != client.Hit || got.Blocks != 12 || got.Tokens != 48 || got.Cut != client.CutAbsent || got.Bytes != 12*8192 || len(got.Lost) != 0 {
		t.Fatalf("read: %+v", got)
	}
	w, err := r.put(ns, ids, 10, 0)
	if err != nil || w.Outcome != client.Hit || w.Existed != 2 || w.Stored != 8 || w.Blocks != 20 || w.Bytes != 8*8192 {
		t.Fatalf("second write: %+v, %v", w, err)
	}
	if got := r.get(ns, ids); got.Blocks != 20 || got.Cut != client.CutComplete {
		t.Fatalf("read: %+v", got)
	}
	if s := r.store.Stats(); s.LostPieces != 0 || s.ReadBytes != 32*8192 || s.WriteBytes != 20*8192 || !strings.Contains(s.String(), "read_bytes=262144") {
		t.Errorf("stats: %v", s)
	}
	if n := r.store.Nodes(); len(n) != 1 || !n[0].Up || n[0].Node != "test" || n[0].Err != nil {
		t.Errorf("nodes: %+v", n)
	}
}

// TestWriteSums: with the caller's sums, the node refuses a block whose bytes differ from the sums,
// and the blocks before it are stored.
func TestWriteSums(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 3, 1)
	mem := r.memory(3 * 8192)
	layers, lb := ns.Geometry.Groups[0].Layers, ns.Geometry.LayerBytes(0)
	req := client.WriteRequest{Namespace: ns, IDs: ids, From: mem}
	for _, b := range []int{2, 0, 1} { // any order
		at := int64(2-b) * 8192
		fill(mem.Bytes()[at:][:8192], ids[b], 0, 0)
		sums := make([]uint64, layers)
		for l := range sums {
			sums[l] = xxh3.Hash(mem.Bytes()[at+int64(l)*lb:][:lb])
		}
		req.Pieces, req.Sums = append(req.Pieces, client.Piece{Block: b, Offset: at}), append(req.Sums, sums)
	}
	mem.Bytes()[8192-100] ^= 1 // in block 2
	w, err := r.store.Write(t.Context(), req)
	if err != nil || w.Stored != 2 || w.Blocks != 2 || len(w.Refused) != 1 || w.Refused[0].Block != 2 || w.Refused[0].Reason != client.LostCorrupt {
		t.Fatalf("write: %+v, %v", w, err)
	}
	if got := r.get(ns, ids); got.Blocks != 2 {
		t.Fatalf("read: %+v", got)
	}
	for _, bad := range [][][]uint64{req.Sums[:2], {req.Sums[0], req.Sums[1], req.Sums[2][:1]}} {
		req.Sums = bad
		if _, err := r.store.Write(t.Context(), req); !errors.Is(err, client.ErrRequest) {
			t.Errorf("%d sums: %v", len(bad), err)
		}
	}
}

// TestTokens: tokens name the same blocks as their chain. A tail shorter than a block is ignored.
func TestTokens(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	tokens := make([]kv.Token, 4*6+3)
	for i := range tokens {
		tokens[i] = 1<<16 + kv.Token(i)
	}
	mem := r.memory(6 * 8192)
	for i, id := range chain(ns, 6, 1) {
		fill(mem.Bytes()[i*8192:][:8192], id, 0, 0)
	}
	w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, Tokens: tokens, From: mem})
	if err != nil || w.Stored != 6 {
		t.Fatalf("write: %+v, %v", w, err)
	}
	m, err := r.store.Match(t.Context(), client.MatchRequest{Namespace: ns, Tokens: tokens})
	if err != nil || m.Blocks != 6 || m.Cut != client.CutComplete || !slices.Equal(m.IDs, chain(ns, 6, 1)) {
		t.Fatalf("match: %+v, %v", m, err)
	}
	if m, err := r.store.Match(t.Context(), client.MatchRequest{Namespace: ns, Tokens: tokens[:3]}); err != nil || m.Outcome != client.Miss || m.Cut != client.CutComplete {
		t.Fatalf("match of less than a block: %+v, %v", m, err)
	}
	r.get(ns, chain(ns, 6, 1))
}

// TestLayers: a range of layers of each block, at scattered places.
func TestLayers(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 5, 1)
	r.mustPut(ns, ids)
	mem := r.memory(64 << 10)
	req := client.ReadRequest{Namespace: ns, IDs: ids, Into: mem, FirstLayer: 1, Layers: 2}
	for i := range ids {
		req.Pieces = append(req.Pieces, client.Piece{Block: i, Offset: int64(4-i)*10000 + 17})
	}
	got, err := r.store.Read(t.Context(), req)
	if err != nil || got.Blocks != 5 || got.Bytes != 5*4096 {
		t.Fatalf("read: %+v, %v", got, err)
	}
	block := make([]byte, 8192)
	for i, id := range ids {
		fill(block, id, 0, 0)
		if !slices.Equal(mem.Bytes()[(4-i)*10000+17:][:4096], block[2048:6144]) {
			t.Errorf("block %d: other bytes than its layers 1 and 2", i)
		}
	}
	req.Pieces, req.FirstLayer, req.Layers, req.Base = nil, 3, 0, 5
	if got, err := r.store.Read(t.Context(), req); err != nil || got.Bytes != 5*2048 {
		t.Fatalf("read of the last layer: %+v, %v", got, err)
	}
	fill(block, ids[4], 0, 0)
	if !slices.Equal(mem.Bytes()[5+4*8192+6144:][:2048], block[6144:]) {
		t.Error("block 4: other bytes than its last layer")
	}
}

// TestManyTasks: chains that are much larger than one task and one chunk.
func TestManyTasks(t *testing.T) {
	r := newRig(t, func(o *client.Options) { o.ReadTaskBytes, o.WriteChunkBytes = 3*8192+1, 5*8192 }, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 233, 1)
	r.mustPut(ns, ids)
	if got := r.get(ns, ids); got.Blocks != 233 || got.Cut != client.CutComplete {
		t.Fatalf("read: %+v", got)
	}
	if got := r.get(ns, append(slices.Clone(ids[:100]), chain(ns, 50, 2)...)); got.Blocks != 100 || got.Cut != client.CutAbsent || len(got.Lost) != 0 {
		t.Fatalf("read past the end: %+v", got)
	}
}

// TestBigChain: chains are split at the node's limits without any option.
// TestLongChain: a task sends only the ids of its own blocks, so a read of a long chain fits a message.
func TestLongChain(t *testing.T) {
	const blocks, tasks = 5000, 40 // of 1 MiB; 5000 ids have 80,000 bytes
	r := newRig(t, nil, newLargeHost(t, 4<<20, func(so *storage.Options, o *server.Options) { so.ChainBlocksMax, o.Limits.ChainBlocks = 8192, 8192 }))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, blocks, 1)
	r.mustPut(ns, ids)
	before := r.store.Stats().Messages
	if got := r.get(ns, ids); got.Blocks != blocks {
		t.Fatalf("read: %+v", got)
	}
	if n := r.store.Stats().Messages - before; n != tasks {
		t.Errorf("%d of %d tasks went as messages", n, tasks)
	}
}

func TestBigChain(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 1000, 1) // 8 MiB; the node takes 1 MiB
	r.mustPut(ns, ids)
	if got := r.get(ns, ids); got.Blocks != 1000 {
		t.Fatalf("read: %+v", got)
	}
	w, err := r.put(ns, ids, 0, 0)
	if err != nil || w.Existed != 1000 || w.Bytes != 0 {
		t.Fatalf("the same again: %+v, %v", w, err)
	}
}

func TestHybrid(t *testing.T) {
	g := kv.Geometry{BlockTokens: 4, Groups: []kv.Group{
		{Kind: kv.Full, Layers: 2, TokenBytes: 256},
		{Kind: kv.Window, Layers: 3, TokenBytes: 128, WindowTokens: 10},
		{Kind: kv.State, Layers: 1, TokenBytes: 3000},
	}}
	// Small tasks: each must match the whole prefix, not a shorter one.
	h := newHost(t, nil)
	r := newRig(t, func(o *client.Options) { o.ReadTaskBytes, o.WriteChunkBytes = 4096, 16384 }, h)
	ns := r.namespace("h", g, kv.IndexTrie)
	ids := chain(ns, 16, 1)
	// There are snapshots of the state only after blocks 9 and 15. The window is stored from block
	// 4 on.
	var pieces []client.Piece
	at := int64(0)
	for b := range ids {
		for group := range g.Groups {
			if group == 1 && b < 4 || group == 2 && b != 9 && b != 15 {
				continue
			}
			pieces = append(pieces, client.Piece{Block: b, Group: group, Offset: at})
			at += g.PieceBytes(group)
		}
	}
	mem := r.memory(at)
	for _, p := range pieces {
		fill(mem.Bytes()[p.Offset:][:g.PieceBytes(p.Group)], ids[p.Block], p.Group, 0)
	}
	w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: mem, Pieces: pieces})
	if err != nil || w.Stored != len(pieces) || w.Blocks != 16 {
		t.Fatalf("write: %+v, %v", w, err)
	}
	for _, tc := range []struct {
		asked, want int
		cut         client.Cut
	}{{16, 16, client.CutComplete}, {14, 10, client.CutStateMissing}, {10, 10, client.CutComplete}, {9, 0, client.CutWindowMissing}} {
		m := r.match(ns, ids[:tc.asked])
		if m.Blocks != tc.want || m.Cut != tc.cut {
			t.Errorf("match of %d blocks: %d, %s; want %d, %s", tc.asked, m.Blocks, m.Cut, tc.want, tc.cut)
			continue
		}
		if m.Blocks == 0 {
			continue
		}
		into := r.memory(int64(m.Blocks) * g.BlockBytes())
		got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: m.IDs, Into: into})
		if err != nil || got.Blocks != m.Blocks || got.Bytes != m.Bytes {
			t.Fatalf("read of %d blocks, %d bytes: %+v, %v", m.Blocks, m.Bytes, got, err)
		}
		// Each piece has its place for every length of the match.
		for group := range g.Groups {
			for b := g.FirstNeeded(group, m.Blocks); b < m.Blocks; b++ {
				if err := check(into.Bytes()[g.PieceOffset(b, group):][:g.PieceBytes(group)], ids[b], group, 0); err != nil {
					t.Error(err)
				}
			}
		}
	}
	if _, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: mem}); !errors.Is(err, client.ErrRequest) {
		t.Errorf("write in a hybrid namespace without pieces: %v", err)
	}
	// After a lost piece the longer window or state is unusable: a shorter prefix needs other
	// pieces.
	h.faults.SetRules(faultio.MustParse(`(Err EIO (And Reads (File "segment-*") (After 2)))`))
	got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: r.memory(16 * g.BlockBytes())})
	if err != nil || got.Outcome != client.Miss || got.Blocks != 0 || got.Cut != client.CutLost || len(got.Lost) == 0 {
		t.Errorf("read with a lost piece: %+v, %v", got, err)
	}
}

func TestFlat(t *testing.T) {
	r := newRig(t, func(o *client.Options) { o.ReadTaskBytes, o.WriteChunkBytes = 3*8192, 2*8192 }, newHost(t, nil))
	ns := r.namespace("f", geometry, kv.IndexFlat)
	ids := keys(17, 1)
	r.mustPut(ns, ids[:10])
	r.mustPut(ns, ids[12:])
	if m := r.match(ns, ids); m.Blocks != 10 || m.Cut != client.CutAbsent {
		t.Fatalf("match: %+v", m)
	}
	if got := r.get(ns, ids); got.Blocks != 10 || len(got.Lost) != 0 {
		t.Fatalf("read: %+v", got)
	}
	if got := r.get(ns, ids[12:]); got.Blocks != 5 || got.Cut != client.CutComplete {
		t.Fatalf("read: %+v", got)
	}
	// The same key twice is the same block in two places.
	if got := r.get(ns, []kv.BlockID{ids[3], ids[3], ids[4]}); got.Blocks != 3 {
		t.Fatalf("read of a key twice: %+v", got)
	}
	if _, err := r.store.Match(t.Context(), client.MatchRequest{Namespace: ns, Tokens: make([]kv.Token, 8)}); !errors.Is(err, client.ErrRequest) {
		t.Errorf("tokens in a flat namespace: %v", err)
	}
}

// TestSameIDTwice: a chain with a repeated block is not a chain. Nothing is stored below the second
// occurrence, and other blocks are not affected.
func TestSameIDTwice(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 4, 1)
	bad := []kv.BlockID{ids[0], ids[1], ids[1], ids[2]}
	w, err := r.put(ns, bad, 0, 0)
	if err == nil && w.Blocks > 2 {
		t.Fatalf("write: %+v", w)
	}
	r.mustPut(ns, ids)
	if got := r.get(ns, bad); got.Blocks > 2 {
		t.Fatalf("read: %+v", got)
	}
	if got := r.get(ns, ids); got.Blocks != 4 {
		t.Fatalf("read: %+v", got)
	}
}

func TestTwoNodes(t *testing.T) {
	hosts := []*host{newHost(t, nil), newHost(t, nil)}
	r := newRig(t, nil, hosts...)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	flat := r.namespace("f", geometry, kv.IndexFlat)
	const prompts = 16
	for p := range uint32(prompts) {
		r.mustPut(ns, chain(ns, 6, p))
	}
	all := keys(40, 1)
	r.mustPut(flat, all)
	if got := r.get(flat, all); got.Blocks != 40 {
		t.Fatalf("flat: %+v", got)
	}
	hosts[0].kill()
	var hits, misses int
	for p := range uint32(prompts) {
		switch got := r.get(ns, chain(ns, 6, p)); {
		case got.Outcome == client.Hit && got.Blocks == 6:
			hits++
		case got.Outcome == client.Miss && got.Cut == client.CutNodeDown:
			misses++
		default:
			t.Fatalf("prompt %d: %+v", p, got)
		}
		if m := r.match(ns, chain(ns, 6, p)); (m.Outcome == client.Hit) != (m.Blocks == 6) || m.Outcome == client.Miss && m.Cut != client.CutNodeDown {
			t.Fatalf("prompt %d: %+v", p, m)
		}
	}
	if hits == 0 || misses == 0 || hits+misses != prompts {
		t.Fatalf("%d hits and %d misses of %d prompts on two nodes, one of them dead", hits, misses, prompts)
	}
	if got := r.get(flat, all); got.Blocks == 40 || got.Cut != client.CutNodeDown || got.Blocks != r.match(flat, all).Blocks {
		t.Fatalf("flat: %+v, match %+v", got, r.match(flat, all))
	}
	if w, err := r.put(flat, keys(20, 2), 0, 0); err != nil || w.Outcome != client.Hit || w.Stored == 0 || w.Stored == 20 || len(w.Refused) != 20-w.Stored || w.Refused[0].Reason != "node_down" {
		t.Fatalf("flat write: %+v, %v", w, err)
	}
	hosts[0].start()
	eventually(t, "both nodes answer", func() bool { return r.match(flat, all).Blocks == 40 })
	if got := r.get(flat, all); got.Blocks != 40 {
		t.Fatalf("flat, after the restart: %+v", got)
	}
}

// TestKilledMidRead: the node is killed while a read waits for its device. The read is a miss.
// After the restart of the node it is a hit.
func TestKilledMidRead(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	h.gate.shut()
	results := make(chan client.ReadResult)
	go func() { results <- r.get(ns, ids) }()
	<-h.gate.arrived
	h.kill()
	if got := <-results; got.Outcome != client.Miss || got.Blocks != 0 || got.Cut != client.CutNodeDown || len(got.Lost) != 8 || got.Lost[0].Reason != client.LostNodeDown {
		t.Fatalf("read: %+v", got)
	}
	if w, err := r.put(ns, ids, 0, 0); err != nil || w.Outcome != client.Miss || len(w.Refused) != 8 {
		t.Fatalf("write to a dead node: %+v, %v", w, err)
	}
	if n := r.store.Nodes(); n[0].Up || n[0].Err == nil {
		t.Errorf("nodes: %+v", n)
	}
	h.start()
	eventually(t, "the node is back", func() bool { return r.match(ns, ids).Outcome == client.Hit })
	if got := r.get(ns, ids); got.Blocks != 8 {
		t.Fatalf("read after the restart: %+v", got)
	}
}

// TestRestartUnnoticed: a node that restarts between two calls causes no miss: its sessions are
// opened again.
func TestRestartUnnoticed(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	h.restart()
	eventually(t, "read after the restart", func() bool { return r.get(ns, ids).Blocks == 8 })
	h.restart()
	eventually(t, "write after the restart", func() bool {
		w, err := r.put(ns, chain(ns, 8, 2), 0, 0)
		return err == nil && w.Blocks == 8
	})
}

func TestOpenWithoutNode(t *testing.T) {
	h := newHost(t, nil)
	setup := newRig(t, nil, h)
	ns := setup.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 4, 1)
	setup.mustPut(ns, ids)
	h.kill()
	r := newRig(t, nil, h)
	if m := r.match(ns, ids); m.Outcome != client.Miss || m.Cut != client.CutNodeDown {
		t.Fatalf("match: %+v", m)
	}
	if _, err := r.store.Namespace(t.Context(), "m"); !errors.Is(err, client.ErrUnavailable) {
		t.Fatalf("namespace: %v", err)
	}
	h.start()
	eventually(t, "the node is back", func() bool { return r.match(ns, ids).Blocks == 4 })
	if got := r.get(ns, ids); got.Blocks != 4 {
		t.Fatalf("read: %+v", got)
	}
}

// TestCorruptDevice: the node detects a flipped bit on the device. The block is lost, the prefix
// ends before it, and the block can be written again.
func TestCorruptDevice(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, func(o *client.Options) { o.ReadTaskBytes, o.ReadParallel = 8192, 1 }, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	h.faults.SetRules(faultio.MustParse(`(Flip 40000 (And Reads (File "segment-*") (After 3) (Count 1)))`))
	got := r.get(ns, ids)
	if got.Outcome != client.Hit || got.Blocks != 3 || got.Cut != client.CutLost || len(got.Lost) != 5 {
		t.Fatalf("read: %+v", got)
	}
	for i, l := range got.Lost {
		want := client.LostSkipped
		if i == 0 {
			want = client.LostCorrupt
		}
		if l.Block != 3+i || l.Reason != want {
			t.Errorf("lost %d: %+v; want block %d, %s", i, l, 3+i, want)
		}
	}
	if n := h.faults.Counter().Count(faultio.Flip); n != 1 {
		t.Errorf("%d bits were flipped", n)
	}
	if s := r.store.Stats(); s.LostPieces != 5 || s.LostChecksum != 0 {
		t.Errorf("stats: %v", s)
	}
	h.faults.SetRules(faultio.MustParse(""))
	if m := r.match(ns, ids); m.Blocks != 3 {
		t.Fatalf("match: %+v", m)
	}
	if w, err := r.put(ns, ids, 3, 0); err != nil || w.Blocks != 8 {
		t.Fatalf("write: %+v, %v", w, err)
	}
	if got := r.get(ns, ids); got.Blocks != 8 {
		t.Fatalf("read: %+v", got)
	}
}

func TestDeviceErrors(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	h.faults.SetRules(faultio.MustParse(`(Err EIO (And Reads (File "segment-*")))`))
	got := r.get(ns, ids)
	if got.Outcome != client.Miss || got.Blocks != 0 || len(got.Lost) == 0 || got.Lost[0].Reason != client.LostFailed || got.Lost[0].Detail == "" {
		t.Fatalf("read: %+v", got)
	}
	h.faults.SetRules(faultio.MustParse(""))
	if m := r.match(ns, ids); m.Blocks != 0 || m.Cut != client.CutAbsent {
		t.Errorf("a block that could not be read, twice, is matched: %+v", m)
	}
	r.mustPut(ns, ids)
	if got := r.get(ns, ids); got.Blocks != 8 {
		t.Fatalf("read: %+v", got)
	}
}

// TestVolumeErrors: blocks stay indexed while their volume cannot be read, and are read again when
// it can.
func TestVolumeErrors(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	for range 2 {
		h.faults.SetRules(faultio.MustParse(`(Err EIO Reads)`))
		if got := r.get(ns, ids[:1]); got.Outcome != client.Miss || len(got.Lost) != 1 || got.Lost[0].Reason != client.LostFailed {
			t.Fatalf("read: %+v", got)
		}
		h.faults.SetRules(faultio.MustParse(""))
		if got := r.get(ns, ids); got.Blocks != 8 {
			t.Fatalf("read: %+v", got)
		}
	}
}

func TestBusy(t *testing.T) {
	h := newHost(t, func(so *storage.Options, _ *server.Options) {
		so.ReadsMax, so.QueueWait, so.ReservationsMax = 1, time.Millisecond, 1
	})
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 4, 1)
	r.mustPut(ns, ids)
	h.gate.shut()
	results := make(chan client.ReadResult)
	go func() { results <- r.get(ns, ids) }()
	<-h.gate.arrived
	got := r.get(ns, ids)
	if got.Outcome != client.Busy || got.Blocks != 0 || got.Cut != client.CutBusy || got.Detail == "" {
		t.Fatalf("second read: %+v", got)
	}
	h.gate.lift()
	if got := <-results; got.Blocks != 4 {
		t.Fatalf("first read: %+v", got)
	}
	if s := r.store.Stats(); s.Busy != 1 {
		t.Errorf("stats: %v", s)
	}
	// An open reservation takes the only place.
	conn, err := client.Dial(h.control, client.DialOptions{})
	h.must(err)
	defer conn.Close()
	digest := geometry.Digest()
	other := chain(ns, 1, 9)
	res, err := pb.NewCacheClient(conn).Reserve(t.Context(), &pb.ReserveRequest{Namespace: "m", BlockIds: other[0][:], GeometryDigest: digest[:]})
	if err != nil || res.GetReservation() == 0 {
		t.Fatalf("reserve: %v, %v", res, err)
	}
	w, err := r.put(ns, chain(ns, 4, 2), 0, 0)
	if err != nil || w.Outcome != client.Busy || len(w.Refused) != 4 || w.Refused[0].Reason != "busy" || w.Detail == "" {
		t.Fatalf("write: %+v, %v", w, err)
	}
}

func TestLease(t *testing.T) {
	now := time.Now()
	var mu sync.Mutex
	h := newHost(t, func(so *storage.Options, _ *server.Options) {
		so.Now = func() time.Time { mu.Lock(); defer mu.Unlock(); return now }
	})
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 4, 1)
	r.mustPut(ns, ids)
	evict := func() {
		h.admin(func(ctx context.Context, c pb.AdminClient) error {
			_, err := c.Evict(ctx, &pb.EvictRequest{Bytes: 1 << 20})
			return err
		})
	}
	lease := func(req client.MatchRequest) *client.Lease {
		t.Helper()
		req.Namespace, req.IDs = ns, ids
		m, err := r.store.Match(t.Context(), req)
		if err != nil || m.Lease == nil || len(m.Lease.IDs()) != 1 {
			t.Fatalf("match: %+v, %v", m, err)
		}
		return m.Lease
	}
	l := lease(client.MatchRequest{Lease: time.Minute})
	evict()
	if m := r.match(ns, ids); m.Blocks != 4 {
		t.Fatalf("a leased prefix was evicted: %+v", m)
	}
	if err := l.Renew(t.Context(), 2*time.Minute); err != nil {
		t.Fatal(err)
	}
	if err := l.Renew(t.Context(), 0); !errors.Is(err, client.ErrRequest) {
		t.Errorf("renew for no time: %v", err)
	}
	pin := lease(client.MatchRequest{Pin: true})
	if err := errors.Join(l.Release(t.Context()), l.Release(t.Context())); err != nil {
		t.Errorf("release, twice: %v", err)
	}
	if err := l.Renew(t.Context(), time.Minute); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("renew after release: %v", err)
	}
	evict()
	if m := r.match(ns, ids); m.Blocks != 4 {
		t.Fatalf("a pinned prefix was evicted: %+v", m)
	}
	if err := pin.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	evict()
	if m := r.match(ns, ids); m.Blocks != 0 {
		t.Fatalf("blocks without a lease were not evicted: %+v", m)
	}
	if m, err := r.store.Match(t.Context(), client.MatchRequest{Namespace: ns, IDs: ids, Lease: time.Minute}); err != nil || m.Lease != nil {
		t.Errorf("a lease on nothing: %+v, %v", m, err)
	}
}

func TestEpochs(t *testing.T) {
	r := newRig(t, func(o *client.Options) { o.WriteChunkBytes = 2 * 8192 }, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 4, 1)
	if ns.Epoch != 1 {
		t.Fatalf("a new namespace is at epoch %d", ns.Epoch)
	}
	if w, err := r.put(ns, ids, 0, 1); err != nil || w.Stored != 4 {
		t.Fatalf("write: %+v, %v", w, err)
	}
	m := r.match(ns, ids)
	if m.Blocks != 4 || m.Epoch != 1 {
		t.Fatalf("match: %+v", m)
	}
	r.bump("m")
	mem := r.memory(4 * 8192)
	got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: m.IDs, Epoch: m.Epoch, Into: mem})
	if err != nil || got.Outcome != client.Miss || got.Cut != client.CutEpoch {
		t.Fatalf("read of the old epoch: %+v, %v", got, err)
	}
	w, err := r.put(ns, ids, 0, 1)
	if err != nil || w.Outcome != client.Miss || len(w.Refused) != 4 || w.Refused[0].Reason != "stale_epoch" || w.Refused[3].Reason != client.LostSkipped {
		t.Fatalf("write of the old epoch: %+v, %v", w, err)
	}
	if _, err := r.put(ns, ids, 0, 9); !errors.Is(err, client.ErrMismatch) {
		t.Fatalf("write of a later epoch: %v", err)
	}
	if again, err := r.store.Namespace(t.Context(), "m"); err != nil || again.Epoch != 2 {
		t.Fatalf("namespace after a mismatch: %+v, %v", again, err)
	}
}

func TestRefusals(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 4, 1)
	mem := r.memory(4 * 8192)
	ctx := t.Context()
	if _, err := r.store.Namespace(ctx, "nobody"); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("unknown namespace: %v", err)
	}
	other := ns
	other.Name = "nobody"
	if _, err := r.store.Match(ctx, client.MatchRequest{Namespace: other, IDs: ids}); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("match in an unknown namespace: %v", err)
	}
	if _, err := r.store.Read(ctx, client.ReadRequest{Namespace: other, IDs: ids, Into: mem}); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("read in an unknown namespace: %v", err)
	}
	wrong := ns
	wrong.Geometry = kv.SingleGroup(2, 4, 1024) // the same bytes, other layers
	if _, err := r.store.Write(ctx, client.WriteRequest{Namespace: wrong, IDs: ids, From: mem}); !errors.Is(err, client.ErrMismatch) {
		t.Errorf("write under another geometry: %v", err)
	}
	r.mustPut(ns, ids)
	if got, err := r.store.Read(ctx, client.ReadRequest{Namespace: wrong, IDs: ids, Into: mem}); !errors.Is(err, client.ErrMismatch) {
		t.Errorf("read under another geometry: %+v, %v", got, err)
	}
	long := slices.Repeat(ids, 300)
	if _, err := r.store.Match(ctx, client.MatchRequest{Namespace: ns, IDs: long}); !errors.Is(err, client.ErrRequest) {
		t.Errorf("chain of %d blocks: %v", len(long), err)
	}
	for name, req := range map[string]client.ReadRequest{
		"no memory":          {Namespace: ns, IDs: ids},
		"memory too small":   {Namespace: ns, IDs: ids, Into: mem, Base: 1},
		"offset below zero":  {Namespace: ns, IDs: ids, Into: mem, Base: -8192},
		"offset overflows":   {Namespace: ns, IDs: ids, Into: mem, Pieces: []client.Piece{{Offset: 1<<63 - 1}}},
		"no such block":      {Namespace: ns, IDs: ids, Into: mem, Pieces: []client.Piece{{Block: 4}}},
		"no such group":      {Namespace: ns, IDs: ids, Into: mem, Pieces: []client.Piece{{Group: 1}}},
		"no such layer":      {Namespace: ns, IDs: ids, Into: mem, FirstLayer: 4},
		"too many layers":    {Namespace: ns, IDs: ids, Into: mem, FirstLayer: 2, Layers: 3},
		"negative layers":    {Namespace: ns, IDs: ids, Into: mem, Layers: -1},
		"first is negative":  {Namespace: ns, IDs: ids, Into: mem, First: -1},
		"first is too far":   {Namespace: ns, IDs: ids, Into: mem, First: 5},
		"before first":       {Namespace: ns, IDs: ids, Into: mem, First: 2, Pieces: []client.Piece{{Block: 1}}},
		"ids and tokens":     {Namespace: ns, IDs: ids, Tokens: make([]kv.Token, 4), Into: mem},
		"not a namespace":    {IDs: ids, Into: mem},
		"namespace unshaped": {Namespace: kv.Namespace{Name: "m"}, IDs: ids, Into: mem},
	} {
		if _, err := r.store.Read(ctx, req); !errors.Is(err, client.ErrRequest) {
			t.Errorf("read, %s: %v", name, err)
		}
	}
	for name, req := range map[string]client.WriteRequest{
		"no memory":         {Namespace: ns, IDs: ids},
		"memory too small":  {Namespace: ns, IDs: ids, From: mem, Base: 1},
		"first is negative": {Namespace: ns, IDs: ids, From: mem, First: -1},
		"first is too far":  {Namespace: ns, IDs: ids, From: mem, First: 5},
		"before first":      {Namespace: ns, IDs: ids, From: mem, First: 2, Pieces: []client.Piece{{Block: 1}}},
		"piece twice":       {Namespace: ns, IDs: ids, From: mem, Pieces: []client.Piece{{Block: 1}, {Block: 1, Offset: 8192}}},
	} {
		if _, err := r.store.Write(ctx, req); !errors.Is(err, client.ErrRequest) {
			t.Errorf("write, %s: %v", name, err)
		}
	}
	if got := r.get(ns, ids); got.Blocks != 4 {
		t.Errorf("read afterwards: %+v", got)
	}
	gone, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := r.store.Match(gone, client.MatchRequest{Namespace: ns, IDs: ids}); !errors.Is(err, context.Canceled) {
		t.Errorf("match after its context: %v", err)
	}
	if _, err := r.store.Read(gone, client.ReadRequest{Namespace: ns, IDs: ids, Into: mem}); !errors.Is(err, context.Canceled) {
		t.Errorf("read after its context: %v", err)
	}
	if _, err := r.store.Write(gone, client.WriteRequest{Namespace: ns, IDs: ids, From: mem}); !errors.Is(err, context.Canceled) {
		t.Errorf("write after its context: %v", err)
	}
}

// TestParentAbsent: blocks whose parent is not stored are refused with that reason.
func TestParentAbsent(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	w, err := r.put(ns, chain(ns, 6, 1), 3, 0)
	if err != nil || w.Outcome != client.Miss || w.Blocks != 3 || len(w.Refused) != 3 || w.Refused[0].Reason != "parent_absent" {
		t.Fatalf("write: %+v, %v", w, err)
	}
}

// TestTransfer: transfer blocks are removed when they are delivered.
func TestTransfer(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 4, 1)
	mem := r.memory(4 * 8192)
	for i, id := range ids {
		fill(mem.Bytes()[i*8192:][:8192], id, 0, 0)
	}
	if w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: mem, Class: client.Transfer}); err != nil || w.Stored != 4 {
		t.Fatalf("write: %+v, %v", w, err)
	}
	if got := r.get(ns, ids); got.Blocks != 4 {
		t.Fatalf("read: %+v", got)
	}
	if n, err := r.store.Delivered(t.Context(), ns, ids); err != nil || n != 4 {
		t.Fatalf("delivered: %d, %v", n, err)
	}
	if m := r.match(ns, ids); m.Blocks != 0 {
		t.Fatalf("match: %+v", m)
	}
}

func TestAuth(t *testing.T) {
	const token = "a bearer token of some length"
	h := newHost(t, func(_ *storage.Options, o *server.Options) { o.Tokens = func() []string { return []string{token} } })
	r := newRig(t, func(o *client.Options) { o.BearerToken = token }, h)
	if _, err := r.store.Namespace(t.Context(), "m"); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("namespace: %v", err)
	}
	engine, err := tcp.New(t.Context(), tcp.Options{})
	h.must(err)
	defer engine.Close()
	for _, wrong := range []string{"", "guessed"} {
		if s, err := client.Open(t.Context(), client.Options{Servers: []string{h.control}, Engine: engine, BearerToken: wrong}); !errors.Is(err, client.ErrAuth) {
			t.Errorf("open with token %q: %v, %v", wrong, s, err)
		}
	}
}

// TestTokenIsReplaced: a client whose token is replaced goes on when the node accepts the old one no more, over gRPC
// and over the data plane, whose session ends with the old token.
func TestTokenIsReplaced(t *testing.T) {
	const first, second = "the first bearer token", "the second bearer token"
	var accepted atomic.Pointer[[]string]
	accepted.Store(&[]string{first, second})
	h := newHost(t, func(_ *storage.Options, o *server.Options) { o.Tokens = func() []string { return *accepted.Load() } })
	var token atomic.Pointer[string]
	use := func(s string) { token.Store(&s) }
	use(first)
	r := newRig(t, func(o *client.Options) {
		o.TokenSource, o.DeadFor, o.NoLocal = func() string { return *token.Load() }, time.Millisecond, true
	}, h)
	ns, err := r.store.EnsureNamespace(t.Context(), kv.Namespace{Name: "m", Geometry: geometry, Index: kv.IndexTrie})
	h.must(err)
	ids := chain(ns, 4, 1)
	r.mustPut(ns, ids)
	events, ended := make(chan client.Event, 10), make(chan error)
	go func() {
		// A number that the node never assigned: the stream begins with a gap.
		ended <- r.store.Events(t.Context(), client.EventsRequest{After: map[string]uint64{h.control: 1 << 60}}, func(e client.Event) error {
			events <- e
			if e.Kind == client.AllBlocksCleared {
				return io.EOF
			}
			return nil
		})
	}()
	<-events
	use(second)
	if got := r.get(ns, ids); got.Blocks != 4 {
		t.Errorf("read with the second token, while both are accepted: %+v", got)
	}
	accepted.Store(&[]string{second})
	h.server.EndRemovedSessions()
	for got := r.get(ns, ids); got.Blocks != 4; got = r.get(ns, ids) { // the first call may find that the session has ended
		if t.Context().Err() != nil {
			t.Fatalf("read after the first token was removed: %+v", got)
		}
	}
	// The stream of events, which the first token has opened, is opened again.
	if _, err := r.store.BumpEpoch(t.Context(), "m", 0, 1); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, io.EOF) {
		t.Errorf("the events end with %v", err)
	}
	use("another one")
	if _, err := r.store.Namespace(t.Context(), "m"); !errors.Is(err, client.ErrAuth) {
		t.Errorf("a call with a token that is not accepted: %v", err)
	}
}

// TestRoles: the calls that the client's principal may make work over gRPC and the data plane. The
// errors of the others match ErrAuth, and name the principal, the role and the namespace.
func TestRoles(t *testing.T) {
	const token = "a bearer token of some length"
	text := fmt.Sprintf("principals: [{name: reader, tokens: [sha256:%x], grants: [{roles: [read], namespaces: [m]}, {roles: [read, write, admin], namespaces: [own/*]}]}]", sha256.Sum256([]byte(token)))
	policy, err := access.Parse("roles.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	var on atomic.Bool
	h := newHost(t, func(_ *storage.Options, o *server.Options) {
		o.Roles = func() *access.Policy {
			if on.Load() {
				return policy
			}
			return nil
		}
	})
	all := newRig(t, nil, h)
	ns := all.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 4, 1)
	all.mustPut(ns, ids)
	on.Store(true)
	r := newRig(t, func(o *client.Options) { o.BearerToken = token }, h)
	if got := r.get(ns, ids); got.Blocks != 4 {
		t.Errorf("read: %+v", got)
	}
	own, err := r.store.EnsureNamespace(t.Context(), kv.Namespace{Name: "own/m", Geometry: geometry, Index: kv.IndexTrie})
	if err != nil {
		t.Fatal(err)
	}
	r.mustPut(own, chain(own, 4, 1))
	w, err := r.put(ns, chain(ns, 4, 2), 0, 0)
	if !errors.Is(err, client.ErrAuth) || !strings.Contains(err.Error(), `principal "reader" lacks the role write on namespace "m"`) {
		t.Errorf("write: %+v, %v", w, err)
	}
	if _, err := r.store.BumpEpoch(t.Context(), "m", 0, 1); !errors.Is(err, client.ErrAuth) || !strings.Contains(err.Error(), `lacks the role admin on namespace "m"`) {
		t.Errorf("bump: %v", err)
	}
}

// TestBatches: several sequences in one call.
func TestBatches(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	mem := r.memory(10 * 4 * 8192)
	var writes []client.WriteRequest
	var reads []client.ReadRequest
	into := r.memory(10 * 4 * 8192)
	for p := range 10 {
		ids := chain(ns, 4, uint32(p))
		for i, id := range ids {
			fill(mem.Bytes()[(p*4+i)*8192:][:8192], id, 0, 0)
		}
		writes = append(writes, client.WriteRequest{Namespace: ns, IDs: ids, From: mem, Base: int64(p) * 4 * 8192})
		reads = append(reads, client.ReadRequest{Namespace: ns, IDs: ids, Into: into, Base: int64(p) * 4 * 8192})
	}
	ws, err := r.store.WriteBatch(t.Context(), writes)
	if err != nil || len(ws) != 10 || ws[9].Stored != 4 {
		t.Fatalf("writes: %+v, %v", ws, err)
	}
	rs, err := r.store.ReadBatch(t.Context(), reads)
	if err != nil || len(rs) != 10 || rs[9].Blocks != 4 {
		t.Fatalf("reads: %+v, %v", rs, err)
	}
	if !slices.Equal(mem.Bytes(), into.Bytes()) {
		t.Error("the bytes that were read differ from the written bytes")
	}
	reads[3].Into = nil
	if _, err := r.store.ReadBatch(t.Context(), reads); !errors.Is(err, client.ErrRequest) {
		t.Errorf("a batch with a bad request: %v", err)
	}
}

// TestManyAtOnce: readers and writers of overlapping prompts run while blocks are evicted and the
// epoch changes. Every byte that counts as read is checked.
func TestManyAtOnce(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, func(o *client.Options) { o.ReadTaskBytes, o.WriteChunkBytes = 4*8192, 4*8192 }, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	const blocks, workers, rounds = 24, 6, 25
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			mem := r.memory(blocks * 8192)
			defer mem.Close(context.Background())
			for round := range rounds {
				ids := chain(ns, blocks, uint32((worker+round)%4))
				m, err := r.store.Match(t.Context(), client.MatchRequest{Namespace: ns, IDs: ids})
				if err != nil {
					t.Errorf("match: %v", err)
					return
				}
				got := client.ReadResult{}
				if m.Blocks > 0 {
					got, err = r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: m.IDs, Epoch: m.Epoch, Into: mem})
					if err != nil {
						t.Errorf("read: %v", err)
						return
					}
				}
				for i := range got.Blocks {
					if err := check(mem.Bytes()[i*8192:][:8192], ids[i], 0, m.Epoch); err != nil {
						t.Error(err)
						return
					}
				}
				for i := got.Blocks; i < blocks; i++ {
					fill(mem.Bytes()[i*8192:][:8192], ids[i], 0, m.Epoch)
				}
				if _, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, First: got.Blocks, Epoch: m.Epoch, From: mem}); err != nil {
					t.Errorf("write: %v", err)
					return
				}
				switch {
				case worker == 0 && round%8 == 7:
					r.bump("m")
				case worker == 1 && round%3 == 2:
					h.admin(func(ctx context.Context, c pb.AdminClient) error {
						_, err := c.Evict(ctx, &pb.EvictRequest{Bytes: 200 << 10})
						return err
					})
				}
			}
		})
	}
	wg.Wait()
	s := r.store.Stats()
	if s.LostChecksum != 0 || s.ReadBytes == 0 {
		t.Errorf("stats: %v", s)
	}
	if imm := r.engine.Stats(); imm.ImmediatesDropped != 0 {
		t.Errorf("%d immediates were dropped", imm.ImmediatesDropped)
	}
}

// TestHeldUpDevice: ctx ends while the node's device is slow. Data that the device returns later
// reaches no reader.
func TestHeldUpDevice(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	mem := r.memory(8 * 8192)
	h.gate.shut()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-h.gate.arrived
		cancel()
	}()
	got, err := r.store.Read(ctx, client.ReadRequest{Namespace: ns, IDs: ids, Into: mem})
	if !errors.Is(err, context.Canceled) || got.Blocks != 0 || got.Outcome != client.Miss {
		t.Fatalf("read: %+v, %v", got, err)
	}
	h.gate.lift()
	if got := r.get(ns, ids); got.Blocks != 8 {
		t.Fatalf("the next read: %+v", got)
	}
	// The drain waits for the cancelled load.
	h.kill()
	if i := slices.IndexFunc(mem.Bytes(), func(b byte) bool { return b != 0 }); i >= 0 {
		t.Errorf("byte %d changed after Read had returned", i)
	}
}

// TestClosed: every call of a closed Store returns ErrClosed.
func TestClosed(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 4, 1)
	mem := r.memory(4 * 8192)
	if err := r.store.Close(); err != nil {
		t.Fatal(err)
	}
	_, matchErr := r.store.Match(t.Context(), client.MatchRequest{Namespace: ns, IDs: ids})
	_, readErr := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: mem})
	_, writeErr := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: mem})
	eventsErr := r.store.Events(t.Context(), client.EventsRequest{}, func(client.Event) error { return nil })
	_, nsErr := r.store.Namespace(t.Context(), "other")
	for what, err := range map[string]error{"match": matchErr, "read": readErr, "write": writeErr, "events": eventsErr, "namespace": nsErr} {
		if !errors.Is(err, client.ErrClosed) {
			t.Errorf("%s: %v; want ErrClosed", what, err)
		}
	}
}

// TestTLS: a Store that trusts the node's certificate works. A Store that does not treats the node
// as down and reports the reason.
func TestTLS(t *testing.T) {
	ca := testkit.NewAuthority(t)
	h := newHost(t, func(_ *storage.Options, o *server.Options) {
		o.TLS = &tls.Config{Certificates: []tls.Certificate{ca.Issue(nil)}}
	})
	engine, err := tcp.New(t.Context(), tcp.Options{})
	h.must(err)
	defer engine.Close()
	good, err := client.Open(t.Context(), client.Options{Servers: []string{h.control}, Engine: engine, TLS: &tls.Config{RootCAs: ca.Pool}})
	h.must(err)
	defer good.Close()
	if n := good.Nodes()[0]; !n.Up {
		t.Errorf("node: %+v", n)
	}
	if _, err := good.Namespace(t.Context(), "m"); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("namespace: %v", err)
	}
	stranger, err := client.Open(t.Context(), client.Options{Servers: []string{h.control}, Engine: engine, TLS: &tls.Config{}})
	h.must(err)
	defer stranger.Close()
	if n := stranger.Nodes()[0]; n.Up || n.Err == nil || !strings.Contains(n.Err.Error(), "certificate") {
		t.Errorf("node: %+v", n)
	}
}
