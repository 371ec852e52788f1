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
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/simrdma"
)

// TestNobodyStuck: several engines in virtual time, whose buffers are fragmented by
// prompts of all sizes, with late reads, reads that stop, cancelled requests and lost
// sessions. With the planner's accounting by bytes and without any, each request ends
// well or with what befell it, and never because it waited.
func TestNobodyStuck(t *testing.T) {
	testkit.VerifyNone(t)
	for seed := range uint64(3) {
		for _, accounted := range []bool{true, false} {
			t.Run(fmt.Sprintf("seed %d, accounted %v", seed, accounted), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { newPlant(t, seed, accounted).run() })
			})
		}
	}
}

// plant is the engines of TestNobodyStuck.
type plant struct {
	t         *testing.T
	rng       *rand.Rand
	accounted bool
	shelf     *shelf
	pes, des  []*engine

	mu sync.Mutex
	// used is what requests take of each engine's buffer; changed is closed and
	// replaced when some of it is returned.
	used    map[*engine]int64
	changed chan struct{}
}

// slowShelf is storage that takes some time.
type slowShelf struct {
	at
	mu  sync.Mutex
	rng *rand.Rand
}

// pause waits for a random time of the bubble.
func (s *slowShelf) pause(ctx context.Context) {
	s.mu.Lock()
	d := time.Duration(s.rng.IntN(200)) * time.Millisecond
	s.mu.Unlock()
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
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
	plantRequests = 30
	// plantBuffer is the least that a buffer can have: 512 blocks of 4 KiB.
	plantBuffer = 2 << 20
	plantLong   = 480
)

func newPlant(t *testing.T, seed uint64, accounted bool) *plant {
	w := &plant{t: t, rng: rand.New(rand.NewPCG(seed, 7)), accounted: accounted, shelf: newShelf(), used: map[*engine]int64{}, changed: make(chan struct{})}
	w.shelf.geo = kv.SingleGroup(2, 4, 512)
	f := simrdma.NewFabric(seed, simrdma.FabricOptions{Delay: simrdma.Span{Min: time.Microsecond, Max: time.Millisecond}})
	for i := range 5 {
		r, err := simrdma.New(t.Context(), simrdma.Options{
			Fabric: f, Host: fmt.Sprint("h", i), Listen: true, NICs: []simrdma.NICOptions{simrdma.NICOptions{}.LikeRC()}, Group: group.Options{Token: token},
		})
		if err != nil {
			t.Fatal(err)
		}
		layers := 2
		if i < 2 {
			layers = 1
		}
		storage := &slowShelf{at: newAt(w.shelf), rng: rand.New(rand.NewPCG(seed, uint64(i)))}
		e := newEngineOn(t, w.shelf, storage, layers, plantRequests*plantLong/2, plantBuffer, nil, r, r)
		if i < 2 {
			w.pes = append(w.pes, e)
		} else {
			w.des = append(w.des, e)
		}
	}
	return w
}

