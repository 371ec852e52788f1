package trie

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie/evict"
)

// A Trie is the prefix index of one storage node. All methods may be called concurrently, unless
// their comments forbid it.
type Trie struct {
	opts Options
	// disk changes only in Relocate, with defMu held and records held for writing.
	disk atomic.Pointer[disk]
	// copying is the index that Relocate writes, nil outside of Relocate. It changes with defMu
	// held and records held for writing.
	copying atomic.Pointer[copying]
	// relocating is held by Relocate and by Close.
	relocating sync.Mutex

	// defMu serialises changes of namespace definitions, each with its synced write. It is locked
	// before mu.
	defMu sync.Mutex
	marks marks

	// records excludes changes of records while Move changes the records' keys and while Relocate
	// copies records. A call that adds or changes the record of a node holds records for reading,
	// from its decision on the node until the record is written. A call that only deletes records
	// of removed nodes holds records for reading during the write. Move and each step of Relocate
	// hold records for writing. records is locked after defMu and before mu.
	records sync.RWMutex

	// mu guards all fields below, except where a field's comment names another lock.
	mu     sync.RWMutex
	closed bool
	nodes  slab
	table  *table
	policy evict.Policy
	// spaces is indexed by node.space; entry 0 and free entries are nil. freeSpaces are the indexes of
	// the free entries.
	spaces     []*space
	freeSpaces []uint16
	bySerial   map[uint64]uint16
	namespaces map[kv.NamespaceID]*namespace
	byName     map[string]*namespace
	// recorded has the namespaces that have a record in Pebble.
	recorded map[kv.NamespaceID]*namespace
	// tenants are the tenants with a quota, sorted by prefix. No prefix begins with another.
	tenants []*tenant
	// garbage is the number of nodes that are doomed (deleted) or in a dead space (a retired
	// epoch).
	garbage int
	// reportedBytes is the argument of the last call of Options.Grew: the DRAM of the index, in
	// bytes.
	reportedBytes int64
	// bytes is the size of the slots of all nodes.
	bytes int64
	sweep sweep
	// looks counts the leaves that Evict examined in namespaces' lists.
	looks int64
	// settled is signalled, under mu, whenever nodes stop being pending (not matchable, because
	// their records are not written yet).
	settled *sync.Cond

	leases leases
	load   LoadStats
	// onChange is nil until OnChange is called.
	onChange func(Change)
	// putPool and matchPool hold scratch space, so that the hot paths do not
	// allocate.
	putPool, matchPool sync.Pool
}

// space is one (namespace, epoch). Each node belongs to one space. Spaces share no nodes, so the
// cost of beginning or ending an epoch does not depend on the number of pieces.
type space struct {
	ns *namespace
	// serial is the number of the space on disk. It is never reused.
	serial uint64
	epoch  kv.Epoch
	// number is the index of the space in Trie.spaces; 0: the namespace is announced.
	number uint16
	// dead is set when the epoch is retired, also by a bump, or when all blocks of the epoch are
	// deleted.
	dead bool
	// nodes counts all nodes of the space, and doomed the nodes with flagDoomed (unmatchable).
	nodes, doomed int
	// pieces[g] is the number of nodes of layer group g that are not doomed. bytes is the size of
	// the slots of all nodes.
	pieces [kv.MaxGroups]int64
	bytes  int64
	// leaves is the order of eviction for an eviction that takes pieces of this space only.
	leaves leaves
	// leases counts the open leases on pieces of the space, and pins the leases that keep the epoch
	// live. Trie.leases.mu guards both.
	leases, pins int64
	// matches counts the matches with MatchOptions.Count that this space answered, and hits the
	// blocks that they matched.
	matches, hits atomic.Int64
}

