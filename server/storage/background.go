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
	// tick is how often leases and reservations are looked at for expiry.
	tick = 250 * time.Millisecond
	// scrubStepBytes is how much the scrubber reads before it looks whether it
	// should stop.
	scrubStepBytes = 16 << 20
	// scrubPause is the time between two passes.
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
	if n.opts.ScrubBytesPerSecond > 0 {
		n.loops.Go(n.scrubLoop)
	}
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
			n.wakeReclaim() // the pieces of the leases may be unmatchable
		}
		n.expireReservations(now)
		if len(n.index.Unsettled()) > 0 {
			n.wakeReclaim()
		}
		n.noteWriteState()
	})
}

// syncLoop keeps durability batch's promise: data first, then the index that
// refers to it.
func (n *Node) syncLoop() {
	n.every(n.opts.SyncEvery, func() {
		if n.unsynced.Swap(false) {
			n.logIf("sync", n.Sync(n.stopped))
		}
	})
}

// Sync makes everything that was acknowledged durable. An error names the volumes
// whose newest blocks may not be: see blockstore.Store.Sync. syncLoop tries again
// after an error, so that a device or an index that works again is synced without
// another commit.
func (n *Node) Sync(ctx context.Context) error {
	start := time.Now()
	m := n.opts.Metrics
	m.Syncs.Inc()
	defer func() { m.SyncSeconds.Observe(time.Since(start).Seconds()) }()
	// The index is synced even if a volume was not. It may then refer to slots of that
	// volume that are not durable; a read verifies the slot.
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

// reclaimLoop retires epochs whose pins have ended, and gives back the slots of retired
// epochs and deleted blocks, in steps, so that neither the index nor the store is held
// for long.
func (n *Node) reclaimLoop() {
	for {
		select {
		case <-n.stopped.Done():
			return
		case <-n.reclaim:
			// Before the slots are free: their headers are what a rebuild would find.
			n.logIf("write deletions", ignoreCancel(n.writePending(n.stopped)))
			n.logIf("settle epochs", ignoreCancel(n.settleEpochs(n.stopped)))
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

func (n *Node) scrubLoop() {
	var from kv.Extent
	for {
		result, err := n.scrubStep(n.stopped, from, n.opts.ScrubBytesPerSecond)
		if err != nil {
			n.logIf("scrub", ignoreCancel(err))
		}
		from = result.Next
		pause := time.Duration(0)
		if result.Done || err != nil {
			pause = scrubPause
		}
		select {
		case <-n.stopped.Done():
			return
		case <-time.After(pause):
		}
	}
}

// scrubStep verifies some live slots and drops what is broken.
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

// Scrub verifies every live slot once, at most bytesPerSecond (0: as fast as it
// goes), and reports progress after each step.
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

// writable returns ErrDraining, or ErrReadOnly and why, or nil.
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

// noteWriteState logs when writes begin or cease to be refused.
func (n *Node) noteWriteState() {
	err := n.writable()
	refused := errors.Is(err, ErrReadOnly)
	if n.refusing.Swap(refused) == refused {
		return
	}
	if refused {
		n.opts.Logger.Error("writes are refused; reads go on", "err", err)
	} else {
		n.opts.Logger.Info("writes are taken again")
	}
}
