package blockstore

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
)

// shortSegmentShare: the last segment of a volume may be shorter than the
// others, to use what is left of the capacity, but not shorter than this part.
const shortSegmentShare = 16

// takeGrowth takes the token that serialises changes of the set of segments.
func (v *volume) takeGrowth(ctx context.Context) error {
	select {
	case v.growth <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("blockstore: volume %d: waiting for a new segment: %w", v.index, context.Cause(ctx))
	}
}

func (v *volume) giveGrowth() { <-v.growth }

// grow adds a segment of free slots: a blank one, else an empty one of another
// slot size, else a new file. changes is the count the caller saw before it
// looked: if another one grew the volume meanwhile, grow does nothing.
func (v *volume) grow(ctx context.Context, slotBytes int64, changes uint64) error {
	if err := v.takeGrowth(ctx); err != nil {
		return err
	}
	defer v.giveGrowth()
	if v.changeCount() != changes {
		return nil
	}
	defer v.wake()
	if g := v.claimBlank(ctx, slotBytes); g != nil {
		return v.cut(ctx, g, slotBytes)
	}
	if g := v.claimEmpty(slotBytes); g != nil {
		return v.cut(ctx, g, slotBytes)
	}
	g, err := v.create(v.nextFileBytes(slotBytes), phaseChanging)
	if err != nil {
		return err
	}
	return v.cut(ctx, g, slotBytes)
}

// claimBlank takes a segment that is not cut, waiting for the keeper to let go
// of it if it is being zeroed.
func (v *volume) claimBlank(ctx context.Context, slotBytes int64) *segment {
	v.mu.Lock()
	var found *segment
	for _, g := range v.uncut {
		if (g.phase != phaseBlank && g.phase != phaseZeroing) || g.retiring || ondisk.SegmentSlots(g.file.Size(), slotBytes) == 0 {
			continue
		}
		if found == nil || g.phase < found.phase || (g.phase == found.phase && g.number < found.number) {
			found = g
		}
	}
	if found == nil {
		v.mu.Unlock()
		return nil
	}
	zeroed := found.zeroed
	if found.phase == phaseBlank {
		found.setPhase(phaseChanging)
		v.mu.Unlock()
		return found
	}
	found.abort = true
	v.mu.Unlock()
	select {
	case <-zeroed:
	case <-ctx.Done():
		return nil
	}
	// The growth token is ours, so nobody else has claimed it meanwhile.
	v.mu.Lock()
	defer v.mu.Unlock()
	if found.phase != phaseBlank {
		return nil
	}
	found.setPhase(phaseChanging)
	return found
}

// claimEmpty takes a cut segment of another slot size that has no slot in use.
func (v *volume) claimEmpty(slotBytes int64) *segment {
	v.mu.Lock()
	defer v.mu.Unlock()
	for {
		g := v.space.emptyOf(slotBytes, func(g *segment) bool { return ondisk.SegmentSlots(g.file.Size(), slotBytes) > 0 })
		if g == nil || v.uncutLocked(g) {
			return g
		}
		// The segment changed since it reported, and has reported again.
	}
}

// uncutLocked takes an empty segment out of its class, for a change.
func (v *volume) uncutLocked(g *segment) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.phase != phaseCut || g.retiring || !g.isEmptyLocked() {
		return false
	}
	g.blankLocked(phaseChanging)
	return true
}

// setPhase changes the phase; volume.mu is held.
func (g *segment) setPhase(p phase) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.phase = p
	g.volume.trackLocked(g)
}

// trackLocked keeps the set of uncut segments right after a segment's phase has
// changed; volume.mu and g.mu are held.
func (v *volume) trackLocked(g *segment) {
	if g.phase == phaseBlank || g.phase == phaseZeroing {
		v.uncut[g.number] = g
		return
	}
	delete(v.uncut, g.number)
}

// nextFileBytes is the size of the next segment file, or 0 if the capacity has
// no room for one that holds a slot.
func (v *volume) nextFileBytes(slotBytes int64) int64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	full := v.segmentBytes
	size := min(full, (v.capacityBytes-v.fileBytes)/ondisk.Page*ondisk.Page)
	if size < max(full/shortSegmentShare, 2*ondisk.Page) || ondisk.SegmentSlots(size, max(slotBytes, ondisk.Page)) == 0 {
		return 0
	}
	return size
}

