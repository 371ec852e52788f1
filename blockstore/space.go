package blockstore

import (
	"cmp"
	"container/heap"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/runs"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
)

// space is the allocator of one volume. It has the segments of the volume, the slots of each
// segment, and the runs of free slots by slot size. To cut a segment is to write a header that
// divides the segment into slots of one size. One mutex guards the whole space. No I/O happens
// under the mutex: while a segment is useChanging, one goroutine owns it and does the I/O.
type space struct {
	volume *volume
	// table has the segments by number, nil for numbers without a segment. A change replaces the
	// slice, so that readers need no mutex.
	table atomic.Pointer[[]*segment]

	mu sync.Mutex
	// uses counts the segments of each use.
	uses [useBad + 1]int
	// blank has the segments that are useBlank or usePreparing, by number. surplus has the segments
	// that are retiring (to be removed because they exceed the capacity), by number.
	blank, surplus map[uint32]*segment
	// lowest is a lower bound of the unused segment numbers. Invariant: every number below lowest
	// is in use or foreign.
	lowest uint32
	// foreign has the numbers of segment files that exist although this process did not find them at
	// its start, for example because an earlier owner of a shared volume created them late. They are
	// not used before the next start.
	foreign map[uint32]bool
	// fileBytes is the size of all files of the volume. creatingBytes is the part of
	// fileBytes in files that are being created.
	fileBytes, creatingBytes int64
	// classes has the segments that are divided into slots, by slot size.
	classes map[int64]*class
	// cutting has the cuts (divisions of one segment into slots) in progress, by slot size, at most
	// one for each size. A writer that needs a segment of that size waits for the cut.
	cutting map[int64]*cutting
	// tableBytes is the DRAM of the segments and of their slot tables.
	tableBytes int64
	// steps counts the heap entries that were read, for tests of the complexity.
	steps uint64
}

// class has the segments of one slot size.
type class struct {
	segments int
	// counts is the sum of the segments' counts.
	counts slotCounts
	// free counts the free slots of the segments that are not retiring.
	free int64
	// open has the segments that have free slots and are neither retiring nor draining. last has
	// the draining segments that have free slots. In both heaps the segment with the longest run of
	// free slots is first. Slots of last are taken only if open is empty and no other segment can
	// be divided into slots of this size.
	open, last segmentHeap
	// empty has the segments whose slots are all free.
	empty segmentHeap
}

// cutting is the division of one segment into slots, in progress. done is closed when err is set.
type cutting struct {
	slotBytes int64
	began     time.Time
	done      chan struct{}
	err       error
}

// init makes the space of a volume without segments.
func (s *space) init(v *volume) {
	s.volume = v
	s.table.Store(new([]*segment))
	s.blank, s.surplus = make(map[uint32]*segment), make(map[uint32]*segment)
	s.classes, s.cutting = make(map[int64]*class), make(map[int64]*cutting)
}

// segment returns the segment of that number, or nil.
func (s *space) segment(number uint32) *segment {
	table := *s.table.Load()
	if number >= uint32(len(table)) {
		return nil
	}
	return table[number]
}

// sorted returns all segments by number.
func (s *space) sorted() []*segment {
	return slices.DeleteFunc(slices.Clone(*s.table.Load()), func(g *segment) bool { return g == nil })
}

// found adds a segment with an existing file.
func (s *space) found(number uint32, f blockio.File) *segment {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := &segment{volume: s.volume, mu: &s.mu, number: number, sizeBytes: f.Size(), file: f}
	s.addLocked(g)
	return g
}

// addLocked adds a segment to the table and the counts.
func (s *space) addLocked(g *segment) {
	s.fileBytes += g.sizeBytes
	s.tableBytes += segmentDRAM
	s.uses[g.use]++
	g.setUseLocked(g.use)
	s.publishLocked(g.number, g)
}

// dropLocked removes a segment without slots from the table and the counts.
func (s *space) dropLocked(g *segment) {
	s.fileBytes -= g.sizeBytes
	s.tableBytes -= segmentDRAM
	s.uses[g.use]--
	delete(s.blank, g.number)
	delete(s.surplus, g.number)
	s.lowest = min(s.lowest, g.number)
	s.publishLocked(g.number, nil)
}

func (s *space) publishLocked(number uint32, g *segment) {
	old := *s.table.Load()
	table := make([]*segment, max(len(old), int(number)+1))
	copy(table, old)
	table[number] = g
	s.table.Store(&table)
}

