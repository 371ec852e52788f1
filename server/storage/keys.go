package storage

import (
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// Exists returns for each block the layer groups of which its piece is stored in the epoch, and returns that
// epoch; see trie.Trie.Present.
func (n *Node) Exists(namespace string, epoch kv.Epoch, ids []kv.BlockID, touch bool) ([]trie.GroupSet, kv.Epoch, error) {
	ns, err := n.Namespace(namespace)
	if err != nil {
		return nil, 0, err
	}
	if err := n.checkChain(ids); err != nil {
		return nil, 0, err
	}
	return n.index.Present(make([]trie.GroupSet, 0, len(ids)), ns.ID, epoch, ids, touch)
}

// Delete deletes many blocks of one epoch, as DeleteBlocks deletes one; epoch 0 means the newest.
// One write makes all deletions durable. Delete returns for each block whether the block was
// stored. If the epoch is not live, Delete deletes nothing. Unlike DeleteBlocks it does not count
// the deleted descendants, because counting scans the whole index.
func (n *Node) Delete(namespace string, epoch kv.Epoch, ids []kv.BlockID) ([]bool, error) {
	ns, err := n.Namespace(namespace)
	if err != nil {
		return nil, err
	}
	if err := n.checkChain(ids); err != nil {
		return nil, err
	}
	deleted := make([]bool, len(ids))
	if epoch == 0 {
		epoch = ns.Epoch
	}
	if !ns.IsLive(epoch) {
		return deleted, nil
	}
	var count uint64
	for i, id := range ids {
		// As in DeleteBlocks, the index changes before the catalogue.
		switch err := n.index.Delete(ns.ID, id, epoch); {
		case err == nil:
			deleted[i] = true
		case !errors.Is(err, trie.ErrAbsent):
			return nil, err
		}
		count = n.noteDeleted(ns.ID, []kv.Epoch{epoch}, id, rootGroups(ns)...)
	}
	n.publishChanges()
	n.wakeReclaim()
	if err := n.writeDeleted(n.stopped, count); err != nil {
		return nil, fmt.Errorf("storage: %d blocks are deleted, but the deletion could not be written to the volumes; repeat the call, or a rebuild of the index may restore the blocks: %w", len(ids), err)
	}
	return deleted, nil
}
