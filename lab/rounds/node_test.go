package rounds

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
)

// leaseTTL is the nodes' lease in etcd, the shortest that a node takes.
const leaseTTL = 2 * time.Second

// A node is a member of the cluster.
type node struct {
	process
	dir string
	// advertised is the address for clients, which is that of a wire, and direct the address at which
	// the node listens.
	advertised, direct string
	toClients, toEtcd  []*wire
}

// newNode makes a node with an empty directory, whose name is that of the node, and starts it.
func newNode(t *testing.T, binary, dir string, etcd []string) *node {
	t.Helper()
	name := filepath.Base(dir)
	n := &node{process: process{t: t, name: name, logFile: dir + ".log"}, dir: dir}
	wired := func(listen, to string) *wire {
		w, err := newWire(listen, to)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.close)
		return w
	}
	var listens []string
	for range 2 {
		addr := testkit.Port(t)
		own := strings.Replace(addr, "127.0.0.1:", "127.0.1.1:", 1)
		n.toClients = append(n.toClients, wired(addr, own))
		listens = append(listens, own)
	}
	n.advertised, n.direct = n.toClients[0].listener.Addr().String(), listens[0]
	var members []string
	for _, member := range etcd {
		w := wired("127.0.0.1:0", member)
		n.toEtcd = append(n.toEtcd, w)
		members = append(members, w.listener.Addr().String())
	}
	n.args = []string{binary, "serve", "--node", name, "--data", n.dir, "--capacity", "128MiB", "--segment", "2MiB", "--arena", "32MiB", "--index-cache", "8MiB",
		"--free-floor", "0", "--sync-interval", "50ms", "--prewrite=false", "--scrub-rate", "0", "--http", "",
		"--advertise", "127.0.0.1", "--listen", listens[0], "--data-listen", listens[1],
		"--cluster-etcd", strings.Join(members, ","), "--cluster-lease-ttl", leaseTTL.String(), "--cluster-zone", "rack-" + name}
	t.Cleanup(n.kill)
	n.start()
	return n
}

// admin calls f with a client of the node that goes past the wires, as an operator on the node's host
// does.
func (n *node) admin(ctx context.Context, within time.Duration, f func(context.Context, pb.AdminClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	conn, err := client.Dial(n.direct, client.DialOptions{Timeout: within})
	if err != nil {
		return err
	}
	return errors.Join(f(ctx, pb.NewAdminClient(conn)), conn.Close())
}

// states returns the states of the members by name, from the list that this node returns. A draining
// member whose blocks were all copied has the state "drained".
func (n *node) states() map[string]string {
	var list *pb.ListMembersResponse
	err := n.admin(context.Background(), 2*leaseTTL, func(ctx context.Context, c pb.AdminClient) (err error) {
		list, err = c.ListMembers(ctx, &pb.ListMembersRequest{})
		return err
	})
	if err != nil {
		return nil
	}
	all := make(map[string]string)
	for _, m := range list.GetMembers() {
		all[m.GetName()] = m.GetState()
		if m.GetMove().GetPhase() == "done" {
			all[m.GetName()] = "drained"
		}
	}
	return all
}

// serves reports whether the node has a lease, and so answers calls on a namespace. The record in the
// list of members may be that of an earlier life.
func (n *node) serves(namespace string) bool {
	return n.admin(context.Background(), 2*leaseTTL, func(ctx context.Context, c pb.AdminClient) error {
		_, err := c.GetNamespace(ctx, &pb.GetNamespaceRequest{Name: namespace})
		return err
	}) == nil
}