// namespace is a definition with the state of all its spaces.
type namespace struct {
	def kv.Namespace
	// announced: the namespace has no record in Pebble, and its spaces have neither serials nor numbers.
	// So it has no pieces (Trie.Announce).
	announced bool
	// live has one space for each live epoch, in the order of kv.Namespace.Live.
	live      []*space
	slotBytes [kv.MaxGroups]int64
	// tree is set if a piece of group 0 has the previous block as its parent, and pieces of other
	// groups are children of the block's piece of group 0.
	tree bool
	// bytes is the size of the slots of all pieces of the namespace, and garbage the number of its
	// unmatchable nodes.
	bytes   int64
	garbage int
	// tenant has the quota that the namespace counts towards; nil: none.
	tenant *tenant
	// leases counts the open leases on pieces of the namespace. Trie.leases.mu guards it.
	leases int64
}

// version returns the space of a live epoch, or nil. Trie.mu or Trie.defMu is held.
func (ns *namespace) version(e kv.Epoch) *space {
	for _, sp := range ns.live {
		if sp.epoch == e {
			return sp
		}
	}
	return nil
}

func newNamespace(def kv.Namespace, slotBytes func(kv.Geometry, int) int64) *namespace {
	ns := &namespace{def: def}
	for g, group := range def.Geometry.Groups {
		ns.slotBytes[g] = slotBytes(def.Geometry, g)
		if g == 0 {
			ns.tree = group.Kind == kv.Full && def.Index == kv.IndexTrie
		}
	}
	return ns
}

func (ns *namespace) overQuota() bool {
	return ns.def.QuotaBytes > 0 && ns.bytes > ns.def.QuotaBytes
}

// room reports whether slots of the size bytes fit the quota of the namespace.
func (ns *namespace) room(bytes int64) bool {
	return ns.def.QuotaBytes == 0 || ns.bytes+bytes <= ns.def.QuotaBytes
}

// Open reads the index in opts.Dir into DRAM, or creates an empty one. It drops the records that
// cannot be matched any more (of a retired epoch or a deleted namespace, or with an ancestor lost
// in a crash); Stats.Load counts these records. Afterwards the owner of the slots must treat a slot
// as free unless Refs yields it.
func Open(opts Options) (*Trie, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	policy, err := evict.New(opts.Policy, opts.Tuning)
	if err != nil {
		return nil, fmt.Errorf("trie: %w", err)
	}
	d, err := openDisk(opts, false)
	if err != nil {
		return nil, err
	}
	t := &Trie{
		opts: opts, policy: policy,
		spaces:     make([]*space, 1),
		bySerial:   make(map[uint64]uint16),
		namespaces: make(map[kv.NamespaceID]*namespace),
		byName:     make(map[string]*namespace),
		recorded:   make(map[kv.NamespaceID]*namespace),
	}
	t.disk.Store(d)
	t.table = newTable(&t.nodes, [2]uint64{rand.Uint64(), rand.Uint64()})
	t.settled = sync.NewCond(&t.mu)
	t.leases.max, t.leases.maxPins = opts.MaxLeases, opts.MaxPins
	t.putPool.New = func() any { return new(putScratch) }
	t.matchPool.New = func() any { return new(matchScratch) }
	if err := t.loadAll(); err != nil {
		d.close()
		return nil, fmt.Errorf("trie: open %s: %w", opts.Dir, err)
	}
	d.fs.retry.Store(true)
	return t, nil
}

// SetMaxLeases replaces Options.MaxLeases. Open leases stay; if there are more, no lease is granted
// until there are fewer. max is from 1 to MaxLeasesLimit.
func (t *Trie) SetMaxLeases(max int) {
	t.leases.mu.Lock()
	defer t.leases.mu.Unlock()
	t.leases.max = max
}

// Close syncs and closes Pebble. No other call may be in progress; later calls fail with ErrClosed.
// A second call of Close does nothing.
//
// While the drive fails or hangs, closing Pebble would wait for the drive. Close then returns
// ErrBroken and leaves Pebble open: its goroutines, open files and lock stay until the process
// ends. The next Open finds all durable data.
func (t *Trie) Close() error {
	t.relocating.Lock()
	defer t.relocating.Unlock()
	t.mu.Lock()
	was := t.closed
	t.closed = true
	t.mu.Unlock()
	if was {
		return nil
	}
	return t.disk.Load().close()
}

