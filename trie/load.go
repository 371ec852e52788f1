package trie

import (
	"bytes"
	"fmt"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/penstock-kv/penstock/kv"
)

// LoadStats counts the records that Open loaded, dropped or hid.
type LoadStats struct {
	Loaded int64
	// StaleEpoch counts records of a retired epoch or a deleted namespace, Orphans records whose
	// piece lost an ancestor, Duplicates the older of two records for one piece, and Corrupt
	// records that do not decode or do not fit their namespace. Open dropped all of these records.
	StaleEpoch, Orphans, Duplicates, Corrupt int64
	// Hidden counts records of pieces on a missing volume, and of pieces with an ancestor on a
	// missing volume. Open kept these records in Pebble.
	Hidden int64
	Took   time.Duration
}

// loading is the state of Open.
type loading struct {
	t *Trie
	// drops has the changes to be made to Pebble, mostly deletions of dropped records.
	drops *pebble.Batch
	key   []byte
	// prevExtent and prev are the slot and the node of the previous record.
	prevExtent kv.Extent
	prev       uint32
	// hides is set if Open hid a record because its volume is missing. A piece whose parent is not
	// found may then be a descendant of a hidden piece, so the piece's record is kept.
	hides bool
	// moved holds each node for which two records were found and the second record, with another
	// slot, replaced the first.
	moved map[uint32]bool
}

func (t *Trie) loadAll() error {
	start := time.Now()
	if err := t.start(); err != nil {
		return err
	}
	if err := t.loadNamespaces(); err != nil {
		return err
	}
	l := &loading{t: t, drops: t.disk.Load().db.NewBatch()}
	defer func() { l.drops.Close() }()
	if err := l.blocks(); err != nil {
		return err
	}
	l.join()
	if err := l.prune(); err != nil {
		return err
	}
	if err := l.rewrite(); err != nil {
		return err
	}
	if err := l.flush(); err != nil {
		return err
	}
	for n := uint32(1); n <= t.nodes.top; n++ {
		if t.nodes.at(n).space != 0 {
			l.admit(n)
		}
		if n&chunkMask == 0 {
			t.noteGrowthLocked()
		}
	}
	t.load.Loaded = int64(t.nodes.live)
	t.load.Took = time.Since(start)
	return nil
}

func (t *Trie) loadNamespaces() error {
	return t.scan(namespaceKey, func(key, value []byte) error {
		def, live, err := decodeNamespace(value)
		if err != nil {
			return fmt.Errorf("key % x: %w", key, err)
		}
		if !bytes.Equal(key, appendNamespaceKey(nil, def.ID)) {
			return fmt.Errorf("key % x holds namespace %d: %w", key, def.ID, errRecord)
		}
		// Pins end with the process, so the epochs that were live only because of a pin end here.
		def = def.Settle(unpinned)
		ns := newNamespace(def, t.opts.SlotBytes)
		for _, sp := range live {
			t.marks.Serial = max(t.marks.Serial, sp.serial)
			if !def.IsLive(sp.epoch) {
				continue
			}
			sp.ns = ns
			if err := t.addSpaceLocked(sp); err != nil {
				return err
			}
			ns.live = append(ns.live, sp)
		}
		t.namespaces[def.ID], t.byName[def.Name], t.recorded[def.ID] = ns, ns, ns
		t.marks.NamespaceID = max(t.marks.NamespaceID, def.ID)
		return nil
	})
}

func unpinned(kv.Epoch) bool { return false }

// scan calls f for every record whose key begins with kind, in order.
func (t *Trie) scan(kind byte, f func(key, value []byte) error) error {
	it, err := t.disk.Load().db.NewIter(&pebble.IterOptions{LowerBound: []byte{kind}, UpperBound: []byte{kind + 1}})
	if err != nil {
		return err
	}
	for ok := it.First(); ok; ok = it.Next() {
		value, err := it.ValueAndErr()
		if err == nil {
			err = f(it.Key(), value)
		}
		if err != nil {
			it.Close()
			return err
		}
	}
	return it.Close()
}

