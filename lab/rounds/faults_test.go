package rounds

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"syscall"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// A fault is made and repaired by do, which returns the victim and the variant.
type fault struct {
	name string
	do   func(*cluster) (detail string)
}

// restarts is the name of the fault that restarts all nodes.
const restarts = "nodes restarted"

// faults returns the faults of n rounds: all kinds in a random order, and then again in another order.
func (c *cluster) faults(n int) (all []fault) {
	kinds := []fault{
		{"node killed", (*cluster).killNode},
		{"node stopped", (*cluster).pauseNode},
		{"node cut off", (*cluster).cutNode},
		{"node drained", (*cluster).drainNode},
		{"node replaced", (*cluster).replaceNode},
		{"node joins or leaves", (*cluster).joinOrLeave},
		{"node removed", (*cluster).removeNode},
		{restarts, (*cluster).restartNodes},
		{"planner killed", (*cluster).killPlanner},
		{"clock jumps", (*cluster).jumpClock},
		{"etcd member killed", (*cluster).killEtcdMember},
		{"etcd majority killed", (*cluster).killEtcdMajority},
	}
	if !clocks {
		kinds = slices.DeleteFunc(kinds, func(f fault) bool { return f.name == "clock jumps" })
		c.t.Log("no clock jumps on this processor")
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
	c.order(n, what, func(ctx context.Context, admin pb.AdminClient) error {
		_, err := admin.DrainMember(ctx, &pb.DrainMemberRequest{Name: n.name, Cancel: cancel})
		return err
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

// removeNode removes a node from the cluster, and admits it again with its blocks. The node serves meanwhile,
// or it was drained and stopped before.
func (c *cluster) removeNode() string {
	n, serving := c.victim(), c.coin()
	remove := &pb.RemoveMemberRequest{Name: n.name, Force: serving}
	detail := n.name + ", while it serves"
	if !serving {
		detail = n.name + ", drained and stopped"
		c.drain(n, false)
		c.drained(n)
		if err := n.stop(); err != nil {
			c.t.Fatal(err)
		}
		c.gone(n)
	}
	c.order(n, n.name+" is removed", func(ctx context.Context, admin pb.AdminClient) error {
		_, err := admin.RemoveMember(ctx, remove)
		return err
	})
	if states := c.other(n).states(); states[n.name] != "" {
		c.t.Fatalf("the list of members after the removal of %s: %v", n.name, states)
	}
	c.bumped("without the node")
	c.others()
	if serving && n.serves(c.load.spaces[0].name) {
		c.t.Fatalf("%s answers calls after its removal", n.name)
	}
	c.order(n, n.name+" is admitted again", func(ctx context.Context, admin pb.AdminClient) error {
		_, err := admin.RemoveMember(ctx, &pb.RemoveMemberRequest{Name: n.name, Cancel: true})
		return err
	})
	if !serving {
		n.start()
	}
	return detail
}

// order repeats an administrative call through another node than n until it succeeds. etcd may not answer at
// once.
func (c *cluster) order(n *node, what string, call func(context.Context, pb.AdminClient) error) {
	c.t.Helper()
	var err error
	defer func() {
		if c.t.Failed() && err != nil {
			c.event("the last error of %q: %v", what, err)
		}
	}()
	c.await(what, func() bool {
		err = c.other(n).admin(context.Background(), 3*leaseTTL, call)
		return err == nil
	})
}

// restartNodes restarts all nodes, in the order of cluster restart-plan or all at once.
func (c *cluster) restartNodes() string {
	restart := func(nodes ...*node) {
		for _, n := range nodes {
			if err := n.stop(); err != nil {
				c.t.Fatal(err)
			}
		}
		for _, n := range nodes {
			n.start()
			c.event("node %s is restarted", n.name)
		}
	}
	if c.coin() {
		restart(c.nodes...)
		return "all at once"
	}
	began := time.Now().UTC().Format(time.RFC3339Nano)
	for range c.nodes {
		c.awaitMembers()
		c.served("before the next restart", c.load.spaces...)
		var plan struct {
			Steps []struct{ Node string }
			Done  []string
		}
		c.await("the plan has the next node", func() bool {
			cmd := exec.Command(c.binary, "--server", c.nodes[0].direct, "cluster", "restart-plan", "--since", began, "--expect", strconv.Itoa(len(c.nodes)), "--format", "json")
			out, err := cmd.Output()
			return err == nil && json.Unmarshal(out, &plan) == nil && len(plan.Steps) > 0
		})
		i := slices.IndexFunc(c.nodes, func(n *node) bool { return n.name == plan.Steps[0].Node })
		if i < 0 || slices.Contains(plan.Done, plan.Steps[0].Node) {
			c.t.Fatalf("the plan is %+v", plan)
		}
		restart(c.nodes[i])
	}
	return "by the plan"
}

// jumpClock changes the wall clock of a node by hours to two years, forwards or backwards, and corrects it
// later. Meanwhile the node serves, is cut off from etcd for longer than its lease, or is started again. In
// other rounds the clock is that of the planner that leads.
func (c *cluster) jumpClock() string {
	ahead := time.Hour + time.Duration(c.rng.Int64N(int64(2*365*24*time.Hour)))
	n, what := c.victim(), c.rng.IntN(4)
	// A node that measured its lease by this clock would serve for hours without etcd if the clock goes back.
	if c.coin() || what == 1 {
		ahead = -ahead
	}
	ahead = ahead.Truncate(time.Second)
	if what == 0 {
		p, term := c.leads(0)
		p.jump(ahead)
		c.event("the clock of planner %s jumps by %v", p.name, ahead)
		c.planned("with the clock of the planner")
		if again, now := c.leads(0); now != term {
			c.event("planner %s leads in term %d", again.name, now)
		}
		p.jump(0)
		return fmt.Sprintf("%s by %v", p.name, ahead)
	}
	n.jump(ahead)
	c.event("the clock of node %s jumps by %v", n.name, ahead)
	detail := fmt.Sprintf("%s by %v", n.name, ahead)
	switch what {
	case 1:
		detail += ", then cut off from etcd"
		for _, w := range n.toEtcd {
			w.cut(false)
		}
		c.gone(n)
		c.bumped("without the node")
		c.others()
		for _, w := range n.toEtcd {
			w.mend()
		}
	case 2:
		detail += ", then killed and started"
		n.kill()
		n.start()
	}
	c.awaitMembers()
	c.bumped("with the clock of the node")
	c.served("with the clock of the node", c.load.spaces...)
	c.shifted(n, ahead)
	n.jump(0)
	return detail
}

// shifted waits until the node has the time of the newest epoch by its own clock, which is ahead.
func (c *cluster) shifted(n *node, ahead time.Duration) {
	c.t.Helper()
	c.await("the epoch's time is that of the node's clock", func() bool {
		var ns *pb.Namespace
		err := n.admin(context.Background(), 2*leaseTTL, func(ctx context.Context, admin pb.AdminClient) (err error) {
			ns, err = admin.GetNamespace(ctx, &pb.GetNamespaceRequest{Name: c.load.spaces[len(c.load.spaces)-1].name})
			return err
		})
		return err == nil && time.UnixMilli(ns.GetEpochSinceUnixMs()).Sub(time.Now().Add(ahead)).Abs() < time.Hour/2
	})
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
