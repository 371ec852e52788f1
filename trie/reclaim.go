package trie

import (
	"fmt"
	"slices"

	"github.com/penstock-kv/penstock/kv"
)

// Delete makes a block and all its descendants unmatchable, durably, in the given epochs, or in
// every live epoch if none is given. ReclaimStep later removes the pieces and returns their slots.
// Delete returns ErrAbsent if none of the epochs has the block.
func (t *Trie) Delete(id kv.NamespaceID, block kv.BlockID, epochs ...kv.Epoch) error {
	t.records.RLock()
	defer t.records.RUnlock()
	doomed, err := t.doomBlock(id, block, epochs)
	if err != nil {
		return err
	}
	return t.unrecord(doomed, true)
}

// doomed holds the slots of nodes that were made unmatchable and whose records are about to be
// deleted. The nodes in guarded stay pinned until the records are deleted.
type doomed struct {
	extents []kv.Extent
	guarded []uint32
}

func (d *doomed) add(t *Trie, n uint32, why Why) {
	nd := t.nodes.at(n)
	d.extents = append(d.extents, nd.extent)
	if guard(nd) {
		d.guarded = append(d.guarded, n)
	}
	t.doomLocked(n, why)
}

// doomBlock makes a block unmatchable in those of the given epochs that are live, or in all live
// epochs if none is given. In a tree namespace it marks the block's piece of layer group 0, on
// which the pieces of the other groups depend. In any other namespace it marks all pieces of the
// block.
func (t *Trie) doomBlock(id kv.NamespaceID, block kv.BlockID, epochs []kv.Epoch) (d doomed, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return d, err
	}
	groups := len(ns.def.Geometry.Groups)
	if ns.tree {
		groups = 1
	}
	for _, sp := range ns.live {
		if len(epochs) > 0 && !slices.Contains(epochs, sp.epoch) {
			continue
		}
		for g := range groups {
			n := t.table.find(sp.number, uint8(g), &block)
			if n == 0 || t.nodes.at(n).has(flagPending) || !t.rootedLocked(n) {
				continue
			}
			d.add(t, n, Deleted)
		}
	}
	if d.extents == nil {
		return d, fmt.Errorf("trie: namespace %q: block %v: %w", ns.def.Name, block, ErrAbsent)
	}
	return d, nil
}

// Remove makes the piece in the slot ref, and all descendants of its block, unmatchable, because
// the slot cannot be used any more. why is Dropped, Lost or Chosen. ReclaimStep later returns these
// pieces, the piece in ref included. Remove returns ErrAbsent if the index does not refer to ref.
func (t *Trie) Remove(ref kv.Ref, why Why) error {
	if err := t.usable(); err != nil {
		return err
	}
	t.records.RLock()
	defer t.records.RUnlock()
	value, err := t.disk.Load().get(appendBlockKey(nil, ref.Extent))
	if err != nil {
		return err
	}
	absent := fmt.Errorf("trie: slot %v: %w", ref, ErrAbsent)
	if value == nil {
		return absent
	}
	rec, err := decodeRecord(value)
	if err != nil {
		return fmt.Errorf("trie: slot %v: %w", ref, err)
	}
	doomed := t.doomRecord(ref, &rec, why)
	if doomed.extents == nil {
		return absent
	}
	return t.unrecord(doomed, false)
}

// doomRecord dooms (makes unmatchable) the node of the record rec, if the node still occupies the
// slot ref.
func (t *Trie) doomRecord(ref kv.Ref, rec *record, why Why) (d doomed) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.nodeOf(rec)
	if n == 0 || t.nodes.at(n).ref() != ref {
		return d
	}
	d.add(t, n, why)
	return d
}

// unrecord deletes the records of doomed (unmatchable) nodes from Pebble. The descendants of these
// nodes then lack an ancestor, so Open drops their records after a crash.
func (t *Trie) unrecord(d doomed, sync bool) error {
	defer func() {
		t.mu.RLock()
		defer t.mu.RUnlock()
		t.leases.unguard(t, d.guarded...)
	}()
	b := t.disk.Load().db.NewBatch()
	for _, e := range d.extents {
		if err := b.Delete(appendBlockKey(nil, e), nil); err != nil {
			b.Close()
			return fmt.Errorf("%w: %w", ErrBroken, err)
		}
	}
	return t.commit(b, sync, func(r reverts) {
		for _, e := range d.extents {
			r.remove(appendBlockKey(nil, e))
		}
	})
}

