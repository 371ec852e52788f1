package blockstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
	"golang.org/x/time/rate"
)

// ScrubOptions configure a Scrub.
type ScrubOptions struct {
	// BytesPerSecond limits the reading; 0 means no limit.
	BytesPerSecond int64
	// From is the slot to start with: the Next of an earlier result, or 0.
	From kv.Extent
	// MaxBytes is the number of bytes read after which the call ends; 0 means that it ends after
	// the last slot.
	MaxBytes int64
	// Report is called for each live slot that is corrupt or unreadable. Report may call Free for
	// the slot.
	Report func(ref kv.Ref, err error)
}

// ScrubResult is the progress of a Scrub.
type ScrubResult struct {
	// Next is the slot to continue from. Done is set, and Next is 0, after the last slot.
	Next kv.Extent
	Done bool
	// Slots and Bytes count the verified slots and their bytes, Corrupt and Unreadable the slots
	// passed to Report.
	Slots, Bytes, Corrupt, Unreadable int64
}

// Scrub reads live slots in order and verifies the header and every layer of each. It ends after
// the last slot or after MaxBytes. If ctx ends first, it returns the error of ctx. Scrub does not
// wait for a read that hangs: it releases the memory and the slot of that read when the device
// completes the read. Until then it skips the slots of that volume.
func (s *Store) Scrub(ctx context.Context, opts ScrubOptions) (ScrubResult, error) {
	if err := s.enter(); err != nil {
		return ScrubResult{Next: opts.From}, err
	}
	defer s.gate.Leave()
	b := &scrub{store: s, opts: opts, result: ScrubResult{Next: opts.From}}
	if n := opts.BytesPerSecond; n > 0 {
		b.limiter = rate.NewLimiter(rate.Limit(n), int(min(n, 1<<30)))
	}
	defer b.free()
	for {
		ref, slotBytes, ok := s.nextLive(b.result.Next)
		if !ok {
			b.result.Next, b.result.Done = 0, true
			return b.result, nil
		}
		if opts.MaxBytes > 0 && b.result.Bytes >= opts.MaxBytes {
			b.result.Next = ref.Extent
			return b.result, nil
		}
		if err := b.slot(ctx, ref, slotBytes); err != nil {
			b.result.Next = ref.Extent
			return b.result, err
		}
		b.result.Next = ref.Extent + 1
	}
}

// scrub is one call of Scrub.
type scrub struct {
	store   *Store
	opts    ScrubOptions
	limiter *rate.Limiter
	buf     []byte
	release func()
	result  ScrubResult
}

func (b *scrub) free() {
	if b.release != nil {
		b.release()
	}
	b.buf, b.release = nil, nil
}

// room makes buf at least sizeBytes bytes long: if buf is shorter, room allocates another.
func (b *scrub) room(ctx context.Context, sizeBytes int64) error {
	if int64(len(b.buf)) >= sizeBytes {
		return nil
	}
	b.free()
	var err error
	if b.buf, b.release, err = b.store.opts.Alloc(ctx, int(sizeBytes)); err != nil {
		b.release = nil
		return fmt.Errorf("blockstore: scrub: scratch memory: %w", err)
	}
	return nil
}

// wait waits until BytesPerSecond allows n more bytes.
func (b *scrub) wait(ctx context.Context, n int64) error {
	for b.limiter != nil && n > 0 {
		part := min(n, int64(b.limiter.Burst()))
		if err := b.limiter.WaitN(ctx, int(part)); err != nil {
			return fmt.Errorf("blockstore: scrub: %w", err)
		}
		n -= part
	}
	if err := context.Cause(ctx); err != nil {
		return fmt.Errorf("blockstore: scrub: %w", err)
	}
	return nil
}

