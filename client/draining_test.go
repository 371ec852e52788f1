package client_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// drainMember orders by a call to via that a member be drained, and waits until c has it as draining. The
// nodes of these tests copy nothing.
func drainMember(t *testing.T, via *testnode.Node, name string, c *memberClient) {
	t.Helper()
	conn, err := client.Dial(via.Addr, client.DialOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := pb.NewAdminClient(conn).DrainMember(t.Context(), &pb.DrainMemberRequest{Name: name}); err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for limit := time.After(time.Minute); c.Draining() == 0; {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("the client does not have %s as draining", name)
		}
	}
}

// TestDrainingReplica: with two replicas, the loss of a node is no miss while another node drains, even if
// nothing was copied yet.
func TestDrainingReplica(t *testing.T) {
	etcd := testetcd.Start(t, 1)
	nodes := make(map[string]*testnode.Node)
	for _, name := range []string{"a", "b", "c"} {
		nodes[name] = testnode.Start(t, testnode.Options{Name: name, Etcd: etcd.Endpoints})
	}
	c := openMember(t, client.Options{Servers: []string{nodes["a"].Addr}, Discover: true})
	var err error
	if c.ns, err = c.EnsureNamespace(t.Context(), kv.Namespace{Name: "r", Index: kv.IndexTrie, Replicas: 2, Geometry: c.ns.Geometry}); err != nil {
		t.Fatal(err)
	}
	const sequences = 24
	for i := range sequences {
		c.write(i, 0, 1+i%2)
	}
	drainMember(t, nodes["a"], "b", c)
	for i := range sequences {
		c.write(i, 1, 2)
	}
	for i := range sequences {
		if asked := c.Asked(t.Context(), c.ns, sequenceIDs(i)); len(asked) != 2 {
			t.Errorf("a read of sequence %d asks %v; two nodes have it", i, asked)
		}
	}
	copies := 0
	for _, n := range nodes {
		only := openMember(t, client.Options{Servers: []string{n.Addr}})
		only.ns = c.ns
		for i := range sequences {
			if only.blocks(i) == 2 {
				copies++
			}
		}
	}
	if copies != 2*sequences {
		t.Errorf("two nodes each store %d sequences, which were continued while one drains; there are %d whole copies", sequences, copies)
	}
	inBoth := 0 // sequences that the nodes a and c have
	for i := range sequences {
		if c.exists(i, true) == client.Present {
			inBoth++
		}
		if got := c.exists(i, false); got != client.Present {
			t.Errorf("sequence %d: %v", i, got)
		}
	}
	if inBoth == 0 || inBoth == sequences {
		t.Errorf("%d of %d sequences are in all their new nodes; none was copied", inBoth, sequences)
	}
	c.write(sequences, 0, 2)
	if got := c.exists(sequences, true); got != client.Present {
		t.Errorf("a new sequence is not in all its nodes: %v", got)
	}

	if err := nodes["a"].Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i := range sequences {
		if n := c.blocks(i); n != 2 {
			t.Errorf("%d blocks of sequence %d are found", n, i)
		}
	}
	const late = sequences + 1
	c.write(late, 0, 2)
	w, err := c.Write(t.Context(), client.WriteRequest{Namespace: c.ns, IDs: sequenceIDs(late), From: c.memory, AllCopies: true})
	if err != nil || w.Blocks != 0 || len(w.Refused) == 0 || w.Refused[0].Reason != "node_down" {
		t.Errorf("a write to all nodes, of which one is down: %+v, %v", w, err)
	}
	if one, all := c.exists(late, false), c.exists(late, true); one != client.Present || all != client.Unknown {
		t.Errorf("a block that one of two nodes has, and the other is down: %v, %v in all", one, all)
	}
	if got := c.exists(late+1, true); got != client.Absent {
		t.Errorf("a block that the node lacks that is up: %v", got)
	}
}

