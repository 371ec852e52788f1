package runs

import (
	"math/bits"

	"github.com/penstock-kv/penstock/internal/invariants"
)

// Run is the run of N numbers from Start on.
type Run struct{ Start, N uint32 }

// Set is a set of numbers below a limit. New makes one.
type Set struct {
	limit, size uint32
	words       []uint64 // bit i of words[i/64]: i is in the set
	// tree is a complete binary tree: node i has the children 2i and 2i+1, and each leaf describes
	// one word. Further leaves, which describe words of 0, make the number of leaves a power of
	// two.
	tree   []span
	leaves uint32
	steps  uint64
}

// span describes the set within the range of a node, by three lengths: of the run at the beginning
// of the range, of the run at its end, and of the longest run in the range.
type span struct{ prefix, suffix, best uint32 }

// wordBits is the number of bits of a word, which one leaf describes.
const wordBits = 64

// New returns an empty set of numbers below limit, which is at least 1.
func New(limit uint32) *Set {
	words := (limit + wordBits - 1) / wordBits
	leaves := uint32(1) << bits.Len32(words-1)
	return &Set{limit: limit, words: make([]uint64, words), tree: make([]span, 2*leaves), leaves: leaves}
}

// Size returns how many numbers are in the set.
func (s *Set) Size() uint32 { return s.size }

// Has reports whether i is in the set. Numbers from the limit on are not.
func (s *Set) Has(i uint32) bool {
	return i < s.limit && s.words[i/wordBits]>>(i%wordBits)&1 != 0
}

// Add adds the numbers of a run. None of them may be in the set.
func (s *Set) Add(r Run) {
	s.size += r.N
	s.change(r, func(w, mask uint64) uint64 {
		if invariants.Enabled {
			invariants.Assert(w&mask == 0, "runs: %+v is in the set already", r)
		}
		return w | mask
	})
}

// Remove removes the numbers of a run. All of them must be in the set.
func (s *Set) Remove(r Run) {
	s.size -= r.N
	s.change(r, func(w, mask uint64) uint64 {
		if invariants.Enabled {
			invariants.Assert(w&mask == mask, "runs: %+v is not in the set", r)
		}
		return w &^ mask
	})
}

// change replaces each word that a run covers by the result of f, whose second argument is the mask
// of the run's bits in that word. It then updates the tree.
func (s *Set) change(r Run, f func(w, mask uint64) uint64) {
	if r.N == 0 {
		return
	}
	first, last := r.Start/wordBits, (r.Start+r.N-1)/wordBits
	for w := first; w <= last; w++ {
		s.steps++
		s.words[w] = f(s.words[w], mask(w, r.Start, r.Start+r.N))
		s.tree[s.leaves+w] = spanOf(s.words[w])
	}
	width := uint32(wordBits)
	for lo, hi := (s.leaves+first)/2, (s.leaves+last)/2; lo >= 1; lo, hi, width = lo/2, hi/2, width*2 {
		for i := lo; i <= hi; i++ {
			s.steps++
			s.tree[i] = join(s.tree[2*i], s.tree[2*i+1], width)
		}
	}
}

// mask returns the bits of word w for the numbers in [from, to).
func mask(w, from, to uint32) uint64 {
	base := w * wordBits
	m := ^uint64(0)
	if from > base {
		m <<= min(from-base, wordBits)
	}
	if end := base + wordBits; to < end {
		m &= ^uint64(0) >> min(end-to, wordBits)
	}
	return m
}

// spanOf returns the span of the 64 numbers of one word.
func spanOf(w uint64) span {
	sp := span{prefix: uint32(bits.TrailingZeros64(^w)), suffix: uint32(bits.LeadingZeros64(^w))}
	for ; w != 0; w &= w << 1 {
		sp.best++
	}
	return sp
}

// join returns the span of two neighbouring ranges, l and r, of width numbers each.
func join(l, r span, width uint32) span {
	sp := span{prefix: l.prefix, suffix: r.suffix, best: max(l.best, r.best, l.suffix+r.prefix)}
	if l.prefix == width {
		sp.prefix += r.prefix
	}
	if r.suffix == width {
		sp.suffix += l.suffix
	}
	return sp
}

// Longest returns the length of the longest run.
func (s *Set) Longest() uint32 { return s.tree[1].best }

// First returns the first run of n consecutive members in [from, to). n is at least 1.
func (s *Set) First(n, from, to uint32) (Run, bool) {
	f := finder{set: s, n: n, from: from, to: min(to, s.limit)}
	if f.from >= f.to || n > s.Longest() {
		return Run{}, false
	}
	width := s.leaves * wordBits
	if !f.node(1, 0, width) {
		return Run{}, false
	}
	return Run{Start: f.start, N: n}, true
}

// finder is the state of one call of First.
type finder struct {
	set         *Set
	n, from, to uint32
	// run is the length of the run of members that ends at the current position.
	run   uint32
	start uint32
}

// node searches the range of node i, which begins at lo, and reports whether the run was found. The
// nodes are visited in the order of their ranges.
func (f *finder) node(i, lo, width uint32) bool {
	if lo >= f.to || lo+width <= f.from {
		return false
	}
	f.set.steps++
	sp := f.set.tree[i]
	leaf := i >= f.set.leaves
	if lo >= f.from && lo+width <= f.to {
		switch {
		case f.run+sp.prefix >= f.n:
			f.start = lo - f.run
			return true
		case sp.best < f.n && sp.prefix == width:
			f.run += width
			return false
		case sp.best < f.n:
			f.run = sp.suffix
			return false
		}
	}
	if leaf {
		return f.word(i-f.set.leaves, lo)
	}
	return f.node(2*i, lo, width/2) || f.node(2*i+1, lo+width/2, width/2)
}

// word searches a word.
func (f *finder) word(w, lo uint32) bool {
	x := f.set.words[w] & mask(w, f.from, f.to)
	for at := uint32(0); at < wordBits; {
		if x>>at&1 == 0 {
			f.run = 0
			if x>>at == 0 {
				return false
			}
			at += uint32(bits.TrailingZeros64(x >> at))
		}
		n := uint32(bits.TrailingZeros64(^(x >> at)))
		if f.run += n; f.run >= f.n {
			f.start = lo + at + n - f.run
			return true
		}
		at += n
	}
	return false
}

// From returns the number of consecutive members from the number start on, at most limit.
func (s *Set) From(start, limit uint32) uint32 {
	var n uint32
	for start+n < s.limit && n < limit {
		i := start + n
		k := uint32(bits.TrailingZeros64(^(s.words[i/wordBits] >> (i % wordBits))))
		if k == 0 {
			break
		}
		n += k // the shift fills with zeroes, so k never counts beyond the word
	}
	return min(n, limit)
}

// MemoryBytes returns the size of the words and of the tree.
func (s *Set) MemoryBytes() int64 { return int64(len(s.words))*8 + int64(len(s.tree))*12 }

// Steps returns the number of nodes of the tree read or changed since New. Tests compare this
// number with the size of the set.
func (s *Set) Steps() uint64 { return s.steps }
