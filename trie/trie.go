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

// A Trie is the prefix index of one storage node. All methods may be called
// concurrently unless they say otherwise.
type Trie struct {
	opts Options
	// disk changes in Relocate only, with defMu held and records held for writing.
	disk atomic.Pointer[disk]
	// copying is the index that Relocate makes, nil if it makes none. It changes with
	// defMu held and records held for writing.
	copying atomic.Pointer[copying]
	// relocating is held by Relocate and by Close.
	relocating sync.Mutex

	// defMu serialises changes of namespace definitions, each with its synced
	// write. It comes before mu.
	defMu sync.Mutex
	marks marks

	// records orders changes of records with Move, which changes their keys, and with
	// Relocate, which copies them. A call that adds or changes the record of a node holds
	// records for reading, from the decision until the record is written. A call that only
	// deletes records of nodes that are gone holds it while it writes. Move and each step
	// of Relocate hold it for writing. It is locked after defMu and before mu.
	records sync.RWMutex

	// mu guards everything below, except what says otherwise.
	mu     sync.RWMutex
	closed bool
	nodes  slab
	table  *table
	policy evict.Policy
	// spaces is indexed by node.space; entry 0 and free entries are nil.
	spaces     []*space
	bySerial   map[uint64]uint16
	namespaces map[kv.NamespaceID]*namespace
	byName     map[string]*namespace
	// garbage counts the nodes that are doomed or in a dead space.
	garbage int
	// told is the DRAM that Options.Grew was called with last.
	told int64
	// bytes are the slots of every node.
	bytes int64
	sweep sweep
	// looks counts the leaves that Evict looked at in namespaces' lists.
	looks int64
	// settled is signalled, under mu, whenever pending nodes stop being so.
	settled *sync.Cond

	leases leases
	load   LoadStats
	// onChange is nil until OnChange is called.
	onChange func(Change)
	// putPool and matchPool hold scratch space, so that the hot paths do not
	// allocate.
	putPool, matchPool sync.Pool
}

// space is one (namespace, epoch): what nodes belong to. Spaces share no nodes, so
// an epoch begins and ends whatever the number of its pieces.
type space struct {
	ns *namespace
	// serial is its number on disk, never reused.
	serial uint64
	epoch  kv.Epoch
	// number is its index in Trie.spaces.
	number uint16
	// dead: the epoch was retired, by a bump too, or its blocks were deleted.
	dead bool
	// nodes counts all of its nodes, doomed those with flagDoomed.
	nodes, doomed int
	// pieces counts the nodes that are not doomed by group, and bytes the slots of
	// all nodes.
	pieces [kv.MaxGroups]int64
	bytes  int64
	// leaves are in the order of eviction from this space alone.
	leaves leaves
	// leases are open on its pieces, and pins hold the epoch itself; both are
	// guarded by Trie.leases.mu.
	leases, pins int64
	// matches and hits count the matches that MatchOptions.Count asked to count and
	// that this space answered, and the blocks that they matched.
	matches, hits atomic.Int64
}

