package rounds

import (
	"context"
	"os"
	"regexp"
	"slices"
	"syscall"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// A fault is made and repaired by do, which returns the victim and the variant.
type fault struct {
	name string
	do   func(*cluster) (detail string)
}

// faults returns the faults of n rounds: all kinds in a random order, and then again in another order.
func (c *cluster) faults(n int) (all []fault) {
	kinds := []fault{
		{"node killed", (*cluster).killNode},
		{"node stopped", (*cluster).pauseNode},
		{"node cut off", (*cluster).cutNode},
		{"node drained", (*cluster).drainNode},
		{"node replaced", (*cluster).replaceNode},
		{"node joins or leaves", (*cluster).joinOrLeave},
		{"etcd member killed", (*cluster).killEtcdMember},
		{"etcd majority killed", (*cluster).killEtcdMajority},
	}
	want := regexp.MustCompile(*roundsFaults)
	kinds = slices.DeleteFunc(kinds, func(f fault) bool { return !want.MatchString(f.name) })
	if len(kinds) == 0 {
		c.t.Fatalf("no fault matches %q", *roundsFaults)
	}
	for len(all) < n {
		c.rng.Shuffle(len(kinds), func(i, k int) { kinds[i], kinds[k] = kinds[k], kinds[i] })
		all = append(all, kinds[:min(len(kinds), n-len(all))]...)
	}
	return all
}

// victim returns a random node.
func (c *cluster) victim() *node { return c.nodes[c.rng.IntN(len(c.nodes))] }

func (c *cluster) coin() bool { return c.rng.IntN(2) == 0 }

// others waits until reads find sequences of the nodes that are left, with and without replicas. While
// writes wait for a node that does not answer, engines do not fill an epoch before the next one begins.
func (c *cluster) others() {
	c.t.Helper()
	c.served("without the node", c.load.spaces[:2]...)
}

// killNode kills a node, and starts it again at once or after its lease.
func (c *cluster) killNode() string {
	n, atOnce := c.victim(), c.coin()
	n.kill()
	c.event("node %s was killed", n.name)
	if atOnce {
		n.start()
		return n.name + ", started at once"
	}
	c.surfaced()
	c.gone(n)
	c.others()
	c.bumped("without the node")
	n.start()
	return n.name + ", started after its lease"
}

// pauseNode stops a node with SIGSTOP for longer than its lease. Epochs begin meanwhile.
func (c *cluster) pauseNode() string {
	n := c.victim()
	c.setStopped(n, true)
	n.signal(syscall.SIGSTOP)
	c.event("node %s is stopped", n.name)
	c.surfaced()
	c.gone(n)
	c.bumped("without the node")
	c.others()
	n.signal(syscall.SIGCONT)
	c.setStopped(n, false)
	c.event("node %s continues", n.name)
	return n.name
}

func (c *cluster) setStopped(n *node, stopped bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n.stopped = stopped
}

// cutNode cuts a node off from etcd, from the clients, or from both.
func (c *cluster) cutNode() string {
	n, refuse := c.victim(), c.coin()
	which, wires := "from etcd", n.toEtcd
	switch c.rng.IntN(3) {
	case 0:
		which, wires = "from the clients", n.toClients
	case 1:
		which, wires = "from etcd and the clients", slices.Concat(n.toClients, n.toEtcd)
	}
	if refuse {
		which += ", connections end"
	} else {
		which += ", packets are lost"
	}
	for _, w := range wires {
		w.cut(refuse)
	}
	c.event("node %s is cut off %s", n.name, which)
	c.surfaced()
	if len(wires) > len(n.toClients) {
		c.gone(n)
	}
	c.bumped("without the node")
	c.others()
	for _, w := range wires {
		w.mend()
	}
	c.event("node %s is connected", n.name)
	return n.name + " " + which
}

// drain gives a node the order to drain, or takes it back. etcd may not answer at once.
func (c *cluster) drain(n *node, cancel bool) {
	c.t.Helper()
	what := n.name + " has the order to drain"
	if cancel {
		what = n.name + " has no order to drain"
	}
	c.await(what, func() bool {
		return c.other(n).admin(context.Background(), 2*leaseTTL, func(ctx context.Context, admin pb.AdminClient) error {
			_, err := admin.DrainMember(ctx, &pb.DrainMemberRequest{Name: n.name, Cancel: cancel})
			return err
		}) == nil
	})
}

// drained waits until other nodes have the blocks of a node.
func (c *cluster) drained(n *node) {
	c.t.Helper()
	c.await(n.name+" is drained", func() bool { return c.other(n).states()[n.name] == "drained" })
}

// drainNode drains a node, and takes the order back.
func (c *cluster) drainNode() string {
	n, whole := c.victim(), c.coin()
	c.drain(n, false)
	if whole {
		c.drained(n)
	}
	c.served("during the drain", c.load.spaces...)
	c.drain(n, true)
	if whole {
		return n.name + ", to the end"
	}
	return n.name + ", taken back"
}

// replaceNode kills a node and starts it with an empty directory.
func (c *cluster) replaceNode() string {
	n := c.victim()
	n.kill()
	if err := os.RemoveAll(n.dir); err != nil {
		c.t.Fatal(err)
	}
	c.event("node %s is replaced by an empty one", n.name)
	n.start()
	return n.name
}

// joinOrLeave adds a node. If there are enough, a node is drained and leaves instead.
func (c *cluster) joinOrLeave() string {
	if len(c.nodes) < most {
		n := c.add()
		c.event("node %s joins", n.name)
		return n.name + " joins"
	}
	// The first nodes are the addresses from which clients begin.
	n := c.nodes[fewest+c.rng.IntN(len(c.nodes)-fewest)]
	c.drain(n, false)
	c.drained(n)
	c.mu.Lock()
	c.nodes = slices.DeleteFunc(c.nodes, func(o *node) bool { return o == n })
	c.mu.Unlock()
	if err := n.stop(); err != nil {
		c.t.Fatal(err)
	}
	c.event("node %s leaves", n.name)
	return n.name + " leaves"
}

// killEtcdMember kills a member of etcd, which may be the leader. The cluster goes on.
func (c *cluster) killEtcdMember() string {
	i := c.rng.IntN(len(c.etcd.Endpoints))
	c.etcd.Kill(i)
	c.event("etcd member %d was killed", i)
	c.bumped("without the member of etcd")
	c.served("without the member of etcd", c.load.spaces...)
	c.etcd.Run(i)
	c.etcd.Await()
	return "one of three"
}

// killEtcdMajority kills two members of etcd, and starts them again at once, or when the nodes serve
// nothing any more.
func (c *cluster) killEtcdMajority() string {
	first, atOnce := c.rng.IntN(len(c.etcd.Endpoints)), c.coin()
	pair := []int{first, (first + 1) % len(c.etcd.Endpoints)}
	for _, i := range pair {
		c.etcd.Kill(i)
	}
	c.event("etcd members %v were killed", pair)
	detail := "started at once"
	if !atOnce {
		detail = "started after the leases"
		c.surfaced()
		c.grow("nodes refuse calls in all namespaces", busy, proof, c.load.spaces...)
	}
	for _, i := range pair {
		c.etcd.Run(i)
	}
	c.etcd.Await()
	return detail
}
