package blockstore

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/runs"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
)

// phase is what a segment file is being used for.
type phase uint8

const (
	// phaseBlank: not cut, nobody's.
	phaseBlank phase = iota
	// phaseZeroing: not cut, the keeper is writing zeroes into it.
	phaseZeroing
	// phaseChanging: being cut or removed; only the holder of the volume's
	// growth token touches it.
	phaseChanging
	// phaseCut: has slots.
	phaseCut
	// phaseBad: its header could not be written; out of use until the next Open.
	phaseBad
)

// segment is one preallocated file and the table of its slots.
type segment struct {
	volume *volume
	number uint32
	file   blockio.File

	// abort asks the keeper to stop zeroing; zeroed is closed when it has. Both
	// are set while the phase is phaseZeroing, under volume.mu.
	abort  bool
	zeroed chan struct{}

	mu sync.Mutex
	// phase changes with volume.mu held as well.
	phase  phase
	header ondisk.SegmentHeader // of a cut segment
	words  []slotWord
	// free are the free slots; nil before Ready, while words alone says what
	// they are.
	free   *runs.Set
	counts slotCounts
	// retiring: beyond the capacity; takes no new slots and is removed when
	// empty. draining: being emptied; takes new slots only as a last resort.
	retiring, draining bool
	// reported is what the volume's space knows of the segment.
	reported vacancy
	// looks counts the slots that nextLive looked at.
	looks uint64
	// reading counts the readers of all slots. It changes under mu.
	reading atomic.Int64
}

// cutLocked makes the segment a set of free slots.
func (g *segment) cutLocked(h ondisk.SegmentHeader) {
	g.phase, g.header = phaseCut, h
	g.words = make([]slotWord, h.Slots)
	g.counts = slotCounts{free: h.Slots}
	g.draining = false
	if g.volume.store.ready.Load() {
		g.findFreeLocked()
	}
}

// findFreeLocked makes the set of free slots from the words.
func (g *segment) findFreeLocked() {
	if g.phase != phaseCut || g.free != nil {
		return
	}
	g.free = runs.New(g.header.Slots)
	for at := uint32(0); at < g.header.Slots; at++ {
		r := runs.Run{Start: at}
		for at < g.header.Slots && g.words[at].state() == slotFree {
			at++
		}
		r.N = at - r.Start
		g.free.Add(r)
	}
	g.volume.space.report(g)
}

// blankLocked forgets the slots, all of which are free.
func (g *segment) blankLocked(p phase) {
	g.phase, g.header = p, ondisk.SegmentHeader{}
	g.words, g.free, g.counts, g.draining = nil, nil, slotCounts{}, false
	g.volume.space.report(g)
}

func (g *segment) extent(slot uint32) kv.Extent {
	return kv.MakeExtent(g.volume.index, g.number, slot)
}

// isEmptyLocked reports whether no slot is in use.
func (g *segment) isEmptyLocked() bool { return g.counts.free == g.header.Slots }

// setLocked moves a slot to a state, with the counts and the free map.
func (g *segment) setLocked(slot uint32, w slotWord) {
	old := g.words[slot].state()
	g.words[slot] = w
	*g.counts.of(old)--
	*g.counts.of(w.state())++
	if w.state() == slotFree && old != slotFree {
		if g.free != nil {
			g.free.Add(runs.Run{Start: slot, N: 1})
			g.volume.space.report(g)
		}
		g.volume.usedBytes.Add(-g.header.SlotBytes)
		if g.retiring && g.isEmptyLocked() {
			g.volume.wake()
		}
	}
	if invariants.Enabled {
		invariants.Assert(w.state() != slotFree || w.readers() == 0, "free slot %v has %d readers", g.extent(slot), w.readers())
		invariants.Assert(w.state() != slotCondemned || w.readers() > 0, "condemned slot %v has no readers", g.extent(slot))
		if invariants.Sometimes(1) {
			g.checkLocked()
		}
	}
}

// checkLocked compares table, counts and free map.
func (g *segment) checkLocked() {
	var c slotCounts
	for i, w := range g.words {
		*c.of(w.state())++
		invariants.Assert(g.free == nil || (w.state() == slotFree) == g.free.Has(uint32(i)), "slot %v is %v in the table, and that it is free in the set is %v",
			g.extent(uint32(i)), w.state(), g.free == nil || g.free.Has(uint32(i)))
	}
	invariants.Assert(c == g.counts, "segment %d counts %+v, its table says %+v", g.number, g.counts, c)
	invariants.Assert(g.free == nil || c.free == g.free.Size(), "segment %d has %d free slots, and its set another number", g.number, c.free)
}

// takeLocked reserves a run of free slots. Their generations come later, from
// stamp: a slot without one cannot be named.
func (g *segment) takeLocked(r runs.Run) {
	if g.free != nil {
		g.free.Remove(r)
	}
	g.counts.free -= r.N
	g.counts.reserved += r.N
	g.volume.usedBytes.Add(int64(r.N) * g.header.SlotBytes)
	for i := r.Start; i < r.Start+r.N; i++ {
		g.words[i] = makeSlotWord(0, slotReserved)
	}
	if g.free != nil {
		g.volume.space.report(g)
	}
}

// stamp gives the slots of a run that was just taken consecutive generations.
func (g *segment) stamp(r runs.Run, gen kv.Generation) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range r.N {
		g.words[r.Start+i] = makeSlotWord(gen+kv.Generation(i), slotReserved)
	}
}

// untake gives back a slot that was taken and not stamped.
func (g *segment) untake(slot uint32) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.setLocked(slot, makeSlotWord(0, slotFree))
}

