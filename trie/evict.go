package trie

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

// Why is the reason for which a piece left the index.
type Why uint8

const (
	// Chosen: Evict or Vacate removed the piece, or Remove was called with Chosen.
	Chosen Why = iota
	// Deleted: Delete removed the piece or one of its ancestors.
	Deleted
	// Dropped: Remove removed the piece or an ancestor, because the removed piece's slot holds
	// other bytes or cannot be read.
	Dropped
	// Lost: Remove removed the piece or an ancestor, because the volume with the removed piece's
	// slot was removed.
	Lost
	// Delivered: Trie.Delivered removed the piece after it had been read. The piece had class
	// Transfer, so it was stored for one reader only.
	Delivered
	// Cleared: the piece's (namespace, epoch) ended: its epoch was retired, or DeleteAll or
	// DeleteNamespace ran.
	Cleared
)

// Evicted is one piece that left the index; the caller frees its slot.
type Evicted struct {
	Ref       kv.Ref
	ID        kv.BlockID
	Namespace kv.NamespaceID
	Epoch     kv.Epoch
	Group     int
	Class     Class
	Why       Why
	// SlotBytes is the size of the slot, in bytes, as Options.SlotBytes returned it.
	SlotBytes int64
	// Tenant is the prefix of the quota of the namespace's tenant; "" if there is none.
	Tenant string
}

const (
	// victimsPerStep and looksPerStep are the maximum numbers of victims and of examined nodes
	// while Evict holds the write lock once. A step takes about 100 µs, so no match waits long.
	victimsPerStep = 128
	looksPerStep   = 8192
	// secondChances is the maximum number of times that Evict spares one touched leaf: a policy
	// records up to 3 touches of a node.
	secondChances = 3
)

// Evict removes pieces until their slots have want bytes in total, and appends them to dst. The
// order is: unmatchable pieces, pieces of namespaces over their quota, pieces of tenants over their
// quota in the order of EvictTenant, pieces of live epochs that are not the newest of their
// namespace, Transfer pieces, then the policy's order. Evict always
// goes leaf first and never takes a leased piece. If only is not 0, Evict takes pieces of that
// namespace alone. Within a namespace the oldest epoch goes first, and the pieces of one epoch go
// by age, with a second chance for a touched piece. If Evict returns fewer bytes than want, nothing
// else is evictable. If the write to Pebble fails, Evict returns its error, and the appended pieces
// have left the index nevertheless.
func (t *Trie) Evict(dst []Evicted, want int64, only kv.NamespaceID, now time.Time) ([]Evicted, error) {
	if err := t.usable(); err != nil {
		return dst, err
	}
	t.ExpireLeases(now)
	e := eviction{t: t, dst: dst, base: len(dst), want: want, only: only}
	err := e.run()
	return e.dst, err
}

// EvictTenant removes pieces of the namespaces of a tenant only, whose quota has the given prefix, until
// their slots have want bytes in total, and appends them to dst. The order is: unmatchable pieces,
// pieces of namespaces over their quota, pieces of live epochs that are not the newest of their
// namespace, then pieces of the newest epochs of all namespaces of the tenant, of each in proportion to
// its bytes. Otherwise it is as Evict for one namespace. Without a quota with this prefix EvictTenant
// removes nothing.
func (t *Trie) EvictTenant(dst []Evicted, want int64, prefix string, now time.Time) ([]Evicted, error) {
	if err := t.usable(); err != nil {
		return dst, err
	}
	t.ExpireLeases(now)
	t.mu.RLock()
	tn := t.tenantOfLocked(prefix)
	t.mu.RUnlock()
	if tn == nil || tn.prefix != prefix {
		return dst, nil
	}
	e := eviction{t: t, dst: dst, base: len(dst), want: want, tenant: tn}
	err := e.run()
	return e.dst, err
}

// eviction is the state of one call of Evict.
type eviction struct {
	t    *Trie
	dst  []Evicted
	base int
	want int64
	// only is the namespace of which pieces count towards want; 0: all. tenant, if not nil, has the
	// namespaces of which pieces count.
	only   kv.NamespaceID
	tenant *tenant
	// excess is the tenant that is over its quota and loses pieces until it is within the quota; nil:
	// none.
	excess *tenant
	// freed is the size, in bytes, of the slots in dst[base:counted] that count towards want.
	counted int
	freed   int64
	// chances counts the touched leaves of list or, if lottery is not nil, of the lists of lottery, that
	// got a second chance in this call.
	chances int
	list    *leaves
	// lottery is not nil while pieces of the newest epochs of a tenant's namespaces are evicted.
	lottery *lottery
}

func (e *eviction) done() bool {
	for e.counted = max(e.counted, e.base); e.counted < len(e.dst); e.counted++ {
		v := &e.dst[e.counted]
		if (e.only == 0 || v.Namespace == e.only) && (e.tenant == nil || v.Tenant == e.tenant.prefix) {
			e.freed += v.SlotBytes
		}
	}
	return e.freed >= e.want
}

