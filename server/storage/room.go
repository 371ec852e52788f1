package storage

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sync/semaphore"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

const (
	// roomRounds is the maximum number of evictions for one writer before the store counts as full.
	// Several rounds may be needed: slots that are being read become free later, and freed slots of
	// another size may not help.
	roomRounds = 4
	// roomBatchBytes is the minimum number of bytes that one round of eviction frees, so that a
	// steady stream of writers rarely evicts. In a small store the minimum is 1/roomBatchShare of
	// the capacity, so that one round does not evict a large part of the cache.
	roomBatchBytes = 16 << 20
	roomBatchShare = 256
	// roomAlone is the whole weight of the semaphore roomMaker.turn. A writer that holds this
	// weight excludes all other writers.
	roomAlone = 1 << 20
	// roomWaiters is the maximum number of writers that wait for turn. An eviction takes
	// milliseconds, and the last waiting writer should get its slots within QueueWait.
	roomWaiters = 128
	// reclaimBatch is the number of pieces that one reclaiming step removes from the index. It
	// bounds the time that the index is locked.
	reclaimBatch = 512
	// eventBlocks is the maximum number of blocks in one event, which bounds the size of its
	// message.
	eventBlocks = 4096
)

// A roomMaker reserves slots for writers, and evicts blocks if there are no free slots.
//
// Locks: no writer holds turn and quota at the same time. A writer keeps the one that it holds while
// it evicts, which does I/O on the index. No read waits for either. A writer waits for turn or quota
// until its context ends, at most QueueWait. At most roomWaiters writers wait. A further writer gets
// Busy at once.
type roomMaker struct {
	node       *Node
	batchBytes int64
	// turn orders writers. Writers that look for free slots hold it together (weight 1). The writer
	// that evicts holds it alone (weight roomAlone) until it has its slots, so that no other writer
	// takes the slots that the eviction freed. Writers get turn in the order in which they found
	// the store full.
	turn *semaphore.Weighted
	// quota is held by the one writer that evicts for the quota of its namespace or tenant.
	quota *semaphore.Weighted
	// waiting counts the writers that wait for turn or quota.
	waiting atomic.Int32
}

func newRoomMaker(n *Node) *roomMaker {
	return &roomMaker{
		node:       n,
		batchBytes: min(roomBatchBytes, n.store.Stats().CapacityBytes/roomBatchShare),
		turn:       semaphore.NewWeighted(roomAlone),
		quota:      semaphore.NewWeighted(1),
	}
}

// wait acquires a weight of turn or quota.
func (r *roomMaker) wait(ctx context.Context, s *semaphore.Weighted, weight int64) error {
	if s.TryAcquire(weight) {
		return nil
	}
	if r.waiting.Add(1) > roomWaiters {
		r.waiting.Add(-1)
		return fmt.Errorf("%w: %d writers already wait for room", ErrBusy, roomWaiters)
	}
	defer r.waiting.Add(-1)
	within := r.node.limits.Load().QueueWait
	limit, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	if err := s.Acquire(limit, weight); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("%w: waited %v for the evictions of other writers", ErrBusy, within)
	}
	return nil
}

