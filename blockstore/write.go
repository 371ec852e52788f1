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

// Write is a request to write one slot.
type Write struct {
	// Ref is a reserved slot.
	Ref kv.Ref
	// Header describes the block. Store.Write sets its Extent and Generation. LayerSums are the
	// writer's checksums. Store.Write does not compute or compare them: the caller must have
	// verified them, or trust the writer.
	Header ondisk.SlotHeader
	// Buf is aligned memory of Layout.SlotBytes with the payload at Layout.HeaderBytes. Store.Write
	// fills in the header and clears the padding, unless the volume is encrypted: then it only reads
	// Buf. The store owns Buf until Write returns.
	Buf []byte
	// Err is the outcome of this slot: nil means that the device completed the write.
	Err error
}

// Write writes the slots as one batch for each volume and returns when all slots have an outcome in
// Err. It returns the error of the first slot that failed, or nil. The caller should Abandon a slot
// that failed.
func (s *Store) Write(ctx context.Context, batch []Write) error {
	if err := s.enter(); err != nil {
		return failWrites(batch, err)
	}
	defer s.gate.Leave()
	m := s.submissions.get(blockio.Write, len(batch))
	defer s.submissions.put(m)
	for i := range batch {
		batch[i].Err = s.prepareWrite(&batch[i], &m.jobs[i])
		m.jobs[i].skip = batch[i].Err != nil
	}
	err := s.runWrites(ctx, m, batch)
	var first error
	for i := range batch {
		if !m.jobs[i].skip {
			batch[i].Err = s.finishWrite(&batch[i], &m.jobs[i], err)
		}
		if first == nil {
			first = batch[i].Err
		}
	}
	return first
}

// runWrites performs the writes of a batch.
func (s *Store) runWrites(ctx context.Context, m *submission, batch []Write) error {
	for i := range m.jobs {
		if m.jobs[i].key != nil && !m.jobs[i].skip {
			return m.runSealed(ctx, s.volumes, batch)
		}
	}
	return m.run(ctx, s.volumes)
}

func failWrites(batch []Write, err error) error {
	for i := range batch {
		batch[i].Err = err
	}
	return err
}

// prepareWrite checks a write, completes its buffer, and pins its slot.
func (s *Store) prepareWrite(w *Write, j *job) error {
	l, err := w.Header.Layout()
	if err != nil {
		return fmt.Errorf("blockstore: write %v: %w", w.Ref, err)
	}
	if n := l.SlotBytes(); int64(len(w.Buf)) != n {
		return fmt.Errorf("blockstore: write %v: buffer of %d bytes for a slot of %d: %w", w.Ref, len(w.Buf), n, ErrState)
	}
	g, err := s.segmentOf(w.Ref)
	if err != nil {
		return err
	}
	if !g.volume.dev.health().Syncs() {
		return fmt.Errorf("blockstore: write %v: %w", w.Ref, g.volume.dev.failure(health.Write))
	}
	w.Header.Extent, w.Header.Generation, w.Header.Key = w.Ref.Extent, w.Ref.Generation, ondisk.KeyID{}
	key, err := s.writeKey(g.volume, &w.Header)
	if err != nil {
		return fmt.Errorf("blockstore: write %v: %w", w.Ref, err)
	}
	if key == nil {
		if err := w.Header.EncodeTo(w.Buf); err != nil {
			return fmt.Errorf("blockstore: write %v: %w", w.Ref, err)
		}
		clear(w.Buf[l.HeaderBytes()+l.PayloadBytes:])
	}
	if invariants.Enabled {
		for i, sum := range ondisk.AppendLayerSums(nil, w.Buf[l.HeaderBytes():][:l.PayloadBytes], l.Layers) {
			invariants.Assert(sum == w.Header.LayerSums[i], "write %v: layer %d has checksum %016x, the writer sent %016x", w.Ref, i, sum, w.Header.LayerSums[i])
		}
	}
	offset, err := g.hold(w.Ref, l.SlotBytes(), blockio.Write)
	if err != nil {
		return err
	}
	*j = job{volume: g.volume, file: g.file, offset: offset, bufs: [2][]byte{w.Buf}, bytes: l.SlotBytes(), entire: true, key: key}
	return nil
}

// finishWrite records the outcome and unpins the slot.
func (s *Store) finishWrite(w *Write, j *job, admission error) error {
	err := j.outcome
	if admission != nil && err == nil {
		// A device did not admit its batch. An outcome of nil then means that this write was not
		// submitted, or that it completed on another volume. The caller abandons the slot in both
		// cases.
		err = admission
	}
	g, stale := s.segmentOf(w.Ref)
	if stale != nil {
		return stale
	}
	c := &j.volume.counter
	c.writes.Add(1)
	if err == nil {
		c.writtenBytes.Add(uint64(j.bytes))
		j.volume.syncer.wrote(j.file)
		g.written(w.Ref)
	} else {
		c.writeFailures.Add(1)
		if errors.Is(err, blockio.ErrNoSpace) {
			j.volume.full.Store(true)
		}
		err = fmt.Errorf("blockstore: write %v: %w", w.Ref, err)
	}
	if stale := g.unpin(w.Ref); stale != nil {
		return stale
	}
	return err
}