// classLocked returns the class of a slot size. It creates the class if there is none.
func (s *space) classLocked(slotBytes int64) *class {
	c := s.classes[slotBytes]
	if c == nil {
		c = &class{open: s.newHeap(byRun), last: s.newHeap(byRun), empty: s.newHeap(byEmpty)}
		s.classes[slotBytes] = c
	}
	return c
}

// opensLocked reports whether the volume's state allows slots to be taken. Callers that take slots
// hold mu, and so does used. So once the volume has been ordered to drain, the result of used
// cannot grow.
func (s *space) opensLocked() bool { return s.volume.dev.health().Places() }

// used returns the size of the slots that are not free.
func (s *space) used() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.volume.usedBytes.Load()
}

// take reserves a run of slots from the longest run of free slots; bound limits its length. It
// takes nothing if the longest run has fewer than enough slots. It takes slots of draining segments
// only if lastResort is set.
func (s *space) take(slotBytes int64, bound sizer, enough uint32, lastResort bool) (*segment, runs.Run) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.takeLocked(slotBytes, bound, enough, lastResort)
}

func (s *space) takeLocked(slotBytes int64, bound sizer, enough uint32, lastResort bool) (*segment, runs.Run) {
	c := s.classes[slotBytes]
	if c == nil || !s.opensLocked() {
		return nil, runs.Run{}
	}
	s.steps++
	g := c.open.first()
	if drained := c.last.first(); lastResort && drained != nil && (g == nil || drained.free.Longest() > g.free.Longest()) {
		g = drained
	}
	if g == nil || g.free.Longest() < enough {
		return nil, runs.Run{}
	}
	r, _ := g.free.First(g.free.Longest(), 0, g.header.Slots)
	r.N = min(r.N, bound.upTo(r.Start))
	g.takeLocked(r)
	return g, r
}

// takeAfter reserves up to n free slots that follow the slot after directly, in the same segment.
func (s *space) takeAfter(slotBytes int64, after kv.Extent, n uint32) (*segment, runs.Run) {
	g := s.segment(after.Segment())
	if g == nil {
		return nil, runs.Run{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if g.free == nil || g.header.SlotBytes != slotBytes || g.retiring || after.Slot() >= g.header.Slots || !s.opensLocked() {
		return nil, runs.Run{}
	}
	r := runs.Run{Start: after.Slot() + 1}
	if r.N = g.free.From(r.Start, n); r.N == 0 {
		return nil, runs.Run{}
	}
	g.takeLocked(r)
	return g, r
}

// takeOrCut takes a run as take does. If there is no such run, it returns the cut (division of a
// segment into slots) in progress for that slot size, and starts one if there is none. The returned
// cut is nil if a run was taken, if no segment can be cut, or if no slot of the volume may be
// taken.
func (s *space) takeOrCut(slotBytes int64, bound sizer, enough uint32) (*segment, runs.Run, *cutting) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g, r := s.takeLocked(slotBytes, bound, enough, false); g != nil {
		return g, r, nil
	}
	c := s.cutting[slotBytes]
	if c == nil {
		if !s.opensLocked() {
			return nil, runs.Run{}, nil
		}
		g := s.claimLocked(slotBytes)
		if g == nil {
			return nil, runs.Run{}, nil
		}
		c = &cutting{slotBytes: slotBytes, began: time.Now(), done: make(chan struct{})}
		s.cutting[slotBytes] = c
		// The cut runs on its own goroutine, so that it completes even if the writer
		// stops waiting for it.
		s.volume.store.background.Go(func() { s.volume.cut(g, c) })
	}
	return nil, runs.Run{}, c
}

// claimLocked claims a segment that the caller will divide into slots of slotBytes. In order of
// preference: a blank segment, which has no slots; a segment of another slot size without a slot in
// use; a new segment; a blank segment whose last header could not be written. It returns nil if
// there is none.
func (s *space) claimLocked(slotBytes int64) *segment {
	var blank, failed *segment
	for _, g := range s.blank {
		switch {
		case g.retiring || ondisk.SegmentSlots(g.sizeBytes, slotBytes) == 0:
		case g.failed:
			if failed == nil || g.number < failed.number {
				failed = g
			}
		case blank == nil || g.use < blank.use || (g.use == blank.use && g.number < blank.number):
			blank = g
		}
	}
	if blank == nil {
		if g := s.emptyLocked(slotBytes); g != nil {
			g.blankLocked(useChanging)
			return g
		}
		if g := s.newLocked(slotBytes, useChanging); g != nil {
			return g
		}
		blank = failed
	}
	if blank != nil {
		blank.setUseLocked(useChanging)
	}
	return blank
}

// emptyLocked returns an empty segment of another slot size that has room for a slot, or nil. It
// chooses the segment that was divided into its slots first. Only a volume's last segment is
// shorter than the others, so at most two segments of each slot size are examined.
func (s *space) emptyLocked(slotBytes int64) (oldest *segment) {
	for size, c := range s.classes {
		if size == slotBytes {
			continue
		}
		for _, g := range c.empty.list {
			s.steps++
			if ondisk.SegmentSlots(g.sizeBytes, slotBytes) > 0 {
				if oldest == nil || g.header.Cut < oldest.header.Cut {
					oldest = g
				}
				break
			}
		}
	}
	return oldest
}

// newBytesLocked returns the size of the next segment file, or 0 if there is no room for one.
func (s *space) newBytesLocked() int64 {
	full := s.volume.segmentBytes
	size := min(full, (s.volume.capacityBytes-s.fileBytes)/ondisk.Page*ondisk.Page)
	if s.volume.denied.Load() || size < max(full/shortSegmentShare, 2*ondisk.Page) {
		return 0
	}
	return size
}

// newLocked adds a segment whose file does not exist yet. It returns nil if there is no room for a
// segment that holds at least one slot.
func (s *space) newLocked(slotBytes int64, u use) *segment {
	size := s.newBytesLocked()
	if ondisk.SegmentSlots(size, max(slotBytes, ondisk.Page)) == 0 {
		return nil
	}
	for ; s.segment(s.lowest) != nil || s.foreign[s.lowest]; s.lowest++ {
	}
	if s.lowest >= kv.MaxSegments {
		return nil
	}
	g := &segment{volume: s.volume, mu: &s.mu, number: s.lowest, sizeBytes: size, use: u}
	if u == usePreparing {
		g.prepared = make(chan struct{})
	}
	s.addLocked(g)
	return g
}

// beginCreate adds the size of the segment's file, which is about to be created, to creatingBytes.
// It returns the new creatingBytes.
func (s *space) beginCreate(g *segment) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.creatingBytes += g.sizeBytes
	return s.creatingBytes
}