// slots reserves count slots of the layout. If hasAfter is set, they follow the slot after
// directly, if possible. It evicts if no slots are free.
func (r *roomMaker) slots(ctx context.Context, layout ondisk.Layout, count int, after kv.Extent, hasAfter bool) ([]kv.Ref, error) {
	refs, err := r.free(ctx, layout, count, after, hasAfter)
	if !errors.Is(err, blockstore.ErrFull) {
		return refs, err
	}
	if err := r.wait(ctx, r.turn, roomAlone); err != nil {
		return nil, err
	}
	defer r.turn.Release(roomAlone)
	for round := 0; ; round++ {
		refs, err := r.node.store.Reserve(ctx, layout.PayloadBytes, layout.Layers, count, after, hasAfter)
		if !errors.Is(err, blockstore.ErrFull) || round == roomRounds {
			return refs, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := r.evictFor(ctx, layout, count); err != nil {
			return nil, err
		}
	}
}

// free reserves slots as slots does, but without evicting. It fails with blockstore.ErrFull if no
// slots are free.
func (r *roomMaker) free(ctx context.Context, layout ondisk.Layout, count int, after kv.Extent, hasAfter bool) ([]kv.Ref, error) {
	if err := r.wait(ctx, r.turn, 1); err != nil {
		return nil, err
	}
	defer r.turn.Release(1)
	return r.node.store.Reserve(ctx, layout.PayloadBytes, layout.Layers, count, after, hasAfter)
}

// evictFor evicts pieces whose slots have at least the total size of count slots of the layout. The
// eviction policy may choose pieces in slots of another size. If there are still no free slots of
// the layout's size, evictFor empties a segment of another slot size, the one whose eviction loses
// the fewest bytes, so that the segment can be divided into slots of the layout's size.
func (r *roomMaker) evictFor(ctx context.Context, layout ondisk.Layout, count int) error {
	n := r.node
	// Slots of deleted blocks and retired epochs are freed first, because their blocks can give no
	// hit.
	if _, err := n.reclaimStep(); err != nil {
		return err
	}
	removed, err := n.evict(max(layout.SlotBytes()*int64(count), r.batchBytes), only{})
	if err != nil {
		return err
	}
	if free, err := n.probe(ctx, layout, count); err != nil || free {
		return err
	}
	if empty, err := n.emptySegment(layout); err != nil || empty {
		return err
	}
	if removed.Blocks == 0 {
		return fmt.Errorf("%w: every block is leased or being read: %w", ErrBusy, blockstore.ErrFull)
	}
	return nil
}

// inQuota evicts blocks of a namespace until further slots of the size bytes fit its quota, and then
// blocks of its tenant's namespaces until they fit the tenant's quota. If a quota was lowered, one call
// evicts at most evictRoundBytes of the excess. fit is false if the slots do not fit all the same; the
// index then refuses the pieces that do not fit. If fit is true, writers that evict nothing may use up
// the room before the caller does.
func (r *roomMaker) inQuota(ctx context.Context, ns kv.Namespace, bytes int64) (fit bool, err error) {
	index := r.node.index
	if room, err := index.Room(ns.ID); err != nil || room.Bytes >= bytes && room.TenantBytes >= bytes {
		return err == nil, err
	}
	if err := r.wait(ctx, r.quota, 1); err != nil {
		return false, err
	}
	defer r.quota.Release(1)
	room, err := index.Room(ns.ID)
	if err != nil {
		return false, err
	}
	most := min(bytes, room.QuotaBytes, room.TenantQuotaBytes)
	if room.Bytes < most {
		if _, err := r.node.evict(most-max(room.Bytes, -evictRoundBytes), only{namespace: ns.ID}); err != nil {
			return false, err
		}
		if room, err = index.Room(ns.ID); err != nil {
			return false, err
		}
	}
	if room.TenantBytes < most {
		if _, err := r.node.evict(most-max(room.TenantBytes, -evictRoundBytes), only{tenant: room.Tenant}); err != nil {
			return false, err
		}
		if room, err = index.Room(ns.ID); err != nil {
			return false, err
		}
	}
	return room.Bytes >= bytes && room.TenantBytes >= bytes, nil
}

// probe reports whether count slots of the layout can be reserved.
func (n *Node) probe(ctx context.Context, layout ondisk.Layout, count int) (bool, error) {
	refs, err := n.store.Reserve(ctx, layout.PayloadBytes, layout.Layers, count, 0, false)
	if errors.Is(err, blockstore.ErrFull) {
		return false, nil
	}
	for _, ref := range refs {
		n.logIf("abandon slot", n.store.Abandon(ref))
	}
	return err == nil, err
}

// emptySegment empties one of the segments that can be divided into slots of this layout: the one
// whose eviction loses the fewest bytes. It reports whether the segment is empty. It never removes
// a block that is leased or being read, or an ancestor of such a block.
func (n *Node) emptySegment(layout ondisk.Layout) (bool, error) {
	segments := n.store.Emptiable(layout.PayloadBytes, layout.Layers)
	ranges := make([]trie.ExtentRange, len(segments))
	for i, s := range segments {
		ranges[i] = trie.ExtentRange{From: s.First, To: s.End}
	}
	v, ok := n.index.CheapestVacancy(ranges, n.store.Reading, n.opts.Now())
	if !ok {
		return false, nil
	}
	n.store.DrainSegment(v.Range.From)
	gone, done, err := n.index.Vacate(nil, v, n.store.Reading)
	n.free(gone)
	if err != nil {
		return false, fmt.Errorf("storage: empty a segment: %w", err)
	}
	return done, nil
}

// Removed is the number and the slot size, in bytes, of the pieces that an operation removed from
// the cache.
type Removed struct {
	Blocks, Bytes int64
}

// evictRoundBytes is the size of the slots, in bytes, that evict removes from the index before it
// frees them. It limits the list of evicted pieces to some MiB of heap.
const evictRoundBytes = 256 << 20

// only limits an eviction to one namespace or to the namespaces of one tenant, whose quota has the prefix
// tenant. The zero value does not limit it. A removal of unmatchable pieces is not limited.
type only struct {
	namespace kv.NamespaceID
	tenant    string
}

// evict removes pieces, in the order of the eviction policy, until their slots have at least
// wantBytes in total, and frees these slots.
func (n *Node) evict(wantBytes int64, from only) (removed Removed, err error) {
	var gone []trie.Evicted
	for now, left := n.opts.Now(), wantBytes; left > 0; {
		round := min(left, evictRoundBytes)
		if from.tenant != "" {
			gone, err = n.index.EvictTenant(gone[:0], round, from.tenant, now)
		} else {
			gone, err = n.index.Evict(gone[:0], round, from.namespace, now)
		}
		r := n.free(gone)
		removed.Blocks += r.Blocks
		removed.Bytes += r.Bytes
		if err != nil {
			return removed, fmt.Errorf("storage: evict: %w", err)
		}
		var freed int64
		for _, e := range gone {
			if (from.namespace == 0 || e.Namespace == from.namespace) && (from.tenant == "" || e.Tenant == from.tenant) {
				freed += e.SlotBytes
			}
		}
		if freed < round {
			break // no further block may be removed
		}
		left -= freed
	}
	return removed, nil
}

// Reasons for removals: the label of the metrics and the reason of events.
const (
	whyEvicted   = "evicted"
	whyDeleted   = "deleted"
	whyCorrupt   = "corrupt"
	whyDelivered = "delivered"
	whyEpoch     = "epoch"
	whyVolume    = "volume"
)

// removedWhy maps the index's reason for a removal to the reason in events and metrics.
var removedWhy = map[trie.Why]string{
	trie.Chosen:    whyEvicted,
	trie.Deleted:   whyDeleted,
	trie.Dropped:   whyCorrupt,
	trie.Lost:      whyVolume,
	trie.Delivered: whyDelivered,
}

// free publishes the events of pieces that left the index, then frees their slots and
// counts them.
func (n *Node) free(gone []trie.Evicted) (r Removed) {
	n.publishChanges()
	by := make(map[string]Removed)
	evicted := make(map[kv.NamespaceID]Removed)
	for _, e := range gone {
		if err := n.store.Free(e.Ref); err != nil && !errors.Is(err, blockstore.ErrStale) {
			n.logIf("free slot", err)
		}
		r.Blocks++
		r.Bytes += e.SlotBytes
		why, ok := removedWhy[e.Why]
		if !ok {
			why = n.clearedBy(e.Namespace)
		}
		b := by[why]
		by[why] = Removed{b.Blocks + 1, b.Bytes + e.SlotBytes}
		if why == whyEvicted {
			b := evicted[e.Namespace]
			evicted[e.Namespace] = Removed{b.Blocks + 1, b.Bytes + e.SlotBytes}
		}
	}
	for why, r := range by {
		n.opts.Metrics.RemovedBlocks.WithLabelValues(why).Add(float64(r.Blocks))
		n.opts.Metrics.RemovedBytes.WithLabelValues(why).Add(float64(r.Bytes))
	}
	for id, r := range evicted {
		if ns, err := n.index.NamespaceByID(id); err == nil {
			n.opts.Metrics.EvictedBlocks.Of(ns.Name).Add(float64(r.Blocks))
			n.opts.Metrics.EvictedBytes.Of(ns.Name).Add(float64(r.Bytes))
		}
	}
	return r
}

// clearedBy returns the reason why a whole epoch of a namespace ended.
func (n *Node) clearedBy(id kv.NamespaceID) string {
	if _, err := n.index.NamespaceByID(id); err != nil {
		return whyDeleted
	}
	return whyEpoch
}

// reclaimStep frees some of the unmatchable pieces and reports whether there are more.
func (n *Node) reclaimStep() (more bool, err error) {
	gone, more, err := n.index.ReclaimStep(nil, reclaimBatch)
	n.free(gone)
	if err != nil {
		return false, fmt.Errorf("storage: reclaim: %w", err)
	}
	return more, nil
}

func (n *Node) reclaimAll(ctx context.Context) error {
	for {
		more, err := n.reclaimStep()
		if err != nil || !more {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// dropCorrupt makes a broken piece and its descendants unmatchable.
func (n *Node) dropCorrupt(ref kv.Ref, where string, cause error) {
	n.opts.Metrics.CorruptBlocks.WithLabelValues(where).Inc()
	n.opts.Logger.Error("corrupt block dropped", "ref", ref, "operation", where, "err", cause)
	n.dropPiece(ref)
}

// dropPiece makes a piece and its descendants unmatchable permanently. The header of its slot may
// be intact, so without a tombstone a rebuild of the index would restore the piece.
func (n *Node) dropPiece(ref kv.Ref) {
	owner, ok := n.index.Owner(ref)
	n.forget(ref, trie.Dropped)
	if ok {
		if ns, err := n.index.NamespaceByID(owner.Namespace); err == nil && ns.IsLive(owner.Epoch) {
			n.noteDeleted(ns.ID, []kv.Epoch{owner.Epoch}, owner.ID, owner.Group)
		}
	}
	n.wakeReclaim()
}

// dropUnreadable makes a piece that the device cannot read, and its descendants, unmatchable. The
// next write then stores the piece in another slot.
func (n *Node) dropUnreadable(ref kv.Ref, where string, cause error) {
	n.opts.Metrics.UnreadableBlocks.WithLabelValues(where).Inc()
	n.opts.Logger.Error("unreadable block dropped", "ref", ref, "operation", where, "err", cause)
	n.dropStale(ref)
}

// dropStale removes the index entry that refers to the slot ref, because the slot does not hold the
// entry's piece. It also removes the descendants of the entry.
func (n *Node) dropStale(ref kv.Ref) {
	n.forget(ref, trie.Dropped)
	n.wakeReclaim()
}

// forget removes the index entry of the piece in slot ref, unless the entry was replaced meanwhile.
func (n *Node) forget(ref kv.Ref, why trie.Why) {
	if err := n.index.Remove(ref, why); err != nil && !errors.Is(err, trie.ErrAbsent) {
		n.logIf("drop block", err)
	}
	n.publishChanges()
}
