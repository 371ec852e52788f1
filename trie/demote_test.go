package trie

import (
	"errors"
	"fmt"
	"testing"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie/evict"
)

// TestDemote: the blocks of a demoted chain are evicted first, also from a namespace over its quota, and the last block
// before its parent. A match ends that, except under FIFO, and except a match that does not touch. A pinned block stays.
func TestDemote(t *testing.T) {
	for _, policy := range evict.Kinds() {
		for _, alone := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/alone=%t", policy, alone), func(t *testing.T) {
				tr := openTest(t, Options{Policy: policy, SlotBytes: func(kv.Geometry, int) int64 { return 1 }})
				defer closeTest(t, tr)
				ns, err := tr.Create(kv.Namespace{Name: "m", Index: kv.IndexTrie, Geometry: kv.SingleGroup(2, 16, 128), Epoch: 1})
				if err != nil {
					t.Fatal(err)
				}
				slot := kv.Generation(0)
				chain := func(name byte) []kv.BlockID { return []kv.BlockID{{name, 1}, {name, 2}, {name, 3}} }
				for name := byte(1); name <= 4; name++ {
					var entries []Entry
					var parent kv.BlockID
					for _, id := range chain(name) {
						slot++
						entries = append(entries, Entry{ID: id, Parent: parent, Ref: kv.Ref{Extent: kv.Extent(slot), Generation: slot}})
						parent = id
					}
					if _, err := tr.Put(nil, ns.ID, 1, entries, false); err != nil {
						t.Fatal(err)
					}
				}
				match := func(name byte, o MatchOptions) Match {
					t.Helper()
					o.Now = epoch0
					m, err := tr.Match(ns.ID, chain(name), o)
					if err != nil {
						t.Fatal(err)
					}
					return m
				}
				only := kv.NamespaceID(0)
				if alone {
					only = ns.ID
				}
				evicted := func(want ...kv.BlockID) {
					t.Helper()
					gone, err := tr.Evict(nil, int64(len(want)), only, epoch0)
					if err != nil || len(gone) != len(want) {
						t.Fatalf("evicted %d of %d: %v", len(gone), len(want), err)
					}
					for i, g := range gone {
						if g.ID != want[i] {
							t.Errorf("eviction %d is of block %v; want %v", i, g.ID, want[i])
						}
					}
				}
				match(4, MatchOptions{})
				for _, name := range []byte{4, 3, 2} {
					if err := tr.Demote(ns.ID, 1, append(chain(name), kv.BlockID{9})); err != nil {
						t.Fatal(err)
					}
				}
				if err := tr.Demote(ns.ID, 2, chain(4)); !errors.Is(err, ErrEpoch) {
					t.Errorf("a demotion in an epoch that is not live: %v", err)
				}
				pinned := match(2, MatchOptions{Lease: true, NoTouch: true})
				first, second := byte(4), byte(3)
				if alone { // the list of a space has the last demoted leaf first
					first, second = 3, 4
				}
				match(second, MatchOptions{NoTouch: true})
				a, b := chain(first), chain(second)
				evicted(a[2], a[1], a[0])
				if policy != evict.FIFO {
					match(second, MatchOptions{})
					match(second, MatchOptions{})
					if err := tr.Release(pinned.Lease); err != nil {
						t.Fatal(err)
					}
					c := chain(2)
					evicted(c[2], c[1], c[0])
					return
				}
				match(second, MatchOptions{})
				evicted(b[2], b[1], b[0])
			})
		}
	}
}

// TestDemoteTransfer: a piece of class Transfer, which is evicted before the others in any case, keeps its place.
func TestDemoteTransfer(t *testing.T) {
	tr := openTest(t, Options{Policy: evict.LRU, SlotBytes: func(kv.Geometry, int) int64 { return 1 }})
	defer closeTest(t, tr)
	ns, err := tr.Create(kv.Namespace{Name: "m", Index: kv.IndexTrie, Geometry: kv.SingleGroup(2, 16, 128), Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	prefix, transfer := kv.BlockID{1}, kv.BlockID{2}
	for i, e := range []Entry{{ID: prefix}, {ID: transfer, Class: Transfer}} {
		e.Ref = kv.Ref{Extent: kv.Extent(i + 1), Generation: kv.Generation(i + 1)}
		if _, err := tr.Put(nil, ns.ID, 1, []Entry{e}, false); err != nil {
			t.Fatal(err)
		}
	}
	if err := tr.Demote(ns.ID, 1, []kv.BlockID{transfer}); err != nil {
		t.Fatal(err)
	}
	if _, err := tr.Match(ns.ID, []kv.BlockID{transfer}, MatchOptions{}); err != nil {
		t.Fatal(err)
	}
	if gone, err := tr.Evict(nil, 1, 0, epoch0); err != nil || len(gone) != 1 || gone[0].ID != transfer {
		t.Errorf("evicted %v, %v; want the piece of class Transfer", gone, err)
	}
}
