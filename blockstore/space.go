package blockstore

import (
	"container/heap"
	"sync"

	"github.com/penstock-kv/penstock/kv"
)

// space is the index of a volume's cut segments by what they have free: it
// answers where the longest run of free slots of a size is, how many slots of a
// size are free, and which segments are empty, without looking at any segment
// but the one it names. Segments report their changes to it.
//
// Its mutex is a leaf: it is taken under segment.mu.
type space struct {
	mu      sync.Mutex
	classes map[int64]*class
	// steps counts the places of heaps that were looked at.
	steps uint64
}

// class is the segments of one slot size.
type class struct {
	// open are the segments with free slots, the one with the longest run first.
	// last are those that are being emptied, which are a last resort.
	open, last segmentHeap
	// empty are the segments that have only free slots.
	empty segmentHeap
	// free counts the free slots.
	free int64
}

// vacancy is what a segment last reported, and where it stands in the heaps. It
// is guarded by space.mu. A segment that takes no new slots reports nothing.
type vacancy struct {
	slotBytes       int64
	longest, free   uint32
	draining, empty bool
	// cut is the generation at which the segment was cut.
	cut kv.Generation
	// runAt and emptyAt are places in heaps, counted from 1; 0 is none.
	runAt, emptyAt int
}

// vacancyLocked is what the segment has to report.
func (g *segment) vacancyLocked() vacancy {
	if g.phase != phaseCut || g.retiring || g.free == nil {
		return vacancy{}
	}
	return vacancy{
		slotBytes: g.header.SlotBytes, longest: g.free.Longest(), free: g.counts.free,
		draining: g.draining, empty: g.isEmptyLocked(), cut: g.header.Cut,
	}
}

// report takes the state of a segment into the index; g.mu is held.
func (s *space) report(g *segment) {
	now := g.vacancyLocked()
	s.mu.Lock()
	defer s.mu.Unlock()
	was := &g.reported
	now.runAt, now.emptyAt = was.runAt, was.emptyAt
	if now == *was {
		return
	}
	// A class without a free slot has nothing in its heaps.
	defer s.forget(was.slotBytes)
	if c := s.classes[was.slotBytes]; c != nil {
		c.free -= int64(was.free)
		if was.runAt > 0 && (now.longest == 0 || now.slotBytes != was.slotBytes || now.draining != was.draining) {
			heap.Remove(c.runs(was.draining).with(s, runPlace), was.runAt-1)
		}
		if was.emptyAt > 0 && (!now.empty || now.slotBytes != was.slotBytes) {
			heap.Remove(c.empty.with(s, emptyPlace), was.emptyAt-1)
		}
	}
	now.runAt, now.emptyAt = was.runAt, was.emptyAt
	if *was = now; now.free == 0 {
		return
	}
	c := s.classes[now.slotBytes]
	if c == nil {
		c = new(class)
		s.classes[now.slotBytes] = c
	}
	c.free += int64(now.free)
	runs := c.runs(now.draining).with(s, runPlace)
	switch {
	case was.runAt == 0:
		heap.Push(runs, g)
	default:
		heap.Fix(runs, was.runAt-1)
	}
	if now.empty && was.emptyAt == 0 {
		heap.Push(c.empty.with(s, emptyPlace), g)
	}
}

// forget drops a class that has no free slot; mu is held.
func (s *space) forget(slotBytes int64) {
	if c := s.classes[slotBytes]; c != nil && c.free == 0 {
		delete(s.classes, slotBytes)
	}
}

func (c *class) runs(draining bool) *segmentHeap {
	if draining {
		return &c.last
	}
	return &c.open
}

// longest returns the segment with the longest run of free slots of a size, and
// the run's length, as last reported; nil if none is free.
func (s *space) longest(slotBytes int64, lastResort bool) (*segment, uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.classes[slotBytes]
	if c == nil {
		return nil, 0
	}
	s.steps++
	best := c.open.first()
	if drained := c.last.first(); lastResort && drained != nil && (best == nil || drained.reported.longest > best.reported.longest) {
		best = drained
	}
	if best == nil {
		return nil, 0
	}
	return best, best.reported.longest
}

// free counts the free slots of a size.
func (s *space) free(slotBytes int64) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.classes[slotBytes]; c != nil {
		return c.free
	}
	return 0
}

// emptyOf returns an empty segment of another slot size for which fits is true,
// or nil. Only a volume's last segment is shorter than the others, so of a size
// one or two are looked at.
func (s *space) emptyOf(slotBytes int64, fits func(*segment) bool) *segment {
	s.mu.Lock()
	defer s.mu.Unlock()
	for size, c := range s.classes {
		if size == slotBytes {
			continue
		}
		for _, g := range c.empty.list {
			s.steps++
			if fits(g) {
				return g
			}
		}
	}
	return nil
}

// segmentHeap is a heap of segments that know their places in it.
type segmentHeap struct {
	list  []*segment
	space *space
	place func(g *segment) *int
}

func runPlace(g *segment) *int   { return &g.reported.runAt }
func emptyPlace(g *segment) *int { return &g.reported.emptyAt }

func (h *segmentHeap) with(s *space, place func(*segment) *int) *segmentHeap {
	h.space, h.place = s, place
	return h
}

func (h *segmentHeap) first() *segment {
	if len(h.list) == 0 {
		return nil
	}
	return h.list[0]
}

// Len, Less, Swap, Push and Pop are container/heap's. Among equals the segment
// that was cut first comes first.
func (h *segmentHeap) Len() int { return len(h.list) }

// Less is for container/heap.
func (h *segmentHeap) Less(i, j int) bool {
	h.space.steps++
	a, b := h.list[i], h.list[j]
	if a.reported.longest != b.reported.longest {
		return a.reported.longest > b.reported.longest
	}
	return a.reported.cut < b.reported.cut
}

// Swap is for container/heap.
func (h *segmentHeap) Swap(i, j int) {
	h.list[i], h.list[j] = h.list[j], h.list[i]
	*h.place(h.list[i]), *h.place(h.list[j]) = i+1, j+1
}

// Push is for container/heap.
func (h *segmentHeap) Push(x any) {
	g := x.(*segment)
	h.list = append(h.list, g)
	*h.place(g) = len(h.list)
}

// Pop is for container/heap.
func (h *segmentHeap) Pop() any {
	last := len(h.list) - 1
	g := h.list[last]
	h.list[last] = nil
	h.list = h.list[:last]
	*h.place(g) = 0
	return g
}
