package relay

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
)

// geo has blocks of 16 tokens and 4 KiB in two layers.
var geo = kv.SingleGroup(2, 16, 128)

// site is the storage of a datacenter: a node, and a store with memory for the test.
type site struct {
	*client.Store
	t      *testing.T
	ns     kv.Namespace
	memory *arena.Arena
	mem    *client.Memory
}

func newSite(t *testing.T, g kv.Geometry) *site {
	t.Helper()
	node := testnode.Start(t, testnode.Options{})
	node.Namespace(t, "m", g)
	s := &site{t: t}
	var err error
	s.Store, s.ns = node.Open(t, "m")
	s.memory, err = arena.New(arena.Options{SizeBytes: 2 << 20})
	s.must(err)
	t.Cleanup(func() { s.must(s.memory.Close()) })
	s.mem, err = s.Register(s.memory.Bytes())
	s.must(err)
	t.Cleanup(func() { s.must(s.mem.Close(context.Background())) })
	return s
}

func (s *site) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// put stores blocks [first, n) of the prompt, and returns the chain of all n.
func (s *site) put(first, n int) []kv.BlockID {
	s.t.Helper()
	chain, err := s.ns.Chain()
	s.must(err)
	ids, _ := chain.Append(nil, prompt(n))
	for i := range s.memory.Bytes()[:n*4096] {
		s.memory.Bytes()[i] = byte(i/4096*31 + i)
	}
	w, err := s.Write(s.t.Context(), client.WriteRequest{Namespace: s.ns, IDs: ids, First: first, From: s.mem})
	s.must(err)
	if w.Blocks != n {
		s.t.Fatalf("%+v", w)
	}
	return ids
}

// check compares the stored blocks of a chain with the bytes that put stores.
func (s *site) check(ids []kv.BlockID) {
	s.t.Helper()
	clear(s.memory.Bytes())
	r, err := s.Read(s.t.Context(), client.ReadRequest{Namespace: s.ns, IDs: ids, Into: s.mem})
	s.must(err)
	want := make([]byte, len(ids)*4096)
	for i := range want {
		want[i] = byte(i/4096*31 + i)
	}
	if r.Blocks != len(ids) || !bytes.Equal(s.memory.Bytes()[:len(want)], want) {
		s.t.Errorf("%d of %d blocks are stored, or they have other bytes", r.Blocks, len(ids))
	}
}

func prompt(blocks int) []kv.Token {
	tokens := make([]kv.Token, 16*blocks)
	for i := range tokens {
		tokens[i] = kv.Token(i)
	}
	return tokens
}

// newRelay opens a Relay that is closed at the end of the test.
func newRelay(t *testing.T, o Options) *Relay {
	t.Helper()
	r, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(context.Background()); err != nil {
			t.Error(err)
		}
		if s := r.memory.Stats(); s.UsedBytes != 0 {
			t.Errorf("%d bytes of memory are in use", s.UsedBytes)
		}
	})
	return r
}

// TestCopy: the second side gets the same bytes, in no less time than the budget allows, also for a
// chain whose beginning it already has. A repeated copy causes no error.
func TestCopy(t *testing.T) {
	testkit.VerifyNone(t)
	there, here := newSite(t, geo), newSite(t, geo)
	ids := there.put(0, 100)
	here.put(0, 10)
	const budget = 4 << 20
	r := newRelay(t, Options{From: there, To: here, BytesPerSecond: budget, MemoryBytes: 2 << 20, ChunkBytes: 7 * 4096})
	begin := time.Now()
	end, err := r.Copy(t.Context(), here.ns, 0, ids, 10)
	if err != nil || end.Blocks != 100 {
		t.Fatalf("copied to %+v: %v", end, err)
	}
	if took, least := time.Since(begin).Seconds(), float64(90*4096-7*4096)/budget; took < least {
		t.Errorf("360 KiB took %v s; the budget allows them in %v s", took, least)
	}
	here.check(ids)
	if s := r.Stats(); s != (Stats{CopiedBytes: 90 * 4096}) {
		t.Errorf("%+v", s)
	}
	if end, err := r.Copy(t.Context(), here.ns, 0, ids, 0); err != nil || end.Blocks != 100 {
		t.Errorf("again: %+v, %v", end, err)
	}
	if end, err := r.Copy(t.Context(), here.ns, 0, ids, 100); err != nil || end.Blocks != 100 {
		t.Errorf("nothing: %+v, %v", end, err)
	}
}

