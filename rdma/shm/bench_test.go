package shm

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// lane is two domains, an endpoint between them, and a poller on the target's side, in this
// process.
type lane struct {
	a, b     *Domain
	ea, eb   group.Endpoint
	src, dst group.Memory
	stop     chan struct{}
	ended    chan struct{}
	polled   []group.Completion
}

// newLane connects two domains. The sources are in space, which is shared or not.
func newLane(tb testing.TB, mem []byte, share func(d *Domain)) *lane {
	tb.Helper()
	l := &lane{a: openDomain(tb), b: openDomain(tb), stop: make(chan struct{}), ended: make(chan struct{}), polled: make([]group.Completion, 64)}
	share(l.a)
	share(l.b)
	half := len(mem) / 2
	must := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
	}
	var err error
	l.src, err = l.a.Register(mem[:half], rdma.RegisterOptions{})
	must(err)
	l.dst, err = l.b.Register(mem[half:], rdma.RegisterOptions{})
	must(err)
	l.ea, err = l.a.NewEndpoint(1, rdma.ClassKV)
	must(err)
	l.eb, err = l.b.NewEndpoint(2, rdma.ClassKV)
	must(err)
	connected := make(chan error, 1)
	go func() { connected <- l.ea.Connect(l.eb.Local()) }()
	must(l.eb.Connect(l.ea.Local()))
	must(<-connected)
	go func() {
		defer close(l.ended)
		dst := make([]group.Completion, 64)
		for {
			select {
			case <-l.stop:
				return
			default:
			}
			if n, _ := l.b.Poll(dst); n == 0 {
				l.b.Wait()
			}
		}
	}()
	tb.Cleanup(func() {
		close(l.stop)
		l.b.Wake()
		<-l.ended
		l.ea.Shut()
		l.eb.Shut()
		for _, d := range []*Domain{l.a, l.b} {
			_, _ = d.Poll(l.polled)
		}
		for _, c := range []interface{ Close() error }{l.ea, l.eb, l.src, l.dst, l.a, l.b} {
			if err := c.Close(); err != nil {
				tb.Error(err)
			}
		}
	})
	return l
}

// await polls the sender's side until count Works have completed.
func (l *lane) await(tb testing.TB, count int) {
	for count > 0 {
		n, err := l.a.Poll(l.polled)
		if err != nil {
			tb.Fatal(err)
		}
		for _, c := range l.polled[:n] {
			if c.Status != group.StatusOK {
				tb.Fatalf("status %d: %v", c.Status, c.Err)
			}
		}
		if count -= n; n == 0 && count > 0 {
			l.a.Wait()
		}
	}
}

