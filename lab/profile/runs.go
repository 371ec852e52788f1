package profile

import (
	"math/rand/v2"

	"github.com/penstock-kv/penstock/kv"
)

// Link is one block of a namespace.
type Link struct{ ID, Parent kv.BlockID }

// Run is a part of a chain to be read: the blocks from First on.
type Run struct {
	IDs   []kv.BlockID
	First int
}

// maxIDs is the maximum number of ids in all runs; they take 64 MiB.
const maxIDs = 4 << 20

// Runs divides the blocks of a prefix tree into runs, so that each block is in one run. A run goes
// from a random leaf up to the first block that belongs to another run. Runs omits blocks whose
// ancestors are not listed, because they cannot be read, and blocks beyond the limit on ids.
func Runs(blocks []Link, rng *rand.Rand) []Run {
	parent := make(map[kv.BlockID]kv.BlockID, len(blocks))
	inner := make(map[kv.BlockID]bool, len(blocks))
	for _, b := range blocks {
		parent[b.ID] = b.Parent
		inner[b.Parent] = true
	}
	var leaves []kv.BlockID
	for _, b := range blocks {
		if !inner[b.ID] {
			leaves = append(leaves, b.ID)
		}
	}
	rng.Shuffle(len(leaves), func(i, j int) { leaves[i], leaves[j] = leaves[j], leaves[i] })
	taken := make(map[kv.BlockID]bool, len(blocks))
	var runs []Run
	ids := 0
	for _, leaf := range leaves {
		chain, ok := chainOf(leaf, parent, len(blocks))
		if ids += len(chain); ids > maxIDs {
			break
		}
		if !ok {
			continue
		}
		first := 0
		for first < len(chain) && taken[chain[first]] {
			first++
		}
		for _, id := range chain[first:] {
			taken[id] = true
		}
		runs = append(runs, Run{chain, first})
	}
	return runs
}

// chainOf returns the chain from the root to a block; false if an ancestor is missing.
func chainOf(id kv.BlockID, parent map[kv.BlockID]kv.BlockID, maxLength int) ([]kv.BlockID, bool) {
	var up []kv.BlockID
	for id != (kv.BlockID{}) {
		p, ok := parent[id]
		if !ok || len(up) > maxLength {
			return nil, false
		}
		up, id = append(up, id), p
	}
	for i, j := 0, len(up)-1; i < j; i, j = i+1, j-1 {
		up[i], up[j] = up[j], up[i]
	}
	return up, true
}

// FlatRuns returns the keys of a flat namespace in random order, in runs of n keys.
func FlatRuns(keys []kv.BlockID, n int, rng *rand.Rand) []Run {
	keys = append([]kv.BlockID(nil), keys[:min(len(keys), maxIDs)]...)
	rng.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	var runs []Run
	for at := 0; at < len(keys); at += n {
		runs = append(runs, Run{IDs: keys[at:min(at+n, len(keys))]})
	}
	return runs
}
