package storage_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

// catalogued returns the names in the catalogue on the volumes.
func (r *rig) catalogued() []string {
	r.t.Helper()
	var c struct{ Namespaces []kv.Namespace }
	if err := json.Unmarshal(r.store.Catalogue(), &c); err != nil {
		r.t.Fatal(err)
	}
	var names []string
	for _, ns := range c.Namespaces {
		names = append(names, ns.Name)
	}
	return names
}

func (r *rig) follow(name string, epoch kv.Epoch) kv.Namespace {
	r.t.Helper()
	def := kv.Namespace{Name: name, Epoch: epoch, Index: kv.IndexTrie, Geometry: kv.SingleGroup(2, 16, 256)}
	if err := r.node.Follow(r.t.Context(), def, nil); err != nil {
		r.t.Fatal(err)
	}
	ns, err := r.node.Namespace(name)
	if err != nil {
		r.t.Fatal(err)
	}
	return ns
}

// TestFollowWritesNothing: the namespaces of a cluster take no room on the volumes, until a block of one is
// stored. A bump of a namespace without blocks writes nothing either. A restart keeps the namespace that has
// blocks, with them.
func TestFollowWritesNothing(t *testing.T) {
	r := newRig(t, rigOptions{})
	before := string(r.store.Catalogue())
	for epoch := kv.Epoch(1); epoch <= 2; epoch++ {
		for i := range 300 {
			r.follow(fmt.Sprint("ns", i), epoch)
		}
	}
	if after := string(r.store.Catalogue()); after != before {
		t.Errorf("300 namespaces of a cluster changed the catalogue to %d bytes", len(after))
	}
	ns := r.follow("ns7", 2)
	ids := chain(ns, 3, 1)
	if _, m, err := r.node.Match(storage.MatchRequest{Namespace: "ns7", IDs: ids}); err != nil || m.Blocks != 0 {
		t.Errorf("a match in a namespace without blocks: %d blocks, %v", m.Blocks, err)
	}
	r.mustPut(ns, ids)
	if names := r.catalogued(); len(names) != 1 || names[0] != "ns7" {
		t.Errorf("the catalogue has %q; want ns7", names)
	}
	r.close()
	r.reopenDevices()
	r.open()
	if all := r.node.Namespaces(); len(all) != 1 || all[0].Epoch != 2 {
		t.Errorf("after a restart: %+v", all)
	}
	if _, m, err := r.node.Match(storage.MatchRequest{Namespace: "ns7", IDs: ids}); err != nil || m.Blocks != 3 {
		t.Errorf("after a restart: %d blocks match, %v; want 3", m.Blocks, err)
	}
}

// TestRecordRefused: if the catalogue has no room for a namespace of the cluster, the first write to it is refused
// with the cause, the namespace stays without a record, and other namespaces still take writes.
func TestRecordRefused(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 1 << 20, segmentBytes: 128 << 10})
	begin := func(ns kv.Namespace) error {
		res, err := r.node.Reserve(t.Context(), storage.ReserveRequest{Namespace: ns.Name, Geometry: ns.Geometry.Digest(), IDs: chain(ns, 1, 1)})
		if err == nil {
			err = r.node.Abort(res.ID)
		}
		return err
	}
	first := r.follow("first", 1)
	if err := begin(first); err != nil {
		t.Fatal(err)
	}
	var refused error
	n := 0
	for ; refused == nil && n < 2000; n++ {
		refused = begin(r.follow(fmt.Sprintf("%0120d", n), 1))
	}
	if !errors.Is(refused, blockstore.ErrTooLarge) {
		t.Fatalf("after %d namespaces: %v; want ErrTooLarge", n, refused)
	}
	last := fmt.Sprintf("%0120d", n-1)
	if ns, err := r.node.Namespace(last); err != nil || !r.trie.IsAnnounced(ns.ID) {
		t.Errorf("the refused namespace: %+v, %v; want it without a record", ns, err)
	}
	if got := len(r.catalogued()); got != n {
		t.Errorf("the catalogue has %d namespaces; want %d", got, n)
	}
	if err := begin(first); err != nil {
		t.Errorf("a namespace with a record: %v", err)
	}
	if _, err := r.node.DeleteNamespace(t.Context(), fmt.Sprintf("%0120d", 0), false); err != nil {
		t.Fatal(err)
	}
	ns, err := r.node.Namespace(last)
	if err == nil {
		err = begin(ns)
	}
	if err != nil {
		t.Errorf("after another namespace was deleted: %v", err)
	}
}
