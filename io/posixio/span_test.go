package posixio

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
)

// FuzzSpans checks the spans of next: they contain every request once, in order, and each can be
// done in one call.
func FuzzSpans(f *testing.F) {
	f.Add([]byte{0, 0, 0, 1, 4, 0, 0, 9}, int64(1<<20))
	f.Add([]byte{2, 2, 3, 3, 3}, int64(8192))
	f.Fuzz(func(t *testing.T, steps []byte, limit int64) {
		files := [2]*File{{}, {}}
		page := make([]byte, 2*blockio.Align)
		var batch []blockio.Request
		at := int64(0)
		// The bits of a step: another file, a write, a gap, two pages, many buffers.
		for _, s := range steps {
			r := blockio.Request{Op: blockio.Read, File: files[s&1], Offset: at, Bufs: [][]byte{page[:blockio.Align]}}
			if s&2 != 0 {
				r.Op = blockio.Write
			}
			if s&4 != 0 {
				r.Offset += blockio.Align
			}
			if s&8 != 0 {
				r.Bufs[0] = page
			}
			for s&16 != 0 && len(r.Bufs) < 600 {
				r.Bufs = append(r.Bufs, page)
			}
			at = r.Offset + r.Len()
			batch = append(batch, r)
		}
		cut := newSpans(batch, limit)
		seen := 0
		for s := cut.next(); len(s) > 0; s = cut.next() {
			if &s[0] != &batch[seen] {
				t.Fatalf("the span at %d begins elsewhere", seen)
			}
			seen += len(s)
			if len(s) > 1 && (s.bytes() > min(limit, spanBytesMax) || len(s.bufs()) > blockio.MaxVecs) {
				t.Fatalf("a span of %d requests has %d bytes in %d buffers", len(s), s.bytes(), len(s.bufs()))
			}
			end := s[0].Offset
			for i := range s {
				if s[i].Op != s[0].Op || s[i].File != s[0].File || s[i].Offset != end {
					t.Fatalf("request %d of the span does not continue it", i)
				}
				end += s[i].Len()
			}
		}
		if seen != len(batch) {
			t.Fatalf("%d of %d requests are in spans", seen, len(batch))
		}
	})
}

// TestSpanFailsOnlyWhereItMust: among joined requests only the bad one fails, and joined requests
// are one system call.
func TestSpanFailsOnlyWhereItMust(t *testing.T) {
	var calls atomic.Int64
	var bad atomic.Bool
	hook := func(_ blockio.Op, _ string, offset int64, n int, err error) (int, error) {
		calls.Add(1)
		if bad.Load() && offset <= 3*blockio.Align && 3*blockio.Align < offset+int64(n) {
			return 0, unix.EIO
		}
		return n, err
	}
	d, err := Open(t.TempDir(), Options{Hook: hook})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	f, err := d.Create("a", 8*blockio.Align)
	if err != nil {
		t.Fatal(err)
	}
	buf := testkit.AlignedBuffer(t, 8*blockio.Align)
	batch := make([]blockio.Request, 8)
	for i := range batch {
		batch[i] = blockio.Request{Op: blockio.Write, File: f, Offset: int64(i) * blockio.Align, Bufs: [][]byte{buf[i*blockio.Align : (i+1)*blockio.Align]}}
	}
	if err := d.Do(context.Background(), batch); err != nil || outcomes(batch) != "........" {
		t.Fatalf("%v, outcomes %s", err, outcomes(batch))
	}
	if n := calls.Load(); n != 1 {
		t.Errorf("eight adjacent requests are %d system calls", n)
	}
	bad.Store(true)
	if err := d.Do(context.Background(), batch); err != nil || outcomes(batch) != "...X...." {
		t.Fatalf("%v, outcomes %s", err, outcomes(batch))
	}
	if err := batch[3].Err; !errors.Is(err, unix.EIO) || !strings.Contains(err.Error(), fmt.Sprintf("%d bytes at %d", blockio.Align, 3*blockio.Align)) {
		t.Errorf("the bad request returns %v", err)
	}
	if s := d.Stats(); s.WriteRequests != 16 || s.WriteFailures != 1 || s.InFlightBytes != 0 {
		t.Errorf("stats: %+v", s)
	}
}

func outcomes(batch []blockio.Request) string {
	var out strings.Builder
	for i := range batch {
		if batch[i].Err != nil {
			out.WriteByte('X')
		} else {
			out.WriteByte('.')
		}
	}
	return out.String()
}
