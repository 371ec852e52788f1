package client_test

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// memberClient is a client with the memory of one sequence of two blocks.
type memberClient struct {
	*testing.T
	*client.Store
	ns     kv.Namespace
	memory *client.Memory
}

func openMember(t *testing.T, o client.Options) *memberClient {
	t.Helper()
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = engine.Close() })
	o.Engine, o.MembersEvery = engine, 20*time.Millisecond
	c := &memberClient{T: t}
	if c.Store, err = client.Open(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if c.ns, err = c.EnsureNamespace(t.Context(), kv.Namespace{Name: "m", Index: kv.IndexTrie, Geometry: kv.SingleGroup(2, 4, 8<<10)}); err != nil {
		t.Fatal(err)
	}
	if c.memory, err = c.Register(make([]byte, 2*c.ns.Geometry.BlockBytes())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.memory.Close(context.Background()) })
	return c
}

func sequenceIDs(sequence int) []kv.BlockID {
	var first, second kv.BlockID
	first[0], first[1], second[0], second[1] = 1, byte(sequence), 2, byte(sequence)
	return []kv.BlockID{first, second}
}

// write stores the blocks [first, end) of a sequence.
func (c *memberClient) write(sequence, first, end int) {
	c.Helper()
	for i := range c.memory.Bytes() {
		c.memory.Bytes()[i] = byte(sequence + i%251)
	}
	w, err := c.Write(c.Context(), client.WriteRequest{Namespace: c.ns, IDs: sequenceIDs(sequence)[:end], First: first, From: c.memory})
	if err != nil || w.Blocks != end {
		c.Fatalf("sequence %d: %+v, %v", sequence, w, err)
	}
}

// blocks returns the number of blocks of a sequence that are matched, and read with the right bytes.
func (c *memberClient) blocks(sequence int) int {
	c.Helper()
	m, err := c.Match(c.Context(), client.MatchRequest{Namespace: c.ns, IDs: sequenceIDs(sequence)})
	if err != nil {
		c.Fatal(err)
	}
	if m.Blocks == 0 {
		return 0
	}
	clear(c.memory.Bytes())
	r, err := c.Read(c.Context(), client.ReadRequest{Namespace: c.ns, IDs: m.IDs, Into: c.memory})
	if err != nil || r.Blocks != m.Blocks {
		c.Fatalf("sequence %d: matched %+v, read %+v, %v", sequence, m, r, err)
	}
	want := make([]byte, int64(r.Blocks)*c.ns.Geometry.BlockBytes())
	for i := range want {
		want[i] = byte(sequence + i%251)
	}
	if !bytes.Equal(c.memory.Bytes()[:len(want)], want) {
		c.Errorf("sequence %d has other bytes", sequence)
	}
	return r.Blocks
}

// TestOverfullIsPassedOver: a new sequence passes over a member that is much fuller than the others, and
// a sequence that the member has already grows there. All clients find both, also one that starts
// later, and also while the member drains that has the sequences.
func TestOverfullIsPassedOver(t *testing.T) {
	etcd := testetcd.Start(t, 1)
	small := testnode.Start(t, testnode.Options{Name: "small", Etcd: etcd.Endpoints, CapacityBytes: 8 << 20})
	large := testnode.Start(t, testnode.Options{Name: "large", Etcd: etcd.Endpoints, CapacityBytes: 32 << 20})
	c := openMember(t, client.Options{Servers: []string{large.Addr}, Discover: true})
	onSmall := openMember(t, client.Options{Servers: []string{small.Addr}})
	const before, fill, end = 24, 64, 96
	for i := range before {
		c.write(i, 0, 1)
	}
	there := 0
	for i := range before {
		there += onSmall.blocks(i)
	}
	if there == 0 || there == before {
		t.Fatalf("the small node has %d of %d sequences", there, before)
	}
	for i := before; i < fill; i++ {
		onSmall.write(i, 0, 2)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for limit := time.After(time.Minute); c.Overfull() != 1; {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("the small node is not overfull")
		}
	}
	for i := range before {
		c.write(i, i%2, 2) // only the second block, or both
	}
	for i := fill; i < end; i++ {
		c.write(i, 0, 1)
		c.write(i, i%2, 2)
	}
	for i := range end {
		n := onSmall.blocks(i)
		if i >= fill && n > 0 {
			t.Errorf("the new sequence %d is on the overfull node", i)
		}
		if i < before && n == 1 {
			t.Errorf("the sequence %d is in two parts", i)
		}
	}
	later := openMember(t, client.Options{Servers: []string{small.Addr}, Discover: true})
	allFound := func(when string, c *memberClient) {
		for i := range end {
			if i >= before && i < fill {
				continue // stored on the small node only
			}
			if n := c.blocks(i); n != 2 {
				t.Errorf("%s: %d blocks of sequence %d are found", when, n, i)
			}
			present, err := c.Exists(t.Context(), client.KeysRequest{Namespace: c.ns, IDs: sequenceIDs(i)}, false)
			if err != nil || present[1] != client.Present {
				t.Errorf("%s: sequence %d: %v, %v", when, i, present, err)
			}
			if got := c.exists(i, true); got != client.Present && c.Draining() == 0 {
				t.Errorf("%s: sequence %d is not on the node that has to store it: %v", when, i, got)
			}
		}
	}
	allFound("the writer", c)
	allFound("a later client", later)
	drainMember(t, small, "large", later)
	allFound("while the other node drains", later)
}
