package storage_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
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
	if !errors.Is(refused, blockstore.ErrTooLarge) || !errors.Is(refused, storage.ErrBusy) {
		t.Fatalf("after %d namespaces: %v; want ErrTooLarge and ErrBusy", n, refused)
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

// TestRecordFails: a namespace of the cluster that the catalogue does not take keeps its id, its older epochs and its
// pins, and the next write records it. Until the catalogue has a namespace, no block of it can be stored.
func TestRecordFails(t *testing.T) {
	r, dev := faulty(t, rigOptions{})
	ns := r.follow("m", 1)
	if _, _, err := r.node.PinEpoch(context.Background(), "engine", "m", 1, time.Hour); err != nil {
		t.Fatal(err)
	}
	ns = r.follow("m", 2)
	reserve := func() error {
		res, err := r.node.Reserve(t.Context(), storage.ReserveRequest{Namespace: "m", Geometry: ns.Geometry.Digest(), IDs: chain(ns, 1, 1)})
		if err == nil {
			err = r.node.Abort(res.ID)
		}
		return err
	}
	announced := r.trie.IsAnnounced
	dev.SetRules(faultio.MustParse(`(Err EIO Writes)`))
	if err := reserve(); !errors.Is(err, storage.ErrBusy) {
		t.Fatalf("a write that cannot record its namespace: %v; want ErrBusy", err)
	}
	if got, err := r.node.Namespace("m"); err != nil || got.ID != ns.ID || !slices.Equal(got.Live(), []kv.Epoch{2, 1}) || !announced(ns.ID) {
		t.Errorf("after the failure: %+v, %v, announced %v; want %+v, announced", got, err, announced(ns.ID), ns)
	}
	if n := r.trie.Stats().Leases; n != 1 {
		t.Errorf("%d leases; want that of the pin", n)
	}
	dev.SetRules(nil)
	if err := reserve(); err != nil {
		t.Fatal(err)
	}
	if names := r.catalogued(); !slices.Equal(names, []string{"m"}) || announced(ns.ID) {
		t.Errorf("the catalogue has %q, announced %v", names, announced(ns.ID))
	}
}

// TestRecordOrder: while the catalogue with a namespace of the cluster is being written, the index has no record of
// it, so no other write stores a block of it.
func TestRecordOrder(t *testing.T) {
	dev := &stoppedDevice{Device: memio.New(memio.Options{}), entered: make(chan struct{}), release: make(chan struct{})}
	r := newRig(t, rigOptions{}, dev)
	ns := r.follow("m", 1)
	dev.stop.Store(true)
	ended := make(chan error, 1)
	go func() {
		res, err := r.node.Reserve(t.Context(), storage.ReserveRequest{Namespace: "m", Geometry: ns.Geometry.Digest(), IDs: chain(ns, 1, 1)})
		if err == nil {
			err = r.node.Abort(res.ID)
		}
		ended <- err
	}()
	<-dev.entered
	if !r.trie.IsAnnounced(ns.ID) {
		t.Error("the index has the namespace before the catalogue")
	}
	close(dev.release)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

// stoppedDevice stops the first batch after stop is set, until release is closed.
type stoppedDevice struct {
	blockio.Device
	stop             atomic.Bool
	entered, release chan struct{}
}

func (d *stoppedDevice) Do(ctx context.Context, batch []blockio.Request) error {
	if d.stop.CompareAndSwap(true, false) {
		close(d.entered)
		<-d.release
	}
	return d.Device.Do(ctx, batch)
}