// adopt makes a free slot live, at the generation of an index entry.
func (g *segment) adopt(ref kv.Ref, slotBytes int64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	slot := ref.Extent.Slot()
	switch {
	case g.phase != phaseCut || g.header.SlotBytes != slotBytes || slot >= g.header.Slots:
		return fmt.Errorf("blockstore: adopt %v with slots of %d bytes: segment has %d of %d: %w", ref, slotBytes, g.header.Slots, g.header.SlotBytes, ErrStale)
	case ref.Generation <= g.header.Cut:
		return fmt.Errorf("blockstore: adopt %v: segment was cut later, at generation %d: %w", ref, g.header.Cut, ErrStale)
	case g.words[slot].state() != slotFree:
		return fmt.Errorf("blockstore: adopt %v: slot is %v at generation %d already (one-owner): %w", ref, g.words[slot].state(), g.words[slot].generation(), ErrState)
	}
	g.takeLocked(runs.Run{Start: slot, N: 1})
	g.setLocked(slot, makeSlotWord(ref.Generation, slotLive))
	return nil
}

// findLocked returns the slot's word if it is of the ref's generation.
func (g *segment) findLocked(ref kv.Ref) (uint32, slotWord, error) {
	slot := ref.Extent.Slot()
	if slot >= uint32(len(g.words)) {
		return 0, 0, fmt.Errorf("blockstore: %v: segment has %d slots: %w", ref, len(g.words), ErrStale)
	}
	w := g.words[slot]
	if w.generation() != ref.Generation || w.state() == slotFree || ref.Generation == 0 {
		return 0, 0, fmt.Errorf("blockstore: %v: slot is %v at generation %d: %w", ref, w.state(), w.generation(), ErrStale)
	}
	return slot, w, nil
}

// pin counts a reader in.
func (g *segment) pin(ref kv.Ref) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	slot, w, err := g.findLocked(ref)
	switch {
	case err != nil:
		return err
	case w.state() != slotLive:
		return fmt.Errorf("blockstore: pin %v: slot is %v: %w", ref, w.state(), ErrStale)
	}
	return g.addReaderLocked(ref, slot)
}

// hold counts a reader in for the time of one device request and returns where
// the slot lies in the file. A reader may rely on its own earlier pin, so a
// condemned slot will do; a writer needs a slot that it has reserved.
func (g *segment) hold(ref kv.Ref, slotBytes int64, op blockio.Op) (offset int64, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	slot, w, err := g.findLocked(ref)
	switch {
	case err != nil:
		return 0, err
	case g.header.SlotBytes != slotBytes:
		return 0, fmt.Errorf("blockstore: %v %v: slots of %d bytes, not %d: %w", op, ref, g.header.SlotBytes, slotBytes, ErrStale)
	case op == blockio.Read && w.state() != slotLive && w.state() != slotCondemned,
		op == blockio.Write && w.state() != slotReserved:
		return 0, fmt.Errorf("blockstore: %v %v: slot is %v: %w", op, ref, w.state(), ErrStale)
	}
	if err := g.addReaderLocked(ref, slot); err != nil {
		return 0, err
	}
	return g.header.SlotOffset(slot), nil
}

func (g *segment) addReaderLocked(ref kv.Ref, slot uint32) error {
	if g.words[slot].readers() == MaxReaders {
		return fmt.Errorf("blockstore: pin %v: %d readers: %w", ref, MaxReaders, ErrBusy)
	}
	g.words[slot]++
	g.reading.Add(1)
	return nil
}

// unpin counts a reader out; the last one of a condemned slot frees it.
func (g *segment) unpin(ref kv.Ref) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	slot, w, err := g.findLocked(ref)
	switch {
	case err != nil:
		return err
	case w.readers() == 0:
		return fmt.Errorf("blockstore: unpin %v: slot has no readers: %w", ref, ErrState)
	}
	g.reading.Add(-1)
	if w--; w.readers() == 0 && w.state() == slotCondemned {
		g.setLocked(slot, w.withState(slotFree))
		return nil
	}
	g.words[slot] = w
	return nil
}

// written notes that the device completed the slot's write.
func (g *segment) written(ref kv.Ref) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if slot, w, err := g.findLocked(ref); err == nil && w.state() == slotReserved {
		g.setLocked(slot, w.withState(slotWritten))
	}
}

// commit makes a written slot live.
func (g *segment) commit(ref kv.Ref) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	slot, w, err := g.findLocked(ref)
	if err != nil {
		return err
	}
	if w.state() != slotWritten {
		return fmt.Errorf("blockstore: commit %v: slot is %v, not written (data-before-index): %w", ref, w.state(), ErrState)
	}
	g.setLocked(slot, w.withState(slotLive))
	return nil
}

// release gives a slot up: to the free ones, or to the condemned ones while it
// has readers. live says which half of its life it must be in.
func (g *segment) release(ref kv.Ref, live bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	slot, w, err := g.findLocked(ref)
	if err != nil {
		return err
	}
	if s := w.state(); s == slotCondemned || (s == slotLive) != live {
		return fmt.Errorf("blockstore: %v: slot is %v: %w", ref, s, ErrStale)
	}
	next := slotFree
	if w.readers() > 0 {
		next = slotCondemned
	}
	g.setLocked(slot, w.withState(next))
	return nil
}

// holds reports whether the slot is still of the ref's generation and pinned.
func (g *segment) holds(ref kv.Ref) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, w, err := g.findLocked(ref)
	return err == nil && w.readers() > 0
}

// findFree is findFreeLocked.
func (g *segment) findFree() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.findFreeLocked()
}
