package trie

import "github.com/penstock-kv/penstock/internal/invariants"

// leaves is a list of the leaves of one space (one epoch of a namespace), in the order of eviction
// for an eviction from that space only. Adding and removing a leaf takes constant time.
//
//	put, touched ─► newest … oldest ─► evicted
//	                            ▲
//	   lost its last child or pin
//
// The links need no memory of their own. A leaf has no children to count, and its depth follows
// from its parent. So while a node has flagLeaf, node.kidsOrNewer and node.depthOrOlder hold the
// links.
//
// Invariant: an evictable node is in its space's list. A node that has children or is pending is in
// no list. A leased node may be in the list or not: eviction removes a leased node from the list,
// and the removal of the node's last pin adds the node again.
type leaves struct {
	newest, oldest uint32
	len            int
}

// childCount returns the number of nodes whose parent is nd.
func (nd *node) childCount() uint32 {
	if nd.has(flagLeaf) {
		return 0
	}
	return nd.kidsOrNewer
}

// depth returns the distance of n from the root: 0 for the first block of a
// prompt. A piece of a window or state group has the depth of its block.
func (s *slab) depth(n uint32) uint32 {
	nd := s.at(n)
	switch {
	case !nd.has(flagLeaf):
		return nd.depthOrOlder
	case nd.parent == 0:
		return 0
	case nd.group() != 0:
		return s.at(nd.parent).depthOrOlder
	}
	// The parent has a child, so it is no leaf and its depthOrOlder is its depth.
	return s.at(nd.parent).depthOrOlder + 1
}

// addNewest adds n, which is in no list, at the end that is evicted last.
func (l *leaves) addNewest(s *slab, n uint32) {
	l.link(s, n, 0, l.newest)
}

// addOldest adds n, which is in no list, at the end that is evicted first.
func (l *leaves) addOldest(s *slab, n uint32) {
	l.link(s, n, l.oldest, 0)
}

// link inserts n between the two neighbours newer and older; 0 means the end of the list.
func (l *leaves) link(s *slab, n, newer, older uint32) {
	nd := s.at(n)
	invariants.Assert(!nd.has(flagLeaf|flagPending) && nd.kidsOrNewer == 0, "leaves: node %d is linked with %d children, state %x", n, nd.kidsOrNewer, nd.state.Load())
	nd.state.Or(flagLeaf)
	nd.kidsOrNewer, nd.depthOrOlder = newer, older
	l.setOlder(s, newer, n)
	l.setNewer(s, older, n)
	l.len++
}

// setOlder makes older the older neighbour of n or, if n is 0, the newest leaf of the list.
func (l *leaves) setOlder(s *slab, n, older uint32) {
	if n == 0 {
		l.newest = older
		return
	}
	s.at(n).depthOrOlder = older
}

// setNewer makes newer the newer neighbour of n or, if n is 0, the oldest leaf of the list.
func (l *leaves) setNewer(s *slab, n, newer uint32) {
	if n == 0 {
		l.oldest = newer
		return
	}
	s.at(n).kidsOrNewer = newer
}

// remove removes n from the list. It does nothing if n is in no list.
func (l *leaves) remove(s *slab, n uint32) {
	nd := s.at(n)
	if !nd.has(flagLeaf) {
		return
	}
	newer, older, depth := nd.kidsOrNewer, nd.depthOrOlder, s.depth(n)
	l.setOlder(s, newer, older)
	l.setNewer(s, older, newer)
	nd.kidsOrNewer, nd.depthOrOlder = 0, depth
	nd.state.And(^uint32(flagLeaf))
	l.len--
}

// leavesOf returns the list that n belongs to. Trie.mu is held.
func (t *Trie) leavesOf(n uint32) *leaves { return &t.spaces[t.nodes.at(n).space].leaves }

// evictableAgainLocked is called for a node that lost its last child or pin. It makes the node the
// next one to be evicted, both in its space's list and in the policy, because eviction had already
// reached the node while it had a child or a pin. It does nothing if the node may not be evicted
// yet. Trie.mu is held for writing.
func (t *Trie) evictableAgainLocked(n uint32) {
	if !t.evictable(n) {
		return
	}
	if !t.nodes.at(n).has(flagLeaf) {
		t.leavesOf(n).addOldest(&t.nodes, n)
	}
	if t.policy.Parked(n) {
		t.policy.Unpark(n)
	}
}