// skip makes the number of a segment foreign.
func (s *space) skip(number uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.foreign == nil {
		s.foreign = make(map[uint32]bool)
	}
	s.foreign[number] = true
}

// endCreate ends the creation of a segment's file; f is nil if the creation failed.
func (s *space) endCreate(g *segment, f blockio.File) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.creatingBytes -= g.sizeBytes
	g.file = f
}

// finishCut ends a cut (division of a segment into slots). If err is nil, the segment gets the
// slots that h describes. Otherwise the segment is dropped if it has no file; if it has a file, its
// use is set to the argument otherwise.
func (s *space) finishCut(g *segment, h ondisk.SegmentHeader, otherwise use, c *cutting, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g.failed = otherwise == useBad
	switch {
	case err == nil:
		g.cutLocked(h)
	case g.file == nil:
		s.dropLocked(g)
	default:
		g.setUseLocked(otherwise)
	}
	delete(s.cutting, c.slotBytes)
	c.err = err
	close(c.done)
}

// claimAhead adds a segment for the keeper to prepare. It returns nil if there is a blank segment
// already, or no room for another segment.
func (s *space) claimAhead() *segment {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hasBlankLocked() {
		return nil
	}
	return s.newLocked(0, usePreparing)
}

// wantsBlank reports whether the keeper should prepare a segment: there is no blank segment, and
// there is room for another segment.
func (s *space) wantsBlank() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.hasBlankLocked() && s.newBytesLocked() > 0
}

func (s *space) hasBlankLocked() bool {
	for _, g := range s.blank {
		if !g.retiring && !g.failed {
			return true
		}
	}
	return false
}

// finishAhead ends the keeper's preparation of a segment. A writer may have claimed the
// segment before the preparation was complete.
func (s *space) finishAhead(g *segment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(g.prepared)
	switch {
	case g.use != usePreparing:
	case g.file == nil:
		s.dropLocked(g)
	default:
		g.setUseLocked(useBlank)
	}
}

// spoil makes a blank segment useBad, because its header cannot be read.
func (s *space) spoil(g *segment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g.failed = true
	g.setUseLocked(useBad)
}

