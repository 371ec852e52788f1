//go:build invariants

package arena

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
)

// takers records the call stack that took each lent Buffer, by the number of the Buffer's first
// page.
type takers struct {
	by map[uint32]taker
}

// taker is one loan: its length and the call stack that took it.
type taker struct {
	pages uint32
	calls []uintptr
}

// note records the loan of pages from page on.
func (t *takers) note(page, pages uint32) {
	if t.by == nil {
		t.by = make(map[uint32]taker)
	}
	calls := make([]uintptr, 16)
	t.by[page] = taker{pages, calls[:runtime.Callers(3, calls)]}
}

// forget drops the record when the loan ends.
func (t *takers) forget(page uint32) { delete(t.by, page) }

// report lists the places in the code where lent buffers were taken, for the first ten buffers.
func (t *takers) report() string {
	var b strings.Builder
	for i, page := range slices.Sorted(maps.Keys(t.by)) {
		if i == 10 {
			b.WriteString("\n  …")
			break
		}
		w := t.by[page]
		fmt.Fprintf(&b, "\n  [%#x,+%d) taken by", int64(page)*Granule, int64(w.pages)*Granule)
		for frames := runtime.CallersFrames(w.calls); ; {
			f, more := frames.Next()
			fmt.Fprintf(&b, " %s:%d", f.File, f.Line)
			if !more {
				break
			}
		}
	}
	return b.String()
}
