package client

import (
	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/kv"
)

// share is the part of a chain that one node holds.
type share struct {
	node *node
	ids  []kv.BlockID
	// index maps positions in ids to positions in the whole chain; nil if they are equal.
	index []int
}

func (sh *share) global(local int) int {
	if sh.index == nil {
		return local
	}
	return sh.index[local]
}

// owner returns the node with the highest score for the block id (rendezvous hashing). When a node
// is added, some sequences move to it, and all others stay on their nodes. When a node is removed,
// only its own sequences change their node.
func (s *Store) owner(id kv.BlockID) *node {
	best, bestScore := s.nodes[0], uint64(0)
	for i, n := range s.nodes {
		score := xxh3.HashSeed(id[:], n.seed)
		if i == 0 || score > bestScore || score == bestScore && n.target < best.target {
			best, bestScore = n, score
		}
	}
	return best
}

// shares splits a chain that is not empty over the nodes. A chain of a trie goes whole to the owner
// of its first block. In a flat namespace each key goes to its own owner.
func (s *Store) shares(ns kv.Namespace, ids []kv.BlockID) []share {
	if ns.Index != kv.IndexFlat || len(s.nodes) == 1 {
		return []share{{node: s.owner(ids[0]), ids: ids}}
	}
	var out []share
	at := make(map[*node]int, len(s.nodes))
	for i, id := range ids {
		n := s.owner(id)
		k, ok := at[n]
		if !ok {
			k = len(out)
			at[n] = k
			out = append(out, share{node: n})
		}
		out[k].ids = append(out[k].ids, id)
		out[k].index = append(out[k].index, i)
	}
	return out
}