func (l *loading) blocks() error {
	return l.t.scan(blockKey, func(key, value []byte) error {
		ext, err := extentOfKey(key)
		if err != nil {
			return err
		}
		rec, err := decodeRecord(value)
		if err != nil {
			l.t.opts.Logger.Warn("dropping a record of the index that does not decode; its slot becomes free", "extent", ext, "err", err)
			return l.drop(&l.t.load.Corrupt, ext)
		}
		return l.block(ext, &rec)
	})
}

// drop adds 1 to *count, the count of records dropped for one reason, and stages the deletion of
// the record.
func (l *loading) drop(count *int64, ext kv.Extent) error {
	*count++
	l.key = appendBlockKey(l.key[:0], ext)
	if err := l.drops.Delete(l.key, nil); err != nil {
		return err
	}
	if l.drops.Count() < 1024 {
		return nil
	}
	return l.flush()
}

func (l *loading) flush() error {
	if l.drops.Empty() {
		return nil
	}
	b := l.drops
	l.drops = l.t.disk.Load().db.NewBatch()
	return l.t.commit(b, false, nil)
}

// block makes a node from a record. It does not yet count the node as a child of its parent.
func (l *loading) block(ext kv.Extent, rec *record) error {
	t := l.t
	if t.opts.Absent != nil && t.opts.Absent(ext.Volume()) {
		t.load.Hidden++
		l.hides = true
		return nil
	}
	number, ok := t.bySerial[rec.serial]
	if !ok {
		return l.drop(&t.load.StaleEpoch, ext)
	}
	sp := t.spaces[number]
	if int(rec.group) >= len(sp.ns.def.Geometry.Groups) || rec.id.IsZero() {
		return l.drop(&t.load.Corrupt, ext)
	}
	ref := kv.Ref{Extent: ext, Generation: rec.gen}
	if old := t.table.find(number, rec.group, &rec.id); old != 0 {
		return l.duplicate(old, ref, rec, sp)
	}
	n := t.addNodeLocked(sp, rec.id, rec.group, 0, rec.depth, ref, classFlag(rec))
	if n == 0 {
		return ErrFull
	}
	l.parent(n, ext, rec, sp)
	l.prev, l.prevExtent = n, ext
	return nil
}

// duplicate decides between two records of one piece in two slots. It keeps the record that was
// written later: the deletion of the older record was lost in a crash or had not been written.
func (l *loading) duplicate(n uint32, ref kv.Ref, rec *record, sp *space) error {
	nd := l.t.nodes.at(n)
	if nd.gen() > rec.gen {
		return l.drop(&l.t.load.Duplicates, ref.Extent)
	}
	stale := nd.extent
	if l.moved == nil {
		l.moved = make(map[uint32]bool)
	}
	l.moved[n] = true
	nd.setRef(ref)
	nd.depthOrOlder, nd.parent, nd.kidsOrNewer = rec.depth, 0, 0
	nd.state.And(^uint32(flagTransfer | flagAwaits))
	nd.state.Or(classFlag(rec))
	l.parent(n, ref.Extent, rec, sp)
	l.prev, l.prevExtent = n, ref.Extent
	return l.drop(&l.t.load.Duplicates, stale)
}

func classFlag(rec *record) uint32 {
	if rec.flags&recTransfer != 0 {
		return flagTransfer
	}
	return 0
}

// lost is the parent number of a node whose parent cannot be found, used only while the index is
// loaded. No node has this number.
const lost = maxNodes + 1

func (l *loading) parent(n uint32, ext kv.Extent, rec *record, sp *space) {
	nd := l.t.nodes.at(n)
	switch {
	case !sp.ns.tree:
	case rec.group != 0:
		l.parentByID(n, &rec.id)
	case rec.flags&recParentPrev != 0:
		nd.parent = lost
		if l.prev != 0 && l.prevExtent+1 == ext && l.isParent(l.prev, nd, rec) {
			nd.parent = l.prev
		}
	case rec.flags&recParentID != 0:
		l.parentByID(n, &rec.parent)
	case rec.depth != 0:
		nd.parent = lost
	}
}

func (l *loading) isParent(p uint32, child *node, rec *record) bool {
	pd := l.t.nodes.at(p)
	return pd.space == child.space && pd.group() == 0 && hintOf(&pd.id) == [parentHint]byte(rec.parent[:parentHint])
}

