package trie

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/penstock-kv/penstock/kv"
)

// Class determines how long a piece is stored.
type Class uint8

const (
	// Prefix pieces are kept until they are evicted.
	Prefix Class = iota
	// Transfer pieces are read once: Delivered removes them after the read, and eviction takes them
	// before pieces of class Prefix.
	Transfer
)

// String returns prefix or transfer.
func (c Class) String() string {
	switch c {
	case Prefix:
		return "prefix"
	case Transfer:
		return "transfer"
	}
	return fmt.Sprintf("Class(%d)", uint8(c))
}

// Entry is one piece to be put.
type Entry struct {
	// ID is the id of the block; it must not be zero.
	ID kv.BlockID
	// Parent is the id of the previous block in the chain; zero for the first block of a prompt and
	// in a flat namespace. Parent is ignored for pieces of window and state groups, and if the
	// geometry has no full group.
	Parent kv.BlockID
	// Group is the index of the layer group in the namespace's geometry.
	Group int
	// Class is Prefix or Transfer. If the index has the piece with class Transfer, an entry with
	// class Prefix changes that class to Prefix.
	Class Class
	// Ref is the slot that holds the piece. The device write of the piece must be complete
	// (invariant data-before-index).
	Ref kv.Ref
}

// PutStatus is the outcome of one entry of a Put. If it is Added, the index refers to the entry's
// slot; otherwise the caller frees the slot.
type PutStatus uint8

const (
	// Added: the piece is indexed.
	Added PutStatus = iota + 1
	// Exists: the piece is indexed already, in another slot.
	Exists
	// ParentAbsent: the parent, or for a window or state piece the full piece of
	// its block, is not indexed.
	ParentAbsent
	// ParentMismatch: the block is indexed under another parent.
	ParentMismatch
	// TooDeep: the block would be more than MaxChainBlocks from the root.
	TooDeep
	// StaleEpoch: the epoch is not a live one of the namespace.
	StaleEpoch
	// OverQuota: the piece does not fit into the quota of the namespace.
	OverQuota
	// OverTenantQuota: the piece fits into the quota of the namespace, but not into that of its tenant.
	OverTenantQuota
)

// String returns the status in lower-case words: added, exists, parent_absent,
// parent_mismatch, too_deep, stale_epoch, over_quota. Both quotas have the word over_quota.
func (s PutStatus) String() string {
	switch s {
	case Added:
		return "added"
	case Exists:
		return "exists"
	case ParentAbsent:
		return "parent_absent"
	case ParentMismatch:
		return "parent_mismatch"
	case TooDeep:
		return "too_deep"
	case StaleEpoch:
		return "stale_epoch"
	case OverQuota, OverTenantQuota:
		return "over_quota"
	}
	return fmt.Sprintf("PutStatus(%d)", uint8(s))
}

// ByQuota reports whether a quota refused the piece.
func (s PutStatus) ByQuota() bool { return s == OverQuota || s == OverTenantQuota }

func (e *Entry) validate(ns *namespace) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("trie: namespace %q: block %v: %s: %w", ns.def.Name, e.ID, fmt.Sprintf(format, args...), ErrEntry)
	}
	groups := len(ns.def.Geometry.Groups)
	switch {
	case e.ID.IsZero():
		return bad("the zero id names no block")
	case e.Group < 0 || e.Group >= groups:
		return bad("layer group %d; the geometry has %d", e.Group, groups)
	case e.Class != Prefix && e.Class != Transfer:
		return bad("class %d", e.Class)
	case e.Ref.Generation>>kv.GenerationBits != 0:
		return bad("generation %d has more than %d bits", e.Ref.Generation, kv.GenerationBits)
	case ns.def.Index == kv.IndexFlat && !e.Parent.IsZero():
		return bad("parent %v in a flat namespace", e.Parent)
	case e.Parent == e.ID:
		return bad("it is its own parent")
	}
	return nil
}

