package storage

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// deletions are the tombstones of the node. They are needed because a rebuild of the index reads
// the slot headers. The header of a deleted block stays on its volume until the slot is written
// again, and older copies of the block may be in other free slots and on volumes that are missing
// or read-only. So the catalogue records the deletions:
//
//	tombstone  namespace, epoch, block, group, generation G
//	           slots of that piece and of its descendants are deleted if their
//	           content was written up to generation G
//	floor      namespace, generation G
//	           a rebuild ignores the slots of the namespace up to G
//
// A tombstone covers a piece and all its descendants. Concurrent deletions share one write of the
// catalogue. When an epoch ends or a namespace is deleted, its tombstones are removed, because a
// rebuild ignores epochs and namespaces that the catalogue does not list. When the catalogue is
// full, the older half of the tombstones is replaced by floors. A later rebuild then finds fewer
// blocks, but never a deleted block.
type deletions struct {
	mu     sync.Mutex
	stones map[stoneKey]kv.Generation
	floors map[kv.NamespaceID]kv.Generation
	// added is the number of changes of stones and floors so far. written is the number of the last
	// change that is in the durable catalogue.
	added, written uint64
}

// stoneKey identifies a deleted piece of one epoch; it is the key of its tombstone.
type stoneKey struct {
	namespace kv.NamespaceID
	epoch     kv.Epoch
	trie.PieceKey
}

// deletedPieces are the deletions in one epoch of a namespace, as in the catalogue.
type deletedPieces struct {
	Namespace kv.NamespaceID `json:"namespace"`
	Epoch     kv.Epoch       `json:"epoch"`
	// Floor is the floor of the namespace. It is stored with the newest epoch.
	Floor kv.Generation `json:"floor,omitempty"`
	// Pieces has stoneBytes for each tombstone: id, group, generation (little endian).
	Pieces []byte `json:"pieces,omitempty"`
}

const stoneBytes = kv.BlockIDSize + 1 + 8

func (d *deletedPieces) stones() (out []trie.Deletion, err error) {
	if len(d.Pieces)%stoneBytes != 0 {
		return nil, fmt.Errorf("storage: catalogue: the deleted pieces of namespace %[2]d have %[1]d bytes; want a multiple of %[3]d", len(d.Pieces), d.Namespace, stoneBytes)
	}
	for b := range slices.Chunk(d.Pieces, stoneBytes) {
		out = append(out, trie.Deletion{
			PieceKey: trie.PieceKey{ID: kv.BlockID(b[:kv.BlockIDSize]), Group: b[kv.BlockIDSize]},
			UpTo:     kv.Generation(binary.LittleEndian.Uint64(b[kv.BlockIDSize+1:])),
		})
	}
	return out, nil
}

// load replaces the deletions by the deletions in the catalogue.
func (d *deletions) load(c catalogue) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stones = make(map[stoneKey]kv.Generation)
	d.floors = make(map[kv.NamespaceID]kv.Generation)
	for _, of := range c.Deleted {
		stones, err := of.stones()
		if err != nil {
			return err
		}
		for _, s := range stones {
			d.stones[stoneKey{of.Namespace, of.Epoch, s.PieceKey}] = s.UpTo
		}
		if of.Floor > 0 {
			d.floors[of.Namespace] = of.Floor
		}
	}
	return nil
}

// add records a deletion, which the next write of the catalogue makes durable. It returns the
// number of this change. The method has reports whether the catalogue includes the changes up to a
// number.
func (d *deletions) add(key stoneKey, upTo kv.Generation) uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stones[key] = max(d.stones[key], upTo)
	d.added++
	return d.added
}

// pending reports whether a deletion is not in the catalogue yet.
func (d *deletions) pending() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.added > d.written
}

// has reports whether the catalogue has the first n changes.
func (d *deletions) has(n uint64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.written >= n
}

// encode returns the deletions for a catalogue with these namespaces. count is the number of the
// last change that the deletions include.
func (d *deletions) encode(namespaces []kv.Namespace) (out []deletedPieces, count uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	of := make(map[namespaceEpoch]*deletedPieces, len(namespaces))
	for _, ns := range namespaces {
		for _, e := range ns.Live() {
			of[namespaceEpoch{ns.ID, e}] = &deletedPieces{Namespace: ns.ID, Epoch: e}
		}
		of[namespaceEpoch{ns.ID, ns.Epoch}].Floor = d.floors[ns.ID]
	}
	keys := slices.SortedFunc(maps.Keys(d.stones), func(a, b stoneKey) int {
		return cmp.Or(cmp.Compare(a.namespace, b.namespace), slices.Compare(a.ID[:], b.ID[:]), cmp.Compare(a.Group, b.Group))
	})
	for _, k := range keys {
		p := of[namespaceEpoch{k.namespace, k.epoch}]
		if p == nil {
			continue
		}
		p.Pieces = append(append(p.Pieces, k.ID[:]...), k.Group)
		p.Pieces = binary.LittleEndian.AppendUint64(p.Pieces, uint64(d.stones[k]))
	}
	for _, ns := range namespaces {
		for _, e := range ns.Live() {
			if p := of[namespaceEpoch{ns.ID, e}]; p.Floor > 0 || len(p.Pieces) > 0 {
				out = append(out, *p)
			}
		}
	}
	return out, d.added
}

