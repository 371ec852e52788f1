package trie

import (
	"cmp"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

// ExtentRange is a range of slots, From included and To excluded: a segment that the caller may
// want to empty.
type ExtentRange struct{ From, To kv.Extent }

// Vacancy is a range of slots and the pieces that must leave the index before all slots of the
// range are free: the pieces in these slots, and all their descendants, in any slot.
type Vacancy struct {
	Range ExtentRange
	// Bytes is the size of the slots of all these pieces, in bytes.
	Bytes int64
	// pieces has the descendants of a piece before the piece, so that the pieces can be removed in
	// that order.
	pieces []vacated
}

// vacated is one piece of a Vacancy. If the node's present ref differs from ref, the piece has been
// removed since the search, and the node may be reused for another piece.
type vacated struct {
	ref   kv.Ref
	node  uint32
	depth uint32
	group uint8
}

// vacancyChoices is the number of ranges that CheapestVacancy compares by the bytes to be evicted.
// A node's mark has one bit for each of these ranges.
const vacancyChoices = 7

// markKnown is the bit of a node's mark that states that the other bits are valid.
const markKnown = 1 << vacancyChoices

// CheapestVacancy looks for a range that can be emptied without removing a held piece. A piece is
// held if it is leased, pending or being read, or if it is an ancestor of such a piece; reading
// reports whether a slot is being read. ranges do not overlap and are in the order of preference.
// CheapestVacancy compares the first vacancyChoices ranges that can be emptied, and chooses the one
// that evicts the fewest bytes. ok is false if no range can be emptied.
//
// The search examines every piece of the index twice, in short steps under the read lock, and needs
// about one byte of memory for each piece. One call of Vacate then empties the whole range.
func (t *Trie) CheapestVacancy(ranges []ExtentRange, reading func(kv.Ref) bool, now time.Time) (v Vacancy, ok bool) {
	t.ExpireLeases(now)
	s := vacancySearch{t: t, reading: reading, top: t.topNode()}
	s.ranges = s.unheld(ranges)
	s.mark()
	best := -1
	for i := range s.ranges {
		if !s.held[i] && (best < 0 || s.bytes[i] < s.bytes[best]) {
			best = i
		}
	}
	if best < 0 {
		return Vacancy{}, false
	}
	return Vacancy{Range: s.ranges[best], Bytes: s.bytes[best], pieces: s.collect(best)}, true
}

// Vacate removes the pieces of a vacancy, leaf first, and appends them to dst. If a piece has
// become held since the search, Vacate stops there and returns done false. If the write to Pebble
// fails, Vacate returns its error, and the appended pieces have left the index nevertheless.
func (t *Trie) Vacate(dst []Evicted, v Vacancy, reading func(kv.Ref) bool) (out []Evicted, done bool, err error) {
	if err := t.usable(); err != nil {
		return dst, false, err
	}
	done = true
	for rest := v.pieces; len(rest) > 0 && done; {
		step := rest[:min(len(rest), victimsPerStep)]
		rest = rest[len(step):]
		from := len(dst)
		dst, done = t.vacateStep(dst, step, reading)
		if err := t.forget(dst[from:]); err != nil {
			return dst, false, err
		}
	}
	return dst, done, nil
}

func (t *Trie) vacateStep(dst []Evicted, step []vacated, reading func(kv.Ref) bool) (out []Evicted, done bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range step {
		if nd := t.nodes.at(p.node); nd.space == 0 || nd.ref() != p.ref {
			continue // removed since the search
		}
		if !t.evictable(p.node) || reading(p.ref) {
			return dst, false
		}
		t.policy.Remove(p.node)
		dst = t.removeNodeLocked(dst, p.node, Chosen)
	}
	return dst, true
}

// vacancySearch is the state of one call of CheapestVacancy.
type vacancySearch struct {
	t       *Trie
	reading func(kv.Ref) bool
	// top is the highest node number at the start. Nodes that are added later are not examined;
	// Vacate stops if one of them keeps a piece of the range from being removed.
	top    uint32
	ranges []ExtentRange
	// marks is indexed by node number. Bit i is set if the node must be removed to empty ranges[i].
	marks []uint8
	// held and bytes have one element for each range. The element of held is set if the range
	// cannot be emptied, because a piece that must be removed is held (see CheapestVacancy). The
	// element of bytes is the total slot size of all pieces that must be removed.
	held  [vacancyChoices]bool
	bytes [vacancyChoices]int64
}

func (t *Trie) topNode() uint32 {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.nodes.top
}

// each calls f for every piece, pending ones included, in steps under the read
// lock.
func (s *vacancySearch) each(f func(n uint32, nd *node)) {
	for from := uint32(1); from <= s.top; from += refsPerLock {
		s.step(from, f)
	}
}

func (s *vacancySearch) step(from uint32, f func(n uint32, nd *node)) {
	t := s.t
	t.mu.RLock()
	defer t.mu.RUnlock()
	for n := from; n < from+refsPerLock && n <= s.top; n++ {
		if nd := t.nodes.at(n); nd.space != 0 {
			f(n, nd)
		}
	}
}

// isHeld reports whether the piece itself is held. It does not examine the descendants.
func (s *vacancySearch) isHeld(nd *node) bool {
	return nd.pins() > 0 || nd.has(flagPending) || s.reading(nd.ref())
}

// unheld returns the first vacancyChoices of the ranges that contain neither a held piece nor an
// ancestor of a held piece.
func (s *vacancySearch) unheld(ranges []ExtentRange) []ExtentRange {
	order := make([]int, len(ranges)) // indexes of ranges, sorted by From
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(ranges[a].From, ranges[b].From) })
	held := make([]bool, len(ranges))
	hold := func(e kv.Extent) {
		at, found := slices.BinarySearchFunc(order, e, func(i int, e kv.Extent) int { return cmp.Compare(ranges[i].From, e) })
		if !found {
			at--
		}
		if at >= 0 && e < ranges[order[at]].To {
			held[order[at]] = true
		}
	}
	seen := make(bitmap, s.top/64+1)
	s.each(func(n uint32, nd *node) {
		if !s.isHeld(nd) {
			return
		}
		for n != 0 && n <= s.top && !seen.has(n) {
			seen.set(n)
			nd := s.t.nodes.at(n)
			hold(nd.extent)
			n = nd.parent
		}
	})
	var free []ExtentRange
	for i, r := range ranges {
		if !held[i] && len(free) < vacancyChoices {
			free = append(free, r)
		}
	}
	return free
}

