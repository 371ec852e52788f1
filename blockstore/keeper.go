package blockstore

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
)

const (
	// keeperInterval is how often the file system is asked for its free space.
	keeperInterval = time.Second
	// zeroChunkBytes is written at a time, one in flight: the zeroing is never
	// in a hurry, the requests it shares the device with are.
	zeroChunkBytes = 1 << 20
)

// wake lets the keeper look now; it never blocks.
func (v *volume) wake() {
	select {
	case v.kick <- struct{}{}:
	default:
	}
}

// keep is the volume's goroutine: it watches free space, gives back surplus
// segments and zeroes one ahead of need, until ctx ends.
func (v *volume) keep(ctx context.Context) {
	ticker := time.NewTicker(keeperInterval)
	defer ticker.Stop()
	for v.dev.health().State != health.Removed {
		v.tend(ctx)
		select {
		case <-ctx.Done():
			return
		case <-v.kick:
		case <-ticker.C:
			v.watchSpace()
		}
	}
}

// tend does what is due once.
func (v *volume) tend(ctx context.Context) {
	if err := v.retire(ctx); err != nil && ctx.Err() == nil {
		v.log.Warn("could not give back a surplus segment", "err", err)
	}
	if v.store.opts.Prewrite && ctx.Err() == nil {
		if err := v.zeroAhead(ctx); err != nil && ctx.Err() == nil {
			v.log.Warn("could not prepare a segment ahead of need", "err", err)
		}
	}
}

func (v *volume) watchSpace() {
	was := v.belowFloor()
	if err := v.lookAtSpace(); err != nil {
		v.log.Warn("could not ask for free space", "err", err)
		return
	}
	v.denied.Store(false)
	v.full.Store(false)
	if is := v.belowFloor(); is != was {
		v.log.Warn("free-space floor", "below", is, "free_bytes", v.freeSpaceBytes.Load(), "floor_bytes", v.store.opts.FreeFloorBytes)
	}
}

// markSurplus decides which segments go when the files exceed the capacity: the
// emptiest, so that least is lost.
func (v *volume) markSurplus() {
	v.mu.Lock()
	defer v.mu.Unlock()
	over := v.fileBytes - v.capacityBytes
	for over > 0 {
		var pick *segment
		var least uint32
		for _, g := range v.segments {
			g.mu.Lock()
			used := g.header.Slots - g.counts.free
			if !g.retiring && (pick == nil || used < least || (used == least && g.number > pick.number)) {
				pick, least = g, used
			}
			g.mu.Unlock()
		}
		if pick == nil {
			return
		}
		pick.mu.Lock()
		pick.retiring = true
		v.space.report(pick)
		v.surplus[pick.number] = pick
		pick.mu.Unlock()
		over -= pick.file.Size()
	}
}

// retire removes the surplus segments that are empty.
func (v *volume) retire(ctx context.Context) error {
	for _, g := range v.surplusSegments() {
		if !g.mayRetire() {
			continue
		}
		if err := v.takeGrowth(ctx); err != nil {
			return err
		}
		err := v.remove(g)
		v.giveGrowth()
		if err != nil {
			return err
		}
	}
	return nil
}

// surplusSegments returns the segments that are to be removed.
func (v *volume) surplusSegments() []*segment {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.SortedFunc(maps.Values(v.surplus), func(a, b *segment) int { return int(a.number) - int(b.number) })
}

func (g *segment) mayRetire() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.retiring && g.phase != phaseZeroing && g.phase != phaseChanging && g.isEmptyLocked()
}

// remove deletes a segment's file; the growth token is held.
func (v *volume) remove(g *segment) error {
	v.mu.Lock()
	g.mu.Lock()
	g.blankLocked(phaseChanging)
	v.dropLocked(g)
	g.mu.Unlock()
	v.mu.Unlock()
	v.syncer.forget(g.file)
	if err := g.file.Close(); err != nil {
		return err
	}
	return v.dev.Remove(g.file.Name())
}

// zeroAhead makes sure that one blank segment is ready for the next cut, as long
// as the capacity has room for it.
func (v *volume) zeroAhead(ctx context.Context) error {
	g, err := v.createAhead(ctx)
	if g == nil || err != nil {
		return err
	}
	err = v.zero(ctx, g)
	v.mu.Lock()
	defer v.mu.Unlock()
	g.setPhase(phaseBlank)
	close(g.zeroed)
	return err
}

// createAhead creates the file if there is no blank segment, or returns nil.
func (v *volume) createAhead(ctx context.Context) (*segment, error) {
	if err := v.takeGrowth(ctx); err != nil {
		return nil, err
	}
	defer v.giveGrowth()
	if v.hasBlank() || !v.takesWrites() {
		return nil, nil
	}
	size := v.nextFileBytes(0)
	g, err := v.create(size, phaseChanging)
	if err == errNoRoom {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	g.zeroed = make(chan struct{})
	g.setPhase(phaseZeroing)
	return g, nil
}

func (v *volume) hasBlank() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, g := range v.uncut {
		if g.phase == phaseBlank && !g.retiring {
			return true
		}
	}
	return false
}

// zero writes zeroes over the file until the end, or until it is asked to stop.
func (v *volume) zero(ctx context.Context, g *segment) error {
	buf, release, err := v.store.opts.Alloc(ctx, zeroChunkBytes)
	if err != nil {
		return err
	}
	defer release()
	clear(buf)
	for off := int64(0); off < g.file.Size() && !v.zeroingAborted(g); off += zeroChunkBytes {
		n := min(zeroChunkBytes, g.file.Size()-off)
		if err := doOne(ctx, v.dev, blockio.Request{Op: blockio.Write, File: g.file, Offset: off, Bufs: [][]byte{buf[:n/ondisk.Page*ondisk.Page]}}); err != nil {
			return err
		}
	}
	return nil
}

func (v *volume) zeroingAborted(g *segment) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return g.abort
}
