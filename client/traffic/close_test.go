package traffic

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// TestCloseWhileWaiting: Close ends decode jobs that wait for memory. The end of one job gives its memory to
// the next job, which Close ends while it begins.
func TestCloseWhileWaiting(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	pe := newEngine(t, s, geo.LayerCount(), 64, 1<<20)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for range 30 {
		r, err := tcp.New(t.Context(), tcp.Options{})
		must(err)
		layout := layerMajor(geo.LayerCount(), 64, uint64(geo.LayerBytes(0)))
		layout.Region, err = r.Register(make([]byte, 1<<20), rdma.RegisterOptions{Local: true})
		must(err)
		m, err := New(Options{Namespace: kv.Namespace{Name: "m", Geometry: geo}, Storage: newAt(s), Compute: r, BufferBytes: 1, Device: layout})
		must(err)
		var jobs sync.WaitGroup
		blocks := int(m.Stats().BufferBytes/geo.BlockBytes()) * 2 / 3 // two such jobs do not fit
		for i := range 4 {
			jobs.Go(func() {
				d, err := m.Decode(context.Background(), DecodeJob{Request: fmt.Sprint(i), Blocks: blocks, Pages: make([]uint32, blocks), Peer: pe.peer})
				if err == nil {
					err = d.Finish(context.Background())
				}
				if !errors.Is(err, ErrClosed) {
					t.Errorf("job %d: %v", i, err)
				}
			})
		}
		for m.Stats().Jobs < 4 {
			runtime.Gosched()
		}
		must(m.Close())
		jobs.Wait()
		must(r.Close())
	}
}

// openWindows counts the open windows of the regions of an engine. opening, if set, is called before a window of several
// spans is opened.
type openWindows struct {
	open    atomic.Int32
	opening func()
}

// over returns the engine with its windows counted.
func (c *openWindows) over(e rdma.Engine) rdma.Engine {
	return wrapping{e, func(r rdma.Region) rdma.Region { return windowRegion{r, c} }}
}

type windowRegion struct {
	rdma.Region
	windows *openWindows
}

func (r windowRegion) Window(off, n uint64, peers ...rdma.EngineID) (rdma.Window, error) {
	return r.counted(r.Region.Window(off, n, peers...))
}

func (r windowRegion) WindowSpans(spans []rdma.Span, peers ...rdma.EngineID) (rdma.Window, error) {
	if r.windows.opening != nil {
		r.windows.opening()
	}
	return r.counted(r.Region.WindowSpans(spans, peers...))
}

func (r windowRegion) counted(w rdma.Window, err error) (rdma.Window, error) {
	if err != nil {
		return nil, err
	}
	r.windows.open.Add(1)
	return &countedWindow{Window: w, windows: r.windows}, nil
}

type countedWindow struct {
	rdma.Window
	windows *openWindows
	once    sync.Once
}

func (w *countedWindow) Revoke(ctx context.Context) error {
	err := w.Window.Revoke(ctx)
	if err == nil {
		w.once.Do(func() { w.windows.open.Add(-1) })
	}
	return err
}

// TestCancelWhileWindowOpens: a window that a job opens while Cancel has revoked its other windows is
// revoked too.
func TestCancelWhileWindowOpens(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	raw, err := tcp.New(ctx, tcp.Options{Listen: "127.0.0.1:0", Token: token})
	if err != nil {
		t.Fatal(err)
	}
	var windows openWindows
	pe := newEngineOn(t, s, newAt(s), geo.LayerCount(), 512, 4<<20, newApart(t), raw, windows.over(raw))
	de := newEngine(t, s, geo.LayerCount(), 512, 4<<20)
	const blocks, hit = 8, 6
	s.put(1, hit)
	r := newRequest(t, pe, de, 1, blocks, hit)
	started := make(chan *Prefill, 1)
	cancelled := make(chan struct{})
	windows.opening = func() {
		p := <-started
		go func() {
			defer close(cancelled)
			p.Cancel()
		}()
		// Cancel ends the scope after it has revoked the windows.
		for !errors.Is(p.scope.Write(ctx, rdma.Write{}), rdma.ErrCanceled) && ctx.Err() == nil {
			runtime.Gosched()
		}
	}
	p, d, _, _ := r.both(ctx, 0) // the decode side reads all
	started <- p
	select {
	case <-cancelled:
	case <-ctx.Done():
		t.Fatal("no window was opened")
	}
	d.Cancel()
	if n := windows.open.Load(); n != 0 {
		t.Errorf("%d windows are open after the end of the job", n)
	}
}

