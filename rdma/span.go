package rdma

import (
	"cmp"
	"fmt"
	"slices"
)

// Span is a range of a region: Len bytes from Offset.
type Span struct{ Offset, Len uint64 }

// MergeSpans returns the spans in order, with adjacent and overlapping spans merged. Providers
// call it. It returns ErrRange if there are no spans, or if a span is empty or not within size
// bytes.
func MergeSpans(spans []Span, size uint64) ([]Span, error) {
	if len(spans) == 0 {
		return nil, fmt.Errorf("rdma: window of no spans: %w", ErrRange)
	}
	sorted := slices.Clone(spans)
	slices.SortFunc(sorted, func(a, b Span) int { return cmp.Compare(a.Offset, b.Offset) })
	out := sorted[:0]
	for _, s := range sorted {
		if s.Len == 0 {
			return nil, fmt.Errorf("rdma: window with an empty span at %d: %w", s.Offset, ErrRange)
		}
		if err := Range("window", s.Offset, s.Len, size); err != nil {
			return nil, err
		}
		if last := len(out) - 1; last >= 0 && out[last].Offset+out[last].Len >= s.Offset {
			out[last].Len = max(out[last].Len, s.Offset+s.Len-out[last].Offset)
			continue
		}
		out = append(out, s)
	}
	return slices.Clip(out), nil
}

// HoldSpan reports whether n bytes at off lie within one of the merged spans. If n is 0 it returns
// true.
func HoldSpan(merged []Span, off, n uint64) bool {
	if n == 0 {
		return true
	}
	i, found := slices.BinarySearchFunc(merged, off, func(s Span, off uint64) int { return cmp.Compare(s.Offset, off) })
	if !found {
		i-- // the last span that begins before off
	}
	return i >= 0 && off-merged[i].Offset <= merged[i].Len && n <= merged[i].Len-(off-merged[i].Offset)
}

// Relative returns the offsets and the length of a window over the merged spans. The offsets are
// relative to the first byte of the first span. The length reaches from that byte to the end of
// the last span.
func Relative(merged []Span) (spans []Span, reach uint64) {
	first, last := merged[0], merged[len(merged)-1]
	spans = make([]Span, len(merged))
	for i, s := range merged {
		spans[i] = Span{s.Offset - first.Offset, s.Len}
	}
	return spans, last.Offset + last.Len - first.Offset
}
