package traffic

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/rdmatest/simrdma"
)

// TestNoDeadlock runs requests between several engines in virtual time. Prompts of all
// sizes fragment the buffers. Some ranges are ordered late, some reads stop early, some
// requests are cancelled, and some sessions are lost. Each request must succeed or fail
// with its own cancellation or lost session, never because it waited for memory. This
// must hold with the planner's accounting of bytes and without it.
func TestNoDeadlock(t *testing.T) {
	testkit.Long(t, "many random orders of many requests")
	testkit.VerifyNone(t)
	for seed := range uint64(3) {
		for _, accounted := range []bool{true, false} {
			t.Run(fmt.Sprintf("seed %d, accounted %v", seed, accounted), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { newEngines(t, seed, accounted).run() })
			})
		}
	}
}

// engines are two prefill and three decode engines over one simulated network.
type engines struct {
	t         *testing.T
	rng       *rand.Rand
	accounted bool
	shelf     *shelf
	pes, des  []*engine

	mu sync.Mutex
	// used is the number of bytes of each engine's buffer that requests hold. changed is closed
	// and replaced when a request returns its bytes.
	used    map[*engine]int64
	changed chan struct{}
}

// pause waits for n milliseconds of virtual time, or until ctx ends.
func pause(ctx context.Context, n int) {
	select {
	case <-time.After(time.Duration(n) * time.Millisecond):
	case <-ctx.Done():
	}
}

// slowShelf is storage in which each call takes a random time.
type slowShelf struct {
	at
	mu  sync.Mutex
	rng *rand.Rand
}

// pause waits for a random time.
func (s *slowShelf) pause(ctx context.Context) {
	s.mu.Lock()
	n := s.rng.IntN(200)
	s.mu.Unlock()
	pause(ctx, n)
}

func (s *slowShelf) Read(ctx context.Context, r client.ReadRequest) (client.ReadResult, error) {
	s.pause(ctx)
	return s.at.Read(ctx, r)
}

func (s *slowShelf) Write(ctx context.Context, w client.WriteRequest) (client.WriteResult, error) {
	s.pause(ctx)
	return s.at.Write(ctx, w)
}

const (
	// requestCount requests run at a time.
	requestCount = 30
	// smallBuffer is the smallest size that a buffer can have: 512 blocks of smallBlocks.
	smallBuffer = 2 << 20
	// longBlocks is the length in blocks of the longest prompt.
	longBlocks = 480
)

// smallBlocks has blocks of 4 KiB, one granule of a buffer each.
var smallBlocks = kv.SingleGroup(2, 4, 512)

func newEngines(t *testing.T, seed uint64, accounted bool) *engines {
	w := &engines{t: t, rng: rand.New(rand.NewPCG(seed, 7)), accounted: accounted, shelf: newShelf(), used: map[*engine]int64{}, changed: make(chan struct{})}
	w.shelf.geo = smallBlocks
	f := newSimFabric(seed)
	for i := range 5 {
		layers := 2
		if i < 2 {
			layers = 1
		}
		storage := &slowShelf{at: newAt(w.shelf), rng: rand.New(rand.NewPCG(seed, uint64(i)))}
		e := newSimEngine(t, f, i, w.shelf, storage, layers, requestCount*longBlocks/2, smallBuffer)
		if i < 2 {
			w.pes = append(w.pes, e)
		} else {
			w.des = append(w.des, e)
		}
	}
	return w
}

// newSimFabric returns a network in virtual time.
func newSimFabric(seed uint64) *simrdma.Fabric {
	return simrdma.NewFabric(seed, simrdma.FabricOptions{Delay: simrdma.Span{Min: time.Microsecond, Max: time.Millisecond}})
}

// newSimEngine returns an engine on host number host of a network in virtual time. The device memory
// of hosts with an even number is staged.
func newSimEngine(t *testing.T, f *simrdma.Fabric, host int, s *shelf, storage Storage, layers, pages int, bufferBytes int64) *engine {
	t.Helper()
	r := newSimNIC(t, f, host, simrdma.NICOptions{}.LikeRC())
	var c copier.Copier
	if host%2 == 0 {
		c = newApart(t)
		bufferBytes *= 2 // the staging memory has both layers of a prompt too
	}
	return newEngineOn(t, s, storage, layers, pages, bufferBytes, c, r, r)
}

