package sources

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/penstock-kv/penstock/rdma"
)

// TestReaders: after Close no Acquire succeeds, and Wait returns with the last Release, or when
// its context ends.
func TestReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Readers
		if err := r.Wait(t.Context()); err != nil {
			t.Errorf("without readers: %v", err)
		}
		if err := errors.Join(r.Acquire(), r.Acquire()); err != nil {
			t.Fatal(err)
		}
		r.Close()
		if err := r.Acquire(); !errors.Is(err, rdma.ErrClosed) {
			t.Errorf("acquired after Close: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := r.Wait(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("wait without time: %v", err)
		}
		waited := make(chan error, 2)
		for range 2 {
			go func() { waited <- r.Wait(t.Context()) }()
		}
		r.Release()
		synctest.Wait()
		if len(waited) != 0 {
			t.Fatal("Wait returned before the last had gone")
		}
		r.Release()
		if err := errors.Join(<-waited, <-waited); err != nil {
			t.Error(err)
		}
	})
}
