package spread_test

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/penstock-kv/penstock/internal/spread"
	"github.com/penstock-kv/penstock/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestEachItemOnce: every item is worked on once, for any number of helpers and items, and by
// concurrent calls.
func TestEachItemOnce(t *testing.T) {
	for helpers := range 5 {
		p := spread.NewOf(helpers)
		var calls sync.WaitGroup
		for _, n := range []int{0, 1, 2, 3, 16, 64, 1000} {
			for _, bytes := range []int64{0, 1, 1 << 20, 4 << 20, 1 << 32} {
				calls.Go(func() {
					count := make([]atomic.Int32, n)
					p.Do(n, bytes, func(from, to int) {
						for i := from; i < to; i++ {
							count[i].Add(1)
						}
					})
					for i := range count {
						if got := count[i].Load(); got != 1 {
							t.Errorf("%d helpers, %d items of %d bytes: item %d was worked on %d times", helpers, n, bytes, i, got)
						}
					}
				})
			}
		}
		calls.Wait()
	}
}

// TestHelperTakesPart: while the caller is in its first range, a helper works on all others, and
// one that has begun is waited for.
func TestHelperTakesPart(t *testing.T) {
	const n = 64
	p := spread.NewOf(1)
	others := make(chan struct{})
	var done atomic.Int32
	p.Do(n, n<<20, func(from, to int) {
		if from == 0 {
			<-others
		} else if done.Add(int32(to-from)) == n-1 {
			close(others)
		}
	})
	if got := done.Load(); got != n-1 {
		t.Errorf("%d of %d items were done beside the first", got, n-1)
	}
}

// TestBusyHelpersAreNotWaitedFor: a call finds the only helper busy and does all work itself.
func TestBusyHelpersAreNotWaitedFor(t *testing.T) {
	p := spread.NewOf(1)
	begun, release, ended := make(chan struct{}, 2), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		p.Do(2, 2<<20, func(int, int) {
			begun <- struct{}{}
			<-release
		})
	}()
	<-begun
	<-begun // the caller and its helper are in part
	items := 0
	p.Do(16, 16<<20, func(from, to int) { items += to - from })
	if items != 16 {
		t.Errorf("%d items of 16", items)
	}
	close(release)
	<-ended
}
