package client_test

import (
	"context"
	"errors"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/lab/testnode"
)

// TestOldHandleInCluster: a namespace with two replicas is deleted and made again while one of the two nodes is cut off from
// etcd. A client with the old handle gets misses or an error from both nodes, also when the node is back, and stores
// nothing in the new namespace. A client with the new handle gets the new blocks only.
func TestOldHandleInCluster(t *testing.T) {
	etcd := testetcd.Start(t, 1)
	gate := testetcd.NewGate(t, etcd.Endpoints[0])
	first := testnode.Start(t, testnode.Options{Name: "n1", Etcd: etcd.Endpoints, LeaseTTL: 2 * time.Second})
	second := testnode.Start(t, testnode.Options{Name: "n2", Etcd: []string{gate.Addr}, LeaseTTL: 2 * time.Second})
	// Each client knows both nodes, so that neither depends on the list of members.
	r := newRig(t, func(o *client.Options) { o.Servers, o.Discover = []string{first.Addr, second.Addr}, true })
	def := kv.Namespace{Name: "m", Geometry: geometry, Index: kv.IndexTrie, Replicas: 2}
	ids := keys(4, 1)
	size := geometry.PieceBytes(0)
	m := r.memory(4 * size)
	defer m.Close(context.Background())
	may := func(err error) bool {
		return err == nil || errors.Is(err, client.ErrNotFound) || errors.Is(err, client.ErrMismatch) || errors.Is(err, client.ErrUnavailable)
	}
	write := func(ns kv.Namespace, weights int) (int, error) {
		for i, id := range ids {
			fill(m.Bytes()[int64(i)*size:][:size], id, weights, 1)
		}
		got, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: m})
		return got.Stored, err
	}
	read := func(ns kv.Namespace, weights int) int {
		clear(m.Bytes())
		got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: m})
		if !may(err) {
			t.Errorf("a read with the handle of epoch %d: %v", ns.Epoch, err)
		}
		for i := range got.Blocks {
			if err := check(m.Bytes()[int64(i)*size:][:size], ids[i], weights, 1); err != nil {
				t.Errorf("a read with the handle of epoch %d: %v", ns.Epoch, err)
			}
		}
		return got.Blocks
	}
	old, err := r.store.EnsureNamespace(t.Context(), def)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "both nodes have the blocks of the old weights", func() bool {
		_, err := write(old, 1)
		return err == nil && blocksOf(first, old) == len(ids) && blocksOf(second, old) == len(ids)
	})
	gate.Cut()
	conn, err := client.Dial(first.Addr, client.DialOptions{Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := pb.NewAdminClient(conn).DeleteNamespace(t.Context(), &pb.DeleteNamespaceRequest{Name: "m"}); err != nil {
		t.Fatal(err)
	}
	if n := read(old, 1); n != 0 {
		t.Errorf("after the deletion the old handle reads %d blocks", n)
	}
	again, err := r.store.EnsureNamespace(t.Context(), def)
	if err != nil {
		t.Fatal(err)
	}
	if again.Epoch <= old.Epoch {
		t.Fatalf("epoch %d after %d", again.Epoch, old.Epoch)
	}
	stale := func(when string) {
		t.Helper()
		if n := read(old, 1); n != 0 {
			t.Errorf("%s, the old handle reads %d blocks", when, n)
		}
		if n, err := write(old, 1); n != 0 || !may(err) {
			t.Errorf("%s, the old handle stores %d blocks, %v", when, n, err)
		}
	}
	stale("while a node is cut off")
	if n := read(again, 2); n != 0 {
		t.Errorf("the new namespace begins with %d blocks", n)
	}
	gate.Mend()
	eventually(t, "both nodes have the blocks of the new weights", func() bool {
		stale("while a node comes back")
		_, err := write(again, 2)
		return may(err) && blocksOf(first, again) == len(ids) && blocksOf(second, again) == len(ids)
	})
	stale("with both nodes")
	if n := read(again, 2); n != len(ids) {
		t.Errorf("the new handle reads %d of %d blocks", n, len(ids))
	}
}

// blocksOf returns the number of blocks that a node has of the newest epoch of a namespace, 0 if that is another epoch than the
// handle's.
func blocksOf(n *testnode.Node, handle kv.Namespace) int {
	ns, err := n.Storage.Namespace(handle.Name)
	if err != nil || ns.Epoch != handle.Epoch {
		return 0
	}
	stats, _ := n.Storage.NamespaceStats(ns.ID)
	return int(stats.Blocks)
}