// TestProbeIsNoUse: while a member is filled, a client asks the old and the new home of a sequence for it. If both have it,
// the client reads it at the new home, and the old home counts no use.
func TestProbeIsNoUse(t *testing.T) {
	etcd := testetcd.Start(t, 1)
	old := testnode.Start(t, testnode.Options{Name: "old", Etcd: etcd.Endpoints})
	joined := testnode.Start(t, testnode.Options{Name: "joined", Etcd: etcd.Endpoints})
	c := openMember(t, client.Options{Servers: []string{old.Addr}, Discover: true})
	sequence := 0
	for c.Asked(t.Context(), c.ns, sequenceIDs(sequence))[0] != joined.Addr {
		sequence++
	}
	for _, n := range []*testnode.Node{old, joined} {
		only := openMember(t, client.Options{Servers: []string{n.Addr}})
		only.write(sequence, 0, 2)
	}
	conn, err := client.Dial(old.Addr, client.DialOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := pb.NewAdminClient(conn).FillMembers(t.Context(), &pb.FillMembersRequest{Names: []string{"joined"}}); err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for limit := time.After(time.Minute); !c.AnyIncoming(); {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("the client has no member that is filled")
		}
	}
	for range 3 {
		if n := c.blocks(sequence); n != 2 {
			t.Errorf("%d blocks are found", n)
		}
	}
	uses := func(n *testnode.Node) int {
		tips, _, err := n.Storage.Tips("m", c.ns.Epoch)
		if err != nil || len(tips) != 1 {
			t.Fatal(tips, err)
		}
		return tips[0].Heat
	}
	if a, b := uses(old), uses(joined); a != 0 || b == 0 {
		t.Errorf("the old home counts %d uses, and the new one %d", a, b)
	}
}

// TestDrainingBusy: a sequence is at a draining node that refuses calls, because its lease could not be renewed. A read
// of it is busy, and not absent.
func TestDrainingBusy(t *testing.T) {
	etcd := testetcd.Start(t, 1)
	gate := testetcd.NewGate(t, etcd.Endpoints[0])
	a := testnode.Start(t, testnode.Options{Name: "a", Etcd: []string{gate.Addr}})
	b := testnode.Start(t, testnode.Options{Name: "b", Etcd: etcd.Endpoints})
	c := openMember(t, client.Options{Servers: []string{b.Addr}, Discover: true})
	const sequences = 16
	moved := -1
	for i := range sequences {
		if c.write(i, 0, 2); c.Asked(t.Context(), c.ns, sequenceIDs(i))[0] == a.Addr {
			moved = i
		}
	}
	if moved < 0 {
		t.Fatal("node a has no sequence")
	}
	drainMember(t, b, "a", c)
	gate.Cut()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for limit := time.After(time.Minute); ; {
		r, err := c.Read(t.Context(), client.ReadRequest{Namespace: c.ns, IDs: sequenceIDs(moved), Into: c.memory})
		if err != nil {
			t.Fatal(err)
		}
		if r.Blocks == 0 {
			if r.Outcome != client.Busy || !strings.Contains(r.Detail, "no lease in etcd") {
				t.Errorf("the read returned %+v", r)
			}
			break
		}
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("node a serves without a lease")
		}
	}
	gate.Mend()
}

// exists returns whether the last block of a sequence is stored on one of its nodes, or on all of them.
func (c *memberClient) exists(sequence int, all bool) client.Presence {
	c.Helper()
	present, err := c.Exists(c.Context(), client.KeysRequest{Namespace: c.ns, IDs: sequenceIDs(sequence), AllCopies: all}, false)
	if err != nil {
		c.Fatal(err)
	}
	return present[1]
}

// TestNoMembers: a list without members is no list. The warning has the node that returned it, and all blocks
// are misses.
func TestNoMembers(t *testing.T) {
	f := newFake(t)
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = engine.Close() })
	var log bytes.Buffer
	s, err := client.Open(t.Context(), client.Options{
		Servers: []string{f.addr}, Discover: true, MembersEvery: time.Hour, Engine: engine, Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if text := log.String(); !strings.Contains(text, f.addr+" returned a list without members") || strings.Contains(text, "%!") {
		t.Errorf("the log is %s", text)
	}
}
