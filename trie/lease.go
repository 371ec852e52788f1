package trie

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

// LeaseID names a lease. 0 means no lease. An id is not reused while the process lives.
type LeaseID uint64

// leases holds the open leases in an array of lease slots, with a heap of slot numbers ordered by
// expiry.
//
//	LeaseID  ┌ serial (32 b) ┬ slot (32 b) ┐   the serial changes at each use of a slot
//	         └───────────────┴──────┬──────┘
//	heap  [soonest … latest]        ▼
//	        │          slots [ serial, expires, nodes ]
//	        └─ slot number ─►
type leases struct {
	maxPins int

	mu    sync.Mutex
	max   int
	slots []leaseSlot
	free  []uint32
	heap  []uint32
	pins  int
	// unpark lists nodes that lost their last pin while they were parked (taken out of the queues
	// of the eviction policy), or while they were missing from their space's list of leaves. The
	// next holder of Trie.mu for writing calls evictableAgainLocked for each. Invariant: a node is
	// in unpark iff it has flagUnpark.
	unpark []uint32
}

type leaseSlot struct {
	serial uint32
	// heapAt is the position in the heap, or -1 for a free slot.
	heapAt int32
	// expires is the time at which the lease ends, in Unix nanoseconds; math.MaxInt64 means never.
	expires int64
	// since is the time at which a match or PinEpoch granted the lease, in Unix nanoseconds; 0 for
	// a lease of Hold. owner is the requester's name.
	since int64
	owner string
	// node is the first pinned node, and more has the other pinned nodes: most leases pin one node.
	// A lease of PinEpoch has node 0, and epoch is the space that the lease keeps live.
	node  uint32
	more  []uint32
	epoch *space
}

// keepNodes is the capacity of leaseSlot.more that a free slot may keep.
const keepNodes = 64

func expiry(ttl time.Duration, now time.Time) int64 {
	if ttl <= 0 {
		return math.MaxInt64
	}
	return now.Add(ttl).UnixNano()
}

// grantOptions are the properties of a grant that leaseSlot stores.
type grantOptions struct {
	expires, since int64
	owner          string
}

// grant opens a lease on nodes, of which there is at least one. Trie.mu is held for reading.
func (l *leases) grant(t *Trie, nodes []uint32, o grantOptions) (LeaseID, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.heap) >= l.max || l.pins+len(nodes) > l.maxPins {
		return 0, false
	}
	for i, n := range nodes {
		if !t.nodes.at(n).pin() {
			l.unpinLocked(t, nodes[:i])
			return 0, false
		}
	}
	l.pins += len(nodes)
	i := l.openSlotLocked(o)
	s := &l.slots[i]
	s.node, s.more = nodes[0], append(s.more[:0], nodes[1:]...)
	s.count(t, 1)
	return l.idLocked(i), true
}

// count adds by to the lease count of the namespace, and to that of each space in which the lease
// pins a node. Only a mixed match pins nodes of several spaces.
func (s *leaseSlot) count(t *Trie, by int64) {
	first := t.spaces[t.nodes.at(s.node).space]
	first.ns.leases += by
	first.leases += by
	last, seen := first, [kv.MaxLive + 1]*space{first}
	others := seen[:1]
	for _, n := range s.more {
		if sp := t.spaces[t.nodes.at(n).space]; sp != last && !slices.Contains(others, sp) {
			sp.leases += by
			others = append(others, sp)
			last = sp
		}
	}
}

// openSlotLocked takes a free lease slot for a new lease and returns the slot's number.
func (l *leases) openSlotLocked(o grantOptions) uint32 {
	i := l.slotLocked()
	s := &l.slots[i]
	s.serial++
	s.expires, s.since, s.owner = o.expires, o.since, o.owner
	l.pushLocked(i)
	return i
}

func (l *leases) idLocked(i uint32) LeaseID {
	return LeaseID(uint64(l.slots[i].serial)<<32 | uint64(i))
}

// PinEpoch leases a live epoch of a namespace for ttl, and returns the epoch; epoch 0 means the
// newest. Until the lease ends, the epoch stays live across bumps, unless more than kv.MaxLive
// epochs would be live. The lease does not protect the epoch's blocks from eviction. Errors:
// ErrNamespaceUnknown, ErrEpoch if the epoch is not live, ErrTooManyLeases.
func (t *Trie) PinEpoch(id kv.NamespaceID, epoch kv.Epoch, owner string, ttl time.Duration, now time.Time) (LeaseID, kv.Epoch, error) {
	t.leases.expireIfFull(t, now)
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return 0, 0, err
	}
	if epoch == 0 {
		epoch = ns.def.Epoch
	}
	sp := ns.version(epoch)
	if sp == nil {
		return 0, 0, fmt.Errorf("trie: namespace %q: epoch %d is not live; live are %d: %w", ns.def.Name, epoch, ns.def.Live(), ErrEpoch)
	}
	l := &t.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.heap) >= l.max {
		return 0, 0, fmt.Errorf("trie: pin epoch %d: %d leases are open: %w", epoch, l.max, ErrTooManyLeases)
	}
	i := l.openSlotLocked(grantOptions{expires: expiry(ttl, now), since: now.UnixNano(), owner: owner})
	l.slots[i].epoch = sp
	sp.pins++
	return l.idLocked(i), epoch, nil
}

