package blockstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
)

// Read is a request to read one piece, or a range of its layers.
type Read struct {
	Ref kv.Ref
	// Want is the content that the slot must have.
	Want ondisk.SlotKey
	// FirstLayer and Layers select layers. Layers 0 means all layers; FirstLayer must then be 0.
	FirstLayer, Layers int
	// Buf is aligned memory. For all layers its length is Layout.SlotBytes, and it receives the
	// whole slot with the payload at Layout.HeaderBytes. For a range of layers its length is the
	// result bytes of Layout.Range, and the first layer starts at the result skip. The store owns
	// Buf until Read returns. Its content is undefined unless Err is nil.
	Buf []byte
	// LayerSums receives the writer's checksums of the selected layers; its capacity is reused.
	LayerSums []uint64
	// Class, Parent, Depth and Origin are set from the slot's header.
	Class  ondisk.Class
	Parent kv.BlockID
	Depth  uint32
	Origin kv.Generation
	// Err is the outcome: nil means that the bytes are exactly the written ones. ErrStale
	// and ErrCorrupt are misses; any other error comes from the device.
	Err error
}

// Read reads and verifies the pieces, as one batch for each volume, and returns when every piece
// has its outcome in Err. A failed piece does not make the call fail. The call fails with
// ErrClosed, or with the error of ctx or of the device if a batch was not admitted. Read pins each
// slot while it reads it.
func (s *Store) Read(ctx context.Context, batch []Read) error {
	if err := s.enter(); err != nil {
		return failReads(batch, err)
	}
	defer s.gate.Leave()
	// Job i reads the bytes of item i. For a layer range, job n+i reads the slot header, unless the
	// header lies right before the range.
	n := len(batch)
	m := s.submissions.get(blockio.Read, 2*n)
	defer s.submissions.put(m)
	for i := range batch {
		m.jobs[n+i].skip = true
		batch[i].Err = s.prepareRead(&batch[i], &m.jobs[i], &m.jobs[n+i])
		m.jobs[i].skip = batch[i].Err != nil
	}
	err := m.run(ctx, s.volumes)
	for i := range batch {
		if !m.jobs[i].skip {
			m.jobs[i].retry(ctx)
			m.jobs[n+i].retry(ctx)
			batch[i].Err = s.finishRead(&batch[i], &m.jobs[i], &m.jobs[n+i], err)
		} else {
			s.countRead(batch[i].Ref, 0, batch[i].Err)
		}
	}
	return err
}

func failReads(batch []Read, err error) error {
	for i := range batch {
		batch[i].Err = err
	}
	return err
}

// prepareRead checks a read and pins its slot.
func (s *Store) prepareRead(r *Read, body, head *job) error {
	l, err := r.Want.Layout()
	if err != nil {
		return fmt.Errorf("blockstore: read %v: %w", r.Ref, err)
	}
	if r.Layers < 0 || r.FirstLayer < 0 || r.FirstLayer > l.Layers-r.Layers || (r.Layers == 0 && r.FirstLayer != 0) {
		return fmt.Errorf("blockstore: read %v: layers %d to %d of %d: %w", r.Ref, r.FirstLayer, r.FirstLayer+r.Layers, l.Layers, ErrState)
	}
	offset, bytes := int64(0), l.SlotBytes()
	if r.Layers > 0 {
		offset, bytes, _ = l.Range(r.FirstLayer, r.Layers)
	}
	if int64(len(r.Buf)) != bytes {
		return fmt.Errorf("blockstore: read %v: buffer of %d bytes; want %d: %w", r.Ref, len(r.Buf), bytes, ErrState)
	}
	invariants.Mangle(r.Buf)
	g, err := s.segmentOf(r.Ref)
	if err != nil {
		return err
	}
	if !g.volume.dev.health().Reads() {
		return fmt.Errorf("blockstore: read %v: %w", r.Ref, g.volume.dev.failure(health.Read))
	}
	slot, err := g.hold(r.Ref, l.SlotBytes(), blockio.Read)
	if err != nil {
		return err
	}
	*body = job{volume: g.volume, file: g.file, offset: slot + offset, bufs: [2][]byte{r.Buf}, bytes: bytes, entire: r.Layers == 0}
	if r.Layers == 0 {
		return nil
	}
	header := s.headers.get(l.HeaderBytes())
	if offset == l.HeaderBytes() {
		body.offset, body.bytes, body.bufs = slot, l.HeaderBytes()+bytes, [2][]byte{header, r.Buf}
		head.bufs[0] = header // finishRead uses the header; the job itself is skipped
		return nil
	}
	*head = job{volume: g.volume, file: g.file, offset: slot, bufs: [2][]byte{header}, bytes: l.HeaderBytes()}
	return nil
}

