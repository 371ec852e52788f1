package storage

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/kv"
)

const (
	// tick is the interval at which expired leases and reservations are removed.
	tick = 250 * time.Millisecond
	// scrubStepBytes is the number of bytes that the scrubber reads before it checks whether to
	// stop.
	scrubStepBytes = 16 << 20
	// scrubPause is the time between two passes of the scrubber over all slots.
	scrubPause = 10 * time.Minute
)

func (n *Node) startLoops() {
	n.loops.Go(n.expireLoop)
	n.loops.Go(n.reclaimLoop)
	for _, m := range n.movers {
		n.loops.Go(m.run)
	}
	if n.opts.Durability == blockstore.DurabilityBatch {
		n.loops.Go(n.syncLoop)
	}
	n.loops.Go(n.scrubLoop)
}

// every calls f at the interval until the node stops.
func (n *Node) every(interval time.Duration, f func()) {
	t := time.NewTicker(interval)
	defer t.Stop()
	for {
		select {
		case <-n.stopped.Done():
			return
		case <-t.C:
			f()
		}
	}
}

func (n *Node) expireLoop() {
	n.every(tick, func() {
		now := n.opts.Now()
		if ended := n.index.ExpireLeases(now); ended > 0 {
			n.opts.Metrics.LeasesExpired.Add(float64(ended))
			n.wakeReclaim() // the pieces of an expired lease may be unmatchable, so that reclaiming can free their slots
		}
		n.expireReservations(now)
		if len(n.index.Unsettled()) > 0 || n.unerased.Load() {
			n.wakeReclaim()
		}
		n.noteWriteState()
	})
}

// syncLoop implements durability batch. It syncs the data, and then the index that refers to the
// data.
func (n *Node) syncLoop() {
	n.every(n.opts.SyncEvery, func() {
		if n.unsynced.Swap(false) {
			n.logIf("sync", n.Sync(n.stopped))
		}
	})
}

// Sync makes every acknowledged block durable. The error names the volumes whose newest blocks may
// not be durable: see blockstore.Store.Sync. After an error syncLoop tries again, so that a
// recovered device or index is synced without another commit.
func (n *Node) Sync(ctx context.Context) error {
	start := time.Now()
	m := n.opts.Metrics
	m.Syncs.Inc()
	defer func() { m.SyncSeconds.Observe(time.Since(start).Seconds()) }()
	// The index is synced even if a volume could not be synced. It may then refer to slots of that
	// volume that are not durable. That is safe, because a read verifies the slot.
	err := n.store.Sync(ctx)
	if ctx.Err() == nil {
		err = errors.Join(err, n.index.Sync())
	}
	if err != nil {
		n.unsynced.Store(true)
		if ctx.Err() == nil {
			m.SyncFailures.Inc()
		}
	}
	return err
}

func (n *Node) wakeReclaim() {
	select {
	case n.reclaim <- struct{}{}:
	default:
	}
}

// reclaimLoop retires epochs whose pins have ended, erases their secrets again if that has failed, and
// frees the slots of retired epochs and deleted blocks. It works in steps, so that it does not lock the index or the store for long.
func (n *Node) reclaimLoop() {
	for {
		select {
		case <-n.stopped.Done():
			return
		case <-n.reclaim:
			// The deletions must be durable before the slots are freed: a rebuild of the index
			// would find the headers of the freed slots.
			n.logIf("write deletions", ignoreCancel(n.writePending(n.stopped)))
			n.logIf("settle epochs", ignoreCancel(n.settleEpochs(n.stopped)))
			n.retryErase(n.stopped)
			n.logIf("reclaim", ignoreCancel(n.reclaimAll(n.stopped)))
		}
	}
}

func ignoreCancel(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// scrubLoop scrubs at the current rate, and waits while the rate is 0.
func (n *Node) scrubLoop() {
	var from kv.Extent
	for {
		var resume <-chan time.Time // never, while the scrubber is off
		if rate := n.limits.Load().ScrubBytesPerSecond; rate > 0 {
			result, err := n.scrubStep(n.stopped, from, rate)
			if err != nil {
				n.logIf("scrub", ignoreCancel(err))
			}
			from = result.Next
			pause := time.Duration(0)
			if result.Done || err != nil {
				pause = scrubPause
			}
			resume = time.After(pause)
		}
		select {
		case <-n.stopped.Done():
			return
		case <-n.scrubRate:
		case <-resume:
		}
	}
}

// scrubStep verifies some live slots and drops the broken pieces.
func (n *Node) scrubStep(ctx context.Context, from kv.Extent, bytesPerSecond int64) (blockstore.ScrubResult, error) {
	result, err := n.store.Scrub(ctx, blockstore.ScrubOptions{
		BytesPerSecond: bytesPerSecond,
		From:           from,
		MaxBytes:       scrubStepBytes,
		Report: func(ref kv.Ref, err error) {
			switch {
			case errors.Is(err, blockstore.ErrCorrupt):
				n.dropCorrupt(ref, "scrub", err)
			case n.store.Unreadable(ref, err):
				n.dropUnreadable(ref, "scrub", err)
			}
		},
	})
	n.opts.Metrics.ScrubbedBlocks.Add(float64(result.Slots))
	n.opts.Metrics.ScrubbedBytes.Add(float64(result.Bytes))
	return result, err
}

// Scrub verifies every live slot once, at most bytesPerSecond (0: no limit), and calls progress
// after each step with the totals so far.
func (n *Node) Scrub(ctx context.Context, bytesPerSecond int64, progress func(slots, bytes, corrupt int64) error) error {
	var from kv.Extent
	var slots, bytes, corrupt int64
	for {
		result, err := n.scrubStep(ctx, from, bytesPerSecond)
		slots, bytes, corrupt = slots+result.Slots, bytes+result.Bytes, corrupt+result.Corrupt
		if err != nil {
			return err
		}
		if err := progress(slots, bytes, corrupt); err != nil || result.Done {
			return err
		}
		from = result.Next
	}
}

// writable returns nil, ErrDraining, or ErrReadOnly with the reason.
func (n *Node) writable() error {
	if n.draining.Load() {
		return ErrDraining
	}
	if err := n.store.Writable(); err != nil {
		return fmt.Errorf("%w: %w", ErrReadOnly, err)
	}
	if err := n.index.Writable(); err != nil {
		return fmt.Errorf("%w: %w", ErrReadOnly, err)
	}
	return nil
}

// noteWriteState logs when the node starts or stops refusing writes.
func (n *Node) noteWriteState() {
	err := n.writable()
	refused := errors.Is(err, ErrReadOnly)
	if n.refusing.Swap(refused) == refused {
		return
	}
	if refused {
		n.opts.Logger.Error("writes are refused and reads are served", "err", err)
	} else {
		n.opts.Logger.Info("writes are accepted again")
	}
}