// TestCopyEnds: a block that the first side lacks, a block that changes in transit, an epoch that
// is not live, and a context that ends. The second side has a prefix, and never a wrong block.
func TestCopyEnds(t *testing.T) {
	testkit.VerifyNone(t)
	there, here := newSite(t, geo), newSite(t, geo)
	ids := there.put(0, 40)
	longer := append(ids[:40:40], ids[0], ids[1]) // two blocks that are not stored
	r := newRelay(t, Options{From: there, To: here, BytesPerSecond: 1 << 30, ChunkBytes: 8 * 4096})
	if end, err := r.Copy(t.Context(), here.ns, 0, longer, 0); err != nil || end.Blocks != 40 || end.Reason != "parent_mismatch" {
		t.Errorf("a missing block: %+v, %v", end, err)
	}
	here.check(ids)

	fresh := newSite(t, geo)
	damaged := newRelay(t, Options{From: there, To: &damaging{Store: fresh, block: 19}, BytesPerSecond: 1 << 30, ChunkBytes: 8 * 4096})
	damaged.opts.To.(*damaging).memory = damaged.memory.Bytes()
	if end, err := damaged.Copy(t.Context(), fresh.ns, 0, ids, 0); err != nil || end.Blocks != 19 || end.Reason != "corrupt" {
		t.Errorf("a damaged block: %+v, %v", end, err)
	}
	fresh.check(ids[:19])

	if end, err := r.Copy(t.Context(), here.ns, 7, ids, 0); end.Blocks != 0 || end.Reason != "epoch" {
		t.Errorf("another epoch: %+v, %v", end, err)
	}

	written := make(chan struct{}, 40)
	slow := newRelay(t, Options{From: there, To: &counting{newSite(t, geo), written}, BytesPerSecond: 4096, ChunkBytes: 4096})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := slow.Copy(ctx, here.ns, 0, ids, 0)
		ended <- err
	}()
	<-written // the first block needs no budget
	if b := slow.Backlog(); b < 30*time.Second || b > 40*time.Second {
		t.Errorf("39 blocks at one a second wait for %v", b)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if s := slow.Stats(); s.WaitingBytes != 0 {
		t.Errorf("after the copy: %+v", s)
	}
}

// hybrid has blocks of 16 tokens, of which a prefix needs the full layers everywhere, the window layers in its last
// three blocks, and the state in the last one.
var hybrid = kv.Geometry{BlockTokens: 16, Groups: []kv.Group{
	{Kind: kv.Full, Layers: 2, TokenBytes: 64}, {Kind: kv.Window, Layers: 3, TokenBytes: 64, WindowTokens: 40}, {Kind: kv.State, Layers: 1, TokenBytes: 512},
}}