// retryBad makes the segments that are useBad (header not written) blank, so that they may be
// divided into slots again.
func (s *space) retryBad() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.sorted() {
		if s.uses[useBad] == 0 {
			return
		}
		if g.use == useBad {
			g.setUseLocked(useBlank)
		}
	}
}

// markSurplus marks segments for removal until the segments that are not marked fit the capacity.
// It begins with the segments that have the fewest used slots, so that the fewest blocks are lost.
func (s *space) markSurplus() {
	s.mu.Lock()
	defer s.mu.Unlock()
	over := s.fileBytes - s.volume.capacityBytes
	if over <= 0 {
		return
	}
	used := func(g *segment) int64 { return int64(g.header.Slots) - g.counts.free }
	all := s.sorted()
	slices.SortFunc(all, func(a, b *segment) int {
		return cmp.Or(cmp.Compare(used(a), used(b)), cmp.Compare(b.number, a.number))
	})
	for _, g := range all {
		if over <= 0 {
			return
		}
		g.retireLocked()
		over -= g.sizeBytes
	}
}

// surplusSegments returns the segments marked for removal, by number.
func (s *space) surplusSegments() []*segment {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.surplus), func(a, b *segment) int { return cmp.Compare(a.number, b.number) })
}

// claimSurplus claims a surplus segment for removal. It returns false if the segment is
// not empty yet.
func (s *space) claimSurplus(g *segment) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case g.use == useCut && g.isEmptyLocked():
		g.blankLocked(useChanging)
	case g.use == useBlank, g.use == useBad:
		g.setUseLocked(useChanging)
	default:
		return false
	}
	return true
}

// finishRemoval drops a segment whose file was removed. After an error the segment is
// blank and still surplus, so that the keeper tries again.
func (s *space) finishRemoval(g *segment, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		g.setUseLocked(useBlank)
		return
	}
	s.dropLocked(g)
}

// free returns the number of slots of a size that may be taken.
func (s *space) free(slotBytes int64) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.classes[slotBytes]; c != nil {
		return c.free
	}
	return 0
}

// The heaps that a segment can be in.
const (
	byRun = iota
	byEmpty
	heapKinds
)

// place is the position of a segment in a heap. heap is nil if the segment is in no heap of that
// kind.
type place struct {
	heap *segmentHeap
	at   int
}

// segmentHeap is a heap of segments. Each segment stores its index in the heap.
type segmentHeap struct {
	list []*segment
	// kind is the heap's index in segment.places, which has the position of each segment in its
	// heaps.
	kind  int
	space *space
}

func (s *space) newHeap(kind int) segmentHeap { return segmentHeap{kind: kind, space: s} }

// move removes the segment from its heap of the given kind and adds it to the heap to. If the
// segment is in that heap already, move restores the heap order after a change of the segment. If
// to is nil, the segment is only removed.
func (g *segment) move(kind int, to *segmentHeap) {
	p := &g.places[kind]
	switch {
	case p.heap == to && to != nil:
		heap.Fix(to, p.at)
		return
	case p.heap != nil:
		heap.Remove(p.heap, p.at)
	}
	if p.heap = to; to != nil {
		heap.Push(to, g)
	}
}

func (h *segmentHeap) first() *segment {
	if len(h.list) == 0 {
		return nil
	}
	return h.list[0]
}

// Len implements heap.Interface of container/heap, as do Less, Swap, Push and Pop.
func (h *segmentHeap) Len() int { return len(h.list) }

// Less orders by the longest free run, longest first, then by the generation at which the segment
// was divided into slots, oldest first.
func (h *segmentHeap) Less(i, j int) bool {
	h.space.steps++
	a, b := h.list[i], h.list[j]
	if x, y := a.free.Longest(), b.free.Longest(); x != y {
		return x > y
	}
	return a.header.Cut < b.header.Cut
}

// Swap implements container/heap.
func (h *segmentHeap) Swap(i, j int) {
	h.list[i], h.list[j] = h.list[j], h.list[i]
	h.list[i].places[h.kind].at, h.list[j].places[h.kind].at = i, j
}

// Push implements container/heap.
func (h *segmentHeap) Push(x any) {
	g := x.(*segment)
	g.places[h.kind].at = len(h.list)
	h.list = append(h.list, g)
}

// Pop implements container/heap.
func (h *segmentHeap) Pop() any {
	last := len(h.list) - 1
	g := h.list[last]
	h.list[last] = nil
	h.list = h.list[:last]
	return g
}
