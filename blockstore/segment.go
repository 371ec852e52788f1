package blockstore

import (
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/runs"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
)

// use is the state of a segment: whether it has slots, and whether a goroutine is changing it.
type use uint8

const (
	// useBlank: the segment has no slots.
	useBlank use = iota
	// usePreparing: the segment has no slots. The keeper creates its file or writes
	// zeroes into it. A writer may claim the segment meanwhile.
	usePreparing
	// useChanging: one goroutine has claimed the segment. It creates the file, writes
	// the header, or removes the file.
	useChanging
	// useCut: the segment has slots.
	useCut
	// useBad: the header of the segment could not be written, or not be read at the start. The segment
	// becomes blank when a probe of the volume has succeeded.
	useBad
)

// segment is one preallocated file and the table of its slots.
type segment struct {
	volume    *volume
	number    uint32
	sizeBytes int64
	// prepared is closed when the keeper (volume.keep) has ended its work on a segment that it
	// created. It is nil for other segments.
	prepared chan struct{}
	// closed is set when the keeper has closed the file in order to remove it. Only the keeper
	// reads and sets closed.
	closed bool

	// mu is the mutex of the volume's space. It guards the fields below.
	mu *sync.Mutex
	// file is nil if the segment has no file yet.
	file blockio.File
	use  use
	// failed is set if the last attempt to write the segment's header failed, or to read it at the start.
	failed bool
	header ondisk.SegmentHeader // of a cut segment
	class  *class               // of a cut segment
	words  []slotWord
	// free is the set of free slots. It is nil before Store.Ready; until then only words has the
	// state of the slots.
	free   *runs.Set
	counts slotCounts
	// retiring is set if the segment exceeds the capacity: no slots of it are taken, and it is
	// removed when it is empty. draining is set by DrainSegment: slots of the segment are taken
	// only if no other segment has free slots.
	retiring, draining bool
	places             [heapKinds]place
	// looks counts the slots that liveFrom has examined, for tests of its complexity.
	looks uint64
	// reading is the sum of the readers of all slots.
	reading int64
}

// setUseLocked changes the use of the segment.
func (g *segment) setUseLocked(u use) {
	s := &g.volume.space
	s.uses[g.use]--
	s.uses[u]++
	if g.use = u; u == useBlank || u == usePreparing {
		s.blank[g.number] = g
		return
	}
	delete(s.blank, g.number)
}

// cutLocked gives the segment the slots that h describes, all of them free.
func (g *segment) cutLocked(h ondisk.SegmentHeader) {
	g.setUseLocked(useCut)
	g.header, g.class = h, g.volume.space.classLocked(h.SlotBytes)
	g.words = make([]slotWord, h.Slots)
	g.volume.space.tableBytes += g.tableBytesLocked()
	g.class.segments++
	g.countLocked(slotFree, int64(h.Slots))
	g.draining = false
	if g.volume.store.ready.Load() {
		g.findFreeLocked()
	}
}

