package trie

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/penstock-kv/penstock/kv"
)

// Tip is the last block of a stored sequence: a block without child blocks. In a flat namespace every
// block is one.
type Tip struct {
	ID kv.BlockID
	// Heat orders tips: the hottest have been read the most often, as the policy counts reads.
	Heat int
	// Generation is that of the block's slot. Of two blocks, the one that was stored later has the
	// higher generation.
	Generation kv.Generation
}

// Tips returns the tips of one live epoch of a namespace, the hottest first, and among equals the
// last stored first. Blocks that are put or removed meanwhile may or may not be considered. Tips
// examines every piece of the index in short steps.
func (t *Trie) Tips(id kv.NamespaceID, epoch kv.Epoch) ([]Tip, error) {
	t.mu.RLock()
	sp, err := t.liveSpaceLocked(id, epoch)
	t.mu.RUnlock()
	if err != nil {
		return nil, err
	}
	var tips []Tip
	for from := uint32(1); from != 0; {
		from = t.visit(from, refsPerLock, func(n uint32) bool {
			if nd := t.nodes.at(n); nd.group() == 0 && t.spaces[nd.space] == sp && nd.childCount() == 0 && !sp.dead && t.rootedLocked(n) {
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

// Chain returns the chain of a block from the first block of its sequence to the block itself, in one
// live epoch, and the numbers of the blocks' nodes: as long as a block is stored, no other has its number.
// It fails with ErrAbsent if the block is not stored.
func (t *Trie) Chain(id kv.NamespaceID, epoch kv.Epoch, block kv.BlockID) (ids []kv.BlockID, nodes []uint32, err error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	sp, err := t.liveSpaceLocked(id, epoch)
	if err != nil {
		return nil, nil, err
	}
	n := t.table.find(sp.number, 0, &block)
	if n == 0 || t.nodes.at(n).has(flagPending) || !t.rootedLocked(n) {
		return nil, nil, fmt.Errorf("trie: namespace %q: block %v: %w", sp.ns.def.Name, block, ErrAbsent)
	}
	for ; n != 0; n = t.nodes.at(n).parent {
		ids, nodes = append(ids, t.nodes.at(n).id), append(nodes, n)
	}
	slices.Reverse(ids)
	slices.Reverse(nodes)
	return ids, nodes, nil
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
