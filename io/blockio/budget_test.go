package blockio

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
)

const mib = int64(1 << 20)

func fixed(t testing.TB, limit int64) *Budget {
	t.Helper()
	b, err := NewBudget(BudgetOptions{MinBytes: limit, MaxBytes: limit})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// take starts an Acquire and returns a channel that receives its result.
func take(ctx context.Context, b *Budget, n int64) <-chan error {
	done := make(chan error, 1)
	go func() { done <- b.Acquire(ctx, n) }()
	synctest.Wait()
	return done
}

func granted(done <-chan error) bool {
	synctest.Wait()
	select {
	case err := <-done:
		return err == nil
	default:
		return false
	}
}

func TestBudgetIsFirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := fixed(t, 8*mib)
		if err := b.Acquire(t.Context(), 6*mib); err != nil {
			t.Fatal(err)
		}
		large := take(t.Context(), b, 4*mib)
		small := take(t.Context(), b, mib)
		if granted(large) || granted(small) {
			t.Fatal("granted beyond the limit, or past a request that came first")
		}
		b.Release(6 * mib)
		if !granted(large) || !granted(small) {
			t.Fatal("5 MiB fit into 8 MiB")
		}
		if got := b.InFlightBytes(); got != 5*mib {
			t.Fatalf("%d bytes in flight", got)
		}
	})
}

func TestBudgetAdmitsTooLargeAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := fixed(t, mib)
		small := take(t.Context(), b, mib)
		huge := take(t.Context(), b, 100*mib)
		if !granted(small) || granted(huge) {
			t.Fatal("the large request did not wait until it was alone")
		}
		b.Release(mib)
		after := take(t.Context(), b, 4096)
		if !granted(huge) || granted(after) {
			t.Fatal("the large request is not alone")
		}
		b.Release(100 * mib)
		if !granted(after) {
			t.Fatal("nothing is in flight, yet 4096 bytes wait")
		}
	})
}

func TestBudgetContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := fixed(t, 8*mib)
		if err := b.Acquire(t.Context(), 6*mib); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		large := take(ctx, b, 4*mib)
		small := take(t.Context(), b, mib)
		cancel()
		synctest.Wait()
		if err := <-large; !errors.Is(err, context.Canceled) {
			t.Fatalf("cancelled wait: %v", err)
		}
		if !granted(small) {
			t.Fatal("the small request still waits behind one that has left")
		}
		if err := b.Acquire(ctx, 1); !errors.Is(err, context.Canceled) {
			t.Fatalf("acquire with a done context: %v", err)
		}
		if got := b.InFlightBytes(); got != 7*mib {
			t.Fatalf("%d bytes in flight", got)
		}
	})
}

func TestBudgetOptions(t *testing.T) {
	for _, o := range []BudgetOptions{
		{MinBytes: -1}, {MinBytes: 512}, {MinBytes: 2 * mib, MaxBytes: mib}, {StartBytes: 1}, {StartBytes: 1 << 40},
	} {
		if _, err := NewBudget(o); err == nil {
			t.Errorf("accepted %+v", o)
		}
	}
	b, err := NewBudget(BudgetOptions{MinBytes: 512 * mib})
	if err != nil || b.LimitBytes() != 512*mib {
		t.Errorf("a minimum above the other defaults: %v", err)
	}
}

// channelDevice completes up to parallel requests at a time; the others queue inside it, as in a
// disk. All requests are alike, so the order of service does not matter.
type channelDevice struct {
	channels chan struct{}
	serve    time.Duration
}

func newChannelDevice(parallel int, serve time.Duration) *channelDevice {
	return &channelDevice{channels: make(chan struct{}, parallel), serve: serve}
}

func (d *channelDevice) transfer() {
	d.channels <- struct{}{}
	<-time.After(d.serve)
	<-d.channels
}

