package move

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/server/storage"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// geo has blocks of 16 tokens and 4 KiB in two layers.
var geo = kv.SingleGroup(2, 16, 128)

// site is a node with a client of it.
type site struct {
	*client.Store
	t      *testing.T
	node   *testnode.Node
	ns     kv.Namespace
	memory *client.Memory
}

func newSite(t *testing.T, index kv.IndexKind) *site {
	t.Helper()
	return newSiteOf(t, index, testnode.Options{})
}

func newSiteOf(t *testing.T, index kv.IndexKind, o testnode.Options) *site {
	t.Helper()
	s := &site{t: t, node: testnode.Start(t, o)}
	_, err := s.node.Storage.CreateNamespace(t.Context(), kv.Namespace{Name: "m", Index: index, Geometry: geo})
	s.must(err)
	s.Store, s.ns = s.node.Open(t, "m")
	s.memory, err = s.Register(make([]byte, 1<<20))
	s.must(err)
	t.Cleanup(func() { s.must(s.memory.Close(context.Background())) })
	return s
}

func (s *site) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// bytesOf returns the bytes of a block.
func bytesOf(id kv.BlockID, epoch kv.Epoch) []byte {
	b := make([]byte, 4096)
	for i := range b {
		b[i] = id[i%16] + byte(i/16) + byte(epoch)*7
	}
	return b
}

// ids returns the chain of a sequence of n blocks.
func (s *site) ids(sequence, n int) []kv.BlockID {
	s.t.Helper()
	if s.ns.Index == kv.IndexFlat {
		ids := make([]kv.BlockID, n)
		for i := range ids {
			binary.BigEndian.PutUint32(ids[i][:], uint32(sequence))
			binary.BigEndian.PutUint32(ids[i][4:], uint32(i+1))
		}
		return ids
	}
	chain, err := s.ns.Chain()
	s.must(err)
	tokens := make([]kv.Token, 16*n)
	for i := range tokens {
		tokens[i] = kv.Token(sequence<<16 + i)
	}
	ids, _ := chain.Append(nil, tokens)
	return ids
}

func (s *site) put(ids []kv.BlockID, epoch kv.Epoch) {
	s.t.Helper()
	for i, id := range ids {
		copy(s.memory.Bytes()[i*4096:], bytesOf(id, epoch))
	}
	w, err := s.Write(s.t.Context(), client.WriteRequest{Namespace: s.ns, Epoch: epoch, IDs: ids, From: s.memory})
	s.must(err)
	if w.Blocks != len(ids) {
		s.t.Fatalf("stored %+v", w)
	}
}

// has returns the number of leading blocks that the node has. Their bytes must be right.
func (s *site) has(ids []kv.BlockID, epoch kv.Epoch) int {
	s.t.Helper()
	clear(s.memory.Bytes())
	r, err := s.Read(s.t.Context(), client.ReadRequest{Namespace: s.ns, Epoch: epoch, IDs: ids, Into: s.memory})
	s.must(err)
	for i, id := range ids[:r.Blocks] {
		if !bytes.Equal(s.memory.Bytes()[i*4096:][:4096], bytesOf(id, epoch)) {
			s.t.Errorf("block %d has other bytes", i)
		}
	}
	return r.Blocks
}

// target records the writes.
type target struct {
	*client.Store
	mu    sync.Mutex
	roots []kv.BlockID // of the writes, in order
	bytes int64
	// refuse, if not nil, returns whether a write is refused as a whole.
	refuse func(client.WriteRequest) bool
	before func(client.WriteRequest)
	after  func(client.WriteRequest)
}

