package trie

import (
	"slices"

	"github.com/penstock-kv/penstock/kv"
)

// Demote makes stored blocks of one live epoch the first to be evicted, the last of ids first. A later match of a
// block ends that, as evict.Policy.Demote describes. Ids that are not stored, and pieces of class Transfer, are left as
// they are. The order is lost when the index is opened again.
func (t *Trie) Demote(id kv.NamespaceID, epoch kv.Epoch, ids []kv.BlockID) error {
	for end := len(ids); end > 0; {
		from := max(0, end-victimsPerStep)
		if err := t.demoteStep(id, epoch, ids[from:end]); err != nil {
			return err
		}
		end = from
	}
	return nil
}

func (t *Trie) demoteStep(id kv.NamespaceID, epoch kv.Epoch, ids []kv.BlockID) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	sp, err := t.liveSpaceLocked(id, epoch)
	if err != nil {
		return err
	}
	for _, block := range slices.Backward(ids) {
		for g := len(sp.ns.def.Geometry.Groups) - 1; g >= 0; g-- {
			n := t.table.find(sp.number, uint8(g), &block)
			if n == 0 || t.nodes.at(n).has(flagPending|flagTransfer) {
				continue
			}
			t.policy.Demote(n)
			if t.nodes.at(n).has(flagLeaf) {
				sp.leaves.remove(&t.nodes, n)
				sp.leaves.addOldest(&t.nodes, n)
			}
		}
	}
	return nil
}