// namespaceEpoch is one epoch of a namespace.
type namespaceEpoch struct {
	namespace kv.NamespaceID
	epoch     kv.Epoch
}

// wrote is called when a catalogue with these namespaces and the first count changes is durable. It
// removes the tombstones of namespaces and epochs that the catalogue does not list.
func (d *deletions) wrote(namespaces []kv.Namespace, count uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.written = max(d.written, count)
	listed := make(map[kv.NamespaceID]kv.Namespace, len(namespaces))
	for _, ns := range namespaces {
		listed[ns.ID] = ns
	}
	maps.DeleteFunc(d.stones, func(k stoneKey, _ kv.Generation) bool {
		ns, ok := listed[k.namespace]
		// A tombstone of an epoch later than ns.Epoch was added after the namespaces were listed;
		// it stays.
		return !ok || k.epoch < ns.Epoch && !ns.IsLive(k.epoch)
	})
	maps.DeleteFunc(d.floors, func(id kv.NamespaceID, _ kv.Generation) bool { _, ok := listed[id]; return !ok })
}

// collapse replaces the older half of the tombstones by floors. It returns false if there are no
// tombstones.
func (d *deletions) collapse() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.stones) == 0 {
		return false
	}
	limit := slices.Sorted(maps.Values(d.stones))[(len(d.stones)-1)/2]
	for k, upTo := range d.stones {
		if upTo <= limit {
			d.floors[k.namespace] = max(d.floors[k.namespace], upTo)
			delete(d.stones, k)
		}
	}
	return true
}

// raiseFloor makes later rebuilds of the index ignore the slots of a namespace with generations up
// to upTo.
func (d *deletions) raiseFloor(id kv.NamespaceID, upTo kv.Generation) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.floors[id] = max(d.floors[id], upTo)
	d.added++
}

// noteDeleted records that, in the given epochs, the pieces of the block id in the given groups are
// deleted, with all their descendants. It returns the number of the change, for writeDeleted.
func (n *Node) noteDeleted(ns kv.NamespaceID, epochs []kv.Epoch, id kv.BlockID, groups ...int) (count uint64) {
	// Every slot of the block and of its descendants got its generation before the block was
	// removed from the index, so upTo is at least as high as each of these generations.
	upTo := n.store.NewestGeneration()
	for _, e := range epochs {
		for _, g := range groups {
			count = n.deleted.add(stoneKey{ns, e, trie.PieceKey{ID: id, Group: uint8(g)}}, upTo)
		}
	}
	return count
}

// rootGroups returns the groups for which a deletion of the whole block needs tombstones. The
// block's pieces in the other groups are descendants of its pieces in these groups, so the
// tombstones cover them.
func rootGroups(ns kv.Namespace) []int {
	if ns.Index != kv.IndexFlat && ns.Geometry.Groups[0].Kind == kv.Full {
		return []int{0}
	}
	groups := make([]int, len(ns.Geometry.Groups))
	for i := range groups {
		groups[i] = i
	}
	return groups
}

// writeDeleted returns when the first count changes are in the durable catalogue. Concurrent calls
// share one write.
func (n *Node) writeDeleted(ctx context.Context, count uint64) error {
	if n.deleted.has(count) {
		return nil
	}
	if err := n.takeNamespaces(ctx); err != nil {
		return err
	}
	defer n.giveNamespaces()
	if n.deleted.has(count) {
		return nil
	}
	return n.writeCatalogue(ctx)
}

// writePending writes the deletions for which no caller waits, such as those of dropped blocks.
func (n *Node) writePending(ctx context.Context) error {
	if !n.deleted.pending() {
		return nil
	}
	if err := n.takeNamespaces(ctx); err != nil {
		return err
	}
	defer n.giveNamespaces()
	return n.writeCatalogue(ctx)
}

// redoDeletions deletes from the index the pieces that the catalogue lists as deleted. After a
// crash the index may still have them.
func (n *Node) redoDeletions(c catalogue) error {
	for _, of := range c.Deleted {
		ns, err := n.index.NamespaceByID(of.Namespace)
		if errors.Is(err, trie.ErrNamespaceUnknown) {
			continue
		}
		if err != nil {
			return err
		}
		stones, err := of.stones()
		if err != nil {
			return err
		}
		pieces, err := n.index.Redo(of.Namespace, of.Epoch, stones)
		if err != nil {
			return err
		}
		if pieces > 0 {
			n.opts.Logger.Info("dropped blocks from the index that were deleted before the restart", "namespace", ns.Name, "pieces", pieces)
		}
	}
	return nil
}
