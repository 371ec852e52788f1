package client

import (
	"context"
	"slices"
	"sync"

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

// owner returns the node that stores new sequences whose first block is id: with Options.Discover
// the one that kv.Home chooses, otherwise the node with the highest score for the block id
// (rendezvous hashing). When a node is added, some sequences move to it, and all others stay on
// their nodes. When a node is removed, only its own sequences change their node.
func (s *Store) owner(id kv.BlockID) *node {
	t := s.table.Load()
	if t.places != nil {
		return t.nodes[kv.Home(t.places, id)]
	}
	best, bestScore := t.nodes[0], uint64(0)
	for i, n := range t.nodes {
		score := xxh3.HashSeed(id[:], n.seed)
		if i == 0 || score > bestScore || score == bestScore && n.target < best.target {
			best, bestScore = n, score
		}
	}
	return best
}

// candidates returns the nodes that may have the block or the sequence id: its owner, and then the
// draining members that stored it before they began to drain.
func (s *Store) candidates(id kv.BlockID) []*node {
	t := s.table.Load()
	if t.places == nil {
		return []*node{s.owner(id)}
	}
	nodes := []*node{t.nodes[kv.Home(t.places, id)]}
	for _, i := range kv.Former(nil, t.places, id) {
		nodes = append(nodes, t.nodes[i])
	}
	return nodes
}

// anyDraining reports whether a member drains.
func (s *Store) anyDraining() bool {
	return slices.ContainsFunc(s.table.Load().places, func(p kv.Place) bool { return p.Draining })
}

// holders returns a function from the index of a block to the node from which it is read. That is the
// owner or, while a draining member has more of the sequence, that member. This costs one call to
// each of the candidates; without a draining member it costs none. req has the epochs.
func (s *Store) holders(ctx context.Context, req MatchRequest, ids []kv.BlockID) func(int) *node {
	if !s.anyDraining() {
		return s.ownerOf(req.Namespace, ids)
	}
	if req.Namespace.Index != kv.IndexFlat {
		n := longest(ctx, req, s.candidates(ids[0]), ids)
		return func(int) *node { return n }
	}
	nodes := make([]*node, len(ids))
	open := make(map[*node][]int) // blocks that a draining member may have
	for i, id := range ids {
		c := s.candidates(id)
		nodes[i] = c[0]
		for _, n := range c[1:] {
			open[c[0]] = append(open[c[0]], i)
			open[n] = append(open[n], i)
		}
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	has := make(map[*node]map[int]bool, len(open))
	for n, indexes := range open {
		wg.Go(func() {
			found := n.present(ctx, req, ids, indexes)
			mu.Lock()
			defer mu.Unlock()
			has[n] = found
		})
	}
	wg.Wait()
	for i, id := range ids {
		for _, n := range s.candidates(id) {
			if has[n][i] {
				nodes[i] = n
				break
			}
		}
	}
	return func(i int) *node { return nodes[i] }
}

// ownerOf returns the function from the index of a block to its owner.
func (s *Store) ownerOf(ns kv.Namespace, ids []kv.BlockID) func(int) *node {
	if ns.Index == kv.IndexFlat {
		return func(i int) *node { return s.owner(ids[i]) }
	}
	n := s.owner(ids[0])
	return func(int) *node { return n }
}

// longest returns the node with the longest match of a chain; among equal lengths, the first.
func longest(ctx context.Context, req MatchRequest, nodes []*node, ids []kv.BlockID) *node {
	if len(nodes) == 1 {
		return nodes[0]
	}
	req.Lease, req.Pin = 0, false
	blocks := make([]int, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() {
			sh := share{node: n, ids: ids}
			if m := sh.match(ctx, req); m.err == nil {
				blocks[i] = m.blocks
			}
		})
	}
	wg.Wait()
	best := 0
	for i, n := range blocks {
		if n > blocks[best] {
			best = i
		}
	}
	return nodes[best]
}

// present returns which of the blocks of a flat namespace, given by their indexes in ids, the node has.
func (n *node) present(ctx context.Context, req MatchRequest, ids []kv.BlockID, indexes []int) map[int]bool {
	found := make(map[int]bool)
	keys := KeysRequest{Namespace: req.Namespace, Epoch: req.Epoch, IDs: make([]kv.BlockID, len(indexes))}
	for k, i := range indexes {
		keys.IDs[k] = ids[i]
	}
	sh := share{node: n, ids: keys.IDs}
	answer, err := sh.presence(ctx, "exists", existsCall(ctx, &keys, false))
	if err != nil {
		return nil // the read of these blocks reports the error
	}
	for k, i := range indexes {
		found[i] = answer[k] == Present
	}
	return found
}

// shares splits a chain that is not empty over the nodes that nodeOf returns for its blocks. A chain
// of a trie goes whole to one node. In a flat namespace each key goes to its own node.
func (s *Store) shares(ns kv.Namespace, ids []kv.BlockID, nodeOf func(int) *node) []share {
	if ns.Index != kv.IndexFlat || len(s.all()) == 1 {
		return []share{{node: nodeOf(0), ids: ids}}
	}
	var out split
	for i, id := range ids {
		out.add(nodeOf(i), i, id)
	}
	return out.shares
}

// everywhere splits the keys of a flat namespace over all nodes that may have them. A key may be in
// several shares.
func (s *Store) everywhere(ids []kv.BlockID) []share {
	var out split
	for i, id := range ids {
		for _, n := range s.candidates(id) {
			out.add(n, i, id)
		}
	}
	return out.shares
}

// split collects shares.
type split struct {
	shares []share
	at     map[*node]int
}

// add adds the block with the index i in the whole chain to the share of n.
func (p *split) add(n *node, i int, id kv.BlockID) {
	k, ok := p.at[n]
	if !ok {
		if p.at == nil {
			p.at = make(map[*node]int)
		}
		k = len(p.shares)
		p.at[n] = k
		p.shares = append(p.shares, share{node: n})
	}
	p.shares[k].ids = append(p.shares[k].ids, id)
	p.shares[k].index = append(p.shares[k].index, i)
}
