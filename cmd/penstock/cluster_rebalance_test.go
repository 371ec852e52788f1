package main

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/penstock-kv/penstock/client"
)

// rebalancePlanOf runs a dry run.
func rebalancePlanOf(t *testing.T, on *served, names ...string) map[string]nodeTransfer {
	t.Helper()
	out := decode[rebalanced](t, on.run(append([]string{"cluster", "rebalance", "--dry-run", "--format", "json"}, names...)...))
	plan := make(map[string]nodeTransfer)
	for _, x := range out.Plan {
		plan[x.Node] = x
	}
	return plan
}

// TestRebalance: when a node has joined, a rebalance copies its sequences to it. Meanwhile a client finds every
// block, with its bytes, at the old or the new nodes, and continues sequences. Then the new homes have all
// blocks without the old ones, and the order has ended. A dry run returns the same blocks and changes nothing.
func TestRebalance(t *testing.T) {
	r := newMovesRig(t)
	a := r.here("a")
	r.here("b")
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "256").must(t)
	s := r.open(a, "m", false)
	const had = sequenceBlocks - 1
	for i := range sequenceCount {
		s.write(i, 0, had)
	}
	c := r.process("c")
	onC := r.only(c.client(t), "m")
	awaitTrue(t, "the client has the new node", func() bool { return nodesUp(s) == "3 of 3" })
	var moved []int // the sequences whose home is the new node
	for i := range sequenceCount {
		if s.read(i) == 0 {
			moved = append(moved, i)
		}
	}
	if len(moved) == 0 || len(moved) == sequenceCount {
		t.Fatalf("%d of %d sequences have the new node", len(moved), sequenceCount)
	}
	blocks, payload := int64(had*len(moved)), int64(had*len(moved))*s.ns.Geometry.BlockBytes()
	plan := rebalancePlanOf(t, a, "c")
	if in := plan["c"]; in.InBlocks != blocks || in.InBytes != payload || in.OutBlocks != 0 || plan["a"].OutBytes+plan["b"].OutBytes != payload || plan["a"].InBytes != 0 {
		t.Errorf("the plan is %+v; %d blocks of %d bytes have the new node", plan, blocks, payload)
	}
	if n := onC.found(); n != 0 {
		t.Fatalf("after a dry run the new node has %d blocks", n)
	}

	a.run("cluster", "rebalance", "c", "--rate", "1KiB").must(t)
	awaitTrue(t, "the client finds the sequences at their old nodes", func() bool { return s.read(moved[0]) == had })
	reader := r.open(a, "m", false)
	reading, stop := context.WithCancel(t.Context())
	var reads atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; reading.Err() == nil; i = (i + 1) % sequenceCount {
			if r := reader.result(i); r.Blocks < had {
				t.Errorf("during the rebalance %d blocks of sequence %d are found: %+v", r.Blocks, i, r)
			}
			reads.Add(1)
		}
	})
	t.Cleanup(func() {
		stop()
		wg.Wait()
	})
	for _, i := range moved {
		if w := s.write(i, had, 1); w.Stored+w.Existed != 1 {
			t.Errorf("sequence %d is not continued: %+v", i, w)
		}
	}
	out := decode[rebalanced](t, a.run("cluster", "rebalance", "c", "--rate", "64MiB", "--wait", "--format", "json"))
	if !out.Done {
		t.Errorf("the rebalance returned %+v", out)
	}
	before := reads.Load()
	awaitTrue(t, "all sequences are read once more", func() bool { return reads.Load() > before+sequenceCount })
	stop()
	wg.Wait()
	for _, i := range moved {
		if n := onC.read(i); n != sequenceBlocks {
			t.Errorf("the new node has %d blocks of sequence %d", n, i)
		}
	}
	if text := a.run("cluster", "members").must(t); strings.Contains(text, "blocks") {
		t.Errorf("the order has not ended:\n%s", text)
	}
	if plan := rebalancePlanOf(t, a, "c"); plan["a"].OutBlocks+plan["b"].OutBlocks == 0 {
		t.Errorf("the old nodes have given their blocks up: %+v", plan)
	}
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
}