// pinned reports whether a lease of PinEpoch holds an epoch of ns. Trie.mu or
// Trie.defMu is held.
func (t *Trie) pinned(ns *namespace) func(kv.Epoch) bool {
	return func(e kv.Epoch) bool {
		t.leases.mu.Lock()
		defer t.leases.mu.Unlock()
		sp := ns.version(e)
		return sp != nil && sp.pins > 0
	}
}

func (l *leases) slotLocked() uint32 {
	if k := len(l.free); k > 0 {
		i := l.free[k-1]
		l.free = l.free[:k-1]
		return i
	}
	l.slots = append(l.slots, leaseSlot{heapAt: -1})
	return uint32(len(l.slots) - 1)
}

// openLocked finds an open lease.
func (l *leases) openLocked(id LeaseID) (uint32, error) {
	i := uint32(id)
	if int(i) >= len(l.slots) || l.slots[i].heapAt < 0 || l.slots[i].serial != uint32(id>>32) {
		return 0, fmt.Errorf("trie: lease %d: %w", id, ErrLeaseUnknown)
	}
	return i, nil
}

// endLocked ends the lease in slot i. Trie.mu is held.
func (l *leases) endLocked(t *Trie, i uint32) {
	s := &l.slots[i]
	l.removeLocked(i)
	if s.epoch != nil {
		s.epoch.pins--
	} else {
		// A pinned node is not removed, so its space is still the space whose lease count included
		// this lease.
		s.count(t, -1)
		l.unpinLocked(t, []uint32{s.node})
		l.unpinLocked(t, s.more)
		l.pins -= 1 + len(s.more)
	}
	s.owner, s.node, s.more, s.epoch = "", 0, s.more[:0], nil
	if cap(s.more) > keepNodes {
		s.more = nil
	}
	l.free = append(l.free, i)
}

func (l *leases) unpinLocked(t *Trie, nodes []uint32) {
	for _, n := range nodes {
		nd := t.nodes.at(n)
		if !nd.unpin() {
			continue
		}
		if nd.has(flagDoomed) || t.spaces[nd.space].dead {
			t.sweep.kick()
		}
		unlisted := nd.childCount() == 0 && !nd.has(flagLeaf|flagPending)
		if (unlisted || t.policy.Parked(n)) && !nd.has(flagUnpark) {
			nd.state.Or(flagUnpark)
			l.unpark = append(l.unpark, n)
		}
	}
}

// guard pins a node while its record is written, so that the node stays in the index and keeps its
// slot. Otherwise another piece could get the slot, and the write would replace that piece's
// record. Trie.mu is held for writing. guard returns false if the node already has the maximum
// number of pins; the node then stays in the index because of these pins.
func guard(nd *node) bool { return nd.pin() }

// unguard removes the pins of guard. Trie.mu is held.
func (l *leases) unguard(t *Trie, nodes ...uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unpinLocked(t, nodes)
}

// applyUnparks puts the nodes in unpark, which have lost their last pin, back into the order of
// eviction. Trie.mu is held for writing. A node may have been removed since it was added to unpark.
// Its number is then free or belongs to a new node, and flagUnpark is set only if the new node is
// in unpark too.
func (l *leases) applyUnparks(t *Trie) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range l.unpark {
		if nd := t.nodes.at(n); nd.has(flagUnpark) {
			nd.state.And(^uint32(flagUnpark))
			t.evictableAgainLocked(n)
		}
	}
	l.unpark = l.unpark[:0]
}

// Hold leases one matchable block of an epoch until Release. The lease protects the block's
// ancestors from eviction too. A writer calls Hold for the parent of the blocks that it is about to
// put. Hold fails with ErrAbsent or ErrTooManyLeases.
func (t *Trie) Hold(id kv.NamespaceID, epoch kv.Epoch, block kv.BlockID) (LeaseID, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return 0, err
	}
	var n uint32
	if sp := ns.version(epoch); sp != nil {
		n = t.table.find(sp.number, 0, &block)
	}
	if n == 0 || t.nodes.at(n).has(flagPending) || !t.rootedLocked(n) {
		return 0, fmt.Errorf("trie: namespace %q: block %v: %w", ns.def.Name, block, ErrAbsent)
	}
	lease, ok := t.leases.grant(t, []uint32{n}, grantOptions{expires: math.MaxInt64})
	if !ok {
		return 0, fmt.Errorf("trie: hold block %v: %w", block, ErrTooManyLeases)
	}
	return lease, nil
}

