package rdma

import (
	"errors"
	"testing"
)

// FuzzSpans: merged spans hold a range if and only if each of its bytes is in one of the spans.
func FuzzSpans(f *testing.F) {
	f.Add([]byte{10, 5, 0, 3, 15, 1}, uint8(9), uint8(7))
	f.Add([]byte{0, 0}, uint8(0), uint8(0))
	f.Fuzz(func(t *testing.T, raw []byte, off, n uint8) {
		const size = 200
		var spans []Span
		var open [512]bool
		bad := len(raw) < 2
		for ; len(raw) >= 2; raw = raw[2:] {
			s := Span{uint64(raw[0]), uint64(raw[1])}
			spans = append(spans, s)
			bad = bad || s.Len == 0 || s.Offset+s.Len > size
			for i := s.Offset; i < s.Offset+s.Len; i++ {
				open[i] = true
			}
		}
		merged, err := MergeSpans(spans, size)
		if bad {
			if !errors.Is(err, ErrRange) {
				t.Fatalf("%v: %v", spans, err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		want := true
		for i := int(off); i < int(off)+int(n); i++ {
			want = want && open[i]
		}
		if got := HoldSpan(merged, uint64(off), uint64(n)); got != want {
			t.Fatalf("%v, merged %v: %d bytes at %d: held %v, want %v", spans, merged, n, off, got, want)
		}
		for i := 1; i < len(merged); i++ {
			if merged[i-1].Offset+merged[i-1].Len >= merged[i].Offset {
				t.Fatalf("%v: merged %v", spans, merged)
			}
		}
		if relative, reach := Relative(merged); relative[0].Offset != 0 || reach != merged[len(merged)-1].Offset+merged[len(merged)-1].Len-merged[0].Offset {
			t.Fatalf("%v: relative %v, %d", merged, relative, reach)
		}
	})
}