// TestCallerReusesSlices: the caller may change the slices of a job and of Append when the call has
// returned. Blocks are stored under the ids that were passed.
func TestCallerReusesSlices(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	s.gate, s.waiting = make(chan struct{}), make(chan struct{}, 1)
	pe, de := newEngine(t, s, geo.LayerCount(), 64, 1<<20), newEngine(t, s, geo.LayerCount(), 64, 1<<20)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const blocks, hit = 6, 4
	s.put(1, hit)
	r := newRequest(t, pe, de, 1, blocks, hit)
	ids, pages, read := slices.Clone(r.ids), slices.Clone(r.pages), []Part{{0, hit}}
	p, err := pe.Prefill(ctx, PrefillJob{Request: r.name, IDs: ids, Blocks: blocks, Hit: hit, Parts: read, Pages: pages})
	if err != nil {
		t.Fatal(err)
	}
	mine := slices.Clone(r.ids)
	minePages := slices.Clone(r.pages)
	read[0], ids[hit-1] = Part{hit - 1, hit}, blockName(7, 7)
	clear(pages)
	d, err := de.Decode(ctx, DecodeJob{Request: r.name, IDs: mine, Blocks: blocks, Hit: hit, Pages: minePages, Peer: pe.peer})
	if err != nil {
		t.Fatal(err)
	}
	mine[hit] = blockName(7, 8) // the new block
	clear(minePages)
	if err := errors.Join(r.prefill(ctx, p), d.Ready(ctx), r.check()); err != nil {
		t.Fatal(err)
	}
	decoded := blockName(1, blocks-1)
	chain := append(slices.Clone(r.ids), decoded)
	for l := range geo.LayerCount() {
		fill(de.page(l, r.pages[blocks-1]), decoded, l)
	}
	if err := de.Append(ctx, r.name, chain, 1, r.pages[blocks-1]); err != nil {
		t.Fatal(err)
	}
	chain[blocks-1] = blockName(7, 9)
	select {
	case <-s.waiting:
	case <-ctx.Done():
		t.Fatal("nothing is stored")
	}
	close(s.gate)
	if err := errors.Join(d.Finish(ctx), de.Settle(ctx, decoded)); err != nil {
		t.Fatal(err)
	}
	if n := de.Stats().Persisting; n != 0 {
		t.Errorf("%d blocks are being written after the last has been", n)
	}
	for b := range blocks {
		want := make([]byte, geo.LayerBytes(0))
		fill(want, blockName(1, b), 0)
		if full := s.blocks[blockName(1, b)]; full == nil || !bytes.Equal(full[:len(want)], want) {
			t.Errorf("block %d is not stored, or with other bytes", b)
		}
	}
	for b := range 10 {
		if s.blocks[blockName(7, b)] != nil {
			t.Errorf("a block was stored under an id that the caller put into its slice later")
		}
	}
}

