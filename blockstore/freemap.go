package blockstore

import "math/bits"

// freeMap is the set of free slots of one segment: a bitmap that knows its
// longest run. It is not safe for concurrent use.
type freeMap struct {
	words []uint64 // bit i of words[i/64]: slot i is free
	slots uint32
	free  uint32

	// longest is a longest run of free slots, unless stale says that slots were
	// taken or given since it was looked for.
	longest run
	stale   bool
}

// run is slots [start, start+n).
type run struct{ start, n uint32 }

// newFreeMap returns a map of slots that are all free.
func newFreeMap(slots uint32) freeMap {
	m := freeMap{words: make([]uint64, (slots+63)/64), slots: slots, free: slots, longest: run{0, slots}}
	for i := range m.words {
		m.words[i] = ^uint64(0)
	}
	if tail := slots % 64; tail != 0 {
		m.words[len(m.words)-1] = 1<<tail - 1
	}
	return m
}

// isFree reports whether slot is free; slots beyond the end are not.
func (m *freeMap) isFree(slot uint32) bool {
	return slot < m.slots && m.words[slot/64]&(1<<(slot%64)) != 0
}

// take removes the run, all of which is free.
func (m *freeMap) take(r run) {
	for i := r.start; i < r.start+r.n; {
		lo := i % 64
		n := min(64-lo, r.start+r.n-i)
		m.words[i/64] &^= (1<<n - 1) << lo
		i += n
	}
	m.free -= r.n
	m.stale = true
}

// give adds a slot that was taken.
func (m *freeMap) give(slot uint32) {
	m.words[slot/64] |= 1 << (slot % 64)
	m.free++
	m.stale = true
}

// runFrom returns how many slots from start on are free, at most limit.
func (m *freeMap) runFrom(start, limit uint32) uint32 {
	var n uint32
	for start+n < m.slots && n < limit {
		i := start + n
		free := uint32(bits.TrailingZeros64(^(m.words[i/64] >> (i % 64))))
		if free == 0 {
			break
		}
		// The shift brings in zeroes, so free never counts beyond the word.
		n += free
	}
	return min(n, limit)
}

// longestRun returns the first of the longest runs of free slots.
func (m *freeMap) longestRun() run {
	if m.stale {
		m.longest, m.stale = m.findLongest(), false
	}
	return m.longest
}

func (m *freeMap) findLongest() run {
	var best, cur run
	for w, word := range m.words {
		base := uint32(w) * 64
		switch word {
		case 0:
			cur.n = 0
			continue
		case ^uint64(0):
			if cur.n == 0 {
				cur.start = base
			}
			if cur.n += 64; cur.n > best.n {
				best = cur
			}
			continue
		}
		for at := uint32(0); at < 64; {
			if word>>at&1 == 0 {
				cur.n = 0
				if word>>at == 0 {
					break
				}
				at += uint32(bits.TrailingZeros64(word >> at))
				continue
			}
			if cur.n == 0 {
				cur.start = base + at
			}
			n := uint32(bits.TrailingZeros64(^(word >> at)))
			at += n
			if cur.n += n; cur.n > best.n {
				best = cur
			}
		}
	}
	return best
}
