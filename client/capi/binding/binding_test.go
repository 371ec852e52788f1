package binding

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func openEngine(ctx context.Context, t *tls.Config, log *slog.Logger) (rdma.Engine, error) {
	return tcp.New(ctx, tcp.Options{TLS: t, Logger: log})
}

// rig is a store over a node in this process, with memory outside of Go's heap.
type rig struct {
	t       testing.TB
	library *Library
	handle  Handle
	store   *Store
	mem     []byte
	addr    uint64
}

func newRig(t testing.TB, servers string) *rig {
	t.Helper()
	r := &rig{t: t, library: NewLibrary()}
	var err error
	r.handle, err = r.library.Open(t.Context(), Options{Servers: servers, Engine: openEngine, DialTimeout: time.Minute})
	r.store = valueOf(t, r.library.Store, r.handle, err)
	a, err := arena.New(arena.Options{SizeBytes: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	r.mem, r.addr = a.Bytes(), addressOf(a.Bytes())
	t.Cleanup(func() {
		if err := r.store.Close(); err != nil && !errors.Is(err, ErrHandle) {
			t.Error(err)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// valueOf returns the value of a handle. err is the error of the call that opened it.
func valueOf[T any](t testing.TB, find func(Handle) (T, error), h Handle, err error) (v T) {
	t.Helper()
	if err == nil {
		v, err = find(h)
	}
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func (r *rig) namespace(name string, layers, layerBytes int) *Namespace {
	r.t.Helper()
	h, err := r.store.Ensure(kv.Namespace{Name: name, Index: kv.IndexFlat, Geometry: kv.SingleGroup(layers, 1, layerBytes)}, false)
	return valueOf(r.t, r.library.Namespace, h, err)
}

func (r *rig) register() *Memory {
	r.t.Helper()
	h, err := r.store.Register(r.addr, uint64(len(r.mem)))
	return valueOf(r.t, r.library.Memory, h, err)
}

// batch returns a batch of n keys. The value of key i lies at offset i × size of r.mem.
func (r *rig) batch(prefix string, n, size int) *Batch {
	b := &Batch{KeyOffsets: []uint32{0}, Results: make([]byte, n)}
	for i := range n {
		b.Keys = fmt.Appendf(b.Keys, "%s/%064d", prefix, i)
		b.KeyOffsets = append(b.KeyOffsets, uint32(len(b.Keys)))
		b.Addresses = append(b.Addresses, r.addr+uint64(i*size))
		b.Lengths = append(b.Lengths, uint64(size))
	}
	return b
}

// TestCloseUnderLoad: Close returns while calls and jobs run on many goroutines. Each call
// ends with a result or with Closed or Canceled. After Close the library does not access
// the memory.
func TestCloseUnderLoad(t *testing.T) {
	r := newRig(t, testnode.Start(t, testnode.Options{}).Addr)
	ns := r.namespace("m", 4, 4096)
	r.register()
	var wg sync.WaitGroup
	started := make(chan struct{}, 8)
	for g := range 8 {
		wg.Go(func() {
			// Several jobs may put the same batch at the same time, so they must not
			// write to the same results.
			put, get := r.batch(fmt.Sprint(g), 4, 16<<10), r.batch(fmt.Sprint(g), 4, 16<<10)
			put.Results = nil
			for i := range put.Addresses {
				put.Addresses[i] += uint64(2 * g * 64 << 10)
				get.Addresses[i] += uint64((2*g + 1) * 64 << 10)
			}
			for turn := 0; ; turn++ {
				_, err := ns.Submit(OpPut, put)
				if err == nil || errors.Is(err, ErrBusy) {
					err = ns.Do(OpGet, get).Err
				}
				if turn == 3 {
					started <- struct{}{}
				}
				switch CodeOf(err) {
				case OK, Busy:
				case Closed, Canceled:
					return
				default:
					t.Errorf("%v", err)
					return
				}
			}
		})
	}
	for range 8 {
		<-started
	}
	if err := r.store.Close(); err != nil {
		t.Error(err)
	}
	copy(r.mem, bytes.Repeat([]byte{1}, len(r.mem))) // the race detector reports any other access
	wg.Wait()
	if _, err := r.library.Store(r.handle); !errors.Is(err, ErrHandle) {
		t.Errorf("handle after Close: %v; want ErrHandle", err)
	}
	if err := r.store.Close(); !errors.Is(err, ErrHandle) {
		t.Errorf("second Close: %v; want ErrHandle", err)
	}
}

// TestGetBesideDownNode: a get loads the keys of a node that answers, also if it learns
// first that the other node is down.
func TestGetBesideDownNode(t *testing.T) {
	// Nothing listens on port 1.
	r := newRig(t, testnode.Start(t, testnode.Options{}).Addr+",127.0.0.1:1")
	ns := r.namespace("m", 4, 1024)
	r.register()
	b := r.batch("k", 64, 4096)
	put := ns.Do(OpPut, b)
	if put.Err != nil || put.OK == 0 || put.OK == 64 {
		t.Fatalf("put: %+v", put)
	}
	for range 200 {
		got := ns.Do(OpGet, b)
		down := bytes.Count(b.Results, []byte{KeyDown})
		if got.Err != nil || got.OK != put.OK || down != 64-put.OK {
			t.Fatalf("of %d stored keys %d were loaded, and %d of 64 are of a node that is down: %+v", put.OK, got.OK, down, got)
		}
	}
}

// TestUnregister: memory in use stays registered. A new registration has a new handle.
func TestUnregister(t *testing.T) {
	r := newRig(t, testnode.Start(t, testnode.Options{}).Addr)
	m := r.register()
	in := r.store.use(r.addr+8, 16)
	if in != m {
		t.Fatalf("memory of address %#x: %v; want %v", r.addr+8, in, m)
	}
	if err := m.Unregister(); !errors.Is(err, ErrBusy) {
		t.Errorf("unregister of memory in use: %v; want ErrBusy", err)
	}
	r.store.unuse([]*Memory{in})
	if err := m.Unregister(); err != nil {
		t.Error(err)
	}
	if _, err := r.library.Memory(m.handle); !errors.Is(err, ErrHandle) {
		t.Errorf("handle after Unregister: %v; want ErrHandle", err)
	}
	if again := r.register(); again.handle == m.handle {
		t.Errorf("handle %d was used twice", m.handle)
	}
	for _, at := range []struct{ addr, n uint64 }{
		{r.addr - 1, 2}, {r.addr + uint64(len(r.mem)) - 1, 2}, {r.addr, uint64(len(r.mem)) + 1}, {r.addr, 1 << 63}, {0, 1}, {^uint64(0), 1},
	} {
		if m := r.store.use(at.addr, at.n); m != nil {
			t.Errorf("use of %d bytes at %#x returned [%#x,%#x); want nil", at.n, at.addr, m.addr, m.end)
		}
	}
}

// takeTurns takes all turns of the store, so that its jobs wait until release is called.
func (r *rig) takeTurns() (release func()) {
	var taken []turn
	for range r.store.opts.JobsParallel {
		taken = append(taken, r.store.turns.join())
	}
	return func() {
		for _, t := range taken {
			r.store.turns.leave(t)
		}
	}
}

// TestTurns: jobs start in the order in which they were submitted. A job that ends while it
// waits leaves its place to the next one.
func TestTurns(t *testing.T) {
	q := turns{free: 2}
	open := func(t turn) bool {
		select {
		case <-t:
			return true
		default:
			return false
		}
	}
	var got []turn
	for range 6 {
		got = append(got, q.join())
	}
	want := func(when string, running ...int) {
		t.Helper()
		for i, g := range got {
			if open(g) != slices.Contains(running, i) {
				t.Errorf("%s: turn %d has come: %v", when, i, open(g))
			}
		}
	}
	want("at first", 0, 1)
	q.leave(got[1])
	want("after one job", 0, 1, 2)
	q.leave(got[3])
	q.leave(got[0])
	want("after a job that waited, and another one", 0, 1, 2, 4)
	q.leave(got[2])
	q.leave(got[4])
	q.leave(got[5])
	want("at the end", 0, 1, 2, 4, 5)
	if q.free != 2 || len(q.waiting) != 0 {
		t.Errorf("%d places are free, and %d jobs wait; want 2 and 0", q.free, len(q.waiting))
	}
}

// TestTimeLimit: a job that waits for other jobs ends with Timeout after its time limit,
// and with Canceled when it is cancelled. Its memory can be unregistered afterwards.
func TestTimeLimit(t *testing.T) {
	r := newRig(t, testnode.Start(t, testnode.Options{}).Addr)
	ns, m := r.namespace("m", 1, 4096), r.register()
	r.takeTurns()
	late := r.batch("late", 1, 4096)
	late.Timeout = time.Nanosecond
	h, err := ns.Submit(OpGet, late)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := r.store.Wait(h, time.Minute); err != nil || CodeOf(got.Err) != Timeout || got.Job != h {
		t.Errorf("late: %+v, %v", got, err)
	}
	if h, err = ns.Submit(OpGet, r.batch("never", 1, 4096)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.store.Wait(h, time.Nanosecond); CodeOf(err) != Timeout {
		t.Errorf("wait of 1 ns: %v; want Timeout", err)
	}
	if err := r.store.Cancel(h); err != nil {
		t.Error(err)
	}
	if got, err := r.store.Wait(h, time.Minute); err != nil || CodeOf(got.Err) != Canceled {
		t.Errorf("cancelled: %+v, %v", got, err)
	}
	if err := m.Unregister(); err != nil {
		t.Errorf("unregister after both jobs: %v", err)
	}
}

// TestSubmitWait: a completion is returned once, either by SubmitWait, or after its time
// limit by Drain or Wait.
func TestSubmitWait(t *testing.T) {
	r := newRig(t, testnode.Start(t, testnode.Options{}).Addr)
	ns, m := r.namespace("m", 1, 4096), r.register()
	drained := func(want ...Handle) {
		t.Helper()
		var room [4]Result
		n, err := r.store.Drain(room[:])
		var got []Handle
		for _, d := range room[:n] {
			got = append(got, d.Job)
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("Drain returned jobs %v, %v; want %v", got, err, want)
		}
	}
	var h Handle
	got, err := ns.SubmitWait(OpPut, r.batch("b", 2, 4096), time.Minute, &h)
	if err != nil || got.Err != nil || got.OK != 2 || got.Job != h || h == 0 {
		t.Fatalf("put: %+v, %v; job %d", got, err, h)
	}
	drained()
	if _, err := r.store.Wait(h, time.Nanosecond); !errors.Is(err, ErrNoJob) {
		t.Errorf("Wait for a job that SubmitWait returned: %v; want ErrNoJob", err)
	}

	var held []Handle // jobs that wait for their turn
	release := r.takeTurns()
	for range 2 {
		if _, err := ns.SubmitWait(OpGet, r.batch("b", 2, 4096), time.Nanosecond, &h); CodeOf(err) != Timeout || h == 0 {
			t.Fatalf("job %d: %v; want Timeout", h, err)
		}
		held = append(held, h)
	}
	release()
	if got, err := r.store.Wait(held[0], time.Minute); err != nil || got.OK != 2 {
		t.Errorf("after the time limit: %+v, %v", got, err)
	}
	r.store.mu.Lock()
	last := r.store.jobs[held[1]]
	r.store.mu.Unlock()
	<-last.ended
	drained(held[1])

	if _, err := ns.SubmitWait(Op(77), r.batch("b", 2, 4096), time.Minute, &h); CodeOf(err) != Invalid || h != 0 {
		t.Errorf("job %d of an unknown operation: %v; want Invalid and no job", h, err)
	}
	if err := m.Unregister(); err != nil {
		t.Errorf("unregister after all jobs: %v", err)
	}
}

// TestSubmitWaitWithoutLimit: the caller's goroutine performs the batch. Cancel and Close end
// it all the same.
func TestSubmitWaitWithoutLimit(t *testing.T) {
	r := newRig(t, testnode.Start(t, testnode.Options{}).Addr)
	ns := r.namespace("m", 1, 4096)
	r.register()
	var h Handle
	got, err := ns.SubmitWait(OpPut, r.batch("b", 2, 4096), NoLimit, &h)
	if err != nil || got.Err != nil || got.OK != 2 || got.Job != h || h == 0 {
		t.Fatalf("put: %+v, %v; job %d", got, err, h)
	}
	var room [1]Result
	if n, err := r.store.Drain(room[:]); n != 0 || err != nil {
		t.Errorf("Drain returned %d completions, %v", n, err)
	}
	r.takeTurns()
	if err := r.ended(ns, r.store.Cancel); CodeOf(err) != Canceled {
		t.Errorf("cancel: %v; want Canceled", err)
	}
	if err := r.ended(ns, func(Handle) error { return r.store.Close() }); err == nil {
		t.Error("a call returned without an error after Close")
	}
}

// ended makes a call without a limit that waits for its turn, calls end with its job, and returns
// the error of the call or of its job.
func (r *rig) ended(ns *Namespace, end func(Handle) error) error {
	r.t.Helper()
	failed := make(chan error, 1)
	go func() {
		var h Handle
		got, err := ns.SubmitWait(OpGet, r.batch("b", 2, 4096), NoLimit, &h)
		if err == nil {
			err = got.Err
		}
		failed <- err
	}()
	for {
		r.store.mu.Lock()
		for h, j := range r.store.jobs {
			if j.cancel != nil {
				r.store.mu.Unlock()
				if err := end(h); err != nil {
					r.t.Error(err)
				}
				return <-failed
			}
		}
		r.store.mu.Unlock()
		runtime.Gosched()
	}
}

// TestSubmitWaitRaces: with time limits near the duration of the job, each completion is
// returned once, by SubmitWait or by Drain.
func TestSubmitWaitRaces(t *testing.T) {
	r := newRig(t, testnode.Start(t, testnode.Options{}).Addr)
	ns := r.namespace("m", 1, 4096)
	r.register()
	begin := time.Now()
	var h Handle
	if got, err := ns.SubmitWait(OpPut, r.batch("b", 2, 4096), time.Minute, &h); err != nil || got.OK != 2 {
		t.Fatalf("%+v, %v", got, err)
	}
	took := time.Since(begin)
	var mu sync.Mutex
	seen := map[Handle]int{}
	saw := func(h Handle) {
		mu.Lock()
		defer mu.Unlock()
		seen[h]++
	}
	var wg sync.WaitGroup
	const callers, calls = 4, 100
	for range callers {
		b := r.batch("b", 2, 4096)
		b.Results = nil
		wg.Go(func() {
			var h Handle
			for i := range calls {
				switch got, err := ns.SubmitWait(OpExists, b, took*time.Duration(i)/calls, &h); {
				case err == nil:
					saw(got.Job)
				case CodeOf(err) != Timeout:
					t.Error(err)
				}
			}
		})
	}
	all := make(chan struct{})
	go func() {
		wg.Wait()
		close(all)
	}()
	for over := false; ; {
		select {
		case <-all:
			over = true
		default:
		}
		var room [8]Result
		n, err := r.store.Drain(room[:])
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range room[:n] {
			saw(d.Job)
		}
		r.store.mu.Lock()
		left := len(r.store.jobs)
		r.store.mu.Unlock()
		if over && left == 0 {
			break
		}
		runtime.Gosched()
	}
	if len(seen) != callers*calls {
		t.Errorf("completions of %d jobs; want %d", len(seen), callers*calls)
	}
	for h, n := range seen {
		if n != 1 {
			t.Errorf("job %d completed %d times", h, n)
		}
	}
}

// TestWaitDuringClose: if the store is closed during a Wait, Wait returns Closed or the
// completion of the cancelled job.
func TestWaitDuringClose(t *testing.T) {
	r := newRig(t, testnode.Start(t, testnode.Options{}).Addr)
	ns := r.namespace("m", 1, 4096)
	r.register()
	r.takeTurns()
	var jobs [64]Handle
	for i := range jobs {
		b := r.batch("never", 1, 4096)
		b.Results = nil
		var err error
		if jobs[i], err = ns.Submit(OpGet, b); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for _, h := range jobs {
		wg.Go(func() {
			got, err := r.store.Wait(h, time.Minute)
			if CodeOf(err) != Closed && (err != nil || CodeOf(got.Err) != Canceled) {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
	for range 10_000 { // so that most waits begin before Close; the others return Closed
		runtime.Gosched()
	}
	if err := r.store.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
}

// TestCodes: each error of package client has its code.
func TestCodes(t *testing.T) {
	for err, want := range map[error]Code{
		nil: OK, client.ErrAuth: Auth, client.ErrProvider: Provider, client.ErrNotFound: NotFound, client.ErrRequest: Invalid,
		client.ErrMismatch: Mismatch, client.ErrUnavailable: Unavailable, client.ErrVersion: Version, client.ErrClosed: Closed,
		context.Canceled: Canceled, context.DeadlineExceeded: Timeout, errors.New("else"): Internal,
	} {
		if got := CodeOf(err); got != want {
			t.Errorf("%v: code %d; want %d", err, got, want)
		}
	}
}

// TestLogQueue: log calls do not wait for a callback that hangs. Dropped lines are counted.
func TestLogQueue(t *testing.T) {
	var lines []string
	entered, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	q := newLogQueue(func(_ slog.Level, line string) {
		once.Do(func() { close(entered) })
		<-release
		lines = append(lines, line)
	}, slog.LevelInfo)
	log := q.logger().With("by", "a test")
	log.Info("first")
	<-entered
	log.Debug("below the level")
	for range logLines + 10 {
		log.Warn("more", "n", 1)
	}
	close(release)
	q.close()
	log.Info("after the end")
	if len(lines) != 1+logLines || q.dropped.Load() != 10 {
		t.Errorf("%d lines, %d dropped", len(lines), q.dropped.Load())
	}
	if want := `msg=first by="a test"`; lines[0] != want {
		t.Errorf("%q; want %q", lines[0], want)
	}
}

// TestOptions: Open returns ErrInvalid for invalid options.
func TestOptions(t *testing.T) {
	for _, o := range []Options{
		{Servers: ""}, {Servers: "a:1,a:1"}, {Servers: "a:1", Credentials: Credentials{Token: "t", TokenFile: "f"}}, {Servers: "a:1", Credentials: Credentials{TokenFile: "/no/such"}},
		{Servers: "a:1", Credentials: Credentials{CertFile: "c"}}, {Servers: "a:1", Credentials: Credentials{CAFile: "/no/such"}},
	} {
		o.Engine = openEngine
		if h, err := NewLibrary().Open(t.Context(), o); !errors.Is(err, ErrInvalid) {
			t.Errorf("%+v: handle %d, %v; want ErrInvalid", o, h, err)
		}
	}
}

// BenchmarkPlan measures plan for a batch of 128 keys, and the ids of the keys alone.
func BenchmarkPlan(b *testing.B) {
	r := newRig(b, testnode.Start(b, testnode.Options{}).Addr)
	ns := r.namespace("m", 1, 4096)
	r.register()
	batch := r.batch("b", 128, 4096)
	b.Run("ids", func(b *testing.B) {
		ids := make([]kv.BlockID, 128)
		for b.Loop() {
			if err := ns.KeyIDs(ids, batch.Keys, batch.KeyOffsets); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("plan", func(b *testing.B) {
		for b.Loop() {
			c, err := ns.plan(OpGet, batch)
			if err != nil {
				b.Fatal(err)
			}
			c.end()
		}
	})
}

// BenchmarkGet compares a batch with a client.Read of the same keys into the same memory.
// The difference is the cost of handles, plan and results, without C.
func BenchmarkGet(b *testing.B) {
	for _, c := range []struct {
		name                     string
		keys, layers, layerBytes int
	}{{"128 keys of 4 KiB", 128, 1, 4096}, {"4 MiB", 1, 16, 256 << 10}} {
		b.Run(c.name, func(b *testing.B) {
			r := newRig(b, testnode.Start(b, testnode.Options{SegmentBytes: 8 << 20}).Addr)
			ns, m := r.namespace("m", c.layers, c.layerBytes), r.register()
			batch := r.batch("b", c.keys, c.layers*c.layerBytes)
			if got := ns.Do(OpPut, batch); got.OK != c.keys {
				b.Fatalf("%+v", got)
			}
			through := func() {
				if got := ns.Do(OpGet, batch); got.OK != c.keys {
					b.Fatalf("%+v", got)
				}
			}
			direct := func() {
				ids := make([]kv.BlockID, c.keys)
				if err := ns.KeyIDs(ids, batch.Keys, batch.KeyOffsets); err != nil {
					b.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
				defer cancel()
				if got, err := r.store.client.Read(ctx, client.ReadRequest{Namespace: ns.Definition(), IDs: ids, Into: m.client}); err != nil || got.Blocks != c.keys {
					b.Fatalf("%+v, %v", got, err)
				}
			}
			calls, took := []func(){through, direct}, [2][]time.Duration{}
			for turn := 0; b.Loop(); turn++ {
				for k := range calls { // the order alternates, because the second call finds warm caches
					which := (turn + k) % 2
					start := time.Now()
					calls[which]()
					took[which] = append(took[which], time.Since(start))
				}
			}
			for i := range took {
				slices.Sort(took[i])
			}
			over, base := took[0][len(took[0])/2], took[1][len(took[1])/2]
			b.ReportMetric(float64((over-base).Nanoseconds())/1e3, "µs-over-go")
			b.ReportMetric(float64(base)/float64(over), "of-go's-rate")
		})
	}
}
