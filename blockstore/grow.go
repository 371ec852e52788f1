package blockstore

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
)

// shortSegmentShare bounds the size of a volume's last segment. That segment may be shorter than
// the others, to use the remaining capacity, but has at least 1/shortSegmentShare of the size of a
// full segment.
const shortSegmentShare = 16

// cut divides a claimed segment into slots of c.slotBytes bytes.
func (v *volume) cut(g *segment, c *cutting) {
	// Several requests wait for this new segment, so the end of one request's context must not stop
	// the work.
	ctx := context.Background()
	otherwise := useBlank
	h, err := v.plan(ctx, g, c.slotBytes)
	if err == nil {
		if err = v.writeHeader(ctx, g, h); volumesFault(err) != nil {
			otherwise = useBad
		}
	}
	v.space.finishCut(g, h, otherwise, c, err)
	v.wake()
}

// plan returns a new header for a claimed segment. It creates the segment's file if there is none.
func (v *volume) plan(ctx context.Context, g *segment, slotBytes int64) (ondisk.SegmentHeader, error) {
	if g.prepared != nil {
		<-g.prepared
	}
	if g.file == nil {
		if err := v.create(g); err != nil {
			return ondisk.SegmentHeader{}, err
		}
	}
	gen, err := v.store.generations.take(ctx, v.store, 1)
	return ondisk.SegmentHeader{
		Volume: v.id, Number: g.number, Cut: gen,
		Slots: ondisk.SegmentSlots(g.sizeBytes, slotBytes), SlotBytes: slotBytes,
	}, err
}

// writeHeader writes a segment's header durably, before the first slot is used. If the header were
// lost, the next start would not find the slots; if an older header were left, the next start would
// take parts of slots for slots of another size. writeHeader waits for the device even if the
// volume fails, because a late write must not replace a newer header.
func (v *volume) writeHeader(ctx context.Context, g *segment, h ondisk.SegmentHeader) error {
	page, release, err := heapAlloc(ctx, ondisk.Page)
	if err != nil {
		return err
	}
	defer release()
	copy(page, h.Encode())
	if err = doOne(ctx, v.dev, blockio.Request{Op: blockio.Write, File: g.file, Bufs: [][]byte{page}}); err == nil {
		err = v.dev.Sync(ctx, g.file)
	}
	if errors.Is(err, blockio.ErrNoSpace) {
		v.full.Store(true)
	}
	if err != nil {
		return fmt.Errorf("blockstore: volume %d: cut segment %d: %w", v.index, g.number, err)
	}
	return nil
}

// create creates the file of a segment.
func (v *volume) create(g *segment) error {
	f, err := v.createFile(g, v.space.beginCreate(g))
	v.space.endCreate(g, f)
	return err
}

// createFile creates a segment file, unless the free space would fall below the floor.
// creatingBytes is the size of the files that are being created, including this one.
func (v *volume) createFile(g *segment, creatingBytes int64) (blockio.File, error) {
	if floor := v.store.freeFloorBytes.Load(); floor > 0 {
		if err := v.lookAtSpace(); err != nil {
			return nil, err
		}
		if v.freeSpaceBytes.Load()-creatingBytes < floor {
			v.denied.Store(true)
			return nil, errNoRoom
		}
	}
	f, err := v.dev.Create(ondisk.SegmentName(g.number), g.sizeBytes)
	if errors.Is(err, blockio.ErrNoSpace) {
		v.denied.Store(true)
		v.log.Warn("file system has no room for another segment", "bytes", g.sizeBytes, "err", err)
		return nil, errNoRoom
	}
	if errors.Is(err, blockio.ErrExist) {
		v.log.Warn("a segment file exists that this process has not created: its number is not used until the next start", "segment", g.number)
		v.space.skip(g.number)
	}
	if err != nil {
		return nil, fmt.Errorf("blockstore: volume %d: %w", v.index, err)
	}
	return f, nil
}

// writePage writes one record to a file and syncs the file. If the volume fails, it returns at
// once, even if the write has not completed; pending counts the write until it has completed.
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
