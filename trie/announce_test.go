package trie

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/kv"
)

func announceTest(t *testing.T, tr *Trie, name string) kv.Namespace {
	t.Helper()
	ns, err := tr.Announce(kv.Namespace{Name: name, Epoch: 1, Index: kv.IndexTrie, Geometry: kv.SingleGroup(1, 2, 1)})
	if err != nil {
		t.Fatal(err)
	}
	return ns
}

func checkTest(t *testing.T, tr *Trie) {
	t.Helper()
	if err := tr.Check(); err != nil {
		t.Fatal(err)
	}
}

// TestAnnounce: an announced namespace can be matched, bumped, pinned and changed, and takes neither a record nor
// a number of a space until Record, after which it is a namespace as any other. It keeps its id, its pins and
// its epochs then.
func TestAnnounce(t *testing.T) {
	fs := vfs.NewMem()
	tr := openTest(t, Options{FS: fs})
	for i := range 1000 {
		announceTest(t, tr, fmt.Sprint("unused", i))
	}
	ns := announceTest(t, tr, "m")
	if n := len(tr.spaces); n != 1 {
		t.Errorf("1,001 announced namespaces have %d spaces", n-1)
	}
	block := kv.BlockID{7}
	entry := Entry{ID: block, Ref: kv.Ref{Extent: 1, Generation: 1}}
	match := func(want int) {
		t.Helper()
		if m, err := tr.Match(ns.ID, []kv.BlockID{block}, MatchOptions{}); err != nil || m.Blocks != want {
			t.Errorf("match: %d blocks, %v; want %d", m.Blocks, err, want)
		}
	}
	match(0)
	if _, err := tr.Put(nil, ns.ID, 1, []Entry{entry}, true); !errors.Is(err, ErrEntry) {
		t.Errorf("a put before the record: %v", err)
	}
	if _, _, err := tr.PinEpoch(ns.ID, 1, "engine", time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := bumpEpoch(tr, "m", 0, 1); err != nil {
		t.Fatal(err)
	}
	if err := tr.SetQuota("m", 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := tr.DeleteAll(ns.ID); err != nil {
		t.Fatal(err)
	}
	checkTest(t, tr)
	if n := len(tr.Recorded()); n != 0 || !tr.IsAnnounced(ns.ID) {
		t.Errorf("%d namespaces are recorded", n)
	}
	if err := tr.Record(ns.ID); err != nil {
		t.Fatal(err)
	}
	if err := tr.Record(ns.ID); err != nil {
		t.Errorf("a second Record: %v", err)
	}
	checkTest(t, tr)
	if st, err := tr.Put(nil, ns.ID, 2, []Entry{entry}, true); err != nil || st[0] != Added {
		t.Fatalf("a put after the record: %v, %v", st, err)
	}
	match(1)
	if err := tr.DeleteNamespace("unused0"); err != nil {
		t.Fatal(err)
	}
	if s := tr.Stats(); len(s.Namespaces) != 1 || s.Announced != 999 {
		t.Errorf("%d recorded and %d announced namespaces", len(s.Namespaces), s.Announced)
	}
	checkTest(t, tr)
	closeTest(t, tr)

	tr = openTest(t, Options{FS: fs})
	defer closeTest(t, tr)
	all := tr.Namespaces()
	if len(all) != 1 || all[0].ID != ns.ID || all[0].Epoch != 2 || all[0].QuotaBytes != 1<<20 {
		t.Fatalf("after a restart: %+v", all)
	}
	match(1)
	if next := announceTest(t, tr, "unused0"); next.ID <= ns.ID {
		t.Errorf("the next id is %d, after %d", next.ID, ns.ID)
	}
}

// TestTooManyAnnounced: each limit refuses the namespace that would be one too many, and a refused Record leaves
// the namespace announced.
func TestTooManyAnnounced(t *testing.T) {
	tr := openTest(t, Options{MaxNamespaces: 1, MaxAnnounced: 2})
	defer closeTest(t, tr)
	a, b := announceTest(t, tr, "a"), announceTest(t, tr, "b")
	if _, err := tr.Announce(kv.Namespace{Name: "c", Epoch: 1, Index: kv.IndexTrie, Geometry: kv.SingleGroup(1, 2, 1)}); !errors.Is(err, ErrTooManyNamespaces) {
		t.Errorf("a third announced namespace: %v", err)
	}
	if err := tr.Record(a.ID); err != nil {
		t.Fatal(err)
	}
	if err := tr.Record(b.ID); !errors.Is(err, ErrTooManyNamespaces) || !tr.IsAnnounced(b.ID) {
		t.Errorf("a second record: %v, announced %v", err, tr.IsAnnounced(b.ID))
	}
	checkTest(t, tr)
	if err := tr.DeleteNamespace("a"); err != nil {
		t.Fatal(err)
	}
	if err := tr.Record(b.ID); err != nil {
		t.Errorf("after a deletion: %v", err)
	}
	checkTest(t, tr)
}
