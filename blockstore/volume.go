package blockstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/runs"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
)

// errNoRoom: the volume can take no slot of that size as things are.
var errNoRoom = errors.New("no room on volume")

// runTargetBytes is how long a run of free slots should be before it is worth
// taking while the volume could still grow: long enough that a device reads it
// at full speed.
const runTargetBytes = 4 << 20

// volume is one device with its segments.
type volume struct {
	store *Store
	dev   *watchedDevice
	log   *slog.Logger
	index uint32
	// missing: the volume was not there when the store was opened.
	missing bool
	// capacityBytes is the volume's share of the store's; metaBytes are in the
	// superblock and catalogue files.
	capacityBytes, metaBytes int64

	// id and segmentBytes are copied from the superblock; they do not change.
	id           ondisk.UUID
	segmentBytes int64

	super     blockio.File
	catalogue blockio.File
	// meta is the token of whoever writes the superblock or the catalogue of this
	// volume. superblock and catArea (the area that holds the newest durable
	// catalogue) change only under it.
	meta       chan struct{}
	superblock ondisk.Superblock
	catArea    int
	// metaPending counts the writes of either that have not completed.
	metaPending atomic.Int32

	// growth is the token of whoever changes the set of segments or a segment's
	// cut: one element, taken before any lock.
	growth chan struct{}

	// table is segments by number, nil where there is none. It is replaced, never
	// changed, so that the read path finds a segment without volume.mu.
	table atomic.Pointer[[]*segment]

	// space says which cut segments have free slots.
	space space

	mu       sync.Mutex
	segments map[uint32]*segment
	// uncut are the segments that are blank or being zeroed.
	uncut map[uint32]*segment
	// surplus are the segments that are retiring.
	surplus map[uint32]*segment
	// lowest: every segment number below it is taken.
	lowest uint32
	// fileBytes is the size of all files, also of one being created.
	fileBytes int64
	// changes counts segments that became available: a waiter for the growth
	// token sees that another one grew meanwhile.
	changes uint64

	// usedBytes are in slots that are not free; the placement compares volumes
	// by it.
	usedBytes atomic.Int64
	// freeSpaceBytes is what the file system had left when last asked.
	freeSpaceBytes atomic.Int64
	// denied is set when the file system refused to hold another segment, and
	// cleared when the keeper looks again.
	denied atomic.Bool
	// full is set when a write into a segment found no space, and cleared likewise:
	// a file system may have promised more than it has.
	full atomic.Bool

	syncer  syncer
	kick    chan struct{} // wakes the keeper
	counter counters
}

// segment returns the segment of that number, or nil.
func (v *volume) segment(number uint32) *segment {
	table := *v.table.Load()
	if number >= uint32(len(table)) {
		return nil
	}
	return table[number]
}

// addLocked makes a segment known.
func (v *volume) addLocked(g *segment) {
	v.segments[g.number] = g
	v.trackLocked(g)
	v.fileBytes += g.file.Size()
	v.publishLocked(g.number, g)
}

// dropLocked forgets a segment.
func (v *volume) dropLocked(g *segment) {
	delete(v.segments, g.number)
	delete(v.uncut, g.number)
	delete(v.surplus, g.number)
	v.lowest = min(v.lowest, g.number)
	v.fileBytes -= g.file.Size()
	v.publishLocked(g.number, nil)
}

func (v *volume) publishLocked(number uint32, g *segment) {
	old := *v.table.Load()
	table := make([]*segment, max(len(old), int(number)+1))
	copy(table, old)
	table[number] = g
	v.table.Store(&table)
}

// sorted returns all segments by number.
func (v *volume) sorted() []*segment {
	v.mu.Lock()
	defer v.mu.Unlock()
	all := make([]*segment, 0, len(v.segments))
	for _, g := range v.segments {
		all = append(all, g)
	}
	slices.SortFunc(all, func(a, b *segment) int { return int(a.number) - int(b.number) })
	return all
}

// takesWrites reports whether new blocks may be put on the volume.
func (v *volume) takesWrites() bool {
	return !v.belowFloor() && !v.full.Load() && v.dev.health().Places()
}

