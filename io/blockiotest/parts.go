package blockiotest

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
)

// Create creates a file of size bytes on d.
func Create(t testing.TB, d blockio.Device, name string, size int64) blockio.File {
	t.Helper()
	f, err := d.Create(name, size)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// Pattern returns an aligned buffer of which no two pages are equal.
func Pattern(t testing.TB, pages int, seed byte) []byte {
	t.Helper()
	b := testkit.AlignedBuffer(t, pages*blockio.Align)
	for i := range b {
		b[i] = byte(i) ^ byte(i>>8) ^ byte(i/blockio.Align)*31 ^ seed
	}
	return b
}

// One performs a single request and returns its outcome.
func One(t testing.TB, d blockio.Device, op blockio.Op, f blockio.File, off int64, bufs ...[]byte) error {
	t.Helper()
	batch := []blockio.Request{{Op: op, File: f, Offset: off, Bufs: bufs}}
	if err := d.Do(context.Background(), batch); err != nil {
		t.Fatal(err)
	}
	return batch[0].Err
}

// PageReads returns n reads of one page each, of the first n pages of f.
func PageReads(t testing.TB, f blockio.File, n int) []blockio.Request {
	t.Helper()
	mem := testkit.AlignedBuffer(t, n*blockio.Align)
	batch := make([]blockio.Request, n)
	for i := range batch {
		off := i * blockio.Align
		batch[i] = blockio.Request{Op: blockio.Read, File: f, Offset: int64(off), Bufs: [][]byte{mem[off : off+blockio.Align]}}
	}
	return batch
}

// CloseUnderLoad closes d, twice at once, while streams goroutines read batches of 8, 16, 24… pages
// of f, and after as many batches as given. want is the content of f. Each batch completes with its
// bytes or is refused with ErrClosed.
func CloseUnderLoad(t testing.TB, d blockio.Device, f blockio.File, want []byte, streams int, batches int64) {
	t.Helper()
	var wg sync.WaitGroup
	var done atomic.Int64
	enough := make(chan struct{})
	for g := range streams {
		batch := PageReads(t, f, 8*(g+1))
		wg.Go(func() {
			for {
				err := d.Do(context.Background(), batch)
				if errors.Is(err, blockio.ErrClosed) {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				for i, r := range batch {
					if off := i * blockio.Align; r.Err != nil || !bytes.Equal(r.Bufs[0], want[off:off+blockio.Align]) {
						t.Errorf("page %d: %v", i, r.Err)
						return
					}
					clear(r.Bufs[0])
				}
				if done.Add(1) == batches {
					close(enough)
				}
			}
		})
	}
	<-enough
	for range 2 {
		wg.Go(func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}
