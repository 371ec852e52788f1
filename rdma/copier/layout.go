package copier

import (
	"cmp"
	"math"
	"slices"
)

// run is a part of a batch in which all spans have the same length. It is transferred by one paged
// write.
type run struct {
	len      uint64
	from, to int // range in the batch's spans, after layout has sorted them
	src, dst grid
	// single: no grid with 32-bit indices contains all offsets, so each span is a separate write.
	single bool
}

// writes returns the number of engine operations of the run.
func (r *run) writes() int {
	if r.single {
		return r.to - r.from
	}
	return 1
}

// grid is the set of offsets base + index*stride.
type grid struct{ base, stride uint64 }

// layout sorts spans by length and cuts them into runs, which it appends to runs. It omits spans
// without bytes, which come first in the order.
func layout(spans []Span, runs []run) []run {
	byLen := func(a, b Span) int { return cmp.Compare(a.Len, b.Len) }
	if !slices.IsSortedFunc(spans, byLen) { // usually all spans have one length
		slices.SortFunc(spans, byLen)
	}
	from := 0
	for from < len(spans) && spans[from].Len == 0 {
		from++
	}
	for from < len(spans) {
		to := from + 1
		for to < len(spans) && spans[to].Len == spans[from].Len {
			to++
		}
		r := run{len: spans[from].Len, from: from, to: to}
		var ok1, ok2 bool
		r.src, ok1 = gridOf(spans[from:to], func(s Span) uint64 { return s.Src })
		r.dst, ok2 = gridOf(spans[from:to], func(s Span) uint64 { return s.Dst })
		r.single = !ok1 || !ok2
		runs = append(runs, r)
		from = to
	}
	return runs
}

// gridOf returns the grid with the largest stride that contains all offsets. ok is false if an
// index would not fit into 32 bits.
func gridOf(spans []Span, at func(Span) uint64) (g grid, ok bool) {
	g.base = math.MaxUint64
	most := uint64(0)
	for _, s := range spans {
		g.base = min(g.base, at(s))
		most = max(most, at(s))
	}
	for _, s := range spans {
		g.stride = gcd(g.stride, at(s)-g.base)
	}
	return g, g.stride == 0 || (most-g.base)/g.stride <= math.MaxUint32
}

// index returns the index of an offset in the grid.
func (g grid) index(off uint64) uint32 {
	if g.stride == 0 {
		return 0
	}
	return uint32((off - g.base) / g.stride)
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
