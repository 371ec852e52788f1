package trie

import (
	"slices"

	"github.com/penstock-kv/penstock/kv"
)

// GroupSet is a set of layer groups: bit g is set if group g is in the set.
type GroupSet uint8

var _ [1]struct{} = [kv.MaxGroups / 8]struct{}{} // a GroupSet has a bit for each group

// Has reports whether the group is in the set.
func (s GroupSet) Has(group int) bool { return s>>group&1 != 0 }

// Present appends one value per block to dst: the layer groups of which the block's piece is stored in the
// epoch and matchable. In a tree a piece is matchable if all its ancestors are stored
// too. Epoch 0 means the newest. Present also returns the epoch of the look-up; if the given epoch
// is not live, all sets are empty and the returned epoch is the newest. If touch is set, Present
// records a hit of the piece of layer group 0 of each present block in the eviction policy, from the last block to the first, so
// that a chain's first block becomes the most recently used. Errors: ErrNamespaceUnknown and
// ErrClosed.
func (t *Trie) Present(dst []GroupSet, id kv.NamespaceID, epoch kv.Epoch, ids []kv.BlockID, touch bool) ([]GroupSet, kv.Epoch, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return dst, 0, err
	}
	from := len(dst)
	dst = append(dst, make([]GroupSet, len(ids))...)
	if epoch == 0 {
		epoch = ns.def.Epoch
	}
	sp := ns.version(epoch)
	if sp == nil {
		return dst, ns.def.Epoch, nil
	}
	for i, block := range slices.Backward(ids) {
		for g := range ns.def.Geometry.Groups {
			n := t.table.find(sp.number, uint8(g), &block)
			if n == 0 || t.nodes.at(n).has(flagPending) || !t.rootedLocked(n) {
				continue
			}
			dst[from+i] |= 1 << g
			if touch && g == 0 {
				t.policy.Touch(n)
			}
		}
	}
	return dst, ns.def.Epoch, nil
}
