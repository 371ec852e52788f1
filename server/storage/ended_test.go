package storage_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

func (r *rig) deleteNamespace(name string) {
	r.t.Helper()
	if _, err := r.node.DeleteNamespace(r.t.Context(), name, false); err != nil {
		r.t.Fatal(err)
	}
}

// oldHandle checks that a client with the definition of a deleted namespace neither reads, stores, deletes nor pins a
// block of the namespace that has its name now.
func (r *rig) oldHandle(old kv.Namespace, ids []kv.BlockID) {
	r.t.Helper()
	if _, n, err := r.tryLoad(r.t.Context(), old, ids, func(q *storage.LoadRequest) { q.Epoch = old.Epoch }); n != 0 || err != nil {
		r.t.Errorf("epoch %d: the old definition reads %d blocks, %v", old.Epoch, n, err)
	}
	if _, m, err := r.node.Match(storage.MatchRequest{Namespace: old.Name, Epoch: old.Epoch, IDs: ids}); m.Blocks != 0 || err != nil {
		r.t.Errorf("epoch %d: the old definition matches %d blocks, %v", old.Epoch, m.Blocks, err)
	}
	res, err := r.node.Reserve(r.t.Context(), storage.ReserveRequest{Namespace: old.Name, Epoch: old.Epoch, Geometry: old.Geometry.Digest(), IDs: ids})
	if err != nil || res.ID != 0 {
		r.t.Errorf("epoch %d: a reservation with the old definition: %+v, %v; want one without pieces", old.Epoch, res, err)
	}
	for _, g := range res.Grants {
		if g.Status == trie.Added || g.Status == trie.Exists {
			r.t.Errorf("epoch %d: a reservation with the old definition has %+v", old.Epoch, g)
		}
	}
	if _, _, err := r.node.PinEpoch(r.t.Context(), "test", old.Name, old.Epoch, 1e9); !errors.Is(err, storage.ErrMismatch) {
		r.t.Errorf("epoch %d: a pin with the old definition: %v; want ErrMismatch", old.Epoch, err)
	}
}

// TestNameUsedAgain: a namespace that is deleted and made again with the same definition begins above the
// last epoch of the deleted one, also after a restart, a power failure and a rebuild of the index. A
// client with the old definition gets a miss or ErrMismatch, and neither namespace gets KV of the other.
func TestNameUsedAgain(t *testing.T) {
	for _, index := range []kv.IndexKind{kv.IndexTrie, kv.IndexFlat} {
		t.Run(index.String(), func(t *testing.T) {
			r := newRig(t, rigOptions{}, memories(2, 1)...)
			create := func() kv.Namespace {
				return r.namespace("m", small, func(ns *kv.Namespace) { ns.Index = index })
			}
			between := []struct {
				when string
				do   func()
			}{
				{"at once", func() {}},
				{"after a restart", func() { r.close(); r.reopenDevices(); r.open() }},
				{"after a power failure", func() { r.crash(3) }},
				{"after a loss of the index", func() { r.loseIndex(2, false) }},
			}
			ns := create()
			ids := chain(ns, 4, 1)
			var old []kv.Namespace
			for _, b := range between {
				when := b.when
				ns, _ = r.node.Namespace("m")
				r.mustPut(ns, ids)
				if _, n := r.load(ns, ids); n != len(ids) {
					t.Fatalf("%s: %d of %d blocks", when, n, len(ids))
				}
				commit, err := r.reserve(ns, chain(ns, 4, 2), 0)
				if err != nil || commit == nil {
					t.Fatalf("%s: reserve: %v", when, err)
				}
				r.deleteNamespace("m")
				b.do()
				again := create()
				if again.Epoch != ns.Epoch+1 {
					t.Errorf("%s: epoch %d after %d", when, again.Epoch, ns.Epoch)
				}
				if when == "at once" {
					if stored, err := commit(); err == nil && len(stored) > 0 && stored[0].Stored {
						t.Errorf("a reservation in the deleted namespace stores %+v", stored)
					}
				}
				old = append(old, ns)
				r.mustPut(again, ids[:2])
				for _, o := range old {
					r.oldHandle(o, ids)
				}
				if _, n := r.load(again, ids); n != 2 {
					t.Errorf("%s: %d of 2 blocks of the new namespace", when, n)
				}
			}
			// The order of a deletion and a creation with an epoch of the caller.
			r.deleteNamespace("m")
			if ns := r.namespace("m", small, func(ns *kv.Namespace) { ns.Epoch, ns.Index = 40, index }); ns.Epoch != 40 {
				t.Errorf("epoch %d; want the caller's 40", ns.Epoch)
			}
			r.deleteNamespace("m")
			if ns := r.namespace("m", small, func(ns *kv.Namespace) { ns.Epoch = 7 }); ns.Epoch != 41 {
				t.Errorf("with another definition: epoch %d; want 41", ns.Epoch)
			}
			if ns := r.namespace("other", small); ns.Epoch != 1 {
				t.Errorf("another name begins at epoch %d; want 1", ns.Epoch)
			}
		})
	}
}