// BenchmarkWrite alternates writes between two domains with copy, for a twentieth of a second
// each, over the same memory, which is larger than the caches. It reports the median of the
// ratios of the rates, and the rate.
func BenchmarkWrite(b *testing.B) {
	const half = 128 << 20
	space := openArena(b, 2*half)
	mem := space.Bytes()
	share := func(d *Domain) {
		if err := d.Share(space); err != nil {
			b.Fatal(err)
		}
	}
	none := func(*Domain) {}
	for _, kind := range []struct {
		name  string
		share func(*Domain)
	}{{"arena", share}, {"process", none}} {
		for _, size := range []int{4 << 10, 64 << 10, 1 << 20, 4 << 20} {
			b.Run(fmt.Sprintf("%s/%dKiB", kind.name, size>>10), func(b *testing.B) {
				l := newLane(b, mem, kind.share)
				const inFlight = 8
				works := make([]group.Work, inFlight)
				at, ratios, rates := 0, []float64(nil), []float64(nil)
				next := func() uint64 {
					if at += size; at+size > half {
						at = 0
					}
					return uint64(at)
				}
				for b.Loop() {
					var shm, plain int
					start := time.Now()
					for time.Since(start) < 50*time.Millisecond {
						for i := range works {
							off := next()
							works[i] = group.Work{Op: group.OpWrite, Src: l.src, SrcOff: off, Len: uint64(size), RemoteAddr: off, RemoteKey: l.dst.Key()}
						}
						n, err := l.ea.Post(works)
						if n != inFlight || err != nil {
							b.Fatal(n, err)
						}
						l.await(b, inFlight)
						shm += inFlight
					}
					shmRate := float64(shm) / time.Since(start).Seconds()
					start = time.Now()
					for time.Since(start) < 50*time.Millisecond {
						for range inFlight {
							off := next()
							copy(mem[half+off:half+off+uint64(size)], mem[off:off+uint64(size)])
						}
						plain += inFlight
					}
					ratios = append(ratios, shmRate/(float64(plain)/time.Since(start).Seconds()))
					rates = append(rates, shmRate*float64(size)/(1<<30))
				}
				slices.Sort(ratios)
				slices.Sort(rates)
				b.ReportMetric(ratios[len(ratios)/2], "rate/copy")
				b.ReportMetric(rates[len(rates)/2], "GiB/s")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// BenchmarkPieces measures the bound on posted payload (aheadPieces in package group, 4 MiB
// by default): the rate of writes between two engines, and its ratio to the rate of engines
// whose writes are neither cut nor bounded. Both take turns of 0.1 s, with 64 MiB in flight,
// the default budget. The figures are medians over the turns.
func BenchmarkPieces(b *testing.B) {
	const half = 128 << 20
	space := openArena(b, 2*half)
	for _, size := range []uint64{1 << 20, 16 << 20} {
		b.Run(fmt.Sprintf("%dMiB", size>>20), func(b *testing.B) {
			pieces, whole := newWriter(b, space, 0, size), newWriter(b, space, 1<<30, size)
			const turn = 100 * time.Millisecond
			var rates, ratios []float64
			for b.Loop() {
				cut, uncut := pieces.rate(turn), whole.rate(turn)
				rates, ratios = append(rates, cut/(1<<30)), append(ratios, cut/uncut)
			}
			slices.Sort(rates)
			slices.Sort(ratios)
			b.ReportMetric(rates[len(rates)/2], "GiB/s")
			b.ReportMetric(ratios[len(ratios)/2], "rate/uncut")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// writer writes from one engine to another, from the first half of an arena to the second.
type writer struct {
	tb    testing.TB
	from  *group.Engine
	w     rdma.Write
	free  []uint64 // offsets that no write in flight uses
	ended chan writeEnd
}

type writeEnd struct {
	at  uint64
	err error
}

func newWriter(tb testing.TB, space *arena.Arena, pieceBytes int, size uint64) *writer {
	tb.Helper()
	var engines [2]*group.Engine
	for i := range engines {
		o := Options{Arenas: []*arena.Arena{space}, Group: group.Options{Token: rdma.Token(testToken), PieceBytes: pieceBytes}}
		if i == 0 {
			o.Listen = filepath.Join(tb.TempDir(), "s")
		}
		var err error
		if engines[i], err = New(tb.Context(), o); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { _ = engines[i].Close() })
	}
	if _, err := engines[1].Connect(tb.Context(), engines[0].Addr(), rdma.Token(testToken)); err != nil {
		tb.Fatal(err)
	}
	mem := space.Bytes()
	half := len(mem) / 2
	src, err := engines[1].Register(mem[:half], rdma.RegisterOptions{})
	if err != nil {
		tb.Fatal(err)
	}
	dst, err := engines[0].Register(mem[half:], rdma.RegisterOptions{})
	if err != nil {
		tb.Fatal(err)
	}
	n := 64 << 20 / int(size)
	w := &writer{tb: tb, from: engines[1], w: rdma.Write{Src: src, Dst: dst.Desc(), Len: size}, ended: make(chan writeEnd, n)}
	for i := range uint64(n) {
		w.free = append(w.free, i*size)
	}
	return w
}

// rate writes for the given time and returns the bytes per second.
func (w *writer) rate(turn time.Duration) float64 {
	began, bytes := time.Now(), uint64(0)
	for over := false; !over || len(w.free) < cap(w.ended); over = time.Since(began) > turn {
		for ; !over && len(w.free) > 0; w.free = w.free[1:] {
			at, o := w.free[0], w.w
			o.SrcOffset, o.DstOffset = at, at
			o.Done = func(err error) { w.ended <- writeEnd{at, err} }
			if err := w.from.Write(w.tb.Context(), o); err != nil {
				w.tb.Fatal(err)
			}
		}
		e := <-w.ended
		if e.err != nil {
			w.tb.Fatal(e.err)
		}
		w.free = append(w.free, e.at)
		bytes += w.w.Len
	}
	return float64(bytes) / time.Since(began).Seconds()
}

// BenchmarkPost measures the time of a Post of one Work while the target is awake, and its
// allocations.
func BenchmarkPost(b *testing.B) {
	space := openArena(b, 2<<20)
	l := newLane(b, space.Bytes(), func(d *Domain) {
		if err := d.Share(space); err != nil {
			b.Fatal(err)
		}
	})
	works := []group.Work{{Op: group.OpWrite, Src: l.src, Len: 8, RemoteKey: l.dst.Key()}}
	b.ReportAllocs()
	posted := 0
	for b.Loop() {
		if n, err := l.ea.Post(works); n != 1 || err != nil {
			b.Fatal(n, err)
		}
		if posted++; posted == depth {
			b.StopTimer()
			l.await(b, posted)
			posted = 0
			b.StartTimer()
		}
	}
	l.await(b, posted)
}

// BenchmarkRoundTrip measures the time from a Post to the poll of its completion.
func BenchmarkRoundTrip(b *testing.B) {
	space := openArena(b, 2<<20)
	l := newLane(b, space.Bytes(), func(d *Domain) {
		if err := d.Share(space); err != nil {
			b.Fatal(err)
		}
	})
	works := []group.Work{{Op: group.OpWriteImm, Src: l.src, Len: 8, RemoteKey: l.dst.Key()}}
	b.ReportAllocs()
	for b.Loop() {
		if n, err := l.ea.Post(works); n != 1 || err != nil {
			b.Fatal(n, err)
		}
		l.await(b, 1)
	}
}

// TestPostAllocatesNothing: neither Post nor polling its completion allocates. A Work that
// escapes, or an error that is made without need, would break it.
func TestPostAllocatesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("needs a build without the race detector, which allocates memory")
	}
	space := openArena(t, 2<<20)
	l := newLane(t, space.Bytes(), func(d *Domain) {
		if err := d.Share(space); err != nil {
			t.Fatal(err)
		}
	})
	works := []group.Work{{Op: group.OpWriteImm, Src: l.src, Len: 4096, RemoteKey: l.dst.Key()}}
	got := testing.AllocsPerRun(1000, func() {
		if n, err := l.ea.Post(works); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		l.await(t, 1)
	})
	if got != 0 {
		t.Errorf("%v allocations for a write", got)
	}
}