// enoughLocked is done, but also true once excess is within its quota, or if a quota was removed meanwhile.
func (e *eviction) enoughLocked() bool {
	return e.done() || e.tenant != nil && e.tenant.removed || e.excess != nil && (e.excess.removed || !e.excess.overQuota())
}

func (e *eviction) run() error {
	if err := e.garbage(); err != nil {
		return err
	}
	if e.only != 0 {
		return e.steps(func() bool { return e.fromNamespace(e.only, false) })
	}
	for _, id := range e.t.overQuota(e.tenant) {
		if err := e.steps(func() bool { return e.fromNamespace(id, true) }); err != nil {
			return err
		}
	}
	if e.tenant != nil {
		return e.ofTenant(e.tenant)
	}
	for _, tn := range e.t.tenantsOverQuota() {
		e.excess = tn
		if err := e.ofTenant(tn); err != nil {
			return err
		}
	}
	e.excess = nil
	if err := e.ofOldEpochs(nil); err != nil {
		return err
	}
	return e.steps(e.byPolicy)
}

// ofTenant evicts pieces of live epochs of a tenant's namespaces, the newest epochs last.
func (e *eviction) ofTenant(tn *tenant) error {
	if err := e.ofOldEpochs(tn); err != nil {
		return err
	}
	e.lottery, e.list, e.chances = e.t.lotteryOf(tn), nil, 0
	defer func() { e.lottery = nil }()
	return e.steps(e.fromLottery)
}

// ofOldEpochs evicts pieces of the live epochs that are not the newest of their namespace. If tn is not
// nil, it takes them from the namespaces of this tenant only.
func (e *eviction) ofOldEpochs(tn *tenant) error {
	for _, sp := range e.t.superseded(tn) {
		if err := e.steps(func() bool { return e.fromSpace(sp) }); err != nil {
			return err
		}
	}
	return nil
}

// garbage evicts unmatchable pieces (deleted or of retired epochs), if the bytes of any of them
// count towards want.
func (e *eviction) garbage() error {
	for more := e.t.hasGarbage(e.only, e.tenant); more && !e.done(); {
		var err error
		if e.dst, more, err = e.t.ReclaimStep(e.dst, victimsPerStep); err != nil {
			return err
		}
	}
	return nil
}

// steps calls step, which takes the write lock, until step returns false or enough is evicted.
// After each call it removes the records of the evicted pieces from Pebble.
func (e *eviction) steps(step func() (more bool)) error {
	for more := true; more && !e.done(); {
		from := len(e.dst)
		more = step()
		if tn := cmp.Or(e.tenant, e.excess); tn != nil {
			tn.charge(e.dst[from:])
		}
		if err := e.t.forget(e.dst[from:]); err != nil {
			return err
		}
	}
	return nil
}

// byPolicy evicts one step of victims in the policy's order.
func (e *eviction) byPolicy() (more bool) {
	t := e.t
	t.mu.Lock()
	defer t.mu.Unlock()
	defer t.noteGrowthLocked()
	t.leases.applyUnparks(t)
	looks := looksPerStep
	for range victimsPerStep {
		n, ok := t.policy.Victim(&looks, t.evictable)
		if !ok {
			// When the step has examined looksPerStep nodes, the eviction continues with another
			// step. Each examined node lost a touch, moved to another queue or was parked, so the
			// number of steps is finite.
			return looks <= 0
		}
		t.policy.Evicted(n, t.contentKey(n))
		e.dst = t.removeNodeLocked(e.dst, n, Chosen)
		if e.done() {
			return false
		}
	}
	return true
}

// overQuota returns the namespaces that hold more bytes than their quota. If tn is not nil, it returns
// only namespaces of this tenant.
func (t *Trie) overQuota(tn *tenant) (ids []kv.NamespaceID) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for id, ns := range t.recorded {
		if ns.overQuota() && (tn == nil || ns.tenant == tn) {
			ids = append(ids, id)
		}
	}
	return ids
}

// superseded returns the spaces (one for each epoch of a namespace) of all live epochs except the
// newest of each namespace, in the order in which the epochs began. If tn is not nil, it returns only
// spaces of this tenant's namespaces.
func (t *Trie) superseded(tn *tenant) (spaces []*space) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, ns := range t.recorded {
		if tn == nil || ns.tenant == tn {
			spaces = append(spaces, ns.live[1:]...)
		}
	}
	slices.SortFunc(spaces, func(a, b *space) int { return cmp.Compare(a.serial, b.serial) })
	return spaces
}