// ended returns the deleted names with their last epochs, and the floor, as the catalogue has them.
func (r *rig) ended() (names map[string]kv.Epoch, floor kv.Epoch) {
	r.t.Helper()
	var c struct {
		Ended      map[string]kv.Epoch `json:"ended"`
		EndedFloor kv.Epoch            `json:"ended_floor"`
	}
	if err := json.Unmarshal(r.store.Catalogue(), &c); err != nil {
		r.t.Fatal(err)
	}
	return c.Ended, c.EndedFloor
}

// TestDeletedNamesAreBounded: the catalogue has at most 1,024 deleted names, those with the highest epochs. Every
// other name begins above the epochs of the names that it has no more.
func TestDeletedNamesAreBounded(t *testing.T) {
	r := newRig(t, rigOptions{})
	last := make(map[string]kv.Epoch)
	for i := range 1030 {
		name := fmt.Sprint("n", i)
		ns := r.namespace(name, small, func(ns *kv.Namespace) { ns.Epoch = kv.Epoch(100 + (i*7)%1030) })
		last[name] = ns.Epoch
		r.deleteNamespace(name)
	}
	names, floor := r.ended()
	if len(names) != 1024 || floor != 105 {
		t.Errorf("%d names and the floor %d; want 1024 and 105", len(names), floor)
	}
	r.close()
	r.reopenDevices()
	r.open()
	for _, name := range []string{"n0", "n1", "n500", "n883", "n1029", "unused"} {
		want := max(last[name], floor) + 1
		if ns := r.namespace(name, small); ns.Epoch != want {
			t.Errorf("%s begins at epoch %d; want %d", name, ns.Epoch, want)
		}
	}
	if again, _ := r.ended(); again["n500"] != 0 || len(again) >= len(names) {
		t.Errorf("%d deleted names, with n500 at %d, after it was created again", len(again), again["n500"])
	}
}

// TestDeletedNamesMakeRoom: if the catalogue is full, deleted names make room for namespaces, and the epochs
// still only increase.
func TestDeletedNamesMakeRoom(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 1 << 20, segmentBytes: 128 << 10})
	name := func(i int) string { return fmt.Sprintf("%0120d", i) }
	var err error
	n, deleted := 0, 0
	for ; err == nil && n < 2000; n++ {
		_, err = r.node.CreateNamespace(t.Context(), kv.Namespace{Name: name(n), Epoch: kv.Epoch(1 + n), Geometry: small, Index: kv.IndexTrie})
		if err == nil && n%2 == 0 {
			r.deleteNamespace(name(n))
			deleted++
		}
	}
	if err == nil {
		t.Fatalf("%d namespaces fit the catalogue", n)
	}
	names, floor := r.ended()
	if len(names) > 0 || floor == 0 {
		t.Errorf("a full catalogue has %d of %d deleted names and the floor %d", len(names), deleted, floor)
	}
	r.deleteNamespace(name(1))
	if ns := r.namespace(name(0), small); ns.Epoch != max(1, floor)+1 {
		t.Errorf("epoch %d; want %d", ns.Epoch, floor+1)
	}
}

// TestClusterEpochOfDeletedName: the epochs of a cluster are those of etcd, whatever the node has deleted before.
func TestClusterEpochOfDeletedName(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small, func(ns *kv.Namespace) { ns.Epoch = 9 })
	r.deleteNamespace(ns.Name)
	if ns := r.follow("m", 3); ns.Epoch != 3 {
		t.Errorf("epoch %d; want the cluster's 3", ns.Epoch)
	}
	if _, err := r.node.DeleteNamespace(t.Context(), "m", false); err != nil {
		t.Fatal(err)
	}
	if _, err := r.node.Namespace("m"); !errors.Is(err, trie.ErrNamespaceUnknown) {
		t.Error(err)
	}
	if ns := r.namespace("m", small); ns.Epoch != 10 {
		t.Errorf("epoch %d without the cluster; want 10", ns.Epoch)
	}
}