// TestRebalanceKilled: a node that is killed while it copies continues after its restart, and the order ends
// when it has. --stop ends an order.
func TestRebalanceKilled(t *testing.T) {
	r := newMovesRig(t)
	a := r.process("a")
	b := r.here("b")
	b.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024", "--replicas", "2").must(t)
	s := r.open(b, "m", false)
	for i := range sequenceCount {
		s.write(i, 0, sequenceBlocks)
	}
	c := r.here("c")
	onC := r.only(c, "m")
	b.run("cluster", "rebalance", "c", "--rate", "100KiB").must(t)
	awaitTrue(t, "some blocks are copied", func() bool { return onC.found() > 0 })
	if err := a.Kill(); err != nil {
		t.Fatal(err)
	}
	again := r.process("a")
	b.run("cluster", "rebalance", "c", "--rate", "64MiB", "--wait").must(t)
	moved := 0
	for i := range sequenceCount {
		res, err := onC.Read(t.Context(), client.ReadRequest{Namespace: onC.ns, Tokens: onC.tokens(i, sequenceBlocks), Into: onC.memory})
		if err != nil {
			t.Fatal(err)
		}
		if res.Blocks != 0 && res.Blocks != sequenceBlocks {
			t.Errorf("%d blocks of sequence %d are copied: %+v", res.Blocks, i, res)
		}
		if res.Blocks > 0 {
			moved++
		}
	}
	if want := rebalancePlanOf(t, b, "c")["c"].InBlocks; moved == 0 || int64(2*moved*sequenceBlocks) < want {
		t.Errorf("%d sequences are copied; the old nodes have %d blocks of the new one", moved, want)
	}
	b.run("cluster", "rebalance", "c", "--rate", "1").must(t)
	b.run("cluster", "rebalance", "--stop").must(t)
	awaitTrue(t, "the order has ended", func() bool {
		return !strings.Contains(b.run("cluster", "members").must(t), "blocks")
	})
	for _, x := range []struct {
		args []string
		want string
	}{
		{[]string{"x"}, `no node "x"`},
		{[]string{"a", "b", "c"}, "all nodes of the cluster are named"},
		{nil, "give the nodes that have joined"},
		{[]string{"x", "--dry-run"}, `no node "x"`},
	} {
		if r := b.run(append([]string{"cluster", "rebalance"}, x.args...)...); r.code == 0 || !strings.Contains(r.err, x.want) {
			t.Errorf("%v: exit %d: %s", x.args, r.code, r.err)
		}
	}
	if err := again.Stop(); err != nil {
		t.Fatal(err)
	}
}

// TestRebalanceWait: rebalance --wait does not return while a node that is filled, or one that copies, is down. When
// it returns, the new node has all blocks.
func TestRebalanceWait(t *testing.T) {
	r := newMovesRig(t)
	short := []string{"--cluster-lease-ttl", "4s"}
	b := r.here("b", short...)
	a, c := r.process("a", short...), r.process("c", short...)
	b.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "256", "--replicas", "3").must(t)
	onA, onC := r.only(a.client(t), "m"), r.only(c.client(t), "m")
	onA.writeAll()
	type waited struct {
		result
		states string
	}
	ended := make(chan waited, 1)
	go func() {
		got := b.run("cluster", "rebalance", "c", "--rate", "1", "--wait")
		ended <- waited{got, states(t, b)}
	}()
	awaitTrue(t, "the order is there", func() bool { return strings.Contains(b.run("cluster", "members").must(t), "  a: ") })
	for name, p := range map[string]*process{"a": a, "c": c} {
		if err := p.Kill(); err != nil {
			t.Fatal(err)
		}
		awaitTrue(t, "the node is down", func() bool { return !strings.Contains(states(t, b), name+":") })
	}
	if err := onC.Close(); err != nil {
		t.Fatal(err)
	}
	again := []*process{r.process("c", short...), r.process("a", short...)}
	b.run("cluster", "rebalance", "c", "--rate", "64MiB").must(t)
	got := <-ended
	got.must(t)
	if got.states != "a:serving b:serving c:serving" {
		t.Errorf("the command has returned with the nodes %s", got.states)
	}
	if n := r.only(again[0].client(t), "m").found(); n != sequenceCount*sequenceBlocks {
		t.Errorf("the new node has %d blocks", n)
	}
	for _, p := range again {
		if err := p.Stop(); err != nil {
			t.Fatal(err)
		}
	}
}
