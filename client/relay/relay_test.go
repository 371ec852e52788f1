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

func newSite(t *testing.T) *site {
	t.Helper()
	node := testnode.Start(t, testnode.Options{})
	node.Namespace(t, "m", geo)
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
	there, here := newSite(t), newSite(t)
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
	there, here := newSite(t), newSite(t)
	ids := there.put(0, 40)
	longer := append(ids[:40:40], ids[0], ids[1]) // two blocks that are not stored
	r := newRelay(t, Options{From: there, To: here, BytesPerSecond: 1 << 30, ChunkBytes: 8 * 4096})
	if end, err := r.Copy(t.Context(), here.ns, 0, longer, 0); err != nil || end.Blocks != 40 || end.Reason != "parent_mismatch" {
		t.Errorf("a missing block: %+v, %v", end, err)
	}
	here.check(ids)

	fresh := newSite(t)
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
	slow := newRelay(t, Options{From: there, To: &counting{newSite(t), written}, BytesPerSecond: 4096, ChunkBytes: 4096})
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

// damaging changes a byte of a block before it is written.
type damaging struct {
	Store
	block  int
	memory []byte
}

func (d *damaging) Write(ctx context.Context, r client.WriteRequest) (client.WriteResult, error) {
	for _, p := range r.Pieces {
		if p.Block == d.block {
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
	there := newSite(t)
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
	hybrid := there.ns
	hybrid.Geometry.Groups = append(hybrid.Geometry.Groups, hybrid.Geometry.Groups[0])
	if _, err := r.Copy(t.Context(), hybrid, 0, make([]kv.BlockID, 1), 0); err == nil {
		t.Error("two layer groups are accepted")
	}
}
