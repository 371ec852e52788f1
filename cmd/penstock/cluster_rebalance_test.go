package main

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/server/membership"
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

// stored returns the number of blocks of a sequence that are stored, without a use of them.
func (s *sequences) stored(i int) (n int) {
	s.Helper()
	chain, err := s.ns.Chain()
	if err != nil {
		s.Fatal(err)
	}
	ids, _ := chain.Append(nil, s.tokens(i, sequenceBlocks))
	present, err := s.Exists(s.Context(), client.KeysRequest{Namespace: s.ns, IDs: ids}, false)
	if err != nil {
		s.Fatal(err)
	}
	for _, p := range present {
		if p == client.Present {
			n++
		}
	}
	return n
}

// TestRebalanceEvictsCopies: after a rebalance the old home evicts the blocks that the new home has before all others,
// although all blocks were used as often. The command without names chooses the new node, whose fill is below that of the other.
func TestRebalanceEvictsCopies(t *testing.T) {
	r := newMovesRig(t)
	a := r.here("a")
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "256").must(t)
	s := r.open(a, "m", false)
	s.writeAll()
	c := r.here("c")
	onA, onC := r.only(a, "m"), r.only(c, "m")
	for range 3 {
		s.found()
	}
	awaitTrue(t, "the list of members has the fills", func() bool {
		return reflect.DeepEqual(rebalancePlanOf(t, a), rebalancePlanOf(t, a, "c"))
	})
	out := decode[rebalanced](t, a.run("cluster", "rebalance", "--rate", "64MiB", "--wait", "--format", "json"))
	if !out.Done || !slices.Equal(out.Nodes, []string{"c"}) {
		t.Errorf("the command returned %+v", out)
	}
	var moved []int
	for i := range sequenceCount {
		if onC.stored(i) == sequenceBlocks {
			moved = append(moved, i)
		}
	}
	if len(moved) == 0 || len(moved) == sequenceCount {
		t.Fatalf("%d sequences have the new node", len(moved))
	}
	for evicted := int64(0); evicted < int64(len(moved)*sequenceBlocks); {
		gone := decode[struct{ Blocks int64 }](t, a.run("evict", "--bytes", "1", "--format", "json"))
		if gone.Blocks == 0 {
			t.Fatal("nothing is evicted")
		}
		evicted += gone.Blocks
	}
	for i := range sequenceCount {
		want := sequenceBlocks
		if slices.Contains(moved, i) {
			want = 0
		}
		if n := onA.stored(i); n != want {
			t.Errorf("the old node has %d blocks of sequence %d; want %d", n, i, want)
		}
	}
	if n := s.found(); n != sequenceCount*sequenceBlocks {
		t.Errorf("%d blocks are found", n)
	}
}

// TestRebalanceEnded: rebalance --wait and drain --wait exit with a code of their own if another command ends the order, or
// replaces it by one for other nodes.
func TestRebalanceEnded(t *testing.T) {
	r := newMovesRig(t)
	ttl := []string{"--cluster-lease-ttl", "60s"} // each command needs all nodes
	a := r.here("a", ttl...)
	r.here("b", ttl...)
	r.here("c", ttl...)
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024", "--replicas", "3").must(t)
	r.only(a, "m").writeAll()
	ended := func(why string, begin []string, end ...string) {
		t.Helper()
		done := make(chan result, 1)
		go func() { done <- a.run(append([]string{"cluster"}, append(begin, "--wait", "--rate", "1")...)...) }()
		awaitTrue(t, "the copies have begun", func() bool { return strings.Contains(a.run("cluster", "members").must(t), "  a: ") })
		a.run(append([]string{"cluster"}, end...)...).must(t)
		if got := <-done; got.code != exitEnded || !strings.Contains(got.err, why) || !strings.Contains(got.err, errEnded.Error()) {
			t.Errorf("%v, ended by %v: exit %d: %s", begin, end, got.code, got.err)
		}
		a.run("cluster", "rebalance", "--stop").must(t)
		a.run("cluster", "undrain", "a").must(t)
		awaitTrue(t, "the copies have ended", func() bool { return !strings.Contains(a.run("cluster", "members").must(t), "  a: ") })
	}
	ended("stopped before they were complete", []string{"rebalance", "c"}, "rebalance", "--stop")
	ended("no sequences are copied to node c", []string{"rebalance", "b", "c"}, "rebalance", "b", "--rate", "1")
	ended("node a does not drain", []string{"drain", "a"}, "undrain", "a")
}

// TestFilled: an order is complete if its end is recorded after it, for its nodes.
func TestFilled(t *testing.T) {
	for name, x := range map[string]struct {
		end      *pb.FillEnd
		revision int64
		complete bool
	}{
		"complete":                   {&pb.FillEnd{Revision: 8, Names: []string{"b", "c"}}, 7, true},
		"for more nodes":             {&pb.FillEnd{Revision: 8, Names: []string{"a", "b", "c"}}, 7, true},
		"stopped":                    {&pb.FillEnd{Revision: 8, Names: []string{"b", "c"}, Stopped: true}, 7, false},
		"for other nodes":            {&pb.FillEnd{Revision: 8, Names: []string{"a", "b"}}, 7, false},
		"an earlier end":             {&pb.FillEnd{Revision: 6, Names: []string{"b", "c"}}, 7, false},
		"no end":                     {nil, 7, false},
		"a node of an older version": {nil, 0, true},
	} {
		if err := filled(x.end, []string{"b", "c"}, x.revision); (err == nil) != x.complete || err != nil && !errors.Is(err, errEnded) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestEmptier: the nodes that a rebalance without names fills serve, and are filled already, or their fill is below 0.8 times that of all
// serving nodes.
func TestEmptier(t *testing.T) {
	node := func(name string, used, capacity int64, state membership.State) *pb.Member {
		return &pb.Member{Name: name, UsedBytes: used, CapacityBytes: capacity, State: string(state)}
	}
	filling := func(m *pb.Member) *pb.Member {
		m.Filling = true
		return m
	}
	for _, x := range []struct {
		members []*pb.Member
		want    string
	}{
		{[]*pb.Member{node("a", 50, 100, membership.Serving), node("b", 60, 100, membership.Serving)}, "[]"},
		{[]*pb.Member{node("a", 50, 100, membership.Serving), node("b", 0, 100, membership.Serving)}, "[b]"},
		{[]*pb.Member{node("a", 50, 100, membership.Serving), node("b", 0, 100, membership.Joining), node("c", 0, 100, membership.Draining)}, "[]"},
		{[]*pb.Member{node("a", 900, 1000, membership.Serving), node("b", 90, 100, membership.Serving), node("c", 5, 100, membership.Serving), node("d", 2, 100, membership.Serving)}, "[c d]"},
		{[]*pb.Member{node("a", 0, 100, membership.Serving), node("b", 0, 100, membership.Serving)}, "[]"},
		{[]*pb.Member{node("a", 50, 100, membership.Serving), filling(node("b", 49, 100, membership.Serving)), node("c", 10, 100, membership.Serving)}, "[b c]"},
		{[]*pb.Member{node("a", 50, 100, membership.Serving), filling(node("b", 49, 100, membership.Serving))}, "[b]"},
		{nil, "[]"},
	} {
		if got := fmt.Sprint(emptier(x.members)); got != x.want {
			t.Errorf("of %v the nodes %s are filled; want %s", x.members, got, x.want)
		}
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
		{[]string{"c", "--stop"}, "give nodes or --stop"},
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