// Sync makes all puts, evictions and deletions before the call durable.
func (t *Trie) Sync() error {
	if err := t.usable(); err != nil {
		return err
	}
	return t.sync()
}

// sync makes all committed batches durable.
func (t *Trie) sync() error {
	t.records.RLock()
	defer t.records.RUnlock()
	return t.disk.Load().sync()
}

// commit commits the batch as disk.commit does. While Relocate copies the index, it also writes the
// change to the copy. defMu is held, or records for reading.
func (t *Trie) commit(b *pebble.Batch, sync bool, revert func(reverts)) error {
	c := t.copying.Load()
	if c == nil {
		return t.disk.Load().commit(b, sync, revert)
	}
	change := slices.Clone(b.Repr())
	err := t.disk.Load().commit(b, sync, revert)
	if err != nil {
		c.revert(revert)
	} else {
		c.apply(change)
	}
	return err
}

// Writable returns nil, or ErrBroken with the cause while the index refuses changes.
func (t *Trie) Writable() error { return t.disk.Load().broken() }

func (t *Trie) usable() error {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.closed {
		return ErrClosed
	}
	return nil
}

// lookupLocked returns the namespace, if the trie is open.
func (t *Trie) lookupLocked(id kv.NamespaceID) (*namespace, error) {
	if t.closed {
		return nil, ErrClosed
	}
	ns, ok := t.namespaces[id]
	if !ok {
		return nil, fmt.Errorf("trie: namespace id %d: %w", id, ErrNamespaceUnknown)
	}
	return ns, nil
}

// addSpaceLocked assigns a number to sp, or fails if all numbers are in use.
func (t *Trie) addSpaceLocked(sp *space) error {
	switch free := len(t.freeSpaces); {
	case free > 0:
		sp.number, t.freeSpaces = t.freeSpaces[free-1], t.freeSpaces[:free-1]
	case len(t.spaces) > maxSpaces:
		return fmt.Errorf("trie: %d epochs have blocks or wait for ReclaimStep: %w", maxSpaces, ErrTooManyNamespaces)
	default:
		sp.number = uint16(len(t.spaces))
		t.spaces = append(t.spaces, nil)
	}
	t.spaces[sp.number] = sp
	t.bySerial[sp.serial] = sp.number
	return nil
}

// killSpaceLocked makes all pieces of sp unmatchable. It is called when the epoch of sp is retired
// and when all of its blocks are deleted.
func (t *Trie) killSpaceLocked(sp *space) {
	sp.dead = true
	why := Cleared
	if t.namespaces[sp.ns.def.ID] == nil {
		why = Deleted
	}
	t.changeLocked(SpaceCleared, why, sp, 0, kv.BlockID{}, kv.BlockID{})
	t.addGarbageLocked(sp.ns, sp.nodes-sp.doomed)
	t.sweep.kick()
	t.dropSpaceLocked(sp)
}

// dropSpaceLocked frees the number of sp if sp is dead (all of its pieces are unmatchable) and has
// no nodes.
func (t *Trie) dropSpaceLocked(sp *space) {
	if sp.dead && sp.nodes == 0 {
		t.freeSpaceLocked(sp)
	}
}

// freeSpaceLocked frees the number of a space without nodes, if it has one.
func (t *Trie) freeSpaceLocked(sp *space) {
	if sp.number == 0 || t.spaces[sp.number] != sp {
		return
	}
	t.spaces[sp.number] = nil
	t.freeSpaces = append(t.freeSpaces, sp.number)
	delete(t.bySerial, sp.serial)
}

func (t *Trie) addGarbageLocked(ns *namespace, n int) {
	t.garbage += n
	ns.garbage += n
	if ns.tenant != nil {
		ns.tenant.garbage += n
	}
}

// addBytesLocked adds n bytes of slots to the byte count of a space. n is negative for freed slots.
func (t *Trie) addBytesLocked(sp *space, n int64) {
	sp.bytes += n
	sp.ns.bytes += n
	t.bytes += n
	if tn := sp.ns.tenant; tn != nil {
		tn.bytes += n
	}
}