// create makes a segment file, within capacity and floor. The growth token is
// held.
func (v *volume) create(sizeBytes int64, p phase) (*segment, error) {
	if sizeBytes == 0 || v.denied.Load() {
		return nil, errNoRoom
	}
	if floor := v.store.opts.FreeFloorBytes; floor > 0 {
		if err := v.lookAtSpace(); err != nil {
			return nil, err
		}
		if v.freeSpaceBytes.Load()-sizeBytes < floor {
			v.denied.Store(true)
			return nil, errNoRoom
		}
	}
	number, ok := v.nextNumber()
	if !ok {
		return nil, errNoRoom
	}
	f, err := v.dev.Create(ondisk.SegmentName(number), sizeBytes)
	if errors.Is(err, blockio.ErrNoSpace) {
		v.denied.Store(true)
		v.log.Warn("file system has no room for another segment", "bytes", sizeBytes, "err", err)
		return nil, errNoRoom
	}
	if err != nil {
		return nil, fmt.Errorf("blockstore: volume %d: %w", v.index, err)
	}
	g := &segment{volume: v, number: number, file: f, phase: p}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.addLocked(g)
	return g, nil
}

// nextNumber is the lowest segment number that is not taken.
func (v *volume) nextNumber() (uint32, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for ; v.lowest < kv.MaxSegments; v.lowest++ {
		if _, taken := v.segments[v.lowest]; !taken {
			return v.lowest, true
		}
	}
	return 0, false
}

// cut writes a segment's header, durably, and only then lets its slots be used:
// a slot whose place the header does not say could not be found again, and one
// found by an older header could be taken for something else.
func (v *volume) cut(ctx context.Context, g *segment, slotBytes int64) error {
	gen, err := v.store.generations.take(ctx, v.store, 1)
	if err != nil {
		v.abandonCut(g, phaseBlank)
		return err
	}
	h := ondisk.SegmentHeader{
		Volume: v.id, Number: g.number, Cut: gen,
		Slots: ondisk.SegmentSlots(g.file.Size(), slotBytes), SlotBytes: slotBytes,
	}
	// Not ctx: a request that gives up must not leave the segment half cut.
	if err := v.writePage(context.WithoutCancel(ctx), g.file, 0, h.Encode(), nil); err != nil {
		v.abandonCut(g, phaseBad)
		return fmt.Errorf("blockstore: volume %d: cut segment %d: %w", v.index, g.number, err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cutLocked(h)
	v.trackLocked(g)
	v.changes++
	return nil
}

func (v *volume) abandonCut(g *segment, p phase) {
	v.mu.Lock()
	defer v.mu.Unlock()
	g.setPhase(p)
}

// writePage writes one record to a file and syncs it. It returns early if the
// volume fails meanwhile; pending, if not nil, counts the write until it has
// completed.
func (v *volume) writePage(ctx context.Context, f blockio.File, offset int64, page []byte, pending *atomic.Int32) error {
	buf, release, err := heapAlloc(ctx, len(page))
	if err != nil {
		return err
	}
	defer release()
	copy(buf, page)
	if err := v.dev.doDetached(ctx, blockio.Request{Op: blockio.Write, File: f, Offset: offset, Bufs: [][]byte{buf}}, pending); err != nil {
		return err
	}
	return v.dev.Sync(ctx, f)
}

// readPages reads n bytes from a file into fresh aligned memory.
func readPages(ctx context.Context, dev blockio.Device, f blockio.File, offset int64, n int) ([]byte, error) {
	buf, _, err := heapAlloc(ctx, n)
	if err != nil {
		return nil, err
	}
	return buf, doOne(ctx, dev, blockio.Request{Op: blockio.Read, File: f, Offset: offset, Bufs: [][]byte{buf}})
}

// doOne performs one request.
func doOne(ctx context.Context, dev blockio.Device, r blockio.Request) error {
	batch := []blockio.Request{r}
	if err := dev.Do(ctx, batch); err != nil {
		return err
	}
	return batch[0].Err
}