// doomLocked makes a node and its descendants unmatchable: it removes the node from the table of
// the nodes, and a match, which starts at the root, cannot get past the node. The node's doomedWhy
// returns why from then on.
func (t *Trie) doomLocked(n uint32, why Why) {
	nd := t.nodes.at(n)
	if nd.has(flagDoomed) {
		return
	}
	t.goneLocked(nd, why)
	t.table.remove(n)
	nd.setDoomed(why)
	sp := t.spaces[nd.space]
	sp.doomed++
	sp.pieces[nd.group()]--
	if !sp.dead {
		t.addGarbageLocked(sp.ns, 1)
	}
	t.sweep.kick()
}

// rootedLocked reports whether n can be matched: neither n nor any of its ancestors is doomed
// (unmatchable).
func (t *Trie) rootedLocked(n uint32) bool {
	if t.spaces[t.nodes.at(n).space].doomed == 0 {
		return true
	}
	for ; n != 0; n = t.nodes.at(n).parent {
		if t.nodes.at(n).has(flagDoomed) {
			return false
		}
	}
	return true
}

// doomedAbove returns the reason why n cannot be matched. It is the reason (doomedWhy) of the
// nearest doomed node among n and its ancestors, of which at least one must be doomed.
func (t *Trie) doomedAbove(n uint32) Why {
	for !t.nodes.at(n).has(flagDoomed) {
		n = t.nodes.at(n).parent
	}
	return t.nodes.at(n).doomedWhy()
}

// hasGarbage reports whether a namespace, a tenant (if tn is not nil) or, without both, the index has
// unmatchable pieces.
func (t *Trie) hasGarbage(only kv.NamespaceID, tn *tenant) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if tn != nil {
		return tn.garbage > 0
	}
	if ns, ok := t.namespaces[only]; ok {
		return ns.garbage > 0
	}
	return t.garbage > 0
}

// ReclaimStep removes up to limit unmatchable pieces (retired epochs, deleted or corrupt subtrees)
// from the index and appends them to dst. If more is false, leases hold all remaining unmatchable
// pieces. If the write to Pebble fails, ReclaimStep returns its error, and the appended pieces have
// left the index nevertheless.
func (t *Trie) ReclaimStep(dst []Evicted, limit int) (out []Evicted, more bool, err error) {
	if err := t.usable(); err != nil {
		return dst, false, err
	}
	end := len(dst) + limit
	for more = true; more && len(dst) < end; {
		from := len(dst)
		dst, more = t.sweepStep(dst, min(end, from+victimsPerStep))
		if err := t.forget(dst[from:]); err != nil {
			return dst, more, err
		}
	}
	return dst, more, nil
}

// sweepStep looks for unmatchable nodes from the position where the last step ended. It marks the
// subtree of a deleted node from the top down: a node whose parent is doomed becomes doomed too. A
// pass over all nodes marks at least one more level of the subtree. It usually marks all levels,
// because children usually have higher numbers than their parents. The subtree is then removed from
// its leaves up.
func (t *Trie) sweepStep(dst []Evicted, end int) (out []Evicted, more bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &t.sweep
	if s.kicked.Swap(false) {
		s.idle = 0
	}
	for range looksPerStep {
		if t.garbage == 0 || s.idle > t.nodes.top {
			return dst, false
		}
		if len(dst) >= end {
			return dst, true
		}
		if s.hand >= t.nodes.top {
			s.hand = 0
		}
		s.hand++
		s.idle++
		if t.nodes.at(s.hand).space != 0 {
			dst = t.sweepNode(dst, s.hand, end)
		}
	}
	return dst, true
}

func (t *Trie) sweepNode(dst []Evicted, n uint32, end int) []Evicted {
	if nd := t.nodes.at(n); nd.parent != 0 && !nd.has(flagDoomed) && t.nodes.at(nd.parent).has(flagDoomed) {
		t.doomLocked(n, t.nodes.at(nd.parent).doomedWhy())
		t.sweep.idle = 0
	}
	for n != 0 && len(dst) < end && t.unmatchable(n) && t.evictable(n) {
		parent := t.nodes.at(n).parent
		t.policy.Remove(n)
		dst = t.removeNodeLocked(dst, n, Deleted)
		n = parent
	}
	return dst
}

func (t *Trie) unmatchable(n uint32) bool {
	nd := t.nodes.at(n)
	return nd.has(flagDoomed) || t.spaces[nd.space].dead
}
