package blockstore

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/runs"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
)

const (
	// scanBytes is the size of one step of a sequential scan, read with scanRequests requests.
	scanBytes    = 8 << 20
	scanRequests = 8
	// sparseBytes is the slot size, in bytes, from which reading only the headers takes less time
	// than reading whole slots.
	sparseBytes = 64 << 10
	// sparseBatch is the number of headers read at a time.
	sparseBatch = 256
)

// ScanOptions configure a Scan.
type ScanOptions struct {
	// Verify reads the payloads too, and yields only slots in which every layer has its checksum.
	Verify bool
	// Slots, if not nil, limits the scan to these slots. They are in ascending order.
	Slots []kv.Extent
	// Progress, if not nil, is called after each segment with the bytes that the scan has finished,
	// and with the bytes of all files, or of Slots.
	Progress func(done, total int64)
}

// ScanStats counts the slots of a Scan.
type ScanStats struct {
	// Segments and Slots count the segments and slots that were read, and Found the slots passed to
	// fn.
	Segments, Slots, Found int64
	// Blank counts slots without a header, or with a header older than the segment's present
	// division into slots. Damaged counts slots with a wrong checksum of the header or, with
	// Verify, of a layer. Unreadable counts slots for which the device returned an I/O error.
	Blank, Damaged, Unreadable int64
	// Bytes is the number of bytes read.
	Bytes int64
}

func (s *ScanStats) add(o ScanStats) {
	s.Segments += o.Segments
	s.Slots += o.Slots
	s.Found += o.Found
	s.Blank += o.Blank
	s.Damaged += o.Damaged
	s.Unreadable += o.Unreadable
	s.Bytes += o.Bytes
}

// Scan reads the header of every slot of every segment, or of opts.Slots, in any state. It calls fn
// for each slot with an intact header that belongs to that slot. Volumes are read in parallel; fn
// is called from one goroutine at a time, and an error of fn ends the scan. The same block may be
// found several times: the highest generation is the newest. fn must not keep the header after it
// returns. Freed slots are found as well, until they are reused.
func (s *Store) Scan(ctx context.Context, opts ScanOptions, fn func(ref kv.Ref, h *ondisk.SlotHeader) error) (ScanStats, error) {
	if err := s.enter(); err != nil {
		return ScanStats{}, err
	}
	defer s.gate.Leave()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	all := &scan{store: s, opts: opts, fn: fn}
	for _, v := range s.volumes {
		for _, g := range v.space.sorted() {
			all.totalBytes += all.bytesOf(g)
		}
	}
	err := onVolumes(s.volumes, func(v *volume) error {
		err := all.volume(ctx, v)
		if err != nil {
			cancel() // the other volumes need not continue
		}
		return err
	})
	if all.fnErr != nil {
		err = all.fnErr
	}
	return all.stats, err
}

// scan is one running Scan.
type scan struct {
	store      *Store
	opts       ScanOptions
	totalBytes int64

	mu        sync.Mutex // also serialises fn and Progress
	fn        func(kv.Ref, *ondisk.SlotHeader) error
	fnErr     error
	stats     ScanStats
	doneBytes int64
}

func (c *scan) volume(ctx context.Context, v *volume) error {
	buf, release, err := c.store.opts.Alloc(ctx, scanBytes)
	if err != nil {
		return fmt.Errorf("blockstore: scan: scratch memory: %w", err)
	}
	defer release()
	for _, g := range v.space.sorted() {
		h, ok := g.cutHeader()
		fileBytes := c.bytesOf(g)
		if ok && fileBytes > 0 {
			w := &segmentScan{scan: c, segment: g, header: h, buf: buf}
			err := w.run(ctx)
			c.account(w.stats, fileBytes)
			// A surplus segment may be removed while it is being scanned.
			if _, still := g.cutHeader(); err != nil && (still || !errors.Is(err, blockio.ErrClosed)) {
				return err
			}
			continue
		}
		c.account(ScanStats{}, fileBytes)
	}
	return nil
}

