package copier

import (
	"bytes"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/shm"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const testToken = "0123456789abcdef"

// engines returns two engines on one NIC, here loopback.
func engines(t testing.TB, o tcp.Options) (near, far rdma.Engine) {
	t.Helper()
	open := func(listen string) rdma.Engine {
		o := o
		o.Listen, o.Token = listen, rdma.Token(testToken)
		e, err := tcp.New(context.Background(), o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		})
		return e
	}
	return open(""), open("127.0.0.1:0")
}

func newNIC(t testing.TB, o tcp.Options) Copier {
	t.Helper()
	near, far := engines(t, o)
	return openNIC(t, near, far)
}

// newSHM copies over a provider whose "NIC" is a goroutine of the far engine.
func newSHM(t testing.TB) Copier {
	t.Helper()
	open := func(at string) rdma.Engine {
		e, err := shm.New(t.Context(), shm.Options{Listen: at, Group: group.Options{Token: rdma.Token(testToken)}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		})
		return e
	}
	return openNIC(t, open(""), open(filepath.Join(t.TempDir(), "far")))
}

func openNIC(t testing.TB, near, far rdma.Engine) Copier {
	t.Helper()
	n, err := NewNIC(t.Context(), NICOptions{Near: near, Far: far, Token: rdma.Token(testToken)})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, n)
	return n
}

func newPlain(t testing.TB, o PlainOptions) Copier {
	t.Helper()
	p, err := NewPlain(o)
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, p)
	return p
}

func closeAtEnd(t testing.TB, c Copier) {
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
}

// implementation is an implementation on which the suite runs.
type implementation struct {
	name string
	open func(testing.TB) Copier
}

func implementations() []implementation {
	return []implementation{
		{"nic", func(t testing.TB) Copier { return newNIC(t, tcp.Options{}) }},
		{"shm", newSHM},
		{"plain", func(t testing.TB) Copier { return newPlain(t, PlainOptions{}) }},
		{"plain4", func(t testing.TB) Copier { return newPlain(t, PlainOptions{Workers: 4, Queue: 2}) }},
	}
}

func TestCopiers(t *testing.T) {
	for _, i := range implementations() {
		t.Run(i.name, func(t *testing.T) { suite(t, i.open) })
	}
}

// suite checks each promise of doc.go for an implementation.
func suite(t *testing.T, open func(testing.TB) Copier) {
	for name, f := range map[string]func(*testing.T, Copier){
		"bytes": testBytes, "refusals": testRefusals, "close memory": testCloseMemory,
		"close": testClose, "many at once": testManyAtOnce, "empty": testEmpty, "resubmit in done": testResubmit,
		"copy": testCopy, "copy and close": testCopyAndClose,
	} {
		t.Run(name, func(t *testing.T) { f(t, open(t)) })
	}
}