// admit waits, as in the planner's queue, until the request's bytes fit on both
// engines, and takes them.
func (w *plant) admit(r *request) (leave func()) {
	if !w.accounted {
		return func() {}
	}
	f := r.pe.Footprint()
	need := map[*engine]int64{r.pe: f.Of(r.blocks, r.hit), r.de: f.Of(r.blocks, r.blocks)}
	fits := func() bool {
		for e, n := range need {
			if w.used[e]+n > f.Buffer {
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
func (w *plant) run() {
	// Far beyond what all of them take one after the other.
	ctx, cancel := context.WithTimeoutCause(w.t.Context(), 10*time.Minute, errors.New("stuck"))
	defer cancel()
	var wg sync.WaitGroup
	errs := make([]error, plantRequests)
	page := uint32(0)
	for i := range errs {
		blocks := 1 + w.rng.IntN(200)
		if w.rng.IntN(4) == 0 {
			blocks = plantLong - w.rng.IntN(100)
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
			time.Sleep(time.Duration(rng.IntN(500)) * time.Millisecond)
			defer w.admit(r)()
			errs[i] = w.serve(ctx, r, rng)
		})
	}
	wg.Go(func() {
		for range 2 {
			time.Sleep(time.Duration(w.rng.IntN(3000)) * time.Millisecond)
			w.des[w.rng.IntN(3)].rdma.Disconnect(w.pes[w.rng.IntN(2)].rdma.Addr().Engine)
		}
	})
	wg.Wait()
	well := 0
	for i, err := range errs {
		switch {
		case err == nil:
			well++
		case ctx.Err() != nil || errors.Is(err, errCheck):
			w.t.Errorf("request %d: %v", i, err)
		case !errors.Is(err, ErrCancelled) && !errors.Is(err, context.Canceled) && !errors.Is(err, rdma.ErrPeerDied):
			w.t.Errorf("request %d: %v; nothing but a cancellation and a lost session was to befall it", i, err)
		}
	}
	if well < plantRequests/4 {
		w.t.Errorf("%d of %d requests went well: too few to test anything", well, plantRequests)
	}
	synctest.Wait()
	for _, e := range append(w.pes, w.des...) {
		if used := e.Stats().BufferUsedBytes; used != 0 {
			w.t.Errorf("%d bytes of a buffer are still taken", used)
		}
	}
}

// errCheck: wrong bytes.
var errCheck = errors.New("wrong bytes")

// serve serves one request. Its sides start on their own. A range of the hit is
// ordered later; what a side stops at goes to the other side, and then to the model.
func (w *plant) serve(ctx context.Context, r *request, rng *rand.Rand) error {
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
		time.Sleep(time.Duration(pauseD) * time.Millisecond)
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
		time.Sleep(time.Duration(pauseP) * time.Millisecond)
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

// TestFragments: two requests fit in a prefill engine's buffer by their bytes, but not
// as the free memory lies. The one that has memory there, in the middle, wants more
// while the other waits for a long piece: it is told to read elsewhere and does not
// wait behind the other, which waits for it.
func TestFragments(t *testing.T) {
	testkit.VerifyNone(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s := newShelf()
	s.geo = kv.SingleGroup(2, 4, 512) // blocks of 4 KiB, one granule each
	pe, de := newEngine(t, s, 2, 2048, 2<<20), newEngine(t, s, 2, 2048, 8<<20)
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
	until := func(what string, ok func() bool) {
		t.Helper()
		for !ok() {
			if ctx.Err() != nil {
				t.Fatalf("%s: never", what)
			}
			time.Sleep(time.Millisecond)
		}
	}
	taken := func() int64 { return pe.Stats().BufferUsedBytes }
	const hit = 250
	for sequence := range 3 {
		s.put(sequence, 400)
	}
	first := newRequest(t, pe, de, 0, hit+1, hit)
	p0, d0 := begin(first, 0, parts(0, hit))
	must(p0.Loaded(ctx))
	before := taken()
	middle := newRequest(t, pe, de, 1, 101, 100)
	p1, d1 := begin(middle, 400, nil)
	until("the second request has memory", func() bool { return taken() > before })
	must(errors.Join(first.prefill(ctx, p0), d0.Finish(ctx), first.check()))

	long := newRequest(t, pe, de, 2, 401, 400)
	f := pe.Footprint()
	if f.Of(401, 400)+f.Of(101, 100) > f.Buffer {
		t.Fatal("the planner would not have both at a time")
	}
	p2, d2 := begin(long, 600, parts(0, 400))
	until("the long request waits", func() bool { return pe.buffer.Stats().Waiting == 1 })
	p1.Read(Part{0, 100})
	select {
	case stop := <-stops:
		if !errors.Is(stop.Err, ErrBusy) || stop.Upto != 0 || stop.Gone {
			t.Errorf("stopped with %+v", stop)
		}
		d1.Read(stop.Part)
	case <-ctx.Done():
		t.Fatal("the second request waits behind the third, which waits for it")
	}
	must(errors.Join(middle.prefill(ctx, p1), d1.Finish(ctx), middle.check()))
	must(errors.Join(long.prefill(ctx, p2), d2.Finish(ctx), long.check()))
}