func (w *target) Write(ctx context.Context, r client.WriteRequest) (client.WriteResult, error) {
	if w.before != nil {
		w.before(r)
	}
	if w.refuse != nil && w.refuse(r) {
		return client.WriteResult{Refused: []client.RefusedPiece{{Block: r.First, Reason: "full"}}, Blocks: r.First}, nil
	}
	result, err := w.Store.Write(ctx, r)
	if w.after != nil {
		w.after(r)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.roots = append(w.roots, r.IDs[0])
	w.bytes += result.Bytes
	return result, err
}

// run runs a Mover until the condition holds, and returns its last progress.
func run(t *testing.T, o Options, until func(Progress) bool) Progress {
	t.Helper()
	o.RetryMin, o.RetryMax = 10*time.Millisecond, 20*time.Millisecond
	m, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	limit := time.After(time.Minute)
	for !until(m.Progress()) {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("not reached: %+v", m.Progress())
		}
	}
	p := m.Progress()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	return p
}

func done(p Progress) bool { return p.Phase == Done }

// TestHottestFirst: sequences are copied in the order of their use, whole and with their bytes. A second
// Run sends nothing. Blocks that are stored later are copied too.
func TestHottestFirst(t *testing.T) {
	testkit.VerifyNone(t)
	from, to := newSite(t, kv.IndexTrie), newSite(t, kv.IndexTrie)
	const sequences = 8
	for i := range sequences {
		from.put(from.ids(i, 10), 1)
	}
	for _, i := range []int{3, 5} {
		for range i {
			if _, err := from.Match(t.Context(), client.MatchRequest{Namespace: from.ns, IDs: from.ids(i, 10)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	w := &target{Store: to.Store}
	o := Options{Node: from.node.Storage, To: w, Parallel: 1}
	p := run(t, o, done)
	if p.Blocks != 10*sequences || p.CopiedBlocks != p.Blocks || p.CopiedBytes != p.Bytes || p.Bytes != 10*sequences*4096 || p.Left != 0 {
		t.Errorf("%+v", p)
	}
	hot := map[kv.BlockID]bool{from.ids(3, 1)[0]: true, from.ids(5, 1)[0]: true}
	if !hot[w.roots[0]] || !hot[w.roots[1]] || w.roots[2] != from.ids(7, 1)[0] {
		t.Errorf("the first copies are of %v; want those of sequences 3 and 5, and then the last stored one, of\n%v", w.roots[:3], []kv.BlockID{from.ids(3, 1)[0], from.ids(5, 1)[0], from.ids(7, 1)[0]})
	}
	for i := range sequences {
		if n := to.has(to.ids(i, 10), 1); n != 10 {
			t.Errorf("sequence %d has %d blocks", i, n)
		}
	}
	again := &target{Store: to.Store}
	o.To = again
	stored := false
	p = run(t, o, func(p Progress) bool {
		if p.Phase == Done && !stored {
			if len(again.roots) > 0 {
				t.Errorf("a second Run wrote %d times", len(again.roots))
			}
			from.put(from.ids(2, 12), 1)
			stored = true
		}
		return stored && p.Phase == Done && p.Blocks == 10*sequences+2
	})
	if n := to.has(to.ids(2, 12), 1); n != 12 || again.bytes != 2*4096 {
		t.Errorf("%d blocks of a sequence that became longer, %d bytes; %+v", n, again.bytes, p)
	}
}

// TestFlat: all keys of a flat namespace are copied, and keys that the other node has are not sent.
func TestFlat(t *testing.T) {
	testkit.VerifyNone(t)
	from, to := newSite(t, kv.IndexFlat), newSite(t, kv.IndexFlat)
	for i := range 5 {
		from.put(from.ids(i, 100), 1)
	}
	to.put(to.ids(1, 100), 1)
	w := &target{Store: to.Store}
	p := run(t, Options{Node: from.node.Storage, To: w}, done)
	if p.CopiedBlocks != 500 || w.bytes != 400*4096 {
		t.Errorf("%d bytes were sent; %+v", w.bytes, p)
	}
	for i := range 5 {
		if n := to.has(to.ids(i, 100), 1); n != 100 {
			t.Errorf("%d of 100 keys", n)
		}
	}
}

// someDown is a cluster of which a node is down that stores the keys with an odd last byte.
type someDown struct{ *client.Store }

func (d someDown) ExistsGroups(ctx context.Context, r client.KeysRequest) ([][]client.Presence, error) {
	have, err := d.Store.ExistsGroups(ctx, r)
	for i := range have[0] {
		if r.IDs[i][7]%2 == 1 {
			have[0][i] = client.Unknown
		}
	}
	return have, err
}

// TestFlatNodeDown: keys of a node that is down do not stop those of other nodes.
func TestFlatNodeDown(t *testing.T) {
	from, to := newSite(t, kv.IndexFlat), newSite(t, kv.IndexFlat)
	ids := from.ids(1, 16)
	from.put(ids, 1)
	p := run(t, Options{Node: from.node.Storage, To: someDown{to.Store}}, func(p Progress) bool { return p.Phase == Waiting })
	if p.CopiedBlocks != 8 || p.Left != 8 || p.Reason != "node_down" {
		t.Errorf("%+v", p)
	}
	for i, id := range ids {
		if n := to.has([]kv.BlockID{id}, 1); n != i%2 {
			t.Errorf("%d blocks of key %d are copied", n, i+1)
		}
	}
}

// TestEpochEnds: blocks of an epoch that ends on both nodes between the read and the write of a copy are
// not stored under another epoch, and the copies end.
func TestEpochEnds(t *testing.T) {
	testkit.VerifyNone(t)
	from, to := newSite(t, kv.IndexTrie), newSite(t, kv.IndexTrie)
	ids := from.ids(0, 20)
	from.put(ids, 1)
	var once sync.Once
	w := &target{Store: to.Store, before: func(client.WriteRequest) {
		once.Do(func() {
			for _, s := range []*site{to, from} {
				if _, err := s.node.Storage.BumpEpoch(t.Context(), "m", 0, 1); err != nil {
					t.Error(err)
				}
			}
		})
	}}
	p := run(t, Options{Node: from.node.Storage, To: w}, func(p Progress) bool { return p.Phase == Done && p.Blocks == 0 })
	if p.Left != 0 {
		t.Errorf("%+v", p)
	}
	for _, epoch := range []kv.Epoch{1, 2} {
		if n := to.has(ids, epoch); n != 0 {
			t.Errorf("%d blocks under epoch %d", n, epoch)
		}
	}
}

// TestLeft: blocks that the other node refuses are counted with a reason, and the others are copied.
func TestLeft(t *testing.T) {
	testkit.VerifyNone(t)
	from, to := newSite(t, kv.IndexTrie), newSite(t, kv.IndexTrie)
	for i := range 3 {
		from.put(from.ids(i, 5), 1)
	}
	// The other node has a later epoch, so it refuses the blocks.
	if _, err := from.node.Storage.BumpEpoch(t.Context(), "m", 0, 2); err != nil {
		t.Fatal(err)
	}
	if _, err := to.node.Storage.BumpEpoch(t.Context(), "m", 0, 1); err != nil {
		t.Fatal(err)
	}
	from.put(from.ids(7, 5), 2)
	p := run(t, Options{Node: from.node.Storage, To: &target{Store: to.Store}}, func(p Progress) bool { return p.Phase == Waiting })
	if p.Left != 15 || p.CopiedBlocks != 5 || p.Reason == "" {
		t.Errorf("%+v", p)
	}
	if n := to.has(to.ids(7, 5), 2); n != 5 {
		t.Errorf("%d blocks of the common epoch", n)
	}
}

// present counts the blocks of sequences that the node has.
func (s *site) present(sequences, blocks int) (n int) {
	s.t.Helper()
	for i := range sequences {
		have, err := s.Exists(s.t.Context(), client.KeysRequest{Namespace: s.ns, IDs: s.ids(i, blocks)}, false)
		s.must(err)
		for _, h := range have {
			if h == client.Present {
				n++
			}
		}
	}
	return n
}

// TestEvictedMeanwhile: when the other node has evicted or lost blocks after they were copied, the progress has the number of blocks that
// it had when it was asked at the end. Another Run copies the others.
func TestEvictedMeanwhile(t *testing.T) {
	testkit.VerifyNone(t)
	for name, c := range map[string]struct {
		sequences, blocks int
		o                 testnode.Options
		lose              bool // the other node loses a block once, after it has all of them
	}{
		"lost once": {3, 5, testnode.Options{}, true},
		"no room":   {4, 100, testnode.Options{CapacityBytes: 1 << 20, SegmentBytes: 128 << 10}, false},
	} {
		t.Run(name, func(t *testing.T) {
			from, to := newSite(t, kv.IndexTrie), newSiteOf(t, kv.IndexTrie, c.o)
			for i := range c.sequences {
				from.put(from.ids(i, c.blocks), 1)
			}
			count, lost := int64(c.sequences*c.blocks), false
			w := &target{Store: to.Store}
			w.after = func(client.WriteRequest) {
				if !c.lose || lost || to.present(c.sequences, c.blocks) < int(count) {
					return
				}
				lost = true
				if _, err := to.Delete(t.Context(), client.KeysRequest{Namespace: to.ns, IDs: to.ids(1, c.blocks)[3:]}); err != nil {
					t.Error(err)
				}
			}
			p := run(t, Options{Node: from.node.Storage, To: w, Parallel: 1}, done)
			has := int64(to.present(c.sequences, c.blocks))
			if p.CopiedBlocks != has || p.CopiedBytes != 4096*has || p.Blocks != count || p.Left != 0 || p.Checked.IsZero() {
				t.Errorf("%+v; the other node has %d of %d blocks", p, has, count)
			}
			if lost != c.lose || has == count || has == 0 {
				t.Errorf("lost %v; the other node has %d of %d blocks", lost, has, count)
			}
			if !c.lose {
				return
			}
			if p = run(t, Options{Node: from.node.Storage, To: w}, done); p.CopiedBlocks != count || to.present(c.sequences, c.blocks) != int(count) {
				t.Errorf("after another run: %+v", p)
			}
		})
	}
}

// TestCheckFails: while it is unknown whether the other nodes still have the blocks, the copies are not done.
func TestCheckFails(t *testing.T) {
	testkit.VerifyNone(t)
	from, to := newSite(t, kv.IndexTrie), newSite(t, kv.IndexTrie)
	from.put(from.ids(0, 5), 1)
	w := &unsure{target: &target{Store: to.Store}}
	w.after = func(client.WriteRequest) { w.down.Store(true) }
	seen := false
	run(t, Options{Node: from.node.Storage, To: w}, func(p Progress) bool {
		if p.Phase == Done && w.down.Load() {
			t.Fatalf("done while a node is down: %+v", p)
		}
		if p.Phase == Waiting && !seen {
			if seen = true; p.Left != 5 || p.Reason != nodeDown {
				t.Errorf("%+v", p)
			}
			w.after = nil
			w.down.Store(false)
		}
		return p.Phase == Done
	})
	if !seen {
		t.Error("the check did not find that the node is down")
	}
}

// unsure is a target of which it is unknown which blocks it has, while it is down.
type unsure struct {
	*target
	down atomic.Bool
}

func (u *unsure) ExistsGroups(ctx context.Context, r client.KeysRequest) ([][]client.Presence, error) {
	have, err := u.target.ExistsGroups(ctx, r)
	for _, group := range have {
		for i := range group {
			if u.down.Load() {
				group[i] = client.Unknown
			}
		}
	}
	return have, err
}

// hybrid has blocks of 16 tokens with a group of each kind.
var hybrid = kv.Geometry{BlockTokens: 16, Groups: []kv.Group{
	{Kind: kv.Full, Layers: 2, TokenBytes: 128},
	{Kind: kv.Window, Layers: 3, TokenBytes: 64, WindowTokens: 32},
	{Kind: kv.State, Layers: 1, TokenBytes: 1000},
}}

// pieceBytesOf returns the bytes of a piece.
func pieceBytesOf(g kv.Geometry, id kv.BlockID, group int) []byte {
	b := make([]byte, g.PieceBytes(group))
	for i := range b {
		b[i] = id[i%16] ^ byte(i/16*3+group*59)
	}
	return b
}

// putPieces stores pieces of a chain.
func (s *site) putPieces(ids []kv.BlockID, pieces ...client.Piece) {
	s.t.Helper()
	at := int64(0)
	for i := range pieces {
		b := pieceBytesOf(s.ns.Geometry, ids[pieces[i].Block], pieces[i].Group)
		copy(s.memory.Bytes()[at:], b)
		pieces[i].Offset = at
		at += int64(len(b))
	}
	w, err := s.Write(s.t.Context(), client.WriteRequest{Namespace: s.ns, IDs: ids, From: s.memory, Pieces: pieces})
	s.must(err)
	if w.Stored != len(pieces) {
		s.t.Fatalf("stored %+v", w)
	}
}

// pieces returns the stored pieces of a chain as "block.group". Their bytes must be right.
func (s *site) pieces(ids []kv.BlockID) (out []string) {
	s.t.Helper()
	ctx := s.t.Context()
	for b, id := range ids {
		for g := range s.ns.Geometry.Groups {
			got := make([]byte, s.ns.Geometry.PieceBytes(g))
			r, err := s.node.Storage.Load(ctx, storage.LoadRequest{
				Namespace: s.ns.Name, IDs: ids, Alone: true, Pieces: []storage.PieceRef{{Block: b, Group: g}},
			}, func(_ context.Context, parts []storage.Part) {
				for i := range parts {
					copy(got[parts[i].At:], parts[i].Bytes)
					parts[i].Done(nil)
				}
			})
			s.must(err)
			if r.Pieces[0].State != storage.Delivered {
				continue
			}
			if !bytes.Equal(got, pieceBytesOf(s.ns.Geometry, id, g)) {
				s.t.Errorf("block %d, group %d has other bytes", b, g)
			}
			out = append(out, fmt.Sprintf("%d.%d", b, g))
		}
	}
	return out
}

// newHybridSite is newSite with a namespace of the geometry.
func newHybridSite(t *testing.T, g kv.Geometry) *site {
	t.Helper()
	s := newSite(t, kv.IndexTrie)
	_, err := s.node.Storage.CreateNamespace(t.Context(), kv.Namespace{Name: "h", Index: kv.IndexTrie, Geometry: g})
	s.must(err)
	s.ns, err = s.Namespace(t.Context(), "h")
	s.must(err)
	return s
}

// TestGroups: of a namespace with several layer groups exactly the stored pieces are copied, each with its
// bytes. A piece that the other node has is not sent. A piece that is added to a block that was copied
// already is copied too.
func TestGroups(t *testing.T) {
	testkit.VerifyNone(t)
	from, to := newHybridSite(t, hybrid), newHybridSite(t, hybrid)
	long, short := from.ids(1, 4), from.ids(2, 2)
	from.putPieces(long, client.Piece{Block: 0}, client.Piece{Block: 1}, client.Piece{Block: 2}, client.Piece{Block: 2, Group: 1},
		client.Piece{Block: 3}, client.Piece{Block: 3, Group: 1}, client.Piece{Block: 3, Group: 2})
	from.putPieces(short, client.Piece{Block: 0}, client.Piece{Block: 0, Group: 2}, client.Piece{Block: 1}, client.Piece{Block: 1, Group: 2})
	to.putPieces(long, client.Piece{Block: 0}, client.Piece{Block: 1})
	sizes := []int64{hybrid.PieceBytes(0), hybrid.PieceBytes(1), hybrid.PieceBytes(2)}
	blocks, payload := int64(11), 6*sizes[0]+2*sizes[1]+3*sizes[2]
	w := &target{Store: to.Store}
	o := Options{Node: from.node.Storage, To: w}
	added := false
	p := run(t, o, func(p Progress) bool {
		if p.Phase == Done && !added {
			if p.Blocks != blocks || p.Bytes != payload || p.CopiedBlocks != blocks || p.CopiedBytes != payload || w.bytes != payload-2*sizes[0] {
				t.Errorf("%+v, %d bytes were sent; want %d blocks of %d bytes", p, w.bytes, blocks, payload)
			}
			from.putPieces(long, client.Piece{Block: 1, Group: 2})
			added = true
		}
		return added && p.Phase == Done && p.Blocks == blocks+1
	})
	if p.CopiedBlocks != blocks+1 || p.CopiedBytes != payload+sizes[2] || w.bytes != payload-2*sizes[0]+sizes[2] {
		t.Errorf("after another piece %+v, %d bytes were sent", p, w.bytes)
	}
	for _, ids := range [][]kv.BlockID{long, short} {
		if was, is := from.pieces(ids), to.pieces(ids); !slices.Equal(was, is) {
			t.Errorf("the pieces %v were copied as %v", was, is)
		}
	}
}

// TestDeleted: a block that is deleted while it is copied does not come back on the other node, whichever of
// the nodes deletes it first. The blocks before it stay. If it is stored again, it is copied.
func TestDeleted(t *testing.T) {
	testkit.VerifyNone(t)
	for _, index := range []kv.IndexKind{kv.IndexTrie, kv.IndexFlat} {
		for _, late := range []bool{false, true} { // the draining node deletes it after the copy
			from, to := newSite(t, index), newSite(t, index)
			ids := from.ids(1, 8)
			from.put(ids, 1)
			bad := ids[5:6]
			remove := func(s *site) {
				if _, err := s.Delete(t.Context(), client.KeysRequest{Namespace: s.ns, IDs: bad}); err != nil {
					t.Error(err)
				}
			}
			w := &target{Store: to.Store}
			var before, after sync.Once
			w.before = func(client.WriteRequest) {
				before.Do(func() {
					remove(to)
					if !late {
						remove(from)
					}
				})
			}
			w.after = func(client.WriteRequest) {
				if late {
					after.Do(func() { remove(from) })
				}
			}
			want := int64(5)
			if index == kv.IndexFlat {
				want = 7
			}
			stored := false
			run(t, Options{Node: from.node.Storage, To: w}, func(p Progress) bool {
				if p.Phase == Done && p.Blocks == want && !stored {
					if n := to.has(bad, 1); n != 0 && index == kv.IndexFlat {
						t.Errorf("index %v, late %t: the deleted key is on the other node", index, late)
					}
					if n := to.has(ids, 1); n != 5 {
						t.Errorf("index %v, late %t: the other node has the first %d blocks; want 5", index, late, n)
					}
					from.put(ids, 1)
					stored = true
				}
				return stored && p.Phase == Done && p.Blocks == 8
			})
			if n := to.has(ids, 1); n != 8 {
				t.Errorf("index %v, late %t: after another write the other node has %d blocks", index, late, n)
			}
		}
	}
}

// TestWithoutFullGroup: the blocks of a tree without a group of full attention stay, with a reason.
func TestWithoutFullGroup(t *testing.T) {
	testkit.VerifyNone(t)
	g := hybrid
	g.Groups = g.Groups[1:]
	from, to := newHybridSite(t, g), newHybridSite(t, g)
	from.putPieces(from.ids(0, 2), client.Piece{Block: 0}, client.Piece{Block: 1}, client.Piece{Block: 1, Group: 1})
	p := run(t, Options{Node: from.node.Storage, To: &target{Store: to.Store}}, func(p Progress) bool { return p.Phase == Waiting })
	if p.Left != 3 || p.CopiedBlocks != 0 || !strings.Contains(p.Reason, "no layer group of full attention") {
		t.Errorf("%+v", p)
	}
}

// TestOnly: with Options.Only the sequences and keys for which it returns true are copied, and Progress counts
// their blocks only.
func TestOnly(t *testing.T) {
	testkit.VerifyNone(t)
	for _, index := range []kv.IndexKind{kv.IndexTrie, kv.IndexFlat} {
		from, to := newSite(t, index), newSite(t, index)
		for i := range 4 {
			from.put(from.ids(i, 5), 1)
		}
		chosen := from.ids(2, 5)
		want := int64(5)
		if index == kv.IndexFlat {
			want = 1
		}
		p := run(t, Options{Node: from.node.Storage, To: &target{Store: to.Store}, Only: func(_ kv.Namespace, root kv.BlockID) bool { return root == chosen[0] }}, done)
		if p.Blocks != want || p.CopiedBlocks != want || p.Bytes != want*4096 || p.CopiedBytes != p.Bytes {
			t.Errorf("index %v: %+v", index, p)
		}
		for i := range 4 {
			n := 0
			if i == 2 {
				n = int(want)
			}
			if got := to.has(to.ids(i, 5), 1); got != n {
				t.Errorf("index %v: %d blocks of sequence %d are copied; want %d", index, got, i, n)
			}
		}
	}
}

// TestYields: when the other node has a sequence whose home it is, this node evicts its copy first, although it was used
// the most. A sequence that could not be copied as a whole keeps its place, and so does one of this node.
func TestYields(t *testing.T) {
	for _, index := range []kv.IndexKind{kv.IndexTrie, kv.IndexFlat} {
		from, to := newSite(t, index), newSite(t, index)
		const blocks, yielding, refused = 5, 2, 1
		for i := range 4 {
			from.put(from.ids(i, blocks), 1)
		}
		for range 3 {
			from.has(from.ids(yielding, blocks), 1)
		}
		of := func(i int, root kv.BlockID) bool { return slices.Contains(from.ids(i, blocks), root) }
		yields := func(_ kv.Namespace, root kv.BlockID) bool { return of(yielding, root) || of(refused, root) }
		w, copied := &target{Store: to.Store}, int64(4*blocks)
		if index == kv.IndexTrie {
			w.refuse, copied = func(r client.WriteRequest) bool { return of(refused, r.IDs[0]) && r.Pieces[0].Block > 1 }, 3*blocks+2
		} else {
			yields = func(_ kv.Namespace, key kv.BlockID) bool { return of(yielding, key) }
		}
		run(t, Options{Node: from.node.Storage, To: w, Yields: yields, ChunkBytes: 8192}, func(p Progress) bool { return p.CopiedBlocks == copied && (p.Left > 0 || p.Phase == Done) })
		for evicted := int64(0); evicted < blocks; {
			gone, err := from.node.Storage.Evict("", 1, false)
			from.must(err)
			evicted += gone.Blocks
		}
		for i := range 4 {
			want := blocks
			if i == yielding {
				want = 0
			}
			if got := from.has(from.ids(i, blocks), 1); got != want {
				t.Errorf("index %v: after the eviction of as many blocks as the sequence %d had, %d blocks of sequence %d are left", index, yielding, got, i)
			}
			if got := to.has(to.ids(i, blocks), 1); got != blocks && (i != refused || w.refuse == nil) {
				t.Errorf("index %v: %d blocks of sequence %d are copied", index, got, i)
			}
		}
	}
}

// TestRefused: invalid options.
func TestRefused(t *testing.T) {
	for _, o := range []Options{{}, {To: &target{}}, {BytesPerSecond: -1}} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v is accepted", o)
		}
	}
}