// newSimNIC returns a NIC on host number host of a network in virtual time.
func newSimNIC(t *testing.T, f *simrdma.Fabric, host int, kind simrdma.NICOptions) rdma.Engine {
	t.Helper()
	r, err := simrdma.New(t.Context(), simrdma.Options{
		Fabric: f, Host: fmt.Sprint("h", host), Listen: true, NICs: []simrdma.NICOptions{kind}, Group: group.Options{Token: token},
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// admit waits until the request's bytes fit on both engines, and counts them as used
// until leave is called. The planner's queue does the same.
func (w *engines) admit(r *request) (leave func()) {
	if !w.accounted {
		return func() {}
	}
	need := map[*engine]int64{r.pe: r.pe.Footprint().Of(r.blocks, r.hit), r.de: r.de.Footprint().Of(r.blocks, r.blocks)}
	fits := func() bool {
		for e, n := range need {
			if w.used[e]+n > e.Footprint().Buffer {
				return false
			}
		}
		return true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for !fits() {
		changed := w.changed
		w.mu.Unlock()
		<-changed
		w.mu.Lock()
	}
	for e, n := range need {
		w.used[e] += n
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		for e, n := range need {
			w.used[e] -= n
		}
		close(w.changed)
		w.changed = make(chan struct{})
	}
}

// run starts all requests and waits for them.
func (w *engines) run() {
	// This is much longer than all requests take one after another.
	ctx, cancel := context.WithTimeoutCause(w.t.Context(), 10*time.Minute, errors.New("stuck"))
	defer cancel()
	var wg sync.WaitGroup
	errs := make([]error, requestCount)
	page := uint32(0)
	for i := range errs {
		blocks := 1 + w.rng.IntN(200)
		if w.rng.IntN(4) == 0 {
			blocks = longBlocks - w.rng.IntN(100)
		}
		hit := w.rng.IntN(blocks)
		w.shelf.put(i, hit)
		r := newRequest(w.t, w.pes[w.rng.IntN(2)], w.des[w.rng.IntN(3)], i, blocks, hit)
		for b := range r.pages {
			r.pages[b] = page % uint32(r.pe.pages)
			page++
		}
		rng := rand.New(rand.NewPCG(w.rng.Uint64(), 1))
		wg.Go(func() {
			pause(ctx, rng.IntN(500))
			defer w.admit(r)()
			errs[i] = w.serve(ctx, r, rng)
		})
	}
	wg.Go(func() {
		for range 2 {
			pause(ctx, w.rng.IntN(3000))
			w.des[w.rng.IntN(3)].rdma.Disconnect(w.pes[w.rng.IntN(2)].rdma.Addr().Engine)
		}
	})
	wg.Wait()
	succeeded := 0
	for i, err := range errs {
		switch {
		case err == nil:
			succeeded++
		case ctx.Err() != nil || errors.Is(err, errCheck):
			w.t.Errorf("request %d: %v", i, err)
		case !errors.Is(err, ErrCancelled) && !errors.Is(err, context.Canceled) && !errors.Is(err, rdma.ErrPeerDied):
			w.t.Errorf("request %d: %v; a request may fail only by a cancellation or a lost session", i, err)
		}
	}
	if succeeded < requestCount/4 {
		w.t.Errorf("%d of %d requests succeeded; want at least a quarter, otherwise too little was tested", succeeded, requestCount)
	}
	synctest.Wait()
	for _, e := range append(w.pes, w.des...) {
		if used := e.Stats().BufferUsedBytes; used != 0 {
			w.t.Errorf("%d bytes of a buffer are still allocated", used)
		}
	}
}

// errCheck: a device holds wrong bytes after a request.
var errCheck = errors.New("wrong bytes")

// serve serves one request, whose sides start at different times. One range of the hit is ordered
// late. The rest of a stopped read is assigned to the other side, and after four stops to the
// model.
func (w *engines) serve(ctx context.Context, r *request, rng *rand.Rand) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if rng.IntN(5) == 0 {
		defer time.AfterFunc(time.Duration(rng.IntN(1500))*time.Millisecond, cancel).Stop()
	}
	x := rng.IntN(r.hit + 1)
	y := x + rng.IntN(r.hit-x+1)
	lateByPE, pauseP, pauseD, pauseLate := rng.IntN(2) == 0, rng.IntN(50), rng.IntN(50), rng.IntN(500)
	type stop struct {
		Stop
		prefill bool
	}
	stops := make(chan stop, 64)
	began := make(chan *Decode, 1)
	ps := make(chan *Prefill, 1)
	var sides, orders sync.WaitGroup
	var pErr, dErr error
	sides.Go(func() {
		pause(ctx, pauseD)
		var d *Decode
		d, dErr = r.de.Decode(ctx, DecodeJob{
			Request: r.name, IDs: r.ids, Blocks: r.blocks, Hit: r.hit, Parts: parts(y, r.hit), Pages: r.pages, Peer: r.pe.peer,
			Stopped: func(s Stop) { stops <- stop{s, false} },
		})
		if dErr != nil {
			cancel()
			return
		}
		began <- d
		if dErr = d.Finish(ctx); dErr != nil {
			cancel()
		}
	})
	sides.Go(func() {
		pause(ctx, pauseP)
		var p *Prefill
		p, pErr = r.pe.Prefill(ctx, PrefillJob{
			Request: r.name, IDs: r.ids, Blocks: r.blocks, Hit: r.hit, Parts: parts(0, x), Pages: r.pages, Stopped: func(s Stop) { stops <- stop{s, true} },
		})
		if pErr != nil {
			cancel()
			return
		}
		ps <- p
		if pErr = p.Loaded(ctx); pErr != nil {
			p.Cancel()
		} else {
			pErr = r.prefill(ctx, p)
			p.Cancel()
		}
		if pErr != nil {
			cancel()
		}
	})
	ended := make(chan struct{})
	orders.Go(func() {
		var d *Decode
		var p *Prefill
		for d == nil || p == nil {
			select {
			case d = <-began:
			case p = <-ps:
			case <-ended:
				return
			}
		}
		late := parts(x, y)
		timer := time.After(time.Duration(pauseLate) * time.Millisecond)
		stopped := 0
		for {
			select {
			case <-timer:
				for _, part := range late {
					if lateByPE {
						p.Read(part)
					} else {
						d.Read(part)
					}
				}
			case s := <-stops:
				rest := Part{s.Upto, s.Part.To}
				switch stopped++; {
				case stopped > 4:
					p.Recompute(rest)
				case s.prefill:
					d.Read(rest)
				default:
					p.Read(rest)
				}
			case <-ended:
				return
			}
		}
	})
	sides.Wait()
	close(ended)
	orders.Wait()
	if err := errors.Join(pErr, dErr); err != nil {
		return err
	}
	if err := r.check(); err != nil {
		return fmt.Errorf("%w: %w", errCheck, err)
	}
	return nil
}

// TestFragments: two requests fit in a prefill engine's buffer by their bytes, but the
// free memory is fragmented. One request has memory in the middle of the buffer, and gets
// another read order while the other waits for a long piece. Its read must stop with
// ErrBusy. If it waited behind the other request, which waits for its memory, both would
// wait forever.
func TestFragments(t *testing.T) {
	testkit.VerifyNone(t)
	synctest.Test(t, testFragments)
}

func testFragments(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s := newShelf()
	s.geo = smallBlocks
	f := newSimFabric(1)
	pe := newSimEngine(t, f, 0, s, newAt(s), 2, 2048, smallBuffer)
	de := newSimEngine(t, f, 1, s, newAt(s), 2, 2048, 4*smallBuffer)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	stops := make(chan Stop, 1)
	begin := func(r *request, pages int, read []Part) (*Prefill, *Decode) {
		t.Helper()
		for b := range r.pages {
			r.pages[b] = uint32(pages + b)
		}
		d, err := de.Decode(ctx, DecodeJob{Request: r.name, IDs: r.ids, Blocks: r.blocks, Hit: r.hit, Pages: r.pages, Peer: pe.peer})
		must(err)
		p, err := pe.Prefill(ctx, PrefillJob{Request: r.name, IDs: r.ids, Blocks: r.blocks, Hit: r.hit, Parts: read, Pages: r.pages, Stopped: func(s Stop) { stops <- s }})
		must(err)
		return p, d
	}
	const hit = 250
	for sequence := range 3 {
		s.put(sequence, 400)
	}
	first := newRequest(t, pe, de, 0, hit+1, hit)
	p0, d0 := begin(first, 0, parts(0, hit))
	must(p0.Loaded(ctx))
	middle := newRequest(t, pe, de, 1, 101, 100)
	p1, d1 := begin(middle, 400, nil)
	must(p1.await(ctx, func() bool { return p1.begun }))
	must(errors.Join(first.prefill(ctx, p0), d0.Finish(ctx), first.check()))

	long := newRequest(t, pe, de, 2, 401, 400)
	need := pe.Footprint()
	if need.Of(401, 400)+need.Of(101, 100) > need.Buffer {
		t.Fatal("the planner would not admit both requests at a time")
	}
	p2, d2 := begin(long, 600, parts(0, 400))
	must(p2.await(ctx, func() bool { return p2.offer != nil }))
	synctest.Wait()
	if waiting := pe.buffer.Stats().Waiting; waiting != 1 {
		t.Fatalf("%d requests wait for memory; want the long one", waiting)
	}
	p1.Read(Part{0, 100})
	select {
	case stop := <-stops:
		if !errors.Is(stop.Err, ErrBusy) || stop.Upto != 0 || stop.Gone {
			t.Errorf("stopped with %+v", stop)
		}
		d1.Read(stop.Part)
	case <-ctx.Done():
		t.Fatal("the second request's read waits behind the long request, which waits for the second")
	}
	must(errors.Join(middle.prefill(ctx, p1), d1.Finish(ctx), middle.check()))
	must(errors.Join(long.prefill(ctx, p2), d2.Finish(ctx), long.check()))
}
