package trie

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie/evict"
)

// TestTips: each stored sequence is listed once, by its last block: the ones that were read the most
// often first, and among equals the last stored first. Chain returns the blocks of a sequence, and only
// those of its epoch.
func TestTips(t *testing.T) {
	for _, policy := range []evict.Kind{evict.S3FIFO, evict.LRU} {
		tr := openTest(t, Options{Policy: policy})
		ns, err := tr.Create(kv.Namespace{Name: "m", Index: kv.IndexTrie, Geometry: kv.SingleGroup(61, 64, 656), Epoch: 1})
		if err != nil {
			t.Fatal(err)
		}
		id := func(b byte) kv.BlockID { return kv.BlockID{0: b} }
		slot := kv.Generation(0)
		put := func(epoch kv.Epoch, chain ...byte) {
			t.Helper()
			var entries []Entry
			for i, b := range chain {
				slot++
				e := Entry{ID: id(b), Ref: kv.Ref{Extent: kv.Extent(slot), Generation: slot}}
				if i > 0 {
					e.Parent = id(chain[i-1])
				}
				entries = append(entries, e)
			}
			if _, err := tr.Put(nil, ns.ID, epoch, entries, false); err != nil {
				t.Fatal(err)
			}
		}
		read := func(chain ...byte) {
			t.Helper()
			var ids []kv.BlockID
			for _, b := range chain {
				ids = append(ids, id(b))
			}
			if m, err := tr.Match(ns.ID, ids, MatchOptions{}); err != nil || m.Blocks != len(chain) {
				t.Fatal(m, err)
			}
		}
		put(1, 1, 2, 3)
		put(1, 1, 4)
		put(1, 5)
		put(1, 6, 7)
		read(1, 4)
		read(6, 7)
		read(6, 7)
		tips, err := tr.Tips(ns.ID, 1)
		if err != nil {
			t.Fatal(err)
		}
		var order []byte
		for _, tip := range tips {
			order = append(order, tip.ID[0])
		}
		if want := []byte{7, 4, 5, 3}; !slices.Equal(order, want) {
			t.Errorf("%v: the tips are %d; want %d", policy, order, want)
		}
		chain, err := tr.Chain(ns.ID, 1, id(3))
		if err != nil || len(chain) != 3 || chain[0].ID != id(1) || chain[1].ID != id(2) || chain[2].ID != id(3) {
			t.Errorf("the chain is %v, %v; want 1, 2, 3", chain, err)
		}
		other, err := tr.Chain(ns.ID, 1, id(4))
		if err != nil || len(other) != 2 || other[0].Pieces[0] != chain[0].Pieces[0] || other[1].Pieces[0].Node == chain[1].Pieces[0].Node {
			t.Errorf("a chain with the same first block is %v, the other %v, %v", other, chain, err)
		}
		bumped, err := tr.PlanBump("m", 0, 2)
		if err == nil {
			_, err = tr.SetEpochs(bumped)
		}
		if err != nil {
			t.Fatal(err)
		}
		put(2, 1, 2)
		if tips, err := tr.Tips(ns.ID, 2); err != nil || len(tips) != 1 || tips[0].ID != id(2) {
			t.Errorf("epoch 2: %v, %v", tips, err)
		}
		if tips, err := tr.Tips(ns.ID, 1); err != nil || len(tips) != 4 {
			t.Errorf("epoch 1, which was kept: %v, %v", tips, err)
		}
		if _, err := tr.Chain(ns.ID, 2, id(3)); !errors.Is(err, ErrAbsent) {
			t.Errorf("a block of another epoch: %v", err)
		}
		if _, err := tr.Tips(ns.ID, 3); !errors.Is(err, ErrEpoch) {
			t.Errorf("an epoch that is not live: %v", err)
		}
		if err := tr.Delete(ns.ID, id(1)); err != nil {
			t.Fatal(err)
		}
		if tips, err := tr.Tips(ns.ID, 1); err != nil || len(tips) != 2 {
			t.Errorf("after the deletion of a first block: %v, %v", tips, err)
		}
		closeTest(t, tr)
	}
}

// TestTipsOfGroups: in a tree of several layer groups a block whose children are its own pieces is a tip,
// and Chain has the stored pieces of each block. Present returns the groups of each block.
func TestTipsOfGroups(t *testing.T) {
	g := kv.SingleGroup(2, 16, 128)
	g.Groups = append(g.Groups, kv.Group{Kind: kv.Window, Layers: 1, TokenBytes: 128, WindowTokens: 32}, kv.Group{Kind: kv.State, Layers: 1, TokenBytes: 512})
	tr := openTest(t, Options{})
	ns, err := tr.Create(kv.Namespace{Name: "m", Index: kv.IndexTrie, Geometry: g, Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	id := func(b byte) (id kv.BlockID) { id[0] = b; return id }
	slot := kv.Generation(0)
	put := func(block, parent byte, groups ...int) {
		t.Helper()
		for _, group := range groups {
			slot++
			e := Entry{ID: id(block), Parent: id(parent), Group: group, Ref: kv.Ref{Extent: kv.Extent(slot), Generation: slot}}
			if s, err := tr.Put(nil, ns.ID, 1, []Entry{e}, false); err != nil || s[0] != Added {
				t.Fatal(s, err)
			}
		}
	}
	put(1, 0, 0, 1)
	put(2, 1, 0, 1, 2)
	put(3, 1, 0)
	tips, err := tr.Tips(ns.ID, 1)
	if err != nil || len(tips) != 2 || tips[0].ID != id(3) || tips[1].ID != id(2) {
		t.Errorf("the tips are %v, %v; want 3 and 2", tips, err)
	}
	chain, err := tr.Chain(ns.ID, 1, id(2))
	if err != nil {
		t.Fatal(err)
	}
	var pieces [][]int
	for _, link := range chain {
		var groups []int
		for _, p := range link.Pieces {
			groups = append(groups, p.Group)
		}
		pieces = append(pieces, groups)
	}
	if got := fmt.Sprint(pieces); got != "[[0 1] [0 1 2]]" {
		t.Errorf("the chain has the pieces %s", got)
	}
	sets, _, err := tr.Present(nil, ns.ID, 1, []kv.BlockID{id(1), id(2), id(3), id(9)}, false)
	if want := []GroupSet{3, 7, 1, 0}; err != nil || !slices.Equal(sets, want) {
		t.Errorf("present %v, %v; want %v", sets, err, want)
	}
	closeTest(t, tr)
}