// retry repeats a failed job once, as a single request. If it fails again, the error is persistent,
// and retry reads the catalogue of the volume. If that fails too, the error is a failure of the
// volume and not of the block.
func (j *job) retry(ctx context.Context) {
	if j.outcome == nil || j.volume == nil || volumesFault(j.outcome) == nil || !j.volume.dev.health().Reads() {
		return
	}
	if first := j.outcome; !j.twice {
		if j.outcome = j.again(ctx, blockio.Read); j.outcome == nil {
			return
		}
		j.outcome = fmt.Errorf("%w; and once more: %w", first, j.outcome)
	}
	switch _, err := readPages(ctx, j.volume.dev, j.volume.catalogueFile(), 0, ondisk.Page); {
	case err == nil:
	case volumesFault(err) == nil:
		j.outcome = fmt.Errorf("%w; and the catalogue: %w", j.outcome, err)
	default:
		j.outcome = fmt.Errorf("%w: %w; and its catalogue cannot be read: %w", ErrVolumeFailed, j.outcome, err)
	}
}

// Unreadable reports whether the error of a Read or a Scrub means that the slot cannot be read
// although its volume can: the device failed twice on this slot, and can read other pages. The
// caller should drop the block, so that it is written to another slot.
func (s *Store) Unreadable(ref kv.Ref, err error) bool {
	return err != nil && volumesFault(err) != nil && s.VolumeHealth(ref).Reads() &&
		!errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrStale) && !errors.Is(err, ErrVolumeFailed) && !errors.Is(err, ErrBusy) && !errors.Is(err, ErrState) && !errors.Is(err, ErrClosed)
}

// finishRead verifies the bytes and unpins the slot.
func (s *Store) finishRead(r *Read, body, head *job, admission error) error {
	err := errors.Join(body.outcome, head.outcome)
	switch {
	case admission != nil:
		err = admission
	case err != nil:
		err = fmt.Errorf("blockstore: read %v: %w", r.Ref, err)
	default:
		err = r.verify(head.bufs[0], body.volume)
	}
	if h := head.bufs[0]; h != nil {
		s.headers.put(h)
	}
	g, stale := s.segmentOf(r.Ref)
	if stale == nil {
		if e := g.unpin(r.Ref); e != nil {
			stale = fmt.Errorf("blockstore: read %v: slot was reused meanwhile (pinned-stays): %w: %w", r.Ref, ErrStale, e)
		}
	}
	if stale != nil {
		err = stale
	}
	if err != nil {
		invariants.Mangle(r.Buf)
	}
	s.countRead(r.Ref, body.bytes, err)
	return err
}

// verify compares the bytes with Want. header has the slot header, or is nil if the header is at
// the start of Buf. verify decrypts the bytes in place.
func (r *Read) verify(header []byte, v *volume) error {
	payload := r.Buf
	if header == nil {
		header = r.Buf
	}
	h, err := ondisk.DecodeSlotHeader(header, r.LayerSums[:0])
	if err != nil {
		return fmt.Errorf("blockstore: read %v: %w: %w", r.Ref, ErrCorrupt, err)
	}
	switch {
	case h.Generation != r.Ref.Generation:
		return fmt.Errorf("blockstore: read %v: slot holds generation %d: %w", r.Ref, h.Generation, ErrStale)
	case h.Extent != r.Ref.Extent:
		return fmt.Errorf("blockstore: read %v: slot was meant for %v: %w", r.Ref, h.Extent, ErrCorrupt)
	case h.SlotKey != r.Want:
		return fmt.Errorf("blockstore: read %v: slot holds %+v, wanted %+v: %w", r.Ref, h.SlotKey, r.Want, ErrCorrupt)
	}
	opener, err := v.openHeader(&h, header)
	switch {
	case errors.Is(err, ErrErased):
		return fmt.Errorf("blockstore: read %v: %w", r.Ref, err)
	case err != nil:
		return fmt.Errorf("blockstore: read %v: %w: %w", r.Ref, ErrCorrupt, err)
	}
	r.LayerSums = h.LayerSums
	r.Class, r.Parent, r.Depth, r.Origin = h.Class, h.Parent, h.Depth, h.Origin()
	l, err := h.Layout()
	if err != nil {
		return fmt.Errorf("blockstore: read %v: %w: %w", r.Ref, ErrCorrupt, err)
	}
	first, count, skip := 0, l.Layers, l.HeaderBytes()
	if r.Layers > 0 {
		first, count = r.FirstLayer, r.Layers
		_, _, skip = l.Range(first, count)
		r.LayerSums = append(r.LayerSums[:0], r.LayerSums[first:first+count]...)
	}
	for i := range count {
		layer := payload[skip+int64(i)*l.LayerBytes():][:l.LayerBytes()]
		if err := opener.openLayer(first+i, layer, r.LayerSums[i]); err != nil {
			return fmt.Errorf("blockstore: read %v: %w: %w", r.Ref, err, ErrCorrupt)
		}
	}
	return nil
}

// countRead counts one outcome.
func (s *Store) countRead(ref kv.Ref, bytes int64, err error) {
	v := s.volume(ref.Extent)
	if v == nil {
		v = s.volumes[0]
	}
	c := &v.counter
	c.reads.Add(1)
	switch {
	case err == nil:
		c.readBytes.Add(uint64(bytes))
	case errors.Is(err, ErrStale):
		c.readStale.Add(1)
	case errors.Is(err, ErrCorrupt):
		c.readCorrupt.Add(1)
	default:
		c.readFailures.Add(1)
	}
}
