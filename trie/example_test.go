package trie_test

import (
	"fmt"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// The blocks of a prompt are put after their bytes were written to storage. A later prompt with the
// same beginning matches them.
func Example() {
	index, err := trie.Open(trie.Options{Dir: "index", FS: vfs.NewMem()})
	if err != nil {
		panic(err)
	}
	defer index.Close()
	ns, err := index.Create(kv.Namespace{Name: "glm", Index: kv.IndexTrie, Geometry: kv.SingleGroup(61, 64, 656)})
	if err != nil {
		panic(err)
	}
	chain, err := ns.Chain()
	if err != nil {
		panic(err)
	}
	ids, _ := chain.Append(nil, make([]kv.Token, 4*64))
	entries := make([]trie.Entry, 3)
	for i := range entries {
		entries[i] = trie.Entry{ID: ids[i], Ref: kv.Ref{Extent: kv.MakeExtent(0, 0, uint32(i)), Generation: 1}}
		if i > 0 {
			entries[i].Parent = ids[i-1]
		}
	}
	if _, err := index.Put(nil, ns.ID, ns.Epoch, entries, true); err != nil {
		panic(err)
	}
	m, err := index.Match(ns.ID, ids, trie.MatchOptions{Lease: true, TTL: time.Minute, Now: time.Unix(0, 0)})
	if err != nil {
		panic(err)
	}
	fmt.Printf("%d of %d blocks, %d tokens, cut %v\n", m.Blocks, len(ids), m.Tokens, m.Cut)
	for _, p := range m.Pieces {
		fmt.Println(p.Ref)
	}
	fmt.Println(index.Release(m.Lease))
	// Output:
	// 3 of 4 blocks, 192 tokens, cut absent
	// v0/s0/0@1
	// v0/s0/1@1
	// v0/s0/2@1
	// <nil>
}
