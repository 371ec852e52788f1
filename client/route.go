package client

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/internal/placement"
	"github.com/penstock-kv/penstock/kv"
)

// share is the part of a chain that one node holds.
type share struct {
	node *node
	// others are asked one after the other if node does not have the first block.
	others []*node
	ids    []kv.BlockID
	// peek: a match of the share is no use of the blocks.
	peek bool
	// index maps positions in ids to positions in the whole chain; nil if they are equal.
	index []int
}

func (sh *share) global(local int) int {
	if sh.index == nil {
		return local
	}
	return sh.index[local]
}

// Placements counts the changes of the nodes among which the Store places sequences. With the same
// count, a sequence has the same node. Without Options.Discover there are no changes.
func (s *Store) Placements() uint64 { return s.placements.Load() }

// owner returns the node that stores new sequences whose first block is id: with Options.Discover
// the one that placement.Home chooses, otherwise the node with the highest score for the block id
// (rendezvous hashing). When a node is added, some sequences move to it, and all others stay on
// their nodes. When a node is removed, only its own sequences change their node.
func (s *Store) owner(id kv.BlockID) *node {
	t := s.table.Load()
	if t.places != nil {
		return t.nodes[placement.Home(t.places, id)]
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

// homes returns the n nodes that store the sequence, or the block of a flat namespace, id. Without
// Options.Discover there is only the owner.
func (s *Store) homes(t *table, id kv.BlockID, n int) []*node {
	if t.places == nil {
		return []*node{s.owner(id)}
	}
	var nodes []*node
	for _, i := range placement.Homes(nil, t.places, id, n) {
		nodes = append(nodes, t.nodes[i])
	}
	return nodes
}

// spareOf reports whether a sequence whose homes are at the indexes homes may be on the next node of
// placement.Homes, because a new sequence may pass a home over (writing.homes). The blocks of a flat namespace
// never pass a node over.
func (t *table) spareOf(ns kv.Namespace, homes []int) bool {
	return ns.Index != kv.IndexFlat && slices.ContainsFunc(homes, func(i int) bool { return t.places[i].Filling() })
}

// readers returns the nodes that may have the sequence, or the block of a flat namespace, id, in the
// order in which they are asked: its homes, and then the node that has the sequence if the sequence had to pass a
// home over. A silent home is asked after the other homes, a home of the client's zone before other zones, and a
// home with few calls of the Store before one with many. Draining members are not among the nodes.
func (s *Store) readers(ns kv.Namespace, id kv.BlockID) []*node {
	t := s.table.Load()
	if t.places == nil {
		return []*node{s.owner(id)}
	}
	copies := ns.Copies()
	var room [kv.MaxReplicas + 1]int
	homes := placement.Homes(room[:0], t.places, id, copies)
	if copies == 1 && !t.spareOf(ns, homes) {
		return t.nodes[homes[0] : homes[0]+1 : homes[0]+1]
	}
	type rank struct {
		silent, far, calling int64
		node                 *node
	}
	ranks := make([]rank, len(homes))
	for i, k := range homes {
		ranks[i] = rank{calling: t.nodes[k].calling.Load(), node: t.nodes[k]}
		if t.places[k].Zone != s.opts.Zone {
			ranks[i].far = 1
		}
		if t.nodes[k].silent() {
			ranks[i].silent = 1
		}
	}
	slices.SortStableFunc(ranks, func(a, b rank) int {
		return cmp.Or(cmp.Compare(a.silent, b.silent), cmp.Compare(a.far, b.far), cmp.Compare(a.calling, b.calling))
	})
	nodes := make([]*node, 0, copies+1)
	for _, r := range ranks {
		nodes = append(nodes, r.node)
	}
	if !t.spareOf(ns, homes) {
		return nodes
	}
	if more := placement.Homes(nil, t.places, id, copies+1); len(more) > len(homes) {
		nodes = append(nodes, t.nodes[more[copies]])
	}
	return nodes
}

// candidates returns all nodes that may have the block or the sequence id: its readers, and then the
// members that stored it formerly.
func (s *Store) candidates(ns kv.Namespace, id kv.BlockID) []*node {
	return slices.Concat(s.readers(ns, id), s.former(ns, id))
}

// former returns the draining members that stored the block or the sequence id before they began to drain, and
// its homes before the members joined that are being filled.
func (s *Store) former(ns kv.Namespace, id kv.BlockID) (nodes []*node) {
	t := s.table.Load()
	if t.places == nil {
		return nil
	}
	spare := ns.Index != kv.IndexFlat
	former := placement.Former(nil, t.places, id, ns.Copies(), spare)
	for _, i := range placement.Previous(former, t.places, id, ns.Copies(), spare) {
		if n := t.nodes[i]; !slices.Contains(nodes, n) {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// Incoming reports whether a home of the block or the sequence id is a member that is being filled.
func (s *Store) Incoming(ns kv.Namespace, id kv.BlockID) bool {
	t := s.table.Load()
	return t.places != nil && slices.ContainsFunc(placement.Homes(nil, t.places, id, ns.Copies()), func(i int) bool { return t.places[i].New })
}

// Yields reports whether the member with the name is no home of the block or the sequence id, and no home is
// overfull, so that the sequence has not passed a home over to this member.
func (s *Store) Yields(ns kv.Namespace, id kv.BlockID, name string) bool {
	t, seed := s.table.Load(), placement.PlaceSeed(name)
	return t.places != nil && !slices.ContainsFunc(placement.Homes(nil, t.places, id, ns.Copies()), func(i int) bool {
		return t.places[i].Seed == seed || t.overfull[i]
	})
}

// AnyIncoming reports whether a member is being filled, as of the last list of members.
func (s *Store) AnyIncoming() bool {
	return slices.ContainsFunc(s.table.Load().places, func(p placement.Place) bool { return p.New })
}

// anyMoving reports whether a member drains or is being filled.
func (s *Store) anyMoving() bool {
	return slices.ContainsFunc(s.table.Load().places, func(p placement.Place) bool { return p.Draining || p.New })
}

// routes returns a function from the index of a block to the nodes from which it is read, one after the
// other until one has it. These are its readers or, if a draining member stored the sequence, the
// candidates that have its beginning, first the one that has most of it. That costs one call to each of
// the candidates; if no member drains or is filled, it costs none. req has the epochs. With
// copies, the first blocks of a chain that are a hot prefix are read from its copies too, the least loaded node first. hot
// reports whether there are such blocks.
func (s *Store) routes(ctx context.Context, req MatchRequest, ids []kv.BlockID, copies bool) (nodesOf func(int) []*node, hot bool) {
	nodesOf = s.coldRoutes(ctx, req, ids)
	blocks, least := 0, []*node(nil)
	if copies && !req.Mix {
		blocks, least = s.hotNodes(req.Namespace, req.Epoch, ids)
	}
	if blocks == 0 {
		return nodesOf, false
	}
	nodes := nodesOf(0)
	for _, n := range nodes { // a node that drains or has joined may have the sequence too
		if !slices.Contains(least, n) {
			least = append(least, n)
		}
	}
	return func(i int) []*node {
		if i < blocks {
			return least
		}
		return nodes
	}, true
}

// coldRoutes is routes without copies of hot prefixes.
func (s *Store) coldRoutes(ctx context.Context, req MatchRequest, ids []kv.BlockID) func(int) []*node {
	if s.anyMoving() {
		return s.probed(ctx, req, ids)
	}
	if req.Namespace.Index == kv.IndexFlat {
		return func(i int) []*node { return s.readers(req.Namespace, ids[i]) }
	}
	nodes := s.readers(req.Namespace, ids[0])
	return func(int) []*node { return nodes }
}

// holders is routes for a match: a block of a flat namespace with replicas has one node, which has the
// block if any node has it, because a match of many keys makes one call to each node. The nodes with copies of a hot
// prefix come last: they have only the prefix, and the homes count its matches.
func (s *Store) holders(ctx context.Context, req MatchRequest, ids []kv.BlockID) func(int) []*node {
	if req.Namespace.Index == kv.IndexFlat && req.Namespace.Copies() > 1 {
		return s.probed(ctx, req, ids)
	}
	nodesOf := s.coldRoutes(ctx, req, ids)
	if req.Mix { // the reads of several epochs use no copies
		return nodesOf
	}
	blocks, copies := s.hotNodes(req.Namespace, req.Epoch, ids)
	if blocks == 0 {
		return nodesOf
	}
	nodes := slices.Clone(nodesOf(0))
	for _, n := range copies {
		if !slices.Contains(nodes, n) {
			nodes = append(nodes, n)
		}
	}
	return func(int) []*node { return nodes }
}

// probed asks all candidates, except silent ones, which of the blocks they have. For each block it returns a node that
// has it, and then the other candidates. For a sequence that is the node with the longest part of it, and then the
// others that have a part. If no member stored a sequence formerly, it asks none, and returns the readers.
func (s *Store) probed(ctx context.Context, req MatchRequest, ids []kv.BlockID) func(int) []*node {
	if req.Namespace.Index != kv.IndexFlat {
		nodes := s.readers(req.Namespace, ids[0])
		if former := s.former(req.Namespace, ids[0]); len(former) > 0 {
			nodes = longest(ctx, req, slices.Concat(nodes, former), ids)
		}
		return func(int) []*node { return nodes }
	}
	candidates := make([][]*node, len(ids))
	open := make(map[*node][]int) // blocks that more than one node may have
	for i, id := range ids {
		candidates[i] = s.candidates(req.Namespace, id)
		if len(candidates[i]) == 1 {
			continue
		}
		for _, n := range candidates[i] {
			if !n.silent() {
				open[n] = append(open[n], i)
			}
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
	for i, nodes := range candidates {
		if k := slices.IndexFunc(nodes, func(n *node) bool { return has[n][i] }); k > 0 {
			nodes[0], nodes[k] = nodes[k], nodes[0]
		}
	}
	return func(i int) []*node { return candidates[i] }
}

// longest returns the nodes with a match of a chain, the longest first and equal lengths in the given order, and
// then the nodes that may have one: a node that is silent, which longest does not ask, or busy. If there is
// none of both, it returns the first node.
func longest(ctx context.Context, req MatchRequest, nodes []*node, ids []kv.BlockID) []*node {
	req.Lease, req.Pin = 0, false
	type match struct {
		node   *node
		blocks int
		open   bool // it is unknown whether the node has a match
	}
	matches := make([]match, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		matches[i].node = n
		if matches[i].open = n.silent(); matches[i].open {
			continue
		}
		wg.Go(func() {
			sh := share{node: n, ids: ids, peek: true}
			if m := sh.match(ctx, req); m.err == nil {
				matches[i].blocks, matches[i].open = m.blocks, m.busy
			}
		})
	}
	wg.Wait()
	slices.SortStableFunc(matches, func(a, b match) int { return cmp.Compare(b.blocks, a.blocks) })
	var found []*node
	for _, m := range matches {
		if m.blocks > 0 || m.open {
			found = append(found, m.node)
		}
	}
	if len(found) == 0 {
		return nodes[:1]
	}
	return found
}

// present returns which of the blocks of a flat namespace, given by their indexes in ids, the node has.
func (n *node) present(ctx context.Context, req MatchRequest, ids []kv.BlockID, indexes []int) map[int]bool {
	found := make(map[int]bool)
	keys := KeysRequest{Namespace: req.Namespace, Epoch: req.Epoch, IDs: make([]kv.BlockID, len(indexes))}
	for k, i := range indexes {
		keys.IDs[k] = ids[i]
	}
	sh := share{node: n, ids: keys.IDs}
	answer, err := sh.presence(ctx, "exists", 1, existsCall(ctx, &keys, false, false))
	if err != nil {
		return nil // the read of these blocks reports the error
	}
	for k, i := range indexes {
		found[i] = answer[0][k] == Present
	}
	return found
}

// shares divides a chain that is not empty among the nodes that nodesOf returns for its blocks. A chain
// of a trie goes whole to one node. In a flat namespace each key goes to the first of its own nodes.
func (s *Store) shares(ns kv.Namespace, ids []kv.BlockID, nodesOf func(int) []*node) []share {
	if ns.Index != kv.IndexFlat || len(s.all()) == 1 {
		nodes := nodesOf(0)
		return []share{{node: nodes[0], others: nodes[1:], ids: ids}}
	}
	var out split
	for i, id := range ids {
		out.add(nodesOf(i)[0], i, id)
	}
	return out.shares
}

// everywhere splits the keys of a flat namespace over all nodes that may have them. A key may be in
// several shares.
func (s *Store) everywhere(ns kv.Namespace, ids []kv.BlockID) []share {
	var out split
	for i, id := range ids {
		for _, n := range s.candidates(ns, id) {
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
