package blockstore

import (
	"context"
	"errors"
	"time"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
)

const (
	// keeperInterval is the time between two queries of the file system's free space.
	keeperInterval = time.Second
	// zeroChunkBytes is the size, in bytes, of one write of zeroes. Only one such write is in
	// flight, because other requests to the device are more urgent.
	zeroChunkBytes = 1 << 20
)

// wake makes the keeper run soon; it never blocks.
func (v *volume) wake() {
	select {
	case v.kick <- struct{}{}:
	default:
	}
}

// keep is the volume's background goroutine, the keeper. Until ctx ends, it reads the free space of
// the file system, removes surplus segments (beyond the capacity), and fills one segment with
// zeroes before a writer needs it.
func (v *volume) keep(ctx context.Context) {
	ticker := time.NewTicker(keeperInterval)
	defer ticker.Stop()
	for v.dev.health().State != health.Removed {
		v.runDue(ctx)
		select {
		case <-ctx.Done():
			return
		case <-v.kick:
		case <-ticker.C:
			v.watchSpace()
		}
	}
}

// runDue runs the keeper's tasks that are due, once.
func (v *volume) runDue(ctx context.Context) {
	if !v.dev.health().Syncs() {
		return
	}
	if err := v.retire(); err != nil && ctx.Err() == nil {
		v.log.Warn("could not remove a surplus segment", "err", err)
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
		v.log.Warn("could not read the free space", "err", err)
		return
	}
	v.denied.Store(false)
	v.full.Store(false)
	if is := v.belowFloor(); is != was {
		v.log.Warn("free-space floor", "below", is, "free_bytes", v.freeSpaceBytes.Load(), "floor_bytes", v.store.freeFloorBytes.Load())
	}
}

// retire removes the surplus segments that are empty.
func (v *volume) retire() error {
	for _, g := range v.space.surplusSegments() {
		if !v.space.claimSurplus(g) {
			continue
		}
		err := v.remove(g)
		v.space.finishRemoval(g, err)
		if err != nil {
			return err
		}
	}
	return nil
}

// remove deletes the file of a claimed segment.
func (v *volume) remove(g *segment) error {
	if !g.closed {
		v.syncer.forget(g.file)
		if err := g.file.Close(); err != nil {
			return err
		}
		g.closed = true
	}
	return v.dev.Remove(g.file.Name())
}

// zeroAhead creates a blank segment (one not yet divided into slots) ahead of need and fills it
// with zeroes. It does nothing if there is a blank segment already, or if the capacity has no room
// for one.
func (v *volume) zeroAhead(ctx context.Context) error {
	if !v.takesWrites() || !v.space.wantsBlank() {
		return nil
	}
	// The memory is allocated before the segment is claimed. Otherwise the keeper (the volume's
	// background goroutine, which runs this) could hold the segment and wait for memory, while a
	// writer holds the memory and waits for the segment.
	buf, release, err := v.store.opts.Alloc(ctx, zeroChunkBytes)
	if err != nil {
		return err
	}
	defer release()
	g := v.space.claimAhead()
	if g == nil {
		return nil
	}
	defer v.space.finishAhead(g)
	if err := v.create(g); err != nil {
		if errors.Is(err, errNoRoom) {
			return nil
		}
		return err
	}
	return v.zero(ctx, g, buf)
}

// zero writes zeroes to the file, until its end or until a writer claims the segment.
func (v *volume) zero(ctx context.Context, g *segment, buf []byte) error {
	clear(buf)
	for off := int64(0); off < g.sizeBytes && g.isBeingPrepared(); off += zeroChunkBytes {
		n := min(zeroChunkBytes, g.sizeBytes-off)
		if err := doOne(ctx, v.dev, blockio.Request{Op: blockio.Write, File: g.file, Offset: off, Bufs: [][]byte{buf[:n/ondisk.Page*ondisk.Page]}}); err != nil {
			return err
		}
	}
	return nil
}

func (g *segment) isBeingPrepared() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.use == usePreparing
}