// findFreeLocked builds the set of free slots from the words.
func (g *segment) findFreeLocked() {
	if g.use != useCut || g.free != nil {
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
	g.volume.space.tableBytes += heapBytes(g.free.MemoryBytes())
	g.settleLocked()
}

// blankLocked removes the division of the segment into slots; u is its use afterwards. All slots
// must be free.
func (g *segment) blankLocked(u use) {
	g.countLocked(slotFree, -g.counts.free)
	if g.class.segments--; g.class.segments == 0 {
		delete(g.volume.space.classes, g.header.SlotBytes)
	}
	g.volume.space.tableBytes -= g.tableBytesLocked()
	g.setUseLocked(u)
	g.settleLocked()
	g.header, g.class = ondisk.SegmentHeader{}, nil
	g.words, g.free, g.draining = nil, nil, false
}

// segmentDRAM is the DRAM of a segment without slots, in bytes, including its entries in
// the table, the sets and the heaps of the volume.
const segmentDRAM = 512

// tableBytesLocked returns the DRAM of the segment's slot table, in bytes.
func (g *segment) tableBytesLocked() int64 {
	n := heapBytes(int64(len(g.words)) * 8)
	if g.free != nil {
		n += heapBytes(g.free.MemoryBytes())
	}
	return n
}

// heapBytes returns an upper bound of the heap memory that an allocation of n bytes occupies. The
// Go allocator rounds small sizes up to a size class, by at most an eighth, and large sizes up to
// pages of 8 KiB.
func heapBytes(n int64) int64 {
	const large, page = 32 << 10, 8 << 10
	if n <= large {
		return n + n/8
	}
	return (n + page - 1) / page * page
}

// countLocked adds n to the number of slots in a state, in the segment and its class.
func (g *segment) countLocked(s slotState, n int64) {
	*g.counts.of(s) += n
	*g.class.counts.of(s) += n
	if s == slotFree && !g.retiring {
		g.class.free += n
	}
}

// settleLocked moves the segment to the heaps of its slot size that fit the segment's state.
func (g *segment) settleLocked() {
	var byRuns, byEmptiness *segmentHeap
	if g.use == useCut && g.free != nil && !g.retiring && g.counts.free > 0 {
		byRuns = &g.class.open
		if g.draining {
			byRuns = &g.class.last
		}
		if g.isEmptyLocked() {
			byEmptiness = &g.class.empty
		}
	}
	g.move(byRun, byRuns)
	g.move(byEmpty, byEmptiness)
}

// retireLocked marks the segment for removal.
func (g *segment) retireLocked() {
	if g.class != nil {
		g.class.free -= g.counts.free
	}
	g.retiring = true
	g.volume.space.surplus[g.number] = g
	g.settleLocked()
}

func (g *segment) extent(slot uint32) kv.Extent {
	return kv.MakeExtent(g.volume.index, g.number, slot)
}

// isEmptyLocked reports whether no slot is in use.
func (g *segment) isEmptyLocked() bool { return g.counts.free == int64(g.header.Slots) }

// setLocked changes the state of a slot, the counts and the set of free slots.
func (g *segment) setLocked(slot uint32, w slotWord) {
	old := g.words[slot].state()
	g.words[slot] = w
	g.countLocked(old, -1)
	g.countLocked(w.state(), 1)
	if w.state() == slotFree && old != slotFree {
		if g.free != nil {
			g.free.Add(runs.Run{Start: slot, N: 1})
			g.settleLocked()
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

// checkLocked compares words, counts and the set of free slots.
func (g *segment) checkLocked() {
	var c slotCounts
	for i, w := range g.words {
		*c.of(w.state())++
		invariants.Assert(g.free == nil || (w.state() == slotFree) == g.free.Has(uint32(i)), "slot %v is %v in the table, and that it is free in the set is %v",
			g.extent(uint32(i)), w.state(), g.free == nil || g.free.Has(uint32(i)))
	}
	invariants.Assert(c == g.counts, "segment %d counts %+v, its table has %+v", g.number, g.counts, c)
	invariants.Assert(g.free == nil || c.free == int64(g.free.Size()), "segment %d has %d free slots, and its set another number", g.number, c.free)
}

// takeLocked changes a run of free slots to reserved. stamp later assigns their generations; until
// then the slots have no valid Ref.
func (g *segment) takeLocked(r runs.Run) {
	if g.free != nil {
		g.free.Remove(r)
	}
	g.countLocked(slotFree, -int64(r.N))
	g.countLocked(slotReserved, int64(r.N))
	g.volume.usedBytes.Add(int64(r.N) * g.header.SlotBytes)
	for i := r.Start; i < r.Start+r.N; i++ {
		g.words[i] = makeSlotWord(0, slotReserved)
	}
	if g.free != nil {
		g.settleLocked()
	}
}

// stamp assigns consecutive generations to the slots of a run that was just taken.
func (g *segment) stamp(r runs.Run, gen kv.Generation) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range r.N {
		g.words[r.Start+i] = makeSlotWord(gen+kv.Generation(i), slotReserved)
	}
}

// untake frees a slot that was taken and not stamped.
func (g *segment) untake(slot uint32) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.setLocked(slot, makeSlotWord(0, slotFree))
}

// adopt makes a free slot live, with the generation of an index entry.
func (g *segment) adopt(ref kv.Ref, slotBytes int64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	slot := ref.Extent.Slot()
	switch {
	case g.use != useCut || g.header.SlotBytes != slotBytes || slot >= g.header.Slots:
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

// findLocked returns the slot's word if it has the generation of the ref.
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

// pin adds a reader.
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

// hold adds a reader for the duration of one device request and returns the offset of the slot in
// the file. For a read the slot may be condemned, because the reader may have pinned it before it
// was freed. For a write the slot must be reserved.
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
	g.reading++
	return nil
}

// unpin removes a reader; the last reader of a condemned slot frees it.
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
	g.reading--
	if w--; w.readers() == 0 && w.state() == slotCondemned {
		g.setLocked(slot, w.withState(slotFree))
		return nil
	}
	g.words[slot] = w
	return nil
}

// written records that the device completed the slot's write.
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

// release frees a slot, or condemns it while it has readers. If live is set the slot must be live,
// and otherwise reserved or written.
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

// beingRead reports whether the slot still has the ref's generation and is pinned.
func (g *segment) beingRead(ref kv.Ref) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, w, err := g.findLocked(ref)
	return err == nil && w.readers() > 0
}

// findFree calls findFreeLocked under the mutex.
func (g *segment) findFree() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.findFreeLocked()
}
