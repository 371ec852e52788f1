package storage

import (
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// Exists says of each block by itself whether it is stored; see trie.Trie.Present.
func (n *Node) Exists(namespace string, epoch kv.Epoch, ids []kv.BlockID, touch bool) ([]bool, kv.Epoch, error) {
	ns, err := n.Namespace(namespace)
	if err != nil {
		return nil, 0, err
	}
	if err := n.checkChain(ids); err != nil {
		return nil, 0, err
	}
	return n.index.Present(make([]bool, 0, len(ids)), ns.ID, epoch, ids, touch)
}

// Delete is DeleteBlocks for many blocks, which become durable together. It returns of
// each whether it was there; of another epoch than the namespace's none is deleted, and
// epoch 0 is any. What it removes is not counted, since that looks at the whole index.
func (n *Node) Delete(namespace string, epoch kv.Epoch, ids []kv.BlockID) ([]bool, error) {
	ns, err := n.Namespace(namespace)
	if err != nil {
		return nil, err
	}
	if err := n.checkChain(ids); err != nil {
		return nil, err
	}
	deleted := make([]bool, len(ids))
	if epoch != 0 && epoch != ns.Epoch {
		return deleted, nil
	}
	var count uint64
	for i, id := range ids {
		// As in DeleteBlocks: the index first.
		switch err := n.index.Delete(ns.ID, id); {
		case err == nil:
			deleted[i] = true
		case !errors.Is(err, trie.ErrAbsent):
			return nil, err
		}
		count = n.noteDeleted(ns, id, rootGroups(ns)...)
	}
	n.wakeReclaim()
	if err := n.writeDeleted(n.stopped, count); err != nil {
		return nil, fmt.Errorf("storage: %d blocks are deleted, but the volumes could not be told; a rebuild of the index may bring them back until the call is repeated: %w", len(ids), err)
	}
	return deleted, nil
}
