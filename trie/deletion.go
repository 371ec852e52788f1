package trie

import "github.com/penstock-kv/penstock/kv"

// PieceKey names a piece within one epoch of a namespace.
type PieceKey struct {
	ID    kv.BlockID
	Group uint8
}

// Deletion states that a piece and all its descendants are deleted. The owner of the slots stores
// it. It covers slots with generations up to UpTo; pieces with later generations were put after the
// deletion.
type Deletion struct {
	PieceKey
	UpTo kv.Generation
}

// Owner returns the indexed piece that occupies the slot, or false if there is none. The piece may
// be unmatchable and wait for ReclaimStep.
func (t *Trie) Owner(ref kv.Ref) (Evicted, bool) {
	t.records.RLock()
	value, err := t.disk.Load().get(appendBlockKey(nil, ref.Extent))
	t.records.RUnlock()
	if value == nil || err != nil {
		return Evicted{}, false
	}
	rec, err := decodeRecord(value)
	if err != nil || rec.gen != ref.Generation {
		return Evicted{}, false
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	number, ok := t.bySerial[rec.serial]
	if !ok {
		return Evicted{}, false
	}
	sp := t.spaces[number]
	return Evicted{
		Ref: ref, ID: rec.id, Namespace: sp.ns.def.ID, Epoch: sp.epoch,
		Group: int(rec.group), SlotBytes: sp.ns.slotBytes[rec.group],
	}, true
}

// Redo dooms (makes unmatchable) the pieces of the epoch that the deletions cover and that are
// still in the index; ReclaimStep later removes and returns these pieces. Redo returns the number
// of doomed pieces: 0 if the epoch is not live. It must be called before the index serves requests.
// A crash between Delete and ReclaimStep leaves the records of pieces below the deleted block. If
// the block was put again before the crash, these pieces have become descendants of its new piece.
func (t *Trie) Redo(id kv.NamespaceID, epoch kv.Epoch, deletions []Deletion) (pieces int, err error) {
	t.records.RLock()
	defer t.records.RUnlock()
	d, err := t.doomDeleted(id, epoch, deletions)
	if err != nil || len(d.extents) == 0 {
		return 0, err
	}
	return len(d.extents), t.unrecord(d, true)
}

func (t *Trie) doomDeleted(id kv.NamespaceID, epoch kv.Epoch, deletions []Deletion) (d doomed, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return d, err
	}
	sp := ns.version(epoch)
	if sp == nil {
		return d, nil
	}
	// A piece that was put again after its deletion stays. Its descendants that are older than the
	// deletion are doomed below.
	again := make(map[uint32]kv.Generation)
	for _, del := range deletions {
		n := t.table.find(sp.number, del.Group, &del.ID)
		switch {
		case n == 0 || t.nodes.at(n).has(flagPending):
		case t.nodes.at(n).gen() <= del.UpTo:
			d.add(t, n, Deleted)
		default:
			again[n] = max(again[n], del.UpTo)
		}
	}
	if len(again) == 0 || !ns.tree {
		return d, nil
	}
	t.doomBelowLocked(sp, again, &d)
	return d, nil
}

// doomBelowLocked dooms (makes unmatchable) the descendants of the nodes in upTo that are older
// than a deletion. upTo maps a node to the highest generation that the deletion covers. A
// descendant is doomed if its generation is at most the upTo value of one of its ancestors.
func (t *Trie) doomBelowLocked(sp *space, upTo map[uint32]kv.Generation, d *doomed) {
	known := make(bitmap, t.nodes.top/64+1)
	// limits maps each node that is in upTo, or has an ancestor in upTo, to the highest of their
	// generations in upTo.
	limits := make(map[uint32]kv.Generation)
	var path []uint32
	for n := uint32(1); n <= t.nodes.top; n++ {
		if t.nodes.at(n).space != sp.number {
			continue
		}
		path = path[:0]
		at := n
		for at != 0 && !known.has(at) {
			path = append(path, at)
			at = t.nodes.at(at).parent
		}
		limit := limits[at]
		for i := len(path) - 1; i >= 0; i-- {
			p := path[i]
			known.set(p)
			nd := t.nodes.at(p)
			if limit > 0 && nd.gen() <= limit && !nd.has(flagDoomed|flagPending) {
				d.add(t, p, Deleted)
			}
			if limit = max(limit, upTo[p]); limit > 0 {
				limits[p] = limit
			}
		}
	}
}
