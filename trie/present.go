package trie

import (
	"slices"

	"github.com/penstock-kv/penstock/kv"
)

// Present appends to dst, for each block by itself, whether its piece of group 0 is
// stored and can be matched: in a tree, whether all its ancestors are. At another
// epoch than the namespace's, which it returns, none is; epoch 0 is any. With touch
// those that are there count as used, the last first, so that a chain's first block is the
// newest. It fails with ErrNamespaceUnknown or ErrClosed.
func (t *Trie) Present(dst []bool, id kv.NamespaceID, epoch kv.Epoch, ids []kv.BlockID, touch bool) ([]bool, kv.Epoch, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return dst, 0, err
	}
	from := len(dst)
	dst = append(dst, make([]bool, len(ids))...)
	if epoch != 0 && epoch != ns.def.Epoch {
		return dst, ns.def.Epoch, nil
	}
	for i, block := range slices.Backward(ids) {
		n := t.table.find(ns.space.number, 0, &block)
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