// Renew sets the end of the lease to now + ttl; ttl 0 means that only Release ends the lease. Renew
// fails with ErrLeaseUnknown if the lease has expired, even if ExpireLeases has not run since, or
// if the lease held an epoch that is not live any more.
func (t *Trie) Renew(id LeaseID, ttl time.Duration, now time.Time) error {
	t.mu.RLock()
	defer t.mu.RUnlock()
	l := &t.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	i, err := l.openLocked(id)
	if err != nil {
		return err
	}
	if l.slots[i].expires <= now.UnixNano() {
		return fmt.Errorf("trie: lease %d expired: %w", id, ErrLeaseUnknown)
	}
	if sp := l.slots[i].epoch; sp != nil && sp.dead {
		return fmt.Errorf("trie: lease %d: epoch %d was retired: %w", id, sp.epoch, ErrLeaseUnknown)
	}
	l.slots[i].expires = expiry(ttl, now)
	l.fixLocked(l.slots[i].heapAt)
	return nil
}

// IsPin reports whether the lease is open and is a pin: a lease that only Release ends, or a lease
// of PinEpoch.
func (t *Trie) IsPin(id LeaseID) bool {
	l := &t.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	i, err := l.openLocked(id)
	return err == nil && (l.slots[i].expires == math.MaxInt64 || l.slots[i].epoch != nil)
}

// Release ends the lease. A second call returns ErrLeaseUnknown.
func (t *Trie) Release(id LeaseID) error {
	t.mu.RLock()
	defer t.mu.RUnlock()
	l := &t.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	i, err := l.openLocked(id)
	if err != nil {
		return err
	}
	l.endLocked(t, i)
	return nil
}

// ExpireLeases ends every expired lease and returns the number of leases that it ended. Evict calls
// ExpireLeases first.
func (t *Trie) ExpireLeases(now time.Time) int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	l := &t.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for len(l.heap) > 0 && l.slots[l.heap[0]].expires <= now.UnixNano() {
		l.endLocked(t, l.heap[0])
		n++
	}
	return n
}

// expireIfFull ends expired leases if there is no room for another lease.
func (l *leases) expireIfFull(t *Trie, now time.Time) {
	l.mu.Lock()
	full := len(l.heap) >= l.max || l.pins*8 >= l.maxPins*7
	l.mu.Unlock()
	if full {
		t.ExpireLeases(now)
	}
}

func (l *leases) bytes() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return int64(cap(l.slots))*int64(reflect.TypeFor[leaseSlot]().Size()) + int64(cap(l.free)+cap(l.heap)+cap(l.unpark)+l.pins)*4
}

// The heap orders the leases by expiry. Each slot stores its position in the heap, so a renewal
// finds its entry without a search and moves entries of one path only.

func (l *leases) pushLocked(i uint32) {
	l.heap = append(l.heap, i)
	l.upLocked(len(l.heap)-1, i)
}

func (l *leases) removeLocked(i uint32) {
	at := int(l.slots[i].heapAt)
	last := l.heap[len(l.heap)-1]
	l.heap = l.heap[:len(l.heap)-1]
	l.slots[i].heapAt = -1
	if last != i {
		l.placeLocked(at, last)
		l.fixLocked(int32(at))
	}
}

func (l *leases) placeLocked(at int, i uint32) {
	l.heap[at] = i
	l.slots[i].heapAt = int32(at)
}

func (l *leases) expiresAt(at int) int64 { return l.slots[l.heap[at]].expires }

func (l *leases) fixLocked(at int32) {
	i := l.heap[at]
	l.upLocked(int(at), i)
	l.downLocked(int(l.slots[i].heapAt), i)
}

func (l *leases) upLocked(at int, i uint32) {
	for at > 0 {
		up := (at - 1) / 2
		if l.expiresAt(up) <= l.slots[i].expires {
			break
		}
		l.placeLocked(at, l.heap[up])
		at = up
	}
	l.placeLocked(at, i)
}

func (l *leases) downLocked(at int, i uint32) {
	for {
		down := 2*at + 1
		if down >= len(l.heap) {
			break
		}
		if down+1 < len(l.heap) && l.expiresAt(down+1) < l.expiresAt(down) {
			down++
		}
		if l.slots[i].expires <= l.expiresAt(down) {
			break
		}
		l.placeLocked(at, l.heap[down])
		at = down
	}
	l.placeLocked(at, i)
}