// TestRandomEnds: jobs of two engines end at random times: by Cancel of one side or of both, by a context, because
// the session ends, or by Finish. After the last of them no memory, window, message or immediate of a job is left.
func TestRandomEnds(t *testing.T) {
	testkit.VerifyNone(t)
	const jobs, blocks, hit = 60, 8, 5
	for seed := range testkit.Rounds[uint64](8, 4) {
		breaks := seed%2 == 1 // sessions end
		rng := rand.New(rand.NewPCG(seed, 1))
		s := newShelf()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		var engines []*engine
		var windows [2]openWindows
		for i := range windows {
			raw, err := tcp.New(ctx, tcp.Options{Listen: "127.0.0.1:0", Token: token})
			if err != nil {
				t.Fatal(err)
			}
			engines = append(engines, newEngineOn(t, s, newAt(s), geo.LayerCount(), 512, 1<<20, nil, raw, windows[i].over(raw)))
		}
		pe, de := engines[0], engines[1]
		var running sync.WaitGroup
		for i := range jobs {
			sequence := int(seed)*jobs + i
			s.put(sequence, hit)
			r := newRequest(t, pe, de, sequence, blocks, hit)
			for b := range r.pages {
				r.pages[b] = uint32(i*blocks + b) // no other request has these pages
			}
			x, ends := rng.IntN(hit+1), [2]int{rng.IntN(5), rng.IntN(5)}
			yields := [2]int{rng.IntN(400), rng.IntN(400)}
			disconnects := breaks && rng.IntN(20) == 0
			// end ends a job of one side.
			end := func(side int, job interface {
				Cancel()
				Finish(context.Context) error
			}, stop context.CancelFunc, finish func() error) {
				for range yields[side] {
					runtime.Gosched()
				}
				switch ends[side] {
				case 0:
					job.Cancel()
				case 1:
					stop()
					_ = job.Finish(ctx)
				case 2:
					go job.Cancel()
					_ = finish()
				default:
					_ = finish()
				}
			}
			running.Go(func() {
				ctx, stop := context.WithTimeout(ctx, time.Second/2)
				defer stop()
				p, err := pe.Prefill(ctx, PrefillJob{Request: r.name, IDs: r.ids, Blocks: blocks, Hit: hit, Parts: parts(0, x), Pages: r.pages})
				if err != nil {
					return
				}
				end(0, p, stop, func() error {
					for l := range geo.LayerCount() {
						if err := p.Layer(ctx, l); err != nil {
							break
						}
						p.Computed(l)
					}
					return p.Finish(ctx)
				})
			})
			running.Go(func() {
				ctx, stop := context.WithTimeout(ctx, time.Second/2)
				defer stop()
				d, err := de.Decode(ctx, DecodeJob{Request: r.name, IDs: r.ids, Blocks: blocks, Hit: hit, Parts: parts(x, hit), Pages: r.pages, Peer: pe.peer})
				if err != nil {
					return
				}
				if disconnects {
					de.rdma.Disconnect(pe.rdma.Addr().Engine)
				}
				end(1, d, stop, func() error { return d.Finish(ctx) })
			})
		}
		running.Wait()
		for i, e := range engines {
			if n := windows[i].open.Load(); n != 0 {
				t.Errorf("seed %d, engine %d: %d windows are open", seed, i, n)
			}
			if st := e.Stats(); st.BufferUsedBytes != 0 || st.Jobs != 0 || st.Persisting != 0 {
				t.Errorf("seed %d, engine %d: %+v", seed, i, st)
			}
			if st := e.rdma.Stats(); st.ImmediatesDropped != 0 {
				t.Errorf("seed %d, engine %d: %d immediates dropped", seed, i, st.ImmediatesDropped)
			}
		}
		// The last messages of cancelled jobs may still be on their way. A message that the handler gets after
		// the end of its session counts as one of the next session, so it may be left.
		for !breaks {
			pe.mu.Lock()
			left := pe.earlyCount
			pe.mu.Unlock()
			if left == 0 {
				break
			}
			if ctx.Err() != nil {
				t.Fatalf("seed %d: %d early messages are left", seed, left)
			}
			runtime.Gosched()
		}
		cancel()
	}
}

// stuckRegion is a region whose Close fails.
type stuckRegion struct {
	rdma.Region
	err error
}

func (r stuckRegion) Close(ctx context.Context) error {
	return errors.Join(r.err, r.Region.Close(ctx))
}

// TestCloseTwice: each call of Close returns when the buffers have been released, or with the reason why one
// could not be released, also a call that another one precedes.
func TestCloseTwice(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	raw, err := tcp.New(t.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: token})
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	layout := layerMajor(geo.LayerCount(), 8, uint64(geo.LayerBytes(0)))
	layout.Region, err = raw.Register(make([]byte, 1<<20), rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	stuck := errors.New("a peer may still write")
	m, err := New(Options{
		Namespace: kv.Namespace{Name: "m", Geometry: geo}, Storage: newAt(s), Compute: wrapping{raw, func(r rdma.Region) rdma.Region { return stuckRegion{r, stuck} }}, BufferBytes: 1 << 20, Device: layout,
	})
	if err != nil {
		t.Fatal(err)
	}
	var calls sync.WaitGroup
	for range 3 {
		calls.Go(func() {
			if err := m.Close(); !errors.Is(err, stuck) {
				t.Errorf("close: %v; want %v", err, stuck)
			}
		})
	}
	calls.Wait()
}
