package trie

import (
	"errors"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/kv"
)

// TestRestore: restored namespaces have their ids and epochs, also after a restart, and used ids
// are not assigned again.
func TestRestore(t *testing.T) {
	fs := vfs.NewMem()
	open := func() *Trie {
		t.Helper()
		index, err := Open(Options{Dir: "index", FS: fs})
		if err != nil {
			t.Fatal(err)
		}
		return index
	}
	def := func(id kv.NamespaceID, name string, epoch kv.Epoch) kv.Namespace {
		return kv.Namespace{ID: id, Name: name, Epoch: epoch, Index: kv.IndexTrie, Geometry: kv.SingleGroup(1, 4, 8)}
	}
	index := open()
	if !index.Fresh() {
		t.Error("a new index is not fresh")
	}
	for why, defs := range map[string][]kv.Namespace{
		"no id":          {def(0, "a", 1)},
		"id twice":       {def(1, "a", 1), def(1, "b", 1)},
		"name twice":     {def(1, "a", 1), def(2, "a", 1)},
		"bad definition": {def(1, "", 1)},
	} {
		if err := index.Restore(defs, 9); err == nil || !index.Fresh() {
			t.Errorf("%s: %v; the index is fresh: %v", why, err, index.Fresh())
		}
	}
	want := []kv.Namespace{def(3, "a", 7), def(5, "b", 0)}
	if err := index.Restore(want, 9); err != nil {
		t.Fatal(err)
	}
	if err := index.Restore(nil, 0); !errors.Is(err, ErrNamespaceExists) {
		t.Errorf("restored twice: %v", err)
	}
	entry := []Entry{{ID: kv.BlockID{1}, Ref: kv.Ref{Extent: 1, Generation: 1}}}
	if got, err := index.Put(nil, 3, 7, entry, true); err != nil || got[0] != Added {
		t.Errorf("put: %v, %v", got, err)
	}
	for range 2 {
		for _, w := range want {
			got, err := index.NamespaceByID(w.ID)
			if err != nil || got.Name != w.Name || got.Epoch != w.Epoch {
				t.Errorf("namespace %d: %+v, %v", w.ID, got, err)
			}
		}
		if index.Fresh() || index.Stats().Pieces != 1 {
			t.Errorf("fresh %v, %d pieces", index.Fresh(), index.Stats().Pieces)
		}
		if err := index.Check(); err != nil {
			t.Error(err)
		}
		if err := index.Close(); err != nil {
			t.Fatal(err)
		}
		index = open()
	}
	defer index.Close()
	if next, err := index.Create(def(0, "c", 0)); err != nil || next.ID != 10 {
		t.Errorf("next namespace: %+v, %v; want id 10", next, err)
	}
}

// TestRestoreOfNothing: the highest id is kept also if no namespace is restored.
func TestRestoreOfNothing(t *testing.T) {
	index, err := Open(Options{Dir: "index", FS: vfs.NewMem()})
	if err != nil {
		t.Fatal(err)
	}
	defer index.Close()
	if err := index.Restore(nil, 4); err != nil {
		t.Fatal(err)
	}
	ns, err := index.Create(kv.Namespace{Name: "a", Index: kv.IndexTrie, Geometry: kv.SingleGroup(1, 4, 8)})
	if err != nil || ns.ID != 5 || index.Fresh() {
		t.Errorf("%+v, %v", ns, err)
	}
}