// namespace is a definition with what is stored under it, in all of its spaces.
type namespace struct {
	def kv.Namespace
	// live has the space of each live epoch, as kv.Namespace.Live orders them.
	live      []*space
	slotBytes [kv.MaxGroups]int64
	// tree: pieces of group 0 have parents and the other groups hang on them.
	tree bool
	// bytes, garbage: slots and unmatchable nodes of every space.
	bytes   int64
	garbage int
	// leases are open on its pieces, of every space; guarded by Trie.leases.mu.
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

func (ns *namespace) room(bytes int64) bool {
	return ns.def.QuotaBytes == 0 || ns.bytes+bytes <= ns.def.QuotaBytes
}

// Open reads the index in opts.Dir into DRAM, or starts an empty one. Records
// that cannot be matched any more (an old epoch, a deleted namespace, an ancestor
// lost in a crash) are dropped; Stats.Load counts them. The owner of the slots must
// afterwards take everything that Refs does not name for free.
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

// Close syncs and closes Pebble. No other call may be in progress; later ones
// fail with ErrClosed. It is safe to call twice.
//
// While the drive fails or hangs, Close returns ErrBroken without closing Pebble, whose
// Close would wait for the drive: Pebble's goroutines, open files and lock stay until
// the process ends. Everything that was durable is found by the next Open.
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

// Sync makes everything put, evicted or deleted before the call durable.
func (t *Trie) Sync() error {
	if err := t.usable(); err != nil {
		return err
	}
	return t.sync()
}

// sync makes all that was committed durable.
func (t *Trie) sync() error {
	t.records.RLock()
	defer t.records.RUnlock()
	return t.disk.Load().sync()
}

// commit is disk.commit. While Relocate makes a copy of the index, the change is written
// to the copy too. defMu is held, or records for reading.
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

// addSpaceLocked gives sp a number, or fails when all are taken.
func (t *Trie) addSpaceLocked(sp *space) error {
	for i := 1; i < len(t.spaces); i++ {
		if t.spaces[i] == nil {
			sp.number = uint16(i)
			break
		}
	}
	if sp.number == 0 {
		if len(t.spaces) > maxSpaces {
			return fmt.Errorf("trie: %d epochs wait for ReclaimStep: %w", maxSpaces, ErrTooManyNamespaces)
		}
		sp.number = uint16(len(t.spaces))
		t.spaces = append(t.spaces, nil)
	}
	t.spaces[sp.number] = sp
	t.bySerial[sp.serial] = sp.number
	return nil
}

// killSpaceLocked makes everything in sp unmatchable.
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

// dropSpaceLocked frees the number of a dead space once it is empty.
func (t *Trie) dropSpaceLocked(sp *space) {
	if sp.dead && sp.nodes == 0 {
		t.spaces[sp.number] = nil
		delete(t.bySerial, sp.serial)
	}
}

func (t *Trie) addGarbageLocked(ns *namespace, n int) {
	t.garbage += n
	ns.garbage += n
}

// addBytesLocked adds n slots to the byte count of a space. n is negative for slots that
// the space gives back.
func (t *Trie) addBytesLocked(sp *space, n int64) {
	sp.bytes += n
	sp.ns.bytes += n
	t.bytes += n
}

// addNodeLocked makes a node for a piece and links it into table and parent. It
// returns 0 when the index is full.
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

// evictable reports whether n may go now.
func (t *Trie) evictable(n uint32) bool {
	nd := t.nodes.at(n)
	return nd.kids() == 0 && nd.state.Load()>>pinShift == 0 && !nd.has(flagPending)
}

// removeNodeLocked takes an evictable or pending node out and appends it to dst. The
// policy must have forgotten it already. why counts if the node is neither doomed nor in
// a dead space.
func (t *Trie) removeNodeLocked(dst []Evicted, n uint32, why Why) []Evicted {
	nd := t.nodes.at(n)
	invariants.Assert(nd.kids() == 0 && nd.pins() == 0, "prefix-closed, pinned-stays: node %d is removed with %d children and %d pins", n, nd.kids(), nd.pins())
	sp, group := t.spaces[nd.space], nd.group()
	ns := sp.ns
	switch {
	case sp.dead:
		why = Cleared
	case nd.has(flagDoomed):
		why = nd.doomedWhy()
	}
	t.goneLocked(nd, why)
	dst = append(dst, Evicted{
		Ref: nd.ref(), ID: nd.id, Namespace: ns.def.ID, Epoch: sp.epoch,
		Group: int(group), Class: nd.class(), Why: why, SlotBytes: ns.slotBytes[group],
	})
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

// contentKey identifies a piece's content across evictions.
func (t *Trie) contentKey(n uint32) uint64 { return t.table.hashOf(n) }

// sweep is the state of the search for garbage.
type sweep struct {
	hand uint32
	// idle counts the nodes looked at since the last progress: when it exceeds
	// all of them, nothing can be done until kicked.
	idle   uint32
	kicked atomic.Bool
}

// kick says that garbage was made or became removable. It may be called under
// the read lock.
func (s *sweep) kick() { s.kicked.Store(true) }
