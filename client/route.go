package client

import (
	"math"

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
// only its own sequences change their node. With Options.Discover a node gets sequences in
// proportion to its capacity (weighted rendezvous hashing: the logarithmic method of Schindelhauer
// and Schomaker, "Weighted Distributed Hash Tables", SPAA 2005).
func (s *Store) owner(id kv.BlockID) *node {
	nodes := s.all()
	best, bestScore := nodes[0], uint64(0)
	if s.opts.Discover {
		return heaviest(nodes, id)
	}
	for i, n := range nodes {
		score := xxh3.HashSeed(id[:], n.seed)
		if i == 0 || score > bestScore || score == bestScore && n.target < best.target {
			best, bestScore = n, score
		}
	}
	return best
}

// heaviest returns the owner of the block id among nodes of different weights.
func heaviest(nodes []*node, id kv.BlockID) *node {
	best, bestScore := nodes[0], math.Inf(1)
	for _, n := range nodes {
		// u is uniform in (0, 1), so -ln(u)/weight is exponential with the rate weight. The smallest
		// of several is that of a node with a probability in proportion to the node's weight.
		u := (float64(xxh3.HashSeed(id[:], n.seed)>>11) + 0.5) / (1 << 53)
		if score := -math.Log(u) / float64(n.weight.Load()); score < bestScore || score == bestScore && n.target < best.target {
			best, bestScore = n, score
		}
	}
	return best
}

// shares divides a chain that is not empty among the nodes that store its blocks. A chain of a trie
// goes whole to the owner of its first block. In a flat namespace each key goes to its own owner.
func (s *Store) shares(ns kv.Namespace, ids []kv.BlockID) []share {
	if ns.Index != kv.IndexFlat || len(s.all()) == 1 {
		return []share{{node: s.owner(ids[0]), ids: ids}}
	}
	var out []share
	at := make(map[*node]int)
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