func register(t testing.TB, c Copier, mem []byte) Memory {
	t.Helper()
	m, err := c.Register(mem, rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func closeMemory(t testing.TB, m Memory) {
	t.Helper()
	if err := m.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// do copies and waits.
func do(t testing.TB, c Copier, b Batch) error {
	t.Helper()
	f := rdma.NewFlag()
	b.Done = f.Set
	if err := c.Submit(t.Context(), b); err != nil {
		return err
	}
	return f.Wait(t.Context())
}

// deal cuts n bytes into spans whose destinations don't overlap, with equal or different
// lengths.
func deal(r *rand.Rand, n int) []Span {
	sizes := []uint64{uint64(1 + r.IntN(300)), uint64(1 + r.IntN(40))}[:1+r.IntN(2)]
	var spans []Span
	for at := uint64(0); ; {
		s := Span{Dst: at, Len: sizes[r.IntN(len(sizes))]}
		if r.IntN(20) == 0 {
			s.Len = 0
		}
		if at+s.Len > uint64(n) {
			return spans
		}
		s.Src = uint64(r.IntN(n - int(s.Len) + 1))
		at += s.Len + uint64(r.IntN(3))
		spans = append(spans, s)
	}
}

// Every byte of every span arrives, and no other changes.
func testBytes(t *testing.T, c Copier) {
	const n = 1 << 14
	r := rand.New(rand.NewPCG(1, 2))
	src, dst := make([]byte, n), make([]byte, n)
	from, to := register(t, c, src), register(t, c, dst)
	defer closeMemory(t, from)
	defer closeMemory(t, to)
	for round := range 50 {
		for i := range src {
			src[i] = byte(r.Uint32())
		}
		spans := deal(r, n)
		want := bytes.Clone(dst)
		for _, s := range spans {
			copy(want[s.Dst:s.Dst+s.Len], src[s.Src:])
		}
		r.Shuffle(len(spans), func(i, j int) { spans[i], spans[j] = spans[j], spans[i] })
		kept := append([]Span(nil), spans...)
		if err := do(t, c, Batch{Src: from, Dst: to, Spans: spans}); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(dst, want) {
			t.Fatalf("round %d: %d spans: wrong bytes", round, len(spans))
		}
		for i := range kept {
			if spans[i] != kept[i] {
				t.Fatal("the caller's spans were changed")
			}
		}
	}
}

// Copy returns with every byte in place and no other byte changed, also if its context has
// ended after it started. It refuses copies that it cannot perform.
func testCopy(t *testing.T, c Copier) {
	const n = 1 << 14
	r := rand.New(rand.NewPCG(3, 4))
	src, dst := make([]byte, n), make([]byte, n)
	from, to := register(t, c, src), register(t, c, dst)
	for i := range src {
		src[i] = byte(r.Uint32())
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	unused := func(error) { t.Error("Done of a batch of Copy") }
	for round := range 20 {
		spans := deal(r, n)
		want, before := bytes.Clone(dst), bytes.Clone(dst)
		for _, s := range spans {
			copy(want[s.Dst:s.Dst+s.Len], src[s.Src:])
		}
		ctx := t.Context()
		if round%2 == 1 {
			ctx = ended
		}
		err := Copy(ctx, c, Batch{Src: from, Dst: to, Spans: spans, Done: unused})
		if errors.Is(err, context.Canceled) && round%2 == 1 {
			// It was refused, or ended between two writes of the batch. No copy is in progress, so
			// each byte has its final value.
			for i := range dst {
				if dst[i] != want[i] && dst[i] != before[i] {
					t.Fatalf("round %d: byte %d has no writer", round, i)
				}
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(dst, want) {
			t.Fatalf("round %d: %d spans: wrong bytes", round, len(spans))
		}
	}
	if err := Copy(t.Context(), c, Batch{Src: from, Dst: to, Spans: []Span{{Src: 1, Len: n}}}); !errors.Is(err, rdma.ErrRange) {
		t.Errorf("%v, want %v", err, rdma.ErrRange)
	}
	if err := Copy(t.Context(), c, Batch{Src: from}); !errors.Is(err, rdma.ErrForeign) {
		t.Errorf("%v, want %v", err, rdma.ErrForeign)
	}
	closeMemory(t, from)
	if err := Copy(t.Context(), c, Batch{Src: from, Dst: to, Spans: []Span{{Len: 1}}}); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("a closed memory: %v, want %v", err, rdma.ErrClosed)
	}
	closeMemory(t, to)
}

// slow accepts every batch, whatever its context, and ends it later.
type slow struct{ Copier }

func (slow) Submit(_ context.Context, b Batch) error {
	go b.Done(nil)
	return nil
}

// Copy waits for an accepted batch even if its context has ended, because the batch uses the
// memory.
func TestCopyOutlivesContext(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 {
		if err := Copy(ended, slow{}, Batch{}); err != nil {
			t.Fatal(err)
		}
	}
}

// Close waits for the copies of Copy: the memory belongs to the caller after it.
func testCopyAndClose(t *testing.T, c Copier) {
	const part, parts = 64 << 10, 4
	src, dst := make([]byte, part*parts), make([]byte, part*parts)
	from, to := register(t, c, src), register(t, c, dst)
	copied := make(chan struct{}, parts)
	var wg sync.WaitGroup
	for p := range uint64(parts) {
		wg.Go(func() {
			for first := true; ; first = false {
				err := Copy(t.Context(), c, Batch{Src: from, Dst: to, Spans: []Span{{p * part, p * part, part}}})
				if err != nil {
					if !errors.Is(err, rdma.ErrClosed) {
						t.Error(err)
					}
					return
				}
				if first {
					copied <- struct{}{}
				}
			}
		})
	}
	for range parts {
		<-copied
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	for i := range dst {
		dst[i] = 1 // the race detector reports other writes
	}
	wg.Wait()
	closeMemory(t, from)
	closeMemory(t, to)
}

// A copy that is not possible is refused immediately, and Done is not called.
func testRefusals(t *testing.T, c Copier) {
	mem := register(t, c, make([]byte, 1000))
	defer closeMemory(t, mem)
	other := newPlain(t, PlainOptions{})
	alien := register(t, other, make([]byte, 1000))
	for _, x := range []struct {
		b    Batch
		want error
	}{
		{Batch{Src: mem, Dst: mem, Spans: []Span{{Src: 1, Dst: 990, Len: 11}}}, rdma.ErrRange},
		{Batch{Src: mem, Dst: mem, Spans: []Span{{Src: 1001, Dst: 0, Len: 0}}}, rdma.ErrRange},
		{Batch{Src: mem, Dst: mem, Spans: []Span{{Src: math.MaxUint64, Dst: 0, Len: 2}}}, rdma.ErrRange},
		{Batch{Src: mem, Dst: mem, Spans: []Span{{Src: 0, Dst: 10, Len: math.MaxUint64}}}, rdma.ErrRange},
		{Batch{Src: mem, Dst: mem, Spans: make([]Span, MaxSpans+1)}, rdma.ErrRange},
		{Batch{Src: alien, Dst: mem}, rdma.ErrForeign},
		{Batch{Src: mem, Dst: alien}, rdma.ErrForeign},
		{Batch{Src: nil, Dst: mem}, rdma.ErrForeign},
	} {
		x.b.Done = func(error) { t.Error("Done of a batch that was refused") }
		if err := c.Submit(t.Context(), x.b); !errors.Is(err, x.want) {
			t.Errorf("%v, want %v", err, x.want)
		}
	}
	if _, err := c.Register(nil, rdma.RegisterOptions{}); err == nil {
		t.Error("no memory can be registered")
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if _, err := c.Register(nil, rdma.RegisterOptions{Device: "cuda:0", DMABuf: &rdma.DMABuf{FD: int(null.Fd()), Len: 10}}); !errors.Is(err, rdma.ErrUnsupported) {
		t.Errorf("device memory: %v, want %v", err, rdma.ErrUnsupported)
	}
}

// Close of a memory waits for the batches that use it, and later batches fail.
func testCloseMemory(t *testing.T, c Copier) {
	src, dst := make([]byte, 1<<20), make([]byte, 1<<20)
	from, to := register(t, c, src), register(t, c, dst)
	ended := make(chan struct{})
	release := make(chan struct{})
	err := c.Submit(t.Context(), Batch{Src: from, Dst: to, Spans: []Span{{Len: 1 << 20}}, Done: func(error) {
		close(ended)
		<-release
	}})
	if err != nil {
		t.Fatal(err)
	}
	<-ended
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := from.Close(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("close while Done runs: %v", err)
	}
	if err := c.Submit(t.Context(), Batch{Src: from, Dst: to}); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("a batch after Close: %v", err)
	}
	if err := c.Submit(t.Context(), Batch{Src: to, Dst: from}); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("a batch after Close: %v", err)
	}
	close(release)
	closeMemory(t, from)
	closeMemory(t, from)
	closeMemory(t, to)
}

// Close ends every batch once and refuses later batches. It may be called twice.
func testClose(t *testing.T, c Copier) {
	mem := register(t, c, make([]byte, 1<<16))
	var mu sync.Mutex
	submitted, done := 0, 0
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 200 {
				off := uint64(g*1000 + i)
				err := c.Submit(t.Context(), Batch{Src: mem, Dst: mem, Spans: []Span{{off, 1<<15 + off, 1}}, Done: func(error) {
					mu.Lock()
					done++
					mu.Unlock()
				}})
				if err != nil {
					if !errors.Is(err, rdma.ErrClosed) {
						t.Error(err)
					}
					return
				}
				mu.Lock()
				submitted++
				mu.Unlock()
				if i == 100 && g == 0 {
					if err := c.Close(); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if submitted != done || submitted < 100 {
		t.Errorf("%d batches submitted, %d ended", submitted, done)
	}
	if err := c.Submit(t.Context(), Batch{Src: mem, Dst: mem}); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("%v, want %v", err, rdma.ErrClosed)
	}
	closeMemory(t, mem)
}

// Many goroutines copy concurrently, each its own part, in both directions.
func testManyAtOnce(t *testing.T, c Copier) {
	const part, parts = 8 << 10, 8
	host, device := make([]byte, part*parts), make([]byte, part*parts)
	for i := range host {
		host[i] = byte(i * 7)
	}
	want := bytes.Clone(host)
	h, d := register(t, c, host), register(t, c, device)
	defer closeMemory(t, h)
	defer closeMemory(t, d)
	var wg sync.WaitGroup
	for p := range parts {
		wg.Go(func() {
			var spans []Span
			for off := uint64(0); off < part; off += 512 {
				spans = append(spans, Span{Src: uint64(p)*part + off, Dst: uint64(p)*part + off, Len: 512})
			}
			for range 20 {
				if err := do(t, c, Batch{Src: h, Dst: d, Spans: spans}); err != nil {
					t.Error(err)
				}
				if err := do(t, c, Batch{Src: d, Dst: h, Spans: spans}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if !bytes.Equal(host, want) || !bytes.Equal(device, want) {
		t.Error("bytes were lost in the round trip")
	}
}

// A batch without bytes succeeds, and Done is not called from inside Submit.
func testEmpty(t *testing.T, c Copier) {
	mem := register(t, c, make([]byte, 10))
	defer closeMemory(t, mem)
	for _, spans := range [][]Span{nil, {{Src: 10, Dst: 10}}} {
		var mu sync.Mutex
		mu.Lock() // Done would deadlock inside Submit
		f := rdma.NewFlag()
		err := c.Submit(t.Context(), Batch{Src: mem, Dst: mem, Spans: spans, Done: func(err error) {
			mu.Lock()
			defer mu.Unlock()
			f.Set(err)
		}})
		mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Wait(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if err := c.Submit(t.Context(), Batch{Src: mem, Dst: mem}); err != nil { // without Done
		t.Error(err)
	}
}

// Done may submit the next batch, because the place of its own batch is free.
func testResubmit(t *testing.T, c Copier) {
	src, dst := make([]byte, 100), make([]byte, 100)
	from, to := register(t, c, src), register(t, c, dst)
	defer closeMemory(t, from)
	defer closeMemory(t, to)
	end := make(chan error, 1)
	left := 100
	var next func(error)
	next = func(err error) {
		left--
		if err != nil || left == 0 {
			end <- err
			return
		}
		if err := c.Submit(t.Context(), Batch{Src: from, Dst: to, Spans: []Span{{Len: 100}}, Done: next, NoWait: true}); err != nil {
			end <- err
		}
	}
	next(nil)
	if err := <-end; err != nil {
		t.Error(err)
	}
}

// TestNoRoom: a full copier returns ErrBusy, or waits until its context ends.
func TestNoRoom(t *testing.T) {
	for _, i := range []implementation{
		{"nic", func(t testing.TB) Copier { return newNIC(t, tcp.Options{InFlightOps: 1}) }},
		{"plain", func(t testing.TB) Copier { return newPlain(t, PlainOptions{Queue: 1}) }},
	} {
		t.Run(i.name, func(t *testing.T) { noRoom(t, i.open(t)) })
	}
}

// noRoom needs a copier with room for one batch. The engine's room is free when Done runs, so
// the test keeps the memory in use.
func noRoom(t *testing.T, c Copier) {
	mem := register(t, c, make([]byte, 64<<20))
	defer closeMemory(t, mem)
	big := Batch{Src: mem, Dst: mem, Spans: []Span{{Src: 0, Dst: 32 << 20, Len: 32 << 20}}}
	busy := 0
	var wg sync.WaitGroup
	for range 200 {
		wg.Add(1)
		b := big
		b.NoWait, b.Done = true, func(err error) {
			if err != nil {
				t.Error(err)
			}
			wg.Done()
		}
		if err := c.Submit(t.Context(), b); err != nil {
			wg.Done()
			if !errors.Is(err, rdma.ErrBusy) {
				t.Fatal(err)
			}
			busy++
			// It waits, but not longer than its context.
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			b := big
			if err := c.Submit(ctx, b); err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			break
		}
	}
	wg.Wait()
	if busy == 0 {
		t.Error("never busy")
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []PlainOptions{{Workers: -1}, {Workers: 5000}, {Queue: -1}, {Queue: 1 << 20}} {
		if _, err := NewPlain(o); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
	near, far := engines(t, tcp.Options{})
	for _, o := range []NICOptions{{}, {Near: near}, {Near: near, Far: near}} {
		if _, err := NewNIC(t.Context(), o); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
	if _, err := NewNIC(t.Context(), NICOptions{Near: near, Far: far, Token: rdma.Token("another token of good length")}); !errors.Is(err, rdma.ErrAuth) {
		t.Errorf("%v, want %v", err, rdma.ErrAuth)
	}
}

// TestNICDies: when the far engine is gone, each batch ends once with an error, and Close still
// returns.
func TestNICDies(t *testing.T) {
	near, far := engines(t, tcp.Options{})
	n, err := NewNIC(t.Context(), NICOptions{Near: near, Far: far, Token: rdma.Token(testToken)})
	if err != nil {
		t.Fatal(err)
	}
	mem := register(t, n, make([]byte, 1<<20))
	far.Disconnect(near.Addr().Engine)
	if err := do(t, n, Batch{Src: mem, Dst: mem, Spans: []Span{{0, 1 << 19, 100}, {200, 1<<19 + 200, 50}}}); err == nil {
		t.Error("a batch over a session that is gone ended well")
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}

// FuzzLayout: the runs contain every span with bytes once, and every offset can be computed
// from its index.
func FuzzLayout(f *testing.F) {
	f.Add([]byte{0, 0, 1, 8, 8, 1, 16, 16, 1}, uint64(4096))
	f.Add([]byte{1, 2, 3, 7, 7, 3, 9, 9, 0}, uint64(1))
	f.Add([]byte{255, 1, 2, 0, 0, 2}, uint64(1<<40+1))
	f.Fuzz(func(t *testing.T, raw []byte, scale uint64) {
		scale %= 1 << 50
		var spans []Span
		want := make(map[Span]int)
		for ; len(raw) >= 3; raw = raw[3:] {
			s := Span{Src: uint64(raw[0]) * scale, Dst: uint64(raw[1])*scale + 3, Len: uint64(raw[2])}
			spans = append(spans, s)
			if s.Len > 0 {
				want[s]++
			}
		}
		for _, r := range layout(spans, nil) {
			if r.to <= r.from || r.len == 0 {
				t.Fatalf("run %+v", r)
			}
			for _, s := range spans[r.from:r.to] {
				want[s]--
				if s.Len != r.len {
					t.Errorf("span %+v in a run of length %d", s, r.len)
				}
				if r.single {
					continue
				}
				if src := r.src.base + uint64(r.src.index(s.Src))*r.src.stride; src != s.Src {
					t.Errorf("source %d is %d on the grid %+v", s.Src, src, r.src)
				}
				if dst := r.dst.base + uint64(r.dst.index(s.Dst))*r.dst.stride; dst != s.Dst {
					t.Errorf("destination %d is %d on the grid %+v", s.Dst, dst, r.dst)
				}
			}
		}
		for s, n := range want {
			if n != 0 {
				t.Errorf("span %+v: %d times too few", s, n)
			}
		}
	})
}

// TestOneWrite: a batch of equal spans is one paged write, with one doorbell.
func TestOneWrite(t *testing.T) {
	near, far := engines(t, tcp.Options{})
	n, err := NewNIC(t.Context(), NICOptions{Near: near, Far: far, Token: rdma.Token(testToken)})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, n)
	mem := register(t, n, make([]byte, 1<<20))
	defer closeMemory(t, mem)
	var spans []Span
	for i := range uint64(256) {
		spans = append(spans, Span{Src: i * 1024, Dst: 1<<19 + (255-i)*2000, Len: 1000})
	}
	if err := do(t, n, Batch{Src: mem, Dst: mem, Spans: spans}); err != nil {
		t.Fatal(err)
	}
	if w := near.Stats().WritesOut; w != 1 {
		t.Errorf("%d writes for a batch of equal spans", w)
	}
	spans[0].Len = 999
	if err := do(t, n, Batch{Src: mem, Dst: mem, Spans: spans}); err != nil {
		t.Fatal(err)
	}
	if w := near.Stats().WritesOut; w != 3 {
		t.Errorf("%d writes after a batch of two lengths, want 3", w)
	}
}

// TestSubmitAllocatesNothing: batches in flight are recycled. Allocations of the engine are not
// counted.
func TestSubmitAllocatesNothing(t *testing.T) {
	c := newPlain(t, PlainOptions{})
	mem := register(t, c, make([]byte, 1<<16))
	defer closeMemory(t, mem)
	spans := []Span{{0, 1 << 15, 100}, {200, 1<<15 + 200, 100}}
	ended := make(chan error, 1)
	b := Batch{Src: mem, Dst: mem, Spans: spans, Done: func(err error) { ended <- err }}
	ctx := t.Context()
	if n := testing.AllocsPerRun(200, func() {
		if err := c.Submit(ctx, b); err != nil {
			t.Fatal(err)
		}
		<-ended
	}); n != 0 {
		t.Errorf("%v allocations for a batch", n)
	}
}