// putScratch is the reused memory of one Put.
type putScratch struct {
	added []addedNode
	gone  []Evicted
	// raised has the pieces whose class changes from Transfer to Prefix. guard pins them, so that
	// they are not evicted meanwhile.
	raised []addedNode
	buf    []byte
	// exists is set if the index already has some of the entries, perhaps not durably. pending is
	// set if some of these entries were added by another Put that is still in progress.
	exists, pending bool
	// wrote is set if the batch contained at least one record.
	wrote bool
}

// addedNode is a piece whose record is not written yet.
type addedNode struct {
	entry int // index in the call's entries
	node  uint32
	rec   record
	ext   kv.Extent
}

func (s *putScratch) reset() {
	s.added, s.gone, s.raised = s.added[:0], s.gone[:0], s.raised[:0]
	s.exists, s.pending, s.wrote = false, false, false
}

// Put indexes pieces of a live epoch whose bytes are on storage. An entry may be the parent of
// later entries of the same call. Put writes one Pebble batch with the records of the entries,
// synced if durable is set. The entries become matchable after that. A durable Put that finds an
// entry of a concurrent Put waits for that Put. Put appends one status per entry to dst and returns
// dst.
//
// An error (ErrEntry, ErrNamespaceUnknown, ErrFull, ErrBroken, ErrClosed) with no status appended
// means that none of the entries is matchable, and that the caller owns their slots. After
// ErrBroken it is unknown whether the records are on disk: Pebble writes a batch to its log in
// pieces, and a restart finds all of the batch or nothing. If the caller reused a slot before that
// restart, the found record has an old generation, so a read is a miss. ErrBroken with statuses
// means that the Added entries are matchable and keep their slots, but that the entries with status
// Exists could not be made durable.
func (t *Trie) Put(dst []PutStatus, id kv.NamespaceID, epoch kv.Epoch, entries []Entry, durable bool) ([]PutStatus, error) {
	s := t.putPool.Get().(*putScratch)
	defer t.putPool.Put(s)
	s.reset()
	base := len(dst)
	dst, err := t.stageAndWrite(s, dst, id, epoch, entries, durable)
	if err != nil {
		return dst[:base], err
	}
	if len(s.gone) > 0 {
		if err := t.forget(s.gone); err != nil {
			return dst, err
		}
	}
	if durable && (s.pending || s.exists && !s.wrote) {
		return dst, t.awaitExisting(id, epoch, entries, dst[base:])
	}
	return dst, nil
}

// stageAndWrite adds the entries and writes their records. It holds Trie.records, so that no Move
// runs between the decision on an entry and the write of its record.
func (t *Trie) stageAndWrite(s *putScratch, dst []PutStatus, id kv.NamespaceID, epoch kv.Epoch, entries []Entry, durable bool) ([]PutStatus, error) {
	t.records.RLock()
	defer t.records.RUnlock()
	base := len(dst)
	dst, err := t.stage(s, dst, id, epoch, entries)
	if err != nil {
		return dst, err
	}
	if err := t.writePut(s, durable); err != nil {
		t.unstage(s)
		return dst, err
	}
	s.wrote = len(s.added)+len(s.raised) > 0
	t.settle(s, entries, dst[base:])
	return dst, nil
}

// stage sets the status of every entry. It adds the nodes of the new entries. These nodes are
// pending (not matchable) until settle.
func (t *Trie) stage(s *putScratch, dst []PutStatus, id kv.NamespaceID, epoch kv.Epoch, entries []Entry) ([]PutStatus, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.disk.Load().broken(); err != nil && !t.closed {
		return dst, err
	}
	ns, err := t.lookupLocked(id)
	if err != nil {
		return dst, err
	}
	for i := range entries {
		if err := entries[i].validate(ns); err != nil {
			return dst, err
		}
	}
	if ns.announced {
		return dst, fmt.Errorf("trie: put: namespace %q has no record: %w", ns.def.Name, ErrEntry)
	}
	sp := ns.version(epoch)
	if sp == nil {
		for range entries {
			dst = append(dst, StaleEpoch)
		}
		return dst, nil
	}
	a := admission{t: t, ns: ns, sp: sp, write: true}
	for i := range entries {
		e := &entries[i]
		p := a.place(e)
		switch p.status {
		case Added:
			if !t.stageEntry(s, &a, i, e, p) {
				t.unstageLocked(s)
				return dst, fmt.Errorf("trie: %d pieces: %w", t.nodes.live, ErrFull)
			}
		case Exists:
			s.exists = true
			s.pending = s.pending || t.nodes.at(p.node).has(flagPending)
			t.raiseClass(s, &a, e, p.node)
		}
		dst = append(dst, p.status)
	}
	return dst, nil
}