// slotsOf returns the slots of opts.Slots that are in the segment g; h is the header of g.
func (c *scan) slotsOf(g *segment, h ondisk.SegmentHeader) []kv.Extent {
	from, _ := slices.BinarySearch(c.opts.Slots, g.extent(0))
	n, _ := slices.BinarySearch(c.opts.Slots[from:], g.extent(h.Slots))
	return c.opts.Slots[from:][:n]
}

// bytesOf returns the number of bytes that the segment g adds to the totals of
// ScanOptions.Progress.
func (c *scan) bytesOf(g *segment) int64 {
	if c.opts.Slots == nil {
		return g.sizeBytes
	}
	h, ok := g.cutHeader()
	if !ok {
		return 0
	}
	return int64(len(c.slotsOf(g, h))) * h.SlotBytes
}

// account adds st, the counts of one segment, to the totals, and reports the progress.
func (c *scan) account(st ScanStats, fileBytes int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.add(st)
	c.doneBytes += fileBytes
	if c.opts.Progress != nil {
		c.opts.Progress(c.doneBytes, c.totalBytes)
	}
}

// cutHeader returns the header of the segment, if the segment is divided into slots.
func (g *segment) cutHeader() (ondisk.SegmentHeader, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.header, g.use == useCut
}

// segmentScan reads one segment.
type segmentScan struct {
	*scan
	segment *segment
	header  ondisk.SegmentHeader
	buf     []byte
	stats   ScanStats
	sums    []uint64
}

func (w *segmentScan) run(ctx context.Context) error {
	w.stats.Segments++
	step := w.headers
	perStep := uint32(sparseBatch)
	if w.opts.Verify || w.header.SlotBytes < sparseBytes {
		step = w.slots
		perStep = uint32(max(1, scanBytes/w.header.SlotBytes))
	}
	if w.header.SlotBytes > int64(len(w.buf)) && w.opts.Verify {
		buf, release, err := w.store.opts.Alloc(ctx, int(w.header.SlotBytes))
		if err != nil {
			return fmt.Errorf("blockstore: scan: scratch memory: %w", err)
		}
		defer release()
		w.buf = buf
	}
	for r := range w.runs() {
		for ; r.N > 0; r.Start, r.N = r.Start+min(perStep, r.N), r.N-min(perStep, r.N) {
			if err := step(ctx, r.Start, min(perStep, r.N)); err != nil {
				return err
			}
		}
	}
	return nil
}

// runs yields the runs of adjacent slots that the scan reads.
func (w *segmentScan) runs() iter.Seq[runs.Run] {
	return func(yield func(runs.Run) bool) {
		if w.opts.Slots == nil {
			yield(runs.Run{N: w.header.Slots})
			return
		}
		for left := w.slotsOf(w.segment, w.header); len(left) > 0; {
			n := 1
			for n < len(left) && left[n] == left[0]+kv.Extent(n) {
				n++
			}
			if !yield(runs.Run{Start: left[0].Slot(), N: uint32(n)}) {
				return
			}
			left = left[n:]
		}
	}
}

// slots reads n whole slots from first on.
func (w *segmentScan) slots(ctx context.Context, first, n uint32) error {
	total := int64(n) * w.header.SlotBytes
	var batch []blockio.Request
	part := max(w.header.SlotBytes, total/scanRequests/w.header.SlotBytes*w.header.SlotBytes)
	for at := int64(0); at < total; at += part {
		batch = append(batch, blockio.Request{
			Op: blockio.Read, File: w.segment.file, Offset: w.header.SlotOffset(first) + at,
			Bufs: [][]byte{w.buf[at:min(at+part, total)]},
		})
	}
	if err := w.segment.volume.dev.Do(ctx, batch); err != nil {
		return err
	}
	for i := range n {
		at := int64(i) * w.header.SlotBytes
		slot := w.buf[at:][:w.header.SlotBytes]
		if batch[at/part].Err != nil {
			if err := w.alone(ctx, first+i, slot); err != nil {
				w.unreadable(1)
				continue
			}
		}
		w.stats.Bytes += w.header.SlotBytes
		if err := w.look(first+i, slot); err != nil {
			return err
		}
	}
	return nil
}

