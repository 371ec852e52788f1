package rdma

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// step holds the arguments of one callback.
type step struct{ before, now uint64 }

// Steps of many words are reported without a gap, and all of them before Stop returns.
func TestWatcherChain(t *testing.T) {
	for name, o := range map[string]WatcherOptions{
		"spins": {SpinRounds: -1}, "pauses": {SpinRounds: 1, PauseMax: 10 * time.Microsecond}, "default": {LockThread: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := NewWatcher(o)
			const words, increments = 20, 3000
			mem := make([]uint64, words)
			var steps [words][]step
			var watched [words]*Watched
			for i := range mem {
				mem[i] = uint64(i) * 100
				x, err := w.Watch(&mem[i], func(before, now uint64) { steps[i] = append(steps[i], step{before, now}) })
				if err != nil {
					t.Fatal(err)
				}
				watched[i] = x
			}
			var wg sync.WaitGroup
			for k := range 2 {
				wg.Go(func() {
					for range increments {
						for i := k; i < words; i += 2 {
							atomic.AddUint64(&mem[i], 1)
						}
						runtime.Gosched()
					}
				})
			}
			wg.Wait()
			for i, x := range watched {
				if i%2 == 0 {
					x.Stop()
					x.Stop()
				}
			}
			if err := errors.Join(w.Close(), w.Close()); err != nil {
				t.Fatal(err)
			}
			for i, s := range steps {
				at := uint64(i) * 100
				for _, x := range s {
					if x.before != at || x.now <= at {
						t.Fatalf("word %d: a step from %d to %d was reported after %d", i, x.before, x.now, at)
					}
					at = x.now
				}
				if want := uint64(i)*100 + increments; at != want {
					t.Errorf("word %d: reported up to %d of %d", i, at, want)
				}
				watched[i].Stop() // also after Close
			}
			if _, err := w.Watch(&mem[0], func(_, _ uint64) {}); !errors.Is(err, ErrClosed) {
				t.Errorf("watch of a closed watcher: %v", err)
			}
		})
	}
}

// Nothing is reported after Stop. Words are added and removed while others are watched. A word
// that decreases has changed too.
func TestWatcherStop(t *testing.T) {
	w := NewWatcher(WatcherOptions{})
	defer w.Close()
	var busy uint64
	seen := make(chan uint64, 1)
	x, err := w.Watch(&busy, func(_, now uint64) {
		select {
		case seen <- now:
		default:
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		var word, calls uint64 = rng.Uint64(), 0
		y, err := w.Watch(&word, func(_, _ uint64) { calls++ })
		if err != nil {
			t.Fatal(err)
		}
		atomic.StoreUint64(&word, word-1)
		atomic.AddUint64(&busy, 1)
		y.Stop()
		if calls != 1 {
			t.Fatalf("%d calls of one change", calls)
		}
		atomic.StoreUint64(&word, 0) // the word is not watched after Stop
	}
	x.Stop()
	if len(seen) == 0 {
		t.Error("no change of the busy word was reported")
	}
}

// The first change after an idle time is reported within PauseMax. A watcher without words
// sleeps.
func TestWatcherPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const pause = 10 * time.Millisecond
		w := NewWatcher(WatcherOptions{SpinRounds: 100, PauseMax: pause})
		synctest.Wait() // the watcher sleeps; otherwise this would not return
		var word uint64
		reported := make(chan time.Time, 1)
		x, err := w.Watch(&word, func(_, _ uint64) { reported <- time.Now() })
		if err != nil {
			t.Fatal(err)
		}
		for i := range 50 {
			time.Sleep(time.Duration(i) * 3 * time.Millisecond)
			start := time.Now()
			atomic.AddUint64(&word, 1)
			if late := (<-reported).Sub(start); late > pause {
				t.Errorf("reported after %v", late)
			}
		}
		x.Stop()
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestWatcherAllocs: rounds and calls allocate nothing.
func TestWatcherAllocs(t *testing.T) {
	w := NewWatcher(WatcherOptions{SpinRounds: -1})
	defer w.Close()
	var word, reported uint64
	if _, err := w.Watch(&word, func(_, now uint64) { atomic.StoreUint64(&reported, now) }); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() {
		v := atomic.AddUint64(&word, 1)
		for atomic.LoadUint64(&reported) != v {
			runtime.Gosched()
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkWatcher measures the time from a store to the callback, for comparison with fabric-lib's
// Table 4 (6.2 µs at the median, 7.0 at p90, 19.4 at p99.9 from a GPU over PCIe). busy: the
// watcher spins all the time. silence: the word changes once in 5 ms.
func BenchmarkWatcher(b *testing.B) {
	for _, c := range []struct {
		name  string
		every time.Duration
		words int
		o     WatcherOptions
	}{
		{"busy", 0, 1, WatcherOptions{SpinRounds: -1, LockThread: true}},
		{"busy/words=64", 0, 64, WatcherOptions{SpinRounds: -1, LockThread: true}},
		{"silence", 5 * time.Millisecond, 1, WatcherOptions{SpinRounds: 1000}},
	} {
		b.Run(c.name, func(b *testing.B) {
			w := NewWatcher(c.o)
			defer w.Close()
			words := make([]uint64, c.words)
			start := time.Now()
			var reported atomic.Int64
			for i := range words {
				if _, err := w.Watch(&words[i], func(_, _ uint64) { reported.Store(int64(time.Since(start))) }); err != nil {
					b.Fatal(err)
				}
			}
			late := make([]time.Duration, 0, b.N)
			for i := 0; b.Loop(); i++ {
				if c.every > 0 {
					time.Sleep(c.every)
				}
				reported.Store(0)
				at := time.Since(start)
				atomic.AddUint64(&words[i%len(words)], 1)
				for reported.Load() == 0 {
					if c.every > 0 {
						runtime.Gosched()
					}
				}
				late = append(late, time.Duration(reported.Load())-at)
			}
			slices.Sort(late)
			for _, q := range []struct {
				unit string
				at   float64
			}{{"p50-ns", 0.5}, {"p90-ns", 0.9}, {"p99.9-ns", 0.999}} {
				b.ReportMetric(float64(late[int(q.at*float64(len(late)-1))]), q.unit)
			}
		})
	}
}