// parentByID sets the parent of a node whose record contains the parent's id. If the scan has not
// reached the parent's record yet, the node stores the hash of the parent's id, and join later
// finds the parent by the hash. A list of the ids instead would need tens of bytes per block in
// addition to the loaded index.
func (l *loading) parentByID(n uint32, id *kv.BlockID) {
	nd := l.t.nodes.at(n)
	if p := l.t.table.find(nd.space, 0, id); p != 0 {
		nd.parent = p
		return
	}
	h := l.t.table.hash(nd.space, 0, id)
	nd.parent, nd.kidsOrNewer = uint32(h), uint32(h>>32)
	nd.state.Or(flagAwaits)
}

// join sets the parent of each node whose parent came later in the scan. It finds the parent by a
// seeded hash of 64 bits. A wrong block could be taken for the parent only if it had the same hash
// and the right depth; prune checks the depth.
func (l *loading) join() {
	for n := uint32(1); n <= l.t.nodes.top; n++ {
		nd := l.t.nodes.at(n)
		if !nd.has(flagAwaits) {
			continue
		}
		h := uint64(nd.kidsOrNewer)<<32 | uint64(nd.parent)
		nd.state.And(^uint32(flagAwaits))
		nd.kidsOrNewer = 0
		if nd.parent = l.t.table.findHash(h, nd.space, 0); nd.parent == 0 {
			nd.parent = lost
		}
	}
}

// prune drops every node that no match can reach. From child to parent the depth decreases by one,
// or stays equal for a piece of another layer group than group 0, which has the depth of its block.
// So each walk to the root ends.
func (l *loading) prune() error {
	t := l.t
	const unknown, good, bad = 0, 1, 2
	state := make([]uint8, t.nodes.top+1)
	var path []uint32
	for n := uint32(1); n <= t.nodes.top; n++ {
		verdict, at := uint8(unknown), n
		for path = path[:0]; verdict == unknown; {
			nd := t.nodes.at(at)
			switch {
			case state[at] != unknown:
				verdict = state[at]
			case nd.parent == 0:
				verdict, path = good, append(path, at)
			case nd.parent == lost || !l.deeper(nd):
				verdict, path = bad, append(path, at)
			default:
				path = append(path, at)
				at = nd.parent
			}
		}
		for _, p := range path {
			state[p] = verdict
		}
	}
	for n := uint32(1); n <= t.nodes.top; n++ {
		nd := t.nodes.at(n)
		if state[n] == good {
			if nd.parent != 0 {
				t.nodes.at(nd.parent).kidsOrNewer++
			}
			continue
		}
		if l.hides {
			t.load.Hidden++
		} else if err := l.drop(&t.load.Orphans, nd.extent); err != nil {
			return err
		}
		nd.parent = 0
		t.removeNodeLocked(nil, n, Dropped)
	}
	return nil
}

// rewrite writes the records of the children of moved nodes again, because such a record may state
// that the parent is in the previous slot, which the parent has left.
func (l *loading) rewrite() error {
	t := l.t
	if l.moved == nil {
		return nil
	}
	for n := uint32(1); n <= t.nodes.top; n++ {
		nd := t.nodes.at(n)
		if nd.space == 0 || nd.group() != 0 || !l.moved[nd.parent] {
			continue
		}
		rec := t.recordOf(n)
		l.key = appendBlockKey(l.key[:0], nd.extent)
		if err := l.drops.Set(l.key, rec.append(nil), nil); err != nil {
			return err
		}
	}
	return nil
}

// deeper reports whether the depth of nd fits the depth of its parent. No node is in a list of
// leaves yet, so depthOrOlder is the depth.
func (l *loading) deeper(nd *node) bool {
	p := l.t.nodes.at(nd.parent)
	if nd.group() != 0 {
		return nd.depthOrOlder == p.depthOrOlder
	}
	return nd.depthOrOlder == p.depthOrOlder+1
}

// admit adds a loaded node to the policy and, if it is a leaf, to its space's list of leaves.
func (l *loading) admit(n uint32) {
	if l.t.nodes.at(n).childCount() == 0 {
		l.t.leavesOf(n).addNewest(&l.t.nodes, n)
	}
	if l.t.nodes.at(n).has(flagTransfer) {
		l.t.policy.InsertCold(n)
		return
	}
	l.t.policy.Insert(n, l.t.contentKey(n))
}