// stageEntry adds a pending (not yet matchable) node for an entry whose status is Added. It returns
// false if the index is full.
func (t *Trie) stageEntry(s *putScratch, a *admission, i int, e *Entry, p placement) bool {
	flags := uint32(flagPending)
	if e.Class == Transfer {
		flags |= flagTransfer
	}
	n := t.addNodeLocked(a.sp, e.ID, uint8(e.Group), p.parent, p.depth, e.Ref, flags)
	if n == 0 {
		return false
	}
	s.added = append(s.added, addedNode{entry: i, node: n, rec: t.recordOf(n), ext: e.Ref.Extent})
	a.last, a.lastID = n, e.ID
	if e.Group != 0 {
		a.last = p.parent
	}
	return true
}

// raiseClass changes the class of an existing piece from Transfer to Prefix.
func (t *Trie) raiseClass(s *putScratch, a *admission, e *Entry, n uint32) {
	nd := t.nodes.at(n)
	if e.Class != Prefix || !nd.has(flagTransfer) || nd.has(flagPending) || !guard(nd) {
		return
	}
	nd.state.And(^uint32(flagTransfer))
	t.policy.Remove(n)
	t.policy.Insert(n, t.contentKey(n))
	s.raised = append(s.raised, addedNode{node: n, rec: t.recordOf(n), ext: nd.extent})
}

// recordOf returns the record of a node.
func (t *Trie) recordOf(n uint32) record {
	nd := t.nodes.at(n)
	r := record{id: nd.id, gen: nd.gen(), serial: t.spaces[nd.space].serial, depth: t.nodes.depth(n), group: nd.group()}
	if nd.has(flagTransfer) {
		r.flags |= recTransfer
	}
	if r.group != 0 || nd.parent == 0 {
		return r
	}
	p := t.nodes.at(nd.parent)
	if p.extent+1 != nd.extent {
		r.flags |= recParentID
		r.parent = p.id
		return r
	}
	r.flags |= recParentPrev
	hint := hintOf(&p.id)
	copy(r.parent[:], hint[:])
	return r
}

func (t *Trie) writePut(s *putScratch, durable bool) error {
	if len(s.added)+len(s.raised) == 0 {
		return nil
	}
	b := t.disk.Load().db.NewBatch()
	for _, list := range [][]addedNode{s.added, s.raised} {
		for i := range list {
			if err := s.set(b, &list[i]); err != nil {
				b.Close()
				return fmt.Errorf("%w: %w", ErrBroken, err)
			}
		}
	}
	return t.commit(b, durable, s.revert)
}

// revert adds the records that make Pebble equal to DRAM after a failed Put. It deletes the records
// of the added pieces. It writes the raised pieces with the new class, which they keep in DRAM.
func (s *putScratch) revert(r reverts) {
	for _, a := range s.added {
		r.remove(appendBlockKey(s.buf[:0], a.ext))
	}
	for _, a := range s.raised {
		r.set(appendBlockKey(nil, a.ext), a.rec.append(nil))
	}
}

func (s *putScratch) set(b *pebble.Batch, a *addedNode) error {
	s.buf = appendBlockKey(s.buf[:0], a.ext)
	s.buf = a.rec.append(s.buf)
	return b.Set(s.buf[:blockKeyLen], s.buf[blockKeyLen:], nil)
}

