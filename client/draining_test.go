package client_test

import (
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/lab/testnode"
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
		c.write(i, 0, 2)
	}
	drainMember(t, nodes["a"], "b", c)
	if err := nodes["a"].Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i := range sequences {
		if n := c.blocks(i); n != 2 {
			t.Errorf("%d blocks of sequence %d are found", n, i)
		}
	}
}