// mark computes marks: for each piece, the ranges that cannot be emptied unless the piece is
// removed.
func (s *vacancySearch) mark() {
	if len(s.ranges) == 0 {
		return
	}
	s.marks = make([]uint8, int(s.top)+1)
	t := s.t
	var path []uint32
	s.each(func(n uint32, _ *node) {
		path = path[:0]
		for n != 0 && n <= s.top && s.marks[n]&markKnown == 0 {
			path = append(path, n)
			n = t.nodes.at(n).parent
		}
		var above uint8
		if n != 0 && n <= s.top {
			above = s.marks[n]
		}
		for _, p := range slices.Backward(path) {
			nd := t.nodes.at(p)
			above |= s.markOf(nd.extent)
			s.marks[p] = above | markKnown
			s.add(above, nd)
		}
	})
}

// markOf returns the bits of the ranges that contain the slot e.
func (s *vacancySearch) markOf(e kv.Extent) (mark uint8) {
	for i, r := range s.ranges {
		if e >= r.From && e < r.To {
			mark |= 1 << i
		}
	}
	return mark
}

// add adds a piece to bytes, and to held if it is held, for each range in the piece's mark.
func (s *vacancySearch) add(mark uint8, nd *node) {
	if mark &^= markKnown; mark == 0 {
		return
	}
	held := s.isHeld(nd)
	bytes := s.t.spaces[nd.space].ns.slotBytes[nd.group()]
	for i := range s.ranges {
		if mark&(1<<i) != 0 {
			s.held[i] = s.held[i] || held
			s.bytes[i] += bytes
		}
	}
}

// collect returns the pieces that must be removed to empty a range, leaf first.
func (s *vacancySearch) collect(which int) []vacated {
	var pieces []vacated
	bit := uint8(1) << which
	s.each(func(n uint32, nd *node) {
		// The node may have been reused for another piece since mark. So its mark is used only if
		// its present slot or its present parent still requires the mark.
		if s.marks[n]&bit != 0 && (s.markOf(nd.extent)&bit != 0 || nd.parent != 0 && nd.parent <= s.top && s.marks[nd.parent]&bit != 0) {
			pieces = append(pieces, vacated{ref: nd.ref(), node: n, depth: s.t.nodes.depth(n), group: nd.group()})
		}
	})
	// The nodes of a block's other layer groups are children of the node of group 0, but have the
	// same depth. So among nodes of one depth, group 0 goes last.
	slices.SortFunc(pieces, func(a, b vacated) int {
		if a.depth != b.depth {
			return cmp.Compare(b.depth, a.depth)
		}
		return cmp.Compare(b.group, a.group)
	})
	return pieces
}