// settle makes the pieces matchable after their records were written. If their epoch was retired
// meanwhile, settle removes them and sets their status to StaleEpoch.
func (t *Trie) settle(s *putScratch, entries []Entry, status []PutStatus) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range s.added {
		a := &s.added[i]
		t.clearPendingLocked(a.node)
		t.addedLocked(a.node, &entries[a.entry])
	}
	// All nodes are of one space. The loop runs from the leaves to the root, so that each node has
	// no children when it is removed.
	for i := len(s.added) - 1; i >= 0; i-- {
		a := &s.added[i]
		if t.spaces[t.nodes.at(a.node).space].dead && t.evictable(a.node) {
			status[a.entry] = StaleEpoch
			t.policy.Remove(a.node)
			s.gone = t.removeNodeLocked(s.gone, a.node, Cleared)
		}
	}
	t.unguardRaised(s)
	t.settled.Broadcast()
}

// unguardRaised removes the pins that raiseClass set with guard. Trie.mu is held.
func (t *Trie) unguardRaised(s *putScratch) {
	for _, r := range s.raised {
		t.leases.unguard(t, r.node)
	}
	s.raised = s.raised[:0]
}

// clearPendingLocked makes a node matchable and evictable.
func (t *Trie) clearPendingLocked(n uint32) {
	nd := t.nodes.at(n)
	nd.state.And(^uint32(flagPending))
	if nd.has(flagTransfer) {
		t.policy.InsertCold(n)
	} else {
		t.policy.Insert(n, t.contentKey(n))
	}
	if nd.childCount() == 0 {
		t.leavesOf(n).addNewest(&t.nodes, n)
	}
	if nd.has(flagDoomed) || t.spaces[nd.space].dead {
		t.sweep.kick()
	}
}

// unstage removes the nodes that stage has added, after the write of their records has failed.
func (t *Trie) unstage(s *putScratch) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unstageLocked(s)
	t.settled.Broadcast()
}

func (t *Trie) unstageLocked(s *putScratch) {
	for i := len(s.added) - 1; i >= 0; i-- {
		n := s.added[i].node
		if t.nodes.at(n).childCount() == 0 {
			s.gone = t.removeNodeLocked(s.gone[:0], n, Dropped)
			continue
		}
		// A concurrent Put has added a child to the node, so the node cannot be removed here. It is
		// doomed (made unmatchable), and ReclaimStep removes it later.
		t.doomLocked(n, Dropped)
		t.clearPendingLocked(n)
	}
	s.added, s.gone = s.added[:0], s.gone[:0]
	t.unguardRaised(s)
}

// awaitExisting waits until the entries with status Exists, which another Put has added, are
// committed, and then makes them durable.
func (t *Trie) awaitExisting(id kv.NamespaceID, epoch kv.Epoch, entries []Entry, status []PutStatus) error {
	t.mu.Lock()
	for i := range entries {
		for status[i] == Exists && t.pendingLocked(id, epoch, &entries[i]) {
			t.settled.Wait()
		}
	}
	t.mu.Unlock()
	return t.sync()
}

func (t *Trie) pendingLocked(id kv.NamespaceID, epoch kv.Epoch, e *Entry) bool {
	ns, ok := t.namespaces[id]
	if !ok || t.closed {
		return false
	}
	sp := ns.version(epoch)
	if sp == nil {
		return false
	}
	n := t.table.find(sp.number, uint8(e.Group), &e.ID)
	return n != 0 && t.nodes.at(n).has(flagPending)
}

// Known appends to dst the status that Put would return for each entry: Added for a new entry. It
// changes nothing and ignores Entry.Ref.
func (t *Trie) Known(dst []PutStatus, id kv.NamespaceID, epoch kv.Epoch, entries []Entry) ([]PutStatus, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return dst, err
	}
	a := admission{t: t, ns: ns, sp: ns.version(epoch)}
	for i := range entries {
		e := entries[i]
		e.Ref = kv.Ref{}
		if err := e.validate(ns); err != nil {
			return dst[:len(dst)-i], err
		}
		if a.sp == nil {
			dst = append(dst, StaleEpoch)
			continue
		}
		p := a.place(&e)
		if p.status == Added {
			a.promise(&e, p)
		}
		dst = append(dst, p.status)
	}
	return dst, nil
}

