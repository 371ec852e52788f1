package blockstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/runs"
	"github.com/penstock-kv/penstock/io/blockio"
)

// errNoRoom: the volume has no free slot of that size and no room for a new segment.
var errNoRoom = errors.New("no room on volume")

// errCutHangs: the volume has not completed the write of a new segment's header within
// Health.HungAfter.
var errCutHangs = errors.New("the header of a new segment has not been written in time")

// runTargetBytes is the length of a run of free slots, in bytes, from which on take uses the run
// instead of dividing a new segment into slots. A device reads a run of that length at full speed.
const runTargetBytes = 4 << 20

// volume is one device with its segments.
type volume struct {
	store *Store
	dev   *watchedDevice
	log   *slog.Logger
	index uint32
	// missing is set if Open had no device for the volume, or could not read it.
	missing bool
	// local: the volume is a local one of a store with shared volumes (Options.Local).
	local bool
	// plain: the slots are not encrypted, whether the store has keys or not (Options.Plain).
	plain bool
	// capacityBytes is the volume's share of the store's capacity; metaBytes is the size of the
	// superblock and catalogue files.
	capacityBytes, metaBytes int64

	// id, segmentBytes and catalogueBytes are copied from the superblock, and are constant. A probe may
	// replace superblock while they are read.
	id                           ondisk.UUID
	segmentBytes, catalogueBytes int64

	super     blockio.File
	catalogue blockio.File
	// superName is the name of the file super, and names has the names of all files at the start.
	superName string
	names     []string
	// meta is the token for writes of the superblock and the catalogue of this volume. superblock
	// is the newest superblock, and catArea is the area that holds the newest durable catalogue.
	// Both change only under the token; the file catalogue changes under Store.mu too.
	meta       chan struct{}
	superblock ondisk.Superblock
	catArea    int
	// metaPending counts the writes of the superblock or the catalogue that have not completed.
	metaPending atomic.Int32
	// periods has the keys of the volume. It changes only under Store.meta, before Ready, or in Ready. A
	// period begins before a slot with one of its generations is written, and the superblock that has it
	// is durable before.
	periods atomic.Pointer[periods]
	sealing sealPool
	// areaWipes has for each catalogue area the number of the table of secrets (epochTable.wipe) in it; 0
	// for an area that this process has not written. outlived is set while files of an earlier owner
	// that could not be removed are on the volume.
	areaWipes [2]atomic.Uint64
	outlived  atomic.Bool
	// scrubsHung counts the reads in progress for which Scrub has stopped waiting.
	scrubsHung atomic.Int32

	// closed is set when the volume is removed. The channel is closed when the device is closed.
	closed atomic.Pointer[chan struct{}]

	// space is the allocator.
	space space

	// usedBytes is the size of the slots that are not free, in bytes. Placement prefers the volume
	// with the fewest used bytes.
	usedBytes atomic.Int64
	// freeSpaceBytes is the free space of the file system when lookAtSpace last read it.
	freeSpaceBytes atomic.Int64
	// denied is set if the creation of a segment found too little free space in the file system.
	// The keeper clears denied when it next reads the free space.
	denied atomic.Bool
	// full is set if a write into an existing segment found no space, which is possible because a
	// file system may preallocate more than it has. The keeper clears full together with denied.
	full atomic.Bool

	syncer  syncer
	kick    chan struct{} // wakes the keeper
	counter counters
}

// takesWrites reports whether new blocks may be put on the volume.
func (v *volume) takesWrites() bool {
	return !v.belowFloor() && !v.full.Load() && v.dev.health().Places()
}

func (v *volume) belowFloor() bool {
	return v.freeSpaceBytes.Load() < v.store.freeFloorBytes.Load()
}

// lookAtSpace reads the free space of the file system.
func (v *volume) lookAtSpace() error {
	st, err := v.dev.Stat()
	if err != nil {
		return fmt.Errorf("blockstore: volume %d: %w", v.index, err)
	}
	v.freeSpaceBytes.Store(st.FreeBytes)
	return nil
}

// sizer bounds the length of a run of slots: upTo returns the maximum number of slots, at least 1,
// of a run that starts at slot.
type sizer interface{ upTo(slot uint32) uint32 }

// take reserves one run of slots; bound limits its length. It takes an existing run if that is long
// enough (runTargetBytes, a quarter of a segment, or the limit, whichever is less), otherwise a run
// of a segment newly divided into slots, otherwise the longest run. It fails with errNoRoom.
func (v *volume) take(ctx context.Context, slotBytes int64, bound sizer) (*segment, runs.Run, error) {
	perSegment := ondisk.SegmentSlots(v.segmentBytes, slotBytes)
	enough := min(bound.upTo(0), max(1, min(uint32(runTargetBytes/slotBytes), perSegment/4)))
	for {
		g, r, c := v.space.takeOrCut(slotBytes, bound, enough)
		if g != nil {
			return g, r, nil
		}
		err := v.await(ctx, c)
		if err == nil {
			// The new segment may be shorter than enough, or other writers may have
			// taken its slots.
			enough = 1
			continue
		}
		if g, r := v.space.take(slotBytes, bound, 1, true); g != nil {
			return g, r, nil
		}
		return nil, runs.Run{}, err
	}
}

// await waits until a cut (division of a segment into slots) has completed, ctx ends, the volume
// fails, or the cut is Health.HungAfter old. The last condition is needed because a volume can
// recover while an earlier write or sync of a segment header still hangs.
func (v *volume) await(ctx context.Context, c *cutting) error {
	if c == nil {
		return errNoRoom
	}
	hung := time.NewTimer(time.Until(c.began.Add(v.store.opts.Health.HungAfter)))
	defer hung.Stop()
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return fmt.Errorf("blockstore: volume %d: waiting for a new segment: %w", v.index, context.Cause(ctx))
	case <-hung.C:
		return errCutHangs
	case <-v.dev.whenDown():
	}
	select {
	case <-c.done: // prefer the error of the cut, which may have made the volume fail
		return c.err
	default:
		return v.dev.failure(health.Write)
	}
}

// spoilWritten changes the slots that are written but not committed back to unwritten: after a
// failed sync, their data may not be durable. Commit then refuses these slots, and the caller
// writes the pieces to other slots.
func (v *volume) spoilWritten() {
	for _, g := range v.space.sorted() {
		g.spoilWritten()
	}
}

func (g *segment) spoilWritten() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, w := range g.words {
		if w.state() == slotWritten {
			g.setLocked(uint32(i), w.withState(slotReserved))
		}
	}
}
