package trie

import (
	"slices"

	"github.com/penstock-kv/penstock/kv"
)

// Present appends one value per block to dst: true if the block (its piece of layer group 0) is
// stored in the epoch and matchable. In a tree a piece is matchable if all its ancestors are stored
// too. Epoch 0 means the newest. Present also returns the epoch of the look-up; if the given epoch
// is not live, all values are false and the returned epoch is the newest. If touch is set, Present
// records a hit of each present block in the eviction policy, from the last block to the first, so
// that a chain's first block becomes the most recently used. Errors: ErrNamespaceUnknown and
// ErrClosed.
func (t *Trie) Present(dst []bool, id kv.NamespaceID, epoch kv.Epoch, ids []kv.BlockID, touch bool) ([]bool, kv.Epoch, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return dst, 0, err
	}
	from := len(dst)
	dst = append(dst, make([]bool, len(ids))...)
	if epoch == 0 {
		epoch = ns.def.Epoch
	}
	sp := ns.version(epoch)
	if sp == nil {
		return dst, ns.def.Epoch, nil
	}
	for i, block := range slices.Backward(ids) {
		n := t.table.find(sp.number, 0, &block)
		if n == 0 || t.nodes.at(n).has(flagPending) || !t.rootedLocked(n) {
			continue
		}
		dst[from+i] = true
		if touch {
			t.policy.Touch(n)
		}
	}
	return dst, ns.def.Epoch, nil
}