// fromNamespace evicts one step of a namespace's pieces, oldest epoch first. If excess is set, it
// stops when the namespace is within its quota. It does not use the policy, whose order has the
// nodes of all namespaces: a search for the nodes of one would examine those of all others.
// Therefore each space (one epoch of a namespace) has a list of its leaves. A touched leaf gets a
// second chance.
func (e *eviction) fromNamespace(id kv.NamespaceID, excess bool) (more bool) {
	t := e.t
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leases.applyUnparks(t)
	ns, ok := t.namespaces[id]
	if !ok {
		return false
	}
	end := len(e.dst) + victimsPerStep
	for range looksPerStep {
		switch {
		case e.done() || excess && !ns.overQuota():
			return false
		case len(e.dst) >= end:
			return true
		}
		sp := ns.oldestWithLeaves()
		if sp == nil {
			return false
		}
		e.oldestLeaf(&sp.leaves)
	}
	return true
}

// oldestWithLeaves returns the oldest live space of ns whose list of leaves is not empty, or nil.
func (ns *namespace) oldestWithLeaves() *space {
	for _, sp := range slices.Backward(ns.live) {
		if sp.leaves.oldest != 0 {
			return sp
		}
	}
	return nil
}

// fromSpace evicts one step of the pieces of a space (one epoch of a namespace). If the space's
// epoch has been retired meanwhile, fromSpace evicts nothing: ReclaimStep removes these pieces.
func (e *eviction) fromSpace(sp *space) (more bool) {
	t := e.t
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leases.applyUnparks(t)
	end := len(e.dst) + victimsPerStep
	for range looksPerStep {
		switch {
		case e.enoughLocked() || sp.dead || sp.leaves.oldest == 0:
			return false
		case len(e.dst) >= end:
			return true
		}
		e.oldestLeaf(&sp.leaves)
	}
	return true
}

// oldestLeaf evicts the oldest leaf of l. If the leaf was touched, it is moved to the newest end of
// the list instead. If it is leased, it is removed from the list.
func (e *eviction) oldestLeaf(l *leaves) {
	t, n := e.t, l.oldest
	t.looks++
	if !t.evictable(n) {
		l.remove(&t.nodes, n)
		return
	}
	leaves := l.len
	switch {
	case e.lottery != nil:
		leaves = e.lottery.leaves
	case e.list != l:
		e.list, e.chances = l, 0
	}
	// Matches may touch leaves as fast as eviction examines them. So one call gives second chances
	// at most secondChances times the number of leaves.
	if e.chances < secondChances*leaves && t.policy.Cool(n) {
		e.chances++
		l.remove(&t.nodes, n)
		l.addNewest(&t.nodes, n)
		return
	}
	t.policy.Evicted(n, t.contentKey(n))
	e.dst = t.removeNodeLocked(e.dst, n, Chosen)
}

// forget removes the records of evicted pieces from Pebble, without a sync. If a crash undoes the
// removal, the records return with old generations, which the store recognises as stale.
func (t *Trie) forget(gone []Evicted) error {
	if len(gone) == 0 {
		return nil
	}
	t.records.RLock()
	defer t.records.RUnlock()
	b := t.disk.Load().db.NewBatch()
	var key [blockKeyLen]byte
	for i := range gone {
		if err := b.Delete(appendBlockKey(key[:0], gone[i].Ref.Extent), nil); err != nil {
			b.Close()
			return fmt.Errorf("%w: %w", ErrBroken, err)
		}
	}
	return t.commit(b, false, func(r reverts) {
		for i := range gone {
			r.remove(appendBlockKey(key[:0], gone[i].Ref.Extent))
		}
	})
}

// Delivered removes the Transfer pieces of the given blocks of an epoch, and appends them to dst;
// epoch 0 means the newest. It removes only leaves without a lease; the next eviction takes the
// Transfer pieces that are left. ids are in the order of the chain.
func (t *Trie) Delivered(dst []Evicted, id kv.NamespaceID, epoch kv.Epoch, ids []kv.BlockID) ([]Evicted, error) {
	base := len(dst)
	dst, err := t.dropDelivered(dst, id, epoch, ids)
	if err != nil {
		return dst, err
	}
	return dst, t.forget(dst[base:])
}

func (t *Trie) dropDelivered(dst []Evicted, id kv.NamespaceID, epoch kv.Epoch, ids []kv.BlockID) ([]Evicted, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return dst, err
	}
	if epoch == 0 {
		epoch = ns.def.Epoch
	}
	sp := ns.version(epoch)
	if sp == nil {
		return dst, nil
	}
	for i := len(ids) - 1; i >= 0; i-- {
		// The block's piece of layer group 0 comes last, because its pieces of the other groups are
		// children of that piece.
		for g := len(ns.def.Geometry.Groups) - 1; g >= 0; g-- {
			n := t.table.find(sp.number, uint8(g), &ids[i])
			if n != 0 && t.nodes.at(n).has(flagTransfer) && t.evictable(n) {
				t.policy.Remove(n)
				dst = t.removeNodeLocked(dst, n, Delivered)
			}
		}
	}
	return dst, nil
}
