package trie

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/penstock-kv/penstock/kv"
)

// Tip is the last block of a stored sequence: a block without child blocks. In a flat namespace every
// block is a tip, as in a tree without a Full group.
type Tip struct {
	ID kv.BlockID
	// Heat orders tips: the hottest have been read the most often, as the policy counts reads.
	Heat int
	// Generation is that of the block's slot. Of two blocks, the one that was stored later has the
	// higher generation.
	Generation kv.Generation
}

// Tips returns the tips of one live epoch of a namespace, the hottest first, and among equals the
// last stored first. Blocks that are put or removed meanwhile may or may not be considered. If the epoch has
// pieces, Tips examines every piece of the index in short steps.
func (t *Trie) Tips(id kv.NamespaceID, epoch kv.Epoch) ([]Tip, error) {
	t.mu.RLock()
	sp, err := t.liveSpaceLocked(id, epoch)
	empty := err == nil && sp.nodes == 0
	t.mu.RUnlock()
	if err != nil || empty {
		return nil, err
	}
	var tips []Tip
	for from := uint32(1); from != 0; {
		from = t.visit(from, refsPerLock, func(n uint32) bool {
			if nd := t.nodes.at(n); t.spaces[nd.space] == sp && !sp.dead && t.isTipLocked(sp, nd) && t.rootedLocked(n) {
				tips = append(tips, Tip{ID: nd.id, Heat: t.policy.Heat(n), Generation: nd.gen()})
			}
			return true
		})
	}
	slices.SortStableFunc(tips, func(a, b Tip) int {
		return cmp.Or(cmp.Compare(b.Heat, a.Heat), cmp.Compare(b.Generation, a.Generation))
	})
	return tips, nil
}

// isTipLocked reports whether the piece is the piece of layer group 0 of a tip. The block's pieces of other
// groups are children of this piece. Trie.mu is held.
func (t *Trie) isTipLocked(sp *space, nd *node) bool {
	groups, children := len(sp.ns.def.Geometry.Groups), nd.childCount()
	if nd.group() != 0 || children >= uint32(groups) {
		return false
	}
	for g := 1; g < groups && children > 0; g++ {
		if t.table.find(nd.space, uint8(g), &nd.id) != 0 {
			children--
		}
	}
	return children == 0
}

// Link is one block of a chain with its stored pieces.
type Link struct {
	ID kv.BlockID
	// Heat is the highest of the pieces (Tip.Heat).
	Heat   int
	Pieces []LinkPiece
}

// LinkPiece is a stored piece of a Link.
type LinkPiece struct {
	Group int
	// Node is the number of the piece's node: as long as the piece is stored, no other piece has the
	// number. Generation is that of the piece's slot. No two slots have the same generation.
	Node       uint32
	Generation kv.Generation
}

// Chain returns the chain of a block from the first block of its sequence to the block itself, in one
// live epoch. In a flat namespace, and in a tree without a Full group, the chain is the block alone. Chain
// fails with ErrAbsent if the block is not stored.
func (t *Trie) Chain(id kv.NamespaceID, epoch kv.Epoch, block kv.BlockID) ([]Link, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	sp, err := t.liveSpaceLocked(id, epoch)
	if err != nil {
		return nil, err
	}
	n := t.table.find(sp.number, 0, &block)
	if n == 0 || t.nodes.at(n).has(flagPending) || !t.rootedLocked(n) {
		return nil, fmt.Errorf("trie: namespace %q: block %v: %w", sp.ns.def.Name, block, ErrAbsent)
	}
	var chain []Link
	for ; n != 0; n = t.nodes.at(n).parent {
		chain = append(chain, t.linkLocked(sp, t.nodes.at(n).id))
	}
	slices.Reverse(chain)
	return chain, nil
}

// linkLocked returns a block with its stored pieces. Trie.mu is held.
func (t *Trie) linkLocked(sp *space, id kv.BlockID) Link {
	link := Link{ID: id}
	for g := range sp.ns.def.Geometry.Groups {
		n := t.table.find(sp.number, uint8(g), &id)
		if n == 0 || t.nodes.at(n).has(flagPending) || !t.rootedLocked(n) {
			continue
		}
		link.Heat = max(link.Heat, t.policy.Heat(n))
		link.Pieces = append(link.Pieces, LinkPiece{Group: g, Node: n, Generation: t.nodes.at(n).gen()})
	}
	return link
}

// liveSpaceLocked returns the space of a live epoch. It fails with ErrEpoch. Trie.mu is held.
func (t *Trie) liveSpaceLocked(id kv.NamespaceID, epoch kv.Epoch) (*space, error) {
	ns, err := t.lookupLocked(id)
	if err != nil {
		return nil, err
	}
	if sp := ns.version(epoch); sp != nil {
		return sp, nil
	}
	return nil, fmt.Errorf("trie: namespace %q: epoch %d is not live: %w", ns.def.Name, epoch, ErrEpoch)
}