// run drives the device with clients that each keep one request outstanding,
// and returns the completions in the last tenth of the time.
func run(b *Budget, d *channelDevice, clients int, bytes int64, long time.Duration) (late int) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	start := time.Now()
	for range clients {
		wg.Go(func() {
			for time.Since(start) < long {
				if b.Acquire(context.Background(), bytes) != nil {
					return
				}
				d.transfer()
				b.Release(bytes)
				if time.Since(start) > long*9/10 {
					mu.Lock()
					late++
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	return late
}

// TestBudgetFindsTheKnee: for every parallelism of the device, the limit converges to the point
// with nearly all of the throughput and little more in flight.
func TestBudgetFindsTheKnee(t *testing.T) {
	testkit.Long(t, "simulates drives for many seconds of virtual time")
	for _, c := range []struct {
		parallel int
		bytes    int64
		serve    time.Duration
		long     time.Duration
	}{
		{1, 4 * mib, 1400 * time.Microsecond, 20 * time.Second}, // the reference machine's virtual disk
		{2, 4 * mib, 2 * time.Millisecond, 20 * time.Second},
		{16, mib, 500 * time.Microsecond, 10 * time.Second}, // NVMe
		{32, 4 * mib, 5 * time.Millisecond, 20 * time.Second},
		{64, 64 << 10, 100 * time.Microsecond, 2 * time.Second},
	} {
		if testkit.Race && c.parallel == 64 {
			continue // takes three quarters of the time, and runs in the plain build
		}
		t.Run(fmt.Sprintf("%dx%dKiB", c.parallel, c.bytes>>10), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, err := NewBudget(BudgetOptions{})
				if err != nil {
					t.Fatal(err)
				}
				late := run(b, newChannelDevice(c.parallel, c.serve), 256, c.bytes, c.long)
				best := int(c.long/10/c.serve) * c.parallel
				knee := int64(c.parallel) * c.bytes
				if late < best*90/100 {
					t.Errorf("throughput is %d of %d at a limit of %d, knee %d", late, best, b.LimitBytes(), knee)
				}
				if limit := b.LimitBytes(); limit > 3*max(knee, mib) {
					t.Errorf("the limit of %d is far beyond the knee of %d", limit, knee)
				}
			})
		})
	}
}

// TestBudgetFollowsTheDevice: when a device becomes slower and less parallel, the limit decreases;
// when the device recovers, the limit increases again.
func TestBudgetFollowsTheDevice(t *testing.T) {
	testkit.Long(t, "simulates drives for many seconds of virtual time")
	synctest.Test(t, func(t *testing.T) {
		b, err := NewBudget(BudgetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		wide, narrow := newChannelDevice(32, 2*time.Millisecond), newChannelDevice(2, 2*time.Millisecond)
		var limits [3]int64
		for i, d := range []*channelDevice{wide, narrow, wide} {
			run(b, d, 128, mib, 30*time.Second)
			limits[i] = b.LimitBytes()
		}
		if limits[0] < 24*mib || limits[1] > 8*mib || limits[2] < 24*mib {
			t.Errorf("limits on a wide, a narrow and again the wide device: %d", limits)
		}
	})
}

// TestBudgetWithoutQueue: if no caller ever waits, the limit does not change.
func TestBudgetWithoutQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, err := NewBudget(BudgetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		run(b, newChannelDevice(1, time.Millisecond), 2, mib, 10*time.Second)
		if got := b.LimitBytes(); got != 8*mib {
			t.Errorf("the limit moved to %d although a quarter of it was used", got)
		}
	})
}

// feed gives the tuner windows of a device whose throughput, in bytes per second, is a function of
// the limit.
func feed(t *tuner, now *time.Duration, windows int, bytes int64, rate func(limit int64) float64) {
	for range windows * (windowCount + 2) {
		*now += time.Duration(float64(bytes) / rate(t.limit) * float64(time.Second))
		t.observe(*now, bytes, true)
	}
}

func tunerOf(t *testing.T) (tuner, *time.Duration) {
	t.Helper()
	var o BudgetOptions
	o.EnsureDefaults()
	return newTuner(o), new(time.Duration)
}

// TestTunerKeepsTwo: even on a flat curve, another request is in flight when one completes, also
// after requests have become larger than the limit.
func TestTunerKeepsTwo(t *testing.T) {
	flat := func(int64) float64 { return 2 << 30 }
	u, now := tunerOf(t)
	for _, bytes := range []int64{mib / 4, 4 * mib, 16 * mib, 200 * mib} {
		feed(&u, now, 300, bytes, flat)
		if least := min(2*bytes, u.opts.MaxBytes); u.limit < least || u.limit > max(2*least, mib) {
			t.Errorf("requests of %d KiB: limit %d KiB", bytes>>10, u.limit>>10)
		}
	}
}

func FuzzBudget(f *testing.F) {
	f.Add([]byte{3, 200, 9, 0, 1, 0, 255, 0})
	f.Fuzz(func(t *testing.T, steps []byte) {
		if len(steps) > 200 {
			return
		}
		synctest.Test(t, func(t *testing.T) { budgetAgainstModel(t, steps) })
	})
}

type modelWaiter struct {
	n    int64
	done <-chan error
}

// budgetAgainstModel interprets each byte as a step: zero releases the oldest grant, any other
// value acquires that many units, each an eighth of the limit.
func budgetAgainstModel(t *testing.T, steps []byte) {
	const unit, limit = Align, 8 * Align
	b := fixed(t, limit)
	ctx, cancel := context.WithCancel(t.Context())
	var held []int64
	var waiting []modelWaiter
	var sum int64
	admit := func() {
		for len(waiting) > 0 && (sum == 0 || sum+waiting[0].n <= limit) {
			if !granted(waiting[0].done) {
				t.Fatalf("%d bytes should have been granted beside %d", waiting[0].n, sum)
			}
			sum += waiting[0].n
			held = append(held, waiting[0].n)
			waiting = waiting[1:]
		}
	}
	for _, s := range steps {
		if s != 0 {
			n := int64(s%16+1) * unit
			waiting = append(waiting, modelWaiter{n, take(ctx, b, n)})
		} else if len(held) > 0 {
			b.Release(held[0])
			sum -= held[0]
			held = held[1:]
		}
		admit()
		if b.InFlightBytes() != sum {
			t.Fatalf("%d bytes in flight, the model has %d", b.InFlightBytes(), sum)
		}
	}
	cancel()
	for _, w := range waiting {
		// When a waiter leaves the queue, smaller requests after it may be admitted before
		// they leave too.
		switch err := <-w.done; {
		case err == nil:
			sum += w.n
		case !errors.Is(err, context.Canceled):
			t.Fatalf("waiter after cancel: %v", err)
		}
	}
	if b.InFlightBytes() != sum {
		t.Fatalf("%d bytes in flight at the end, the model has %d", b.InFlightBytes(), sum)
	}
}

func BenchmarkBudget(b *testing.B) {
	budget := fixed(b, 8*mib)
	ctx := b.Context()
	for b.Loop() {
		if err := budget.Acquire(ctx, mib); err != nil {
			b.Fatal(err)
		}
		budget.Release(mib)
	}
}