// alone reads a single slot. It is used after a read of several slots failed.
func (w *segmentScan) alone(ctx context.Context, slot uint32, buf []byte) error {
	return doOne(ctx, w.segment.volume.dev, blockio.Request{Op: blockio.Read, File: w.segment.file, Offset: w.header.SlotOffset(slot), Bufs: [][]byte{buf}})
}

// headers reads the first pages of n slots from first on.
func (w *segmentScan) headers(ctx context.Context, first, n uint32) error {
	batch := make([]blockio.Request, n)
	page := func(i uint32) []byte { return w.buf[i*ondisk.Page:][:ondisk.Page] }
	for i := range n {
		batch[i] = blockio.Request{Op: blockio.Read, File: w.segment.file, Offset: w.header.SlotOffset(first + i), Bufs: [][]byte{page(i)}}
	}
	if err := w.segment.volume.dev.Do(ctx, batch); err != nil {
		return err
	}
	for i := range n {
		if batch[i].Err != nil {
			w.unreadable(1)
			continue
		}
		w.stats.Bytes += ondisk.Page
		header := page(i)
		if long := ondisk.SlotHeaderBytes(header); long > ondisk.Page && int64(long) < w.header.SlotBytes {
			var err error
			if header, err = readPages(ctx, w.segment.volume.dev, w.segment.file, w.header.SlotOffset(first+i), long); err != nil {
				w.unreadable(1)
				continue
			}
			w.stats.Bytes += int64(long)
		}
		if err := w.look(first+i, header); err != nil {
			return err
		}
	}
	return nil
}

func (w *segmentScan) unreadable(n int64) {
	w.stats.Slots += n
	w.stats.Unreadable += n
}

// look classifies one slot. b is the whole slot, or its header only.
func (w *segmentScan) look(slot uint32, b []byte) error {
	w.stats.Slots++
	h, err := ondisk.DecodeSlotHeader(b, w.sums[:0])
	switch {
	case errors.Is(err, ondisk.ErrBlank):
		w.stats.Blank++
		return nil
	case err != nil:
		w.stats.Damaged++
		return nil
	}
	w.sums = h.LayerSums
	l, err := h.Layout()
	if err != nil || h.Extent != w.segment.extent(slot) || l.SlotBytes() != w.header.SlotBytes || h.Generation <= w.header.Cut {
		w.stats.Blank++
		return nil
	}
	opener, err := w.segment.volume.openHeader(&h, b)
	switch {
	case errors.Is(err, ErrKey):
		return fmt.Errorf("blockstore: %v may hold a block, and is encrypted with key %v, which is not given: add the key to the keys of the node, or begin with empty volumes: %w", h.Ref(), h.Key, ErrKey)
	case errors.Is(err, errNoKey), errors.Is(err, ErrErased):
		w.stats.Blank++ // no block of the store has that key, or is of that epoch
		return nil
	case err != nil:
		w.stats.Damaged++
		return nil
	}
	w.sums = h.LayerSums
	if w.opts.Verify && opener.openLayers(b, &h, l) != nil {
		w.stats.Damaged++
		return nil
	}
	w.stats.Found++
	return w.pass(&h)
}

// pass calls fn with a header.
func (w *segmentScan) pass(h *ondisk.SlotHeader) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fnErr == nil {
		w.fnErr = w.fn(h.Ref(), h)
	}
	return w.fnErr
}

// openLayers decrypts the layers of a whole slot in place and compares their checksums.
func (o *slotOpener) openLayers(slot []byte, h *ondisk.SlotHeader, l ondisk.Layout) error {
	for i, sum := range h.LayerSums {
		if err := o.openLayer(i, slot[l.HeaderBytes()+int64(i)*l.LayerBytes():][:l.LayerBytes()], sum); err != nil {
			return err
		}
	}
	return nil
}
