package arena

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/datadriven"

	"github.com/penstock-kv/penstock/internal/fair"
	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/sys"
)

// newArena returns an arena. The test's cleanup closes it and checks that no buffer is lent.
func newArena(t testing.TB, o Options) *Arena {
	t.Helper()
	a, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

func mustAlloc(t testing.TB, a *Arena, size int) Buffer {
	t.Helper()
	b, err := a.Alloc(t.Context(), size)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestTranscripts replays testdata/*.td against an arena of 2 MiB, counted in pages; in share.td,
// 256 pages are the share.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		synctest.Test(t, func(t *testing.T) {
			a := newArena(t, Options{SizeBytes: sys.HugePageSize, QueueMax: 3})
			if strings.HasSuffix(path, "share.td") {
				a.SetShare(256*Granule, 3)
			}
			s := &script{arena: a, bufs: map[string]Buffer{}, stops: map[string]context.CancelFunc{}}
			datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.run(t, d) })
			for _, name := range slices.Sorted(maps.Keys(s.bufs)) {
				s.bufs[name].Release()
			}
		})
	})
}

// script is the state of one transcript.
type script struct {
	arena *Arena
	mu    sync.Mutex
	bufs  map[string]Buffer
	stops map[string]context.CancelFunc
	log   []string
}

// run performs one command; each line of the input is one request.
func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	for line := range strings.Lines(d.Input) {
		name, size, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch d.Cmd {
		case "alloc", "alloc-share":
			pages, err := strconv.Atoi(size)
			if err != nil {
				d.Fatalf(t, "%q: %v", line, err)
			}
			ctx, stop := context.WithCancel(context.Background())
			s.stops[name] = stop
			from := s.arena.AllocFor
			if d.Cmd == "alloc-share" {
				from = s.arena.AllocShare
			}
			by, weight := fair.Caller{}, 1
			d.MaybeScanArgs(t, "by", &by.Share.Principal)
			d.MaybeScanArgs(t, "weight", &weight)
			by.Share.Weight = func() int { return weight }
			go s.alloc(ctx, name, pages, by, from)
		case "release":
			s.mu.Lock()
			b := s.bufs[name]
			delete(s.bufs, name)
			s.mu.Unlock()
			b.Release()
		case "cancel":
			s.stops[name]()
		default:
			d.Fatalf(t, "unknown command")
		}
		synctest.Wait()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.Sort(s.log) // goroutines served together log in any order
	out := strings.Join(s.log, "")
	s.log = nil
	return out + s.picture()
}

// alloc takes pages under a name, and logs the outcome.
func (s *script) alloc(ctx context.Context, name string, pages int, by fair.Caller, from func(context.Context, fair.Caller, int) (Buffer, error)) {
	b, err := from(ctx, by, pages*Granule)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case errors.Is(err, ErrBusy):
		s.log = append(s.log, name+": busy\n")
	case errors.Is(err, context.Canceled):
		s.log = append(s.log, name+": cancelled\n")
	case err != nil:
		s.log = append(s.log, fmt.Sprintf("%s: %v\n", name, err))
	default:
		s.bufs[name] = b
		s.log = append(s.log, fmt.Sprintf("%s: page %d\n", name, b.page))
	}
}

// picture draws the region as "a@0+100 .@100+412" and lists the waiters.
func (s *script) picture() string {
	type part struct {
		name        string
		page, pages uint32
	}
	var parts []part
	for n, b := range s.bufs {
		parts = append(parts, part{n, b.page, b.pages})
	}
	for p, all := uint32(0), s.arena.pages; p < all; p++ {
		if n := s.arena.free.From(p, all); n > 0 {
			parts = append(parts, part{".", p, n})
			p += n
		}
	}
	slices.SortFunc(parts, func(x, y part) int { return int(x.page) - int(y.page) })
	var out strings.Builder
	for _, p := range parts {
		fmt.Fprintf(&out, "%s@%d+%d ", p.name, p.page, p.pages)
	}
	return fmt.Sprintf("%swaiting=%d\n", out.String(), s.arena.Stats().Waiting)
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{{}, {SizeBytes: -1}, {SizeBytes: MaxSizeBytes + 1}} {
		if a, err := New(o); err == nil {
			t.Errorf("New(%+v) succeeded", o)
			a.Close()
		}
	}
}

func TestBufferMemory(t *testing.T) {
	a := newArena(t, Options{SizeBytes: 1})
	if got := a.Stats().SizeBytes; got != sys.HugePageSize {
		t.Errorf("an arena of 1 byte has %d; want one huge page", got)
	}
	x, y := mustAlloc(t, a, 5000), mustAlloc(t, a, 4096)
	if x.Len() != 8192 || len(x.Bytes()) != 8192 || cap(x.Bytes()) != 8192 {
		t.Errorf("5000 bytes gave %d; want two pages, and no capacity beyond", x.Len())
	}
	copy(x.Bytes(), bytes.Repeat([]byte{1}, 8192))
	copy(y.Bytes(), bytes.Repeat([]byte{2}, 4096))
	if !bytes.Equal(a.Bytes()[x.Offset():][:8192], x.Bytes()) || x.Bytes()[8191] != 1 {
		t.Error("a buffer is not its part of the region")
	}
	stale := x.Bytes()
	x.Release()
	if got := stale[0] == invariants.MangleByte; got != invariants.Enabled {
		t.Errorf("released memory mangled: %t, with invariants %t", got, invariants.Enabled)
	}
	y.Release()
	Buffer{}.Release()
	if (Buffer{}).Valid() || !y.Valid() || (Buffer{}).Bytes() != nil {
		t.Error("Valid does not distinguish the zero Buffer from others")
	}
}

func TestSizesRefused(t *testing.T) {
	a := newArena(t, Options{SizeBytes: sys.HugePageSize})
	for _, size := range []int{-1, 0, sys.HugePageSize + 1} {
		if _, err := a.Alloc(t.Context(), size); !errors.Is(err, ErrTooLarge) {
			t.Errorf("Alloc(%d): %v; want ErrTooLarge", size, err)
		}
	}
}

func TestTryAllocDoesNotOvertake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t, Options{SizeBytes: sys.HugePageSize})
		half := mustAlloc(t, a, sys.HugePageSize/2)
		got := make(chan Buffer)
		go func() {
			b, _ := a.Alloc(t.Context(), sys.HugePageSize)
			got <- b
		}()
		synctest.Wait()
		if _, err := a.TryAlloc(Granule); !errors.Is(err, ErrBusy) {
			t.Errorf("TryAlloc past a waiting request: %v; want ErrBusy", err)
		}
		half.Release()
		(<-got).Release()
		b, err := a.TryAlloc(Granule)
		if err != nil {
			t.Error(err)
		}
		b.Release()
	})
}

func TestDoubleRelease(t *testing.T) {
	a := newArena(t, Options{SizeBytes: sys.HugePageSize})
	b := mustAlloc(t, a, Granule)
	b.Release()
	again := mustAlloc(t, a, Granule) // the same page, another loan
	defer again.Release()
	defer func() {
		if r := recover(); (r != nil) != invariants.Enabled {
			t.Errorf("second release: panic %v with invariants %t", r, invariants.Enabled)
		}
		s := a.Stats()
		if s.Buffers != 1 || !invariants.Enabled && s.DoubleReleases != 1 {
			t.Errorf("after a double release %d buffers are out, %d counted; want 1 and 1", s.Buffers, s.DoubleReleases)
		}
	}()
	b.Release()
}

func TestCloseRefusesLeaks(t *testing.T) {
	a, err := New(Options{SizeBytes: sys.HugePageSize})
	if err != nil {
		t.Fatal(err)
	}
	b := mustAlloc(t, a, 3*Granule)
	err = a.Close()
	if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "1 buffers of 12288 bytes") {
		t.Errorf("Close with a buffer out: %v", err)
	}
	if invariants.Enabled && !strings.Contains(err.Error(), "arena_test.go") {
		t.Errorf("the report does not name who took it: %v", err)
	}
	b.Bytes()[0] = 1 // still mapped
	b.Release()
	for range 2 {
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := a.Alloc(t.Context(), 1); !errors.Is(err, ErrClosed) {
		t.Errorf("Alloc after Close: %v", err)
	}
	if _, err := a.TryAlloc(1); !errors.Is(err, ErrClosed) {
		t.Errorf("TryAlloc after Close: %v", err)
	}
}

func TestShared(t *testing.T) {
	a := newArena(t, Options{SizeBytes: 2 * sys.HugePageSize, Shared: true})
	b := mustAlloc(t, a, Granule)
	defer b.Release()
	v, err := Map(a.FD())
	if err != nil {
		t.Fatal(err)
	}
	copy(b.Bytes(), "from the owner")
	if got := v.Bytes()[b.Offset():][:14]; string(got) != "from the owner" {
		t.Errorf("the other mapping reads %q", got)
	}
	if len(v.Bytes()) != len(a.Bytes()) {
		t.Errorf("the other mapping has %d bytes of %d", len(v.Bytes()), len(a.Bytes()))
	}
	for range 2 {
		if err := v.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if private := newArena(t, Options{SizeBytes: 1}); private.FD() != -1 {
		t.Errorf("a private arena has descriptor %d", private.FD())
	}
}

// TestHugeTLBFallsBack requests more reserved pages than exist.
func TestHugeTLBFallsBack(t *testing.T) {
	pool, err := sys.ReadHugePages()
	if err != nil {
		t.Fatal(err)
	}
	for _, shared := range []bool{false, true} {
		few := newArena(t, Options{SizeBytes: (pool.Free + 1) * sys.HugePageSize, HugeTLB: true, Shared: shared})
		if few.Kind() == HugeTLB {
			t.Errorf("shared %t: %d bytes of reserved pages from a pool of %d pages", shared, few.Stats().SizeBytes, pool.Free)
		}
		if pool.Free == 0 {
			continue
		}
		one := newArena(t, Options{SizeBytes: sys.HugePageSize, HugeTLB: true, Shared: shared})
		if one.Kind() != HugeTLB {
			t.Errorf("shared %t: got %s with %d reserved pages free", shared, one.Kind(), pool.Free)
		}
	}
}

// TestConcurrent: goroutines of three principals, some in the share, write a pattern of their own into
// their buffers and find it unchanged. No byte is lent twice. Requests that are given up or refused, also at the moment at
// which they are served, leave nothing behind.
func TestConcurrent(t *testing.T) {
	a := newArena(t, Options{SizeBytes: 4 * sys.HugePageSize, QueueMax: 8})
	a.SetShare(2*sys.HugePageSize, 8)
	var wg sync.WaitGroup
	for g := range 16 {
		by := fair.Caller{Share: fair.Share{Principal: strconv.Itoa(g % 3)}}
		alloc := a.AllocFor
		if g%4 == 0 {
			alloc = a.AllocShare
		}
		wg.Go(func() {
			for i := range 200 {
				size := (1 + (i*7+g*13)%200) * Granule
				ctx, stop := context.WithCancel(t.Context())
				if i%4 == 0 {
					go stop() // races with being served: either outcome must be clean
				}
				b, err := alloc(ctx, by, size)
				stop()
				if err != nil {
					if !errors.Is(err, context.Canceled) && !errors.Is(err, ErrBusy) {
						t.Error(err)
					}
					continue
				}
				mem := b.Bytes()
				for p := 0; p < len(mem); p += Granule {
					mem[p], mem[p+Granule-1] = byte(g), byte(i)
				}
				for p := 0; p < len(mem); p += Granule {
					if mem[p] != byte(g) || mem[p+Granule-1] != byte(i) {
						t.Errorf("page %d of %v changed", p/Granule, b)
						break
					}
				}
				b.Release()
			}
		})
	}
	wg.Wait()
	for g := range 3 {
		if bytes, shareBytes := a.Held(strconv.Itoa(g)); bytes != 0 || shareBytes != 0 {
			t.Errorf("after all was released, principal %d has %d and %d bytes", g, bytes, shareBytes)
		}
	}
	if err := a.check(); err != nil {
		t.Error(err)
	}
	if s := a.Stats(); s.UsedBytes != 0 || s.Waiting != 0 || s.LongestFreeBytes != s.SizeBytes {
		t.Errorf("after all was released: %+v", s)
	}
}

// TestGivenUpWhenServed: requests whose contexts end at the moment at which they are served, or are refused
// for a request of another principal, leave nothing behind.
func TestGivenUpWhenServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t, Options{SizeBytes: sys.HugePageSize, QueueMax: 2})
		by := func(name string) fair.Caller { return fair.Caller{Share: fair.Share{Principal: name}} }
		var served, cancelled, refused int
		var mu sync.Mutex
		call := func(ctx context.Context, name string) {
			b, err := a.AllocFor(ctx, by(name), Granule)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				served++
				b.Release()
			case errors.Is(err, ErrBusy):
				refused++
			case errors.Is(err, context.Canceled):
				cancelled++
			default:
				t.Error(err)
			}
		}
		for i := range 1000 {
			all := mustAlloc(t, a, sys.HugePageSize)
			ctx, stop := context.WithCancel(t.Context())
			go call(ctx, "x")
			go call(ctx, "x")
			synctest.Wait()
			switch i % 4 {
			case 0: // served
				all.Release()
			case 1: // refused: the queue is full
				go call(t.Context(), "y")
				synctest.Wait()
				all.Release()
			case 2: // served while they are given up
				go stop()
				all.Release()
			case 3: // refused while they are given up
				go call(t.Context(), "y")
				stop()
				synctest.Wait()
				all.Release()
			}
			synctest.Wait()
			stop()
			if s := a.Stats(); s.UsedBytes != 0 || s.Waiting != 0 {
				t.Fatalf("round %d: %d bytes are lent, %d requests wait", i, s.UsedBytes, s.Waiting)
			}
		}
		if served < 500 || refused < 250 {
			t.Errorf("%d served, %d cancelled, %d refused", served, cancelled, refused)
		}
	})
}

// FuzzAgainstBitmap compares the arena with a model: a bitmap scanned for the first run that is
// long enough.
func FuzzAgainstBitmap(f *testing.F) {
	f.Add([]byte{3, 5, 200, 0, 7, 129, 255, 130, 1})
	f.Add(bytes.Repeat([]byte{1, 128}, 40))
	f.Fuzz(func(t *testing.T, steps []byte) {
		const pages = 512
		a, err := New(Options{SizeBytes: pages * Granule})
		if err != nil {
			t.Fatal(err)
		}
		a.SetShare(pages/4*Granule, 8)
		var used [pages]bool
		var out []Buffer
		for i, s := range steps {
			if s < 128 || len(out) == 0 {
				n := int(s)%128 + 1
				want, fits := naiveFirstFit(used[:], n)
				b, err := a.TryAlloc(n * Granule)
				if fits != (err == nil) || fits && int(b.page) != want {
					t.Fatalf("step %d: %d pages at %v (%v); the bitmap has %d, %t", i, n, b, err, want, fits)
				}
				if fits {
					fill(used[want:want+n], true)
					out = append(out, b)
				}
			} else {
				k := int(s) % len(out)
				fill(used[out[k].page:out[k].page+out[k].pages], false)
				out[k].Release()
				out = slices.Delete(out, k, k+1)
			}
			if err := a.check(); err != nil {
				t.Fatalf("step %d: %v", i, err)
			}
		}
		for _, b := range out {
			b.Release()
		}
		if s := a.Stats(); s.LongestFreeBytes != pages*Granule || s.UsedBytes != 0 {
			t.Fatalf("all released, but %+v", s)
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

func fill(b []bool, v bool) {
	for i := range b {
		b[i] = v
	}
}

// naiveFirstFit scans for the first n free pages.
func naiveFirstFit(used []bool, n int) (page int, ok bool) {
	run := 0
	for i, u := range used {
		if run++; u {
			run = 0
		}
		if run == n {
			return i + 1 - n, true
		}
	}
	return 0, false
}

// check compares the free pages, also those of the share, with the recorded loans.
func (a *Arena) check() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if free := int64(a.free.Size()); free*Granule+a.stats.UsedBytes != a.stats.SizeBytes {
		return fmt.Errorf("%d pages free and %d bytes used of %d", free, a.stats.UsedBytes, a.stats.SizeBytes)
	}
	free := uint32(0)
	for page := a.share; page < a.pages; page++ {
		if a.free.Has(page) {
			free++
		}
	}
	if held := a.waiting.Held() + a.sharing.Held(); free != a.shareFree || held*Granule != a.stats.UsedBytes {
		return fmt.Errorf("%d pages of the share are free, %d counted; principals have %d pages of %d bytes", free, a.shareFree, held, a.stats.UsedBytes)
	}
	return nil
}

// TestAllocAllocatesNothing: Alloc makes no garbage, because a Buffer is a value and the free pages
// are arrays.
func TestAllocAllocatesNothing(t *testing.T) {
	if invariants.Enabled {
		t.Skip("the takers of buffers are recorded in builds with the tag invariants")
	}
	a := newArena(t, Options{SizeBytes: 4 * sys.HugePageSize})
	ctx := t.Context()
	if n := testing.AllocsPerRun(1000, func() {
		b, err := a.Alloc(ctx, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		b.Release()
	}); n != 0 {
		t.Errorf("%v allocations per Alloc and Release; want 0", n)
	}
}

// BenchmarkAllocRelease measures one Alloc and Release in an arena of 64 MiB whose free space lies
// in about a thousand runs.
func BenchmarkAllocRelease(b *testing.B) {
	a := newArena(b, Options{SizeBytes: 64 << 20})
	var held, freed []Buffer
	for i := range (64 << 20) / (8 * Granule) {
		buf := mustAlloc(b, a, (1+i%8)*Granule)
		if i%2 == 0 {
			held = append(held, buf)
		} else {
			freed = append(freed, buf)
		}
	}
	for _, buf := range freed {
		buf.Release()
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		buf, err := a.Alloc(b.Context(), (1+i%4)*Granule)
		if err != nil {
			b.Fatal(err)
		}
		buf.Release()
	}
	for _, buf := range held {
		buf.Release()
	}
}