// TestCopyGroups: of window and state groups only the pieces that the prefix needs cross the link, also if the chunks
// are smaller than the windows. A prefix that is shorter than the copied one is not a match. A damaged piece of a
// window group ends the copy.
func TestCopyGroups(t *testing.T) {
	testkit.VerifyNone(t)
	there, here := newSite(t, hybrid), newSite(t, hybrid)
	const blocks = 40
	chain, err := there.ns.Chain()
	there.must(err)
	ids, _ := chain.Append(nil, prompt(blocks))
	var pieces []client.Piece
	for b := range blocks {
		for g := range hybrid.Groups {
			pieces = append(pieces, client.Piece{Block: b, Group: g, Offset: hybrid.PieceOffset(b, g)})
		}
	}
	for i := range there.memory.Bytes() {
		there.memory.Bytes()[i] = byte(i/4096*31 + i)
	}
	w, err := there.Write(t.Context(), client.WriteRequest{Namespace: there.ns, IDs: ids, From: there.mem, Pieces: pieces})
	there.must(err)
	if w.Blocks != blocks {
		t.Fatalf("%+v", w)
	}

	match := func(s *site, n int) int {
		m, err := s.Match(t.Context(), client.MatchRequest{Namespace: s.ns, IDs: ids[:n]})
		s.must(err)
		return m.Blocks
	}
	r := newRelay(t, Options{From: there, To: here, BytesPerSecond: 1 << 30, ChunkBytes: 4096})
	var moved int64
	for _, n := range []int{10, 12, blocks} {
		first := match(here, n)
		if end, err := r.Copy(t.Context(), here.ns, 0, ids[:n], first); err != nil || end.Blocks != n {
			t.Fatalf("blocks %d to %d: %+v, %v", first, n, end, err)
		}
		moved += hybrid.PartBytes(first, n, n)
		if got := match(here, n); got != n {
			t.Errorf("after the copy of %d blocks %d match", n, got)
		}
		clear(here.memory.Bytes())
		read, err := here.Read(t.Context(), client.ReadRequest{Namespace: here.ns, IDs: ids[:n], Into: here.mem})
		here.must(err)
		if read.Blocks != n {
			t.Errorf("%d of %d blocks are read", read.Blocks, n)
		}
		for b := range n {
			for g := range hybrid.Groups {
				at := hybrid.PieceOffset(b, g)
				end := at + hybrid.PieceBytes(g)
				if b >= hybrid.FirstNeeded(g, n) && !bytes.Equal(here.memory.Bytes()[at:end], there.memory.Bytes()[at:end]) {
					t.Errorf("block %d, group %d of %d blocks has other bytes", b, g, n)
				}
			}
		}
	}
	if s := r.Stats(); s != (Stats{CopiedBytes: moved}) {
		t.Errorf("%+v, want %d bytes", s, moved)
	}
	if got := match(here, 30); got != 12 {
		t.Errorf("%d of 30 blocks match, want the 12 of an earlier copy", got)
	}

	fresh := newSite(t, hybrid)
	damaged := newRelay(t, Options{From: there, To: &damaging{Store: fresh, block: 38, group: 1}, BytesPerSecond: 1 << 30, ChunkBytes: 4096})
	damaged.opts.To.(*damaging).memory = damaged.memory.Bytes()
	if end, err := damaged.Copy(t.Context(), fresh.ns, 0, ids, 0); err != nil || end.Blocks != 38 || end.Reason != "corrupt" {
		t.Errorf("a damaged piece: %+v, %v", end, err)
	}
	if got := match(fresh, blocks); got != 0 {
		t.Errorf("%d blocks match, but the window of none is whole", got)
	}
}

// damaging changes a byte of a piece before it is written.
type damaging struct {
	Store
	block, group int
	memory       []byte
}

func (d *damaging) Write(ctx context.Context, r client.WriteRequest) (client.WriteResult, error) {
	for _, p := range r.Pieces {
		if p.Block == d.block && p.Group == d.group {
			d.memory[p.Offset+5] ^= 1
		}
	}
	return d.Store.Write(ctx, r)
}

// counting sends an element for each Write that has ended.
type counting struct {
	Store
	written chan struct{}
}

func (c *counting) Write(ctx context.Context, r client.WriteRequest) (client.WriteResult, error) {
	w, err := c.Store.Write(ctx, r)
	c.written <- struct{}{}
	return w, err
}

// TestRefused: options and namespaces that a Relay cannot serve.
func TestRefused(t *testing.T) {
	there := newSite(t, geo)
	for _, o := range []Options{
		{BytesPerSecond: 1}, {From: there, To: there}, {From: there, To: there, BytesPerSecond: -1},
		{From: there, To: there, BytesPerSecond: 1, MemoryBytes: -1}, {From: there, To: there, BytesPerSecond: 1, ChunkBytes: -1},
	} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v is accepted", o)
		}
	}
	r := newRelay(t, Options{From: there, To: there, BytesPerSecond: 1, MemoryBytes: 2 << 20})
	big := there.ns
	big.Geometry = kv.SingleGroup(64, 16, 1<<16)
	if _, err := r.Copy(t.Context(), big, 0, make([]kv.BlockID, 1), 0); !errors.Is(err, ErrTooLarge) {
		t.Errorf("a block of 64 MiB: %v", err)
	}
}