func (v *volume) belowFloor() bool {
	return v.store.opts.FreeFloorBytes > 0 && v.freeSpaceBytes.Load() < v.store.opts.FreeFloorBytes
}

// lookAtSpace asks the file system how much is free.
func (v *volume) lookAtSpace() error {
	st, err := v.dev.Stat()
	if err != nil {
		return fmt.Errorf("blockstore: volume %d: %w", v.index, err)
	}
	v.freeSpaceBytes.Store(st.FreeBytes)
	return nil
}

// takeAfter reserves up to n free slots right after a slot, in its segment.
func (v *volume) takeAfter(slotBytes int64, after kv.Extent, n uint32) (*segment, runs.Run) {
	g := v.segment(after.Segment())
	if g == nil {
		return nil, runs.Run{}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.phase != phaseCut || g.free == nil || g.header.SlotBytes != slotBytes || g.retiring || after.Slot() >= g.header.Slots {
		return nil, runs.Run{}
	}
	r := runs.Run{Start: after.Slot() + 1}
	if r.N = g.free.From(r.Start, n); r.N == 0 {
		return nil, runs.Run{}
	}
	g.takeLocked(r)
	return g, r
}

// sizer bounds the run that may be taken from a slot on.
type sizer interface{ upTo(slot uint32) uint32 }

// take reserves one run, as long as bound allows: a long run if there is one,
// else one from a grown volume, else the longest there is. It fails with
// errNoRoom.
func (v *volume) take(ctx context.Context, slotBytes int64, bound sizer) (*segment, runs.Run, error) {
	n := bound.upTo(0)
	perSegment := ondisk.SegmentSlots(v.segmentBytes, slotBytes)
	enough := min(n, max(1, min(uint32(runTargetBytes/slotBytes), perSegment/4)))
	for grown := false; ; grown = true {
		changes := v.changeCount()
		if g, r := v.takeLongest(slotBytes, bound, enough, false); r.N > 0 {
			return g, r, nil
		}
		if grown {
			// A fresh segment may be shorter than enough, or taken by others.
			if g, r := v.takeLongest(slotBytes, bound, 1, false); r.N > 0 {
				return g, r, nil
			}
		}
		err := v.grow(ctx, slotBytes, changes)
		if err == nil {
			continue
		}
		if g, r := v.takeLongest(slotBytes, bound, 1, true); r.N > 0 {
			return g, r, nil
		}
		return nil, runs.Run{}, err
	}
}

func (v *volume) changeCount() uint64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.changes
}

// takeLongest takes slots of the longest free run, if it has at least enough.
// Draining segments are left alone unless lastResort.
func (v *volume) takeLongest(slotBytes int64, bound sizer, enough uint32, lastResort bool) (*segment, runs.Run) {
	for {
		g, n := v.space.longest(slotBytes, lastResort)
		if g == nil || n < enough {
			return nil, runs.Run{}
		}
		if r, ok := g.takeLongest(slotBytes, bound, enough, lastResort); ok {
			return g, r
		}
		// The segment changed since it reported, and has reported again.
	}
}

// takeLongest takes slots of the segment's longest run. ok is false if the
// segment is no longer what its volume's space said.
func (g *segment) takeLongest(slotBytes int64, bound sizer, enough uint32, lastResort bool) (r runs.Run, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.phase != phaseCut || g.header.SlotBytes != slotBytes || g.retiring || (g.draining && !lastResort) || g.free.Longest() < enough {
		return runs.Run{}, false
	}
	r, _ = g.free.First(g.free.Longest(), 0, g.header.Slots)
	if r.N = min(r.N, bound.upTo(r.Start)); r.N > 0 {
		g.takeLocked(r)
	}
	return r, true
}

// spoilWritten makes the slots that were written and not committed unwritten
// again: a sync failed, so it is not known what of them is durable. Their Commit
// is refused, and the caller writes the pieces elsewhere.
func (v *volume) spoilWritten() {
	for _, g := range v.sorted() {
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
