package rdmatest

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
)

// KillTarget writes all of src to dst again and again, and calls kill when some writes have landed.
// kill ends the process of dst at once. KillTarget returns how many writes ended with ErrPeerDied. The
// test fails unless each write ended once, with nil or with ErrPeerDied. KillTarget closes src.
func KillTarget(ctx context.Context, t testing.TB, e rdma.Engine, src rdma.Region, dst rdma.Desc, kill func() error) int {
	t.Helper()
	const some = 20
	var mu sync.Mutex
	var submitted, landed, died int
	landing := make(chan struct{})
	done := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err == nil:
			if landed++; landed == some {
				close(landing)
			}
		case errors.Is(err, rdma.ErrPeerDied):
			died++
		default:
			t.Errorf("write: %v", err)
		}
	}
	var writer sync.WaitGroup
	writer.Go(func() {
		for {
			if err := e.Write(ctx, rdma.Write{Src: src, Dst: dst, Len: uint64(len(src.Bytes())), Done: done}); err != nil {
				if !errors.Is(err, rdma.ErrNoPeer) && !errors.Is(err, rdma.ErrPeerDied) {
					t.Errorf("submit: %v", err)
				}
				return
			}
			mu.Lock()
			submitted++
			mu.Unlock()
		}
	})
	select {
	case <-landing:
	case <-ctx.Done():
		t.Fatal("nothing lands")
	}
	if err := kill(); err != nil {
		t.Fatal(err)
	}
	writer.Wait()
	if err := src.Close(ctx); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if landed+died != submitted {
		t.Errorf("%d submitted, %d landed, %d died", submitted, landed, died)
	}
	return died
}