// slot verifies one slot. It fails with the error of ctx, or if there is no memory.
func (b *scrub) slot(ctx context.Context, ref kv.Ref, slotBytes int64) error {
	if err := b.wait(ctx, slotBytes); err != nil {
		return err
	}
	if err := b.room(ctx, slotBytes); err != nil {
		return err
	}
	g, err := b.store.segmentOf(ref)
	if err != nil {
		return nil // the segment was removed since nextLive
	}
	if !g.volume.dev.health().Reads() || g.volume.scrubsHung.Load() > 0 {
		return nil // a later Scrub verifies the slot
	}
	offset, err := g.hold(ref, slotBytes, blockio.Read)
	if err != nil {
		return nil
	}
	buf := b.buf[:slotBytes]
	done := make(chan error, 1)
	b.store.background.Go(func() {
		j := job{volume: g.volume, file: g.file, offset: offset, bufs: [2][]byte{buf}}
		j.outcome = doOne(ctx, g.volume.dev, blockio.Request{Op: blockio.Read, File: g.file, Offset: offset, Bufs: [][]byte{buf}})
		j.retry(ctx)
		done <- j.outcome
	})
	hung := time.NewTimer(b.store.opts.Health.HungAfter)
	defer hung.Stop()
	select {
	case err = <-done:
	case <-hung.C:
		b.releaseWhenDone(g, ref, done)
		return nil
	case <-ctx.Done():
		b.releaseWhenDone(g, ref, done)
		return context.Cause(ctx)
	}
	if err == nil {
		err = verifySlot(ref, slotBytes, buf, g.volume.openHeader)
	}
	if e := g.unpin(ref); e != nil {
		return e
	}
	return b.account(ctx, &g.volume.counter, ref, slotBytes, err)
}

// releaseWhenDone releases the memory and unpins the slot of a read when the read
// completes.
func (b *scrub) releaseWhenDone(g *segment, ref kv.Ref, done <-chan error) {
	release := b.release
	b.buf, b.release = nil, nil
	g.volume.scrubsHung.Add(1)
	b.store.background.Go(func() {
		<-done
		release()
		g.volume.scrubsHung.Add(-1)
		if err := g.unpin(ref); err != nil {
			b.store.opts.Logger.Error("scrub", "err", err)
		}
	})
}

func (b *scrub) account(ctx context.Context, c *counters, ref kv.Ref, slotBytes int64, err error) error {
	if err != nil && ctx.Err() != nil && !errors.Is(err, ErrCorrupt) {
		return context.Cause(ctx) // the end of ctx may be the cause of err
	}
	if errors.Is(err, ErrErased) {
		return nil // the epoch of the block has ended, and its slot is about to be freed
	}
	b.result.Slots++
	b.result.Bytes += slotBytes
	c.scrubbed.Add(1)
	c.scrubbedBytes.Add(uint64(slotBytes))
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrCorrupt):
		b.result.Corrupt++
		c.scrubCorrupt.Add(1)
	default:
		b.result.Unreadable++
		c.scrubFailures.Add(1)
	}
	if b.opts.Report != nil {
		b.opts.Report(ref, err)
	}
	return nil
}

// verifySlot checks the checksums of a whole slot, and its header against the ref. It decrypts the slot
// in place with the result of open.
func verifySlot(ref kv.Ref, slotBytes int64, slot []byte, open func(*ondisk.SlotHeader, []byte) (slotOpener, error)) error {
	h, err := ondisk.DecodeSlotHeader(slot, nil)
	if err != nil {
		return fmt.Errorf("blockstore: %v: %w: %w", ref, ErrCorrupt, err)
	}
	l, err := h.Layout()
	switch {
	case err != nil:
		return fmt.Errorf("blockstore: %v: %w: %w", ref, ErrCorrupt, err)
	case h.Ref() != ref:
		return fmt.Errorf("blockstore: %v: slot holds %v: %w", ref, h.Ref(), ErrCorrupt)
	case l.SlotBytes() != slotBytes:
		return fmt.Errorf("blockstore: %v: header describes a slot of %d bytes, not %d: %w", ref, l.SlotBytes(), slotBytes, ErrCorrupt)
	}
	opener, err := open(&h, slot)
	switch {
	case errors.Is(err, ErrErased):
		return fmt.Errorf("blockstore: %v: %w", ref, err)
	case err == nil:
		err = opener.openLayers(slot, &h, l)
	}
	if err != nil {
		return fmt.Errorf("blockstore: %v: %w: %w", ref, err, ErrCorrupt)
	}
	return nil
}

// nextLive returns the first live slot at or after an extent. It examines only the slots and
// segments from that extent up to the returned slot.
func (s *Store) nextLive(from kv.Extent) (ref kv.Ref, slotBytes int64, ok bool) {
	for _, v := range s.volumes {
		if v.index < from.Volume() {
			continue
		}
		if v.index > from.Volume() {
			from = kv.MakeExtent(v.index, 0, 0)
		}
		if refs, slotBytes, _, ok := s.LiveFrom(from, 1); ok {
			return refs[0], slotBytes, true
		}
	}
	return kv.Ref{}, 0, false
}