// addNodeLocked creates a node for a piece, and adds the node to the table and to its parent. It
// returns 0 if the index is full.
func (t *Trie) addNodeLocked(sp *space, id kv.BlockID, group uint8, parent, depth uint32, ref kv.Ref, flags uint32) uint32 {
	n := t.nodes.alloc()
	if n == 0 {
		return 0
	}
	if n == t.nodes.top && n&chunkMask == 0 {
		t.noteGrowthLocked()
	}
	nd := t.nodes.at(n)
	nd.id, nd.space, nd.parent, nd.depthOrOlder = id, sp.number, parent, depth
	nd.setRef(ref)
	nd.state.Store(uint32(group)<<groupShift | flags)
	t.table.insert(n)
	if parent != 0 {
		sp.leaves.remove(&t.nodes, parent)
		t.nodes.at(parent).kidsOrNewer++
	}
	sp.nodes++
	sp.pieces[group]++
	t.addBytesLocked(sp, sp.ns.slotBytes[group])
	return n
}

// evictable reports whether n may be evicted now.
func (t *Trie) evictable(n uint32) bool {
	nd := t.nodes.at(n)
	return nd.childCount() == 0 && nd.state.Load()>>pinShift == 0 && !nd.has(flagPending)
}

// removeNodeLocked removes an evictable or pending node and appends its piece to dst. The caller
// must have removed the node from the policy. why is the reason of the removal. It is not used if
// the node was unmatchable already (doomed, or in a dead space), because that has a reason of its
// own.
func (t *Trie) removeNodeLocked(dst []Evicted, n uint32, why Why) []Evicted {
	nd := t.nodes.at(n)
	invariants.Assert(nd.childCount() == 0 && nd.pins() == 0, "prefix-closed, pinned-stays: node %d is removed with %d children and %d pins", n, nd.childCount(), nd.pins())
	sp, group := t.spaces[nd.space], nd.group()
	ns := sp.ns
	switch {
	case sp.dead:
		why = Cleared
	case nd.has(flagDoomed):
		why = nd.doomedWhy()
	}
	t.goneLocked(nd, why)
	gone := Evicted{
		Ref: nd.ref(), ID: nd.id, Namespace: ns.def.ID, Epoch: sp.epoch,
		Group: int(group), Class: nd.class(), Why: why, SlotBytes: ns.slotBytes[group],
	}
	if ns.tenant != nil {
		gone.Tenant = ns.tenant.prefix
	}
	dst = append(dst, gone)
	doomed := nd.has(flagDoomed)
	if doomed {
		sp.doomed--
	} else {
		t.table.remove(n)
	}
	if doomed || sp.dead {
		t.addGarbageLocked(ns, -1)
		t.sweep.idle = 0
	}
	if !doomed {
		sp.pieces[group]--
	}
	sp.nodes--
	t.addBytesLocked(sp, -ns.slotBytes[group])
	parent := nd.parent
	sp.leaves.remove(&t.nodes, n)
	t.nodes.release(n)
	if parent != 0 {
		t.nodes.at(parent).kidsOrNewer--
		t.evictableAgainLocked(parent)
	}
	t.dropSpaceLocked(sp)
	return dst
}

// contentKey returns a hash of the piece's space, group and id. If the piece is put again after its
// eviction, its hash is the same.
func (t *Trie) contentKey(n uint32) uint64 { return t.table.hashOf(n) }

// sweep is the position of sweepStep, which searches all nodes for unmatchable pieces.
type sweep struct {
	hand uint32
	// idle counts the nodes examined since the sweep last doomed or removed a node. When idle
	// exceeds the number of nodes, the sweep pauses until kick is called.
	idle   uint32
	kicked atomic.Bool
}

// kick makes a paused sweep continue. It is called after a node became unmatchable, or an
// unmatchable node became removable. kick may be called under the read lock.
func (s *sweep) kick() { s.kicked.Store(true) }
