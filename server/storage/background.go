package storage

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

const (
	// tick is how often leases and reservations are looked at for expiry.
	tick = 250 * time.Millisecond
	// scrubStepBytes is how much the scrubber reads before it looks whether it
	// should stop.
	scrubStepBytes = 16 << 20
	// refusalPause is how long writes are refused after one showed that none can
	// succeed.
	refusalPause = 5 * time.Second
	// scrubPause is the time between two passes.
	scrubPause = 10 * time.Minute
)

func (n *Node) startLoops() {
	n.loops.Go(n.expireLoop)
	n.loops.Go(n.reclaimLoop)
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
			n.wakeReclaim() // what they held may be unmatchable
		}
		n.expireReservations(now)
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

// Sync makes everything that was acknowledged durable.
func (n *Node) Sync(ctx context.Context) error {
	start := time.Now()
	m := n.opts.Metrics
	m.Syncs.Inc()
	defer func() { m.SyncSeconds.Observe(time.Since(start).Seconds()) }()
	err := n.store.Sync(ctx)
	if err == nil {
		err = n.index.Sync()
	}
	if err != nil && ctx.Err() == nil {
		m.SyncFailures.Inc()
		n.noteWriteError(err)
	}
	return err
}

func (n *Node) wakeReclaim() {
	select {
	case n.reclaim <- struct{}{}:
	default:
	}
}

// reclaimLoop gives back the slots of old epochs and deleted blocks, in steps,
// so that neither the index nor the store is held for long.
func (n *Node) reclaimLoop() {
	for {
		select {
		case <-n.stopped.Done():
			return
		case <-n.reclaim:
			// Before consumers hear that the blocks are gone.
			n.logIf("write deletions", ignoreCancel(n.writePending(n.stopped)))
			n.logIf("reclaim", ignoreCancel(n.reclaimAll(n.stopped, whyCorrupt)))
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
			if errors.Is(err, blockstore.ErrCorrupt) {
				n.dropCorrupt(ref, "scrub", err)
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

// A refusal of all writes, and until when.
type refusal struct {
	why   string
	until time.Time
}

// noteWriteError refuses writes for a while if the error says that none can
// succeed. After that the next writer finds out whether they do again: space may
// have been freed, or the floor lowered.
func (n *Node) noteWriteError(err error) {
	if !errors.Is(err, blockstore.ErrFloor) && !errors.Is(err, trie.ErrBroken) {
		return
	}
	if n.refused.Swap(&refusal{why: err.Error(), until: n.opts.Now().Add(refusalPause)}) == nil {
		n.opts.Logger.Error("writes are refused; reads go on", "err", err)
	}
}

// writable returns ErrDraining, or ErrReadOnly and why, or nil.
func (n *Node) writable() error {
	if n.draining.Load() {
		return ErrDraining
	}
	r := n.refused.Load()
	if r == nil || n.opts.Now().After(r.until) {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrReadOnly, r.why)
}

// noteWritten ends a refusal: a write succeeded.
func (n *Node) noteWritten() {
	if n.refused.Load() != nil && n.refused.Swap(nil) != nil {
		n.opts.Logger.Info("writes are taken again")
	}
}
