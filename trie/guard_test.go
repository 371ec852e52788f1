package trie

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/kv"
)

// TestRecordIsWrittenForItsOwnNode: three operations change DRAM first and write to Pebble
// afterwards: a delete, the removal of a corrupt piece, and a change of class. Between the two
// steps, another goroutine reclaims or evicts pieces and puts new pieces into the freed slots. The
// late write must not change the record of a new piece.
func TestRecordIsWrittenForItsOwnNode(t *testing.T) {
	for _, c := range []struct {
		name  string
		class Class
		// begin runs the step in DRAM, and returns the write to Pebble.
		begin func(tr *Trie, ns kv.Namespace, e Entry) (write func() error, err error)
	}{
		{"delete", Prefix, func(tr *Trie, ns kv.Namespace, e Entry) (func() error, error) {
			d, err := tr.doomBlock(ns.ID, e.ID, nil)
			return func() error { return tr.unrecord(d, true) }, err
		}},
		{"remove", Prefix, func(tr *Trie, ns kv.Namespace, e Entry) (func() error, error) {
			value, err := tr.disk.Load().get(appendBlockKey(nil, e.Ref.Extent))
			if err != nil {
				return nil, err
			}
			rec, err := decodeRecord(value)
			if err != nil {
				return nil, err
			}
			d := tr.doomRecord(e.Ref, &rec, Dropped)
			return func() error { return tr.unrecord(d, false) }, nil
		}},
		{"raise", Transfer, func(tr *Trie, ns kv.Namespace, e Entry) (func() error, error) {
			e.Class = Prefix
			s := new(putScratch)
			status, err := tr.stage(s, nil, ns.ID, ns.Epoch, []Entry{e})
			return func() error {
				if err := tr.writePut(s, false); err != nil {
					return err
				}
				tr.settle(s, []Entry{e}, status)
				return nil
			}, err
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			opts := Options{Dir: "index", FS: vfs.NewMem()}
			tr := openTest(t, opts)
			ns := benchNamespace(t, tr)
			ids := benchIDs(0)
			old := Entry{ID: ids[0], Class: c.class, Ref: kv.Ref{Extent: 7, Generation: 1}}
			put(t, tr, ns, old)
			write, err := c.begin(tr, ns, old)
			if err != nil {
				t.Fatal(err)
			}
			gone, _, err := tr.ReclaimStep(nil, 10)
			if err != nil {
				t.Fatal(err)
			}
			if gone, err = tr.Evict(gone, 1<<40, 0, epoch0); err != nil {
				t.Fatal(err)
			}
			next := Entry{ID: ids[1], Ref: kv.Ref{Extent: 8, Generation: 2}}
			for _, g := range gone {
				next.Ref.Extent = g.Ref.Extent
			}
			put(t, tr, ns, next)
			if err := write(); err != nil {
				t.Fatal(err)
			}
			closeTest(t, tr)
			tr = openTest(t, opts)
			defer closeTest(t, tr)
			if m, err := tr.Match(ns.ID, []kv.BlockID{next.ID}, MatchOptions{}); err != nil || m.Blocks != 1 {
				t.Errorf("the new piece is lost: %d blocks match, %v", m.Blocks, err)
			}
		})
	}
}

func put(t *testing.T, tr *Trie, ns kv.Namespace, e Entry) {
	t.Helper()
	if status, err := tr.Put(nil, ns.ID, ns.Epoch, []Entry{e}, false); err != nil || status[0] != Added {
		t.Fatalf("put: %v, %v", status, err)
	}
}
