package sim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestOrder checks the order that doc.go shows.
func TestOrder(t *testing.T) {
	k := New(1)
	var log []string
	say := func(s string) func() {
		return func() { log = append(log, fmt.Sprintf("%v %s", k.Now(), s)) }
	}
	k.At(2, say("later"))
	k.At(1, func() {
		say("a")()
		k.Settled(func() {
			say("settle")()
			k.After(0, say("after settling"))
			k.Settled(say("settle again"))
		})
		k.At(1, say("b, added at its time"))
		k.At(0, say("c, of the past"))
	})
	k.At(1, say("d"))
	if err := k.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"1ns a", "1ns d", "1ns b, added at its time", "1ns c, of the past", "1ns settle",
		"1ns after settling", "1ns settle again", "2ns later",
	}
	if !slices.Equal(log, want) {
		t.Errorf("called\n\t%s\nwant\n\t%s", strings.Join(log, "\n\t"), strings.Join(want, "\n\t"))
	}
}

func TestTimer(t *testing.T) {
	k := New(1)
	var at []time.Duration
	timer := k.NewTimer(Normal, func() { at = append(at, k.Now()) })
	if timer.Due() != Never {
		t.Errorf("a timer that was not set is due at %v", timer.Due())
	}
	timer.Set(5)
	timer.Set(3)
	k.At(3, func() { timer.SetAfter(4) })
	k.At(8, func() {
		timer.Set(9)
		timer.Stop()
		timer.Stop()
	})
	if err := k.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if want := []time.Duration{3, 7}; !slices.Equal(at, want) {
		t.Errorf("called at %v; want %v", at, want)
	}
}

func TestRunUntil(t *testing.T) {
	k := New(1)
	n := 0
	for i := range 10 {
		k.At(time.Duration(i), func() { n++ })
	}
	if err := k.RunUntil(t.Context(), 4); err != nil || n != 5 || k.Now() != 4 || k.Pending() != 5 {
		t.Errorf("until 4: %d events, now %v, %d pending, %v", n, k.Now(), k.Pending(), err)
	}
	k.At(6, k.Stop)
	if err := k.Run(t.Context()); err != nil || n != 7 || k.Now() != 6 {
		t.Errorf("until Stop: %d events, now %v, %v", n, k.Now(), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("a run whose context has ended: %v", err)
	}
}

// TestStreams: a stream depends only on seed and name, and the digests of different runs differ.
func TestStreams(t *testing.T) {
	a, b := New(7), New(7)
	b.Rand("other").Uint64()
	if x, y := a.Rand("arrivals").Uint64(), b.Rand("arrivals").Uint64(); x != y {
		t.Errorf("one seed and name, two streams: %d and %d", x, y)
	}
	if x, y := a.Rand("arrivals").Uint64(), New(8).Rand("arrivals").Uint64(); x == y {
		t.Error("two seeds, one stream")
	}
	if x, y := a.Rand("arrivals").Uint64(), a.Rand("departures").Uint64(); x == y {
		t.Error("two names, one stream")
	}
	run := func(seed uint64, note uint64) uint64 {
		k := New(seed)
		rng := k.Rand("x")
		for range 100 {
			k.At(time.Duration(rng.IntN(50)), func() { k.Note(note) })
		}
		if err := k.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		return k.Digest()
	}
	first, again := run(1, 1), run(1, 1)
	if first != again || first == run(2, 1) || first == run(1, 2) {
		t.Error("different runs have equal digests, or equal runs different ones")
	}
}

// FuzzOrder compares the heap with a sorted list, under Set and Stop.
func FuzzOrder(f *testing.F) {
	f.Add(uint64(1), uint16(200))
	f.Fuzz(func(t *testing.T, seed uint64, ops uint16) {
		type entry struct {
			at     time.Duration
			phase  Phase
			number int
			id     int
		}
		rng := rand.New(rand.NewPCG(seed, 0))
		k := New(0)
		var got []int
		var model []entry
		timers := make([]*Timer, 8)
		phases := make([]Phase, len(timers))
		for i := range timers {
			phases[i] = Phase(rng.IntN(2))
			timers[i] = k.NewTimer(phases[i], func() { got = append(got, i) })
		}
		for n := range int(ops % 512) {
			at := time.Duration(rng.IntN(20))
			id := rng.IntN(len(timers) + 4)
			if id < len(timers) {
				model = slices.DeleteFunc(model, func(e entry) bool { return e.id == id })
				if rng.IntN(4) == 0 {
					timers[id].Stop()
					continue
				}
				timers[id].Set(at)
				model = append(model, entry{at, phases[id], n, id})
				continue
			}
			k.At(at, func() { got = append(got, 1000+n) })
			model = append(model, entry{at, Normal, n, 1000 + n})
		}
		slices.SortFunc(model, func(a, b entry) int {
			return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.phase, b.phase), cmp.Compare(a.number, b.number))
		})
		if err := k.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		var want []int
		for _, e := range model {
			want = append(want, e.id)
		}
		if !slices.Equal(got, want) {
			t.Errorf("called %v\nwant %v", got, want)
		}
	})
}

// TestNoAllocs: scheduling an event with an existing function allocates nothing.
func TestNoAllocs(t *testing.T) {
	k := New(1)
	f := func() {}
	k.After(1, f)
	if err := k.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() {
		k.After(1, f)
		k.step()
	}); n != 0 {
		t.Errorf("%v allocations an event", n)
	}
}

// BenchmarkEvent measures one event among n others.
func BenchmarkEvent(b *testing.B) {
	for _, n := range []int{100, 100_000} {
		b.Run(fmt.Sprintf("pending=%d", n), func(b *testing.B) {
			k := New(1)
			rng := k.Rand("benchmark")
			f := func() {}
			for range n {
				k.After(time.Duration(rng.IntN(1e9)), f)
			}
			b.ReportAllocs()
			for b.Loop() {
				k.After(time.Duration(rng.IntN(1e9)), f)
				k.step()
			}
		})
	}
}