// admission decides which entries of one call of Put or Known are added to the index.
type admission struct {
	t  *Trie
	ns *namespace
	sp *space
	// write is set in Put, which holds the write lock and so may doom nodes (make them
	// unmatchable).
	write bool
	// last is the node of the last block that was added or found (its piece of layer group 0), and
	// lastID is the id of that block. The next entry is nearly always a child of last.
	last   uint32
	lastID kv.BlockID
	// promised has the depth of each piece for which Known returned Added. bytes is the total size
	// of the slots of these pieces.
	promised map[pieceKey]uint32
	bytes    int64
}

type pieceKey struct {
	id    kv.BlockID
	group int
}

// placement is the status of an entry and its position in the tree of the index.
type placement struct {
	status PutStatus
	// node is the existing node if status is Exists. Otherwise parent is the node number of the
	// entry's parent, and depth the entry's distance from the root.
	node, parent, depth uint32
}

func (a *admission) place(e *Entry) placement {
	if _, ok := a.promised[pieceKey{e.ID, e.Group}]; ok {
		return placement{status: Exists}
	}
	parent, depth, ok := a.parent(e)
	if !ok {
		return placement{status: ParentAbsent}
	}
	if n := a.find(uint8(e.Group), &e.ID); n != 0 {
		if a.t.nodes.at(n).parent != parent {
			return placement{status: ParentMismatch}
		}
		if e.Group == 0 {
			a.last, a.lastID = n, e.ID
		}
		return placement{status: Exists, node: n}
	}
	switch {
	case int64(depth) >= int64(a.t.opts.MaxChainBlocks):
		return placement{status: TooDeep}
	case !a.ns.room(a.bytes + a.ns.slotBytes[e.Group]):
		return placement{status: OverQuota}
	case !a.ns.tenant.room(a.bytes + a.ns.slotBytes[e.Group]):
		return placement{status: OverTenantQuota}
	}
	return placement{status: Added, parent: parent, depth: depth}
}

// parent finds the parent node of e; 0 for a root. ok is false if the index does not have the
// parent.
func (a *admission) parent(e *Entry) (parent, depth uint32, ok bool) {
	want := e.Parent
	var deeper uint32 = 1
	switch {
	case !a.ns.tree:
		return 0, 0, true
	case e.Group != 0:
		want, deeper = e.ID, 0
	case want.IsZero():
		return 0, 0, true
	}
	if d, ok := a.promised[pieceKey{want, 0}]; ok {
		return 0, d + deeper, true
	}
	n := a.last
	if n == 0 || want != a.lastID {
		n = a.find(0, &want)
	}
	if n == 0 {
		return 0, 0, false
	}
	return n, a.t.nodes.depth(n) + deeper, true
}

// find returns the node of a piece that is matchable or pending, or 0. If write is set, and the
// node has a doomed (unmatchable) ancestor, find dooms the node too and returns 0.
func (a *admission) find(group uint8, id *kv.BlockID) uint32 {
	n := a.t.table.find(a.sp.number, group, id)
	if n == 0 || a.sp.doomed == 0 || a.t.rootedLocked(n) {
		return n
	}
	if a.write {
		a.t.doomLocked(n, a.t.doomedAbove(n))
	}
	return 0
}

// promise records an entry for which Known returns Added. Later entries of the call may be children
// of that entry.
func (a *admission) promise(e *Entry, p placement) {
	if a.promised == nil {
		a.promised = make(map[pieceKey]uint32)
	}
	a.promised[pieceKey{e.ID, e.Group}] = p.depth
	a.bytes += a.ns.slotBytes[e.Group]
}
