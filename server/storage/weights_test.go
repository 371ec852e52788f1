package storage_test

import (
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

	"github.com/penstock-kv/penstock/internal/fair"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

// contender is a principal with several clients, each of which holds memory or waits for it at any time.
type contender struct {
	share   fair.Share
	weight  atomic.Int64
	clients int
	calls   int
	granted int64 // in calls
	held    []holding
}

// holding is the memory of one call.
type holding struct {
	of *contender
	// release returns the memory.
	release func()
}

// contention is a node whose memory contenders want. acquire makes one call, which lasts until
// release of the holding.
type contention struct {
	*rig
	ctx     context.Context
	acquire func(ctx context.Context, of *contender, n int) (release func(), err error)
	all     []*contender
	arrived chan holding
	clients sync.WaitGroup
	rng     *rand.Rand
}

func newContender(name string, weight int64) *contender {
	c := &contender{}
	c.weight.Store(weight)
	c.share = fair.Share{Principal: name, Weight: func() int { return int(c.weight.Load()) }}
	return c
}

// start adds clients of a contender.
func (w *contention) start(c *contender, clients int) {
	for range clients {
		w.call(c)
	}
	w.settle()
}

// call makes one call of a client.
func (w *contention) call(c *contender) {
	c.clients++
	c.calls++
	n := c.calls
	w.clients.Go(func() {
		release, err := w.acquire(w.ctx, c, n)
		if err == nil {
			w.arrived <- holding{c, release}
		} else if w.ctx.Err() == nil {
			w.t.Errorf("%s: %v", c.share.Principal, err)
		}
	})
}

// settle waits until each client holds memory or waits for it.
func (w *contention) settle() {
	w.t.Helper()
	for begin := time.Now(); ; {
		if time.Since(begin) > time.Minute {
			w.t.Fatalf("%+v", w.arena.Stats())
		}
		clients, held := 0, 0
		for _, c := range w.all {
			clients += c.clients
			held += len(c.held)
		}
		select {
		case h := <-w.arrived:
			h.of.granted++
			h.of.held = append(h.of.held, h)
		default:
			if held+w.arena.Stats().Waiting == clients {
				return
			}
			runtime.Gosched()
		}
	}
}

// release ends a call of a contender. The client then makes the next one, if again is set.
func (w *contention) release(c *contender, again bool) {
	i := w.rng.IntN(len(c.held))
	c.held[i].release()
	c.held = slices.Delete(c.held, i, i+1)
	c.clients--
	if again {
		w.call(c)
	}
	w.settle()
}

// releaseAny ends the call of a random one of all holdings.
func (w *contention) releaseAny() {
	held := 0
	for _, c := range w.all {
		held += len(c.held)
	}
	i := w.rng.IntN(held)
	for _, c := range w.all {
		if i < len(c.held) {
			w.release(c, true)
			return
		}
		i -= len(c.held)
	}
}

// client is a reader that takes its blocks when take is called. Blocks that come later are taken at once.
type client struct {
	mu    sync.Mutex
	taken bool
	parts []storage.Part
}

func (c *client) deliver(_ context.Context, parts []storage.Part) {
	c.mu.Lock()
	c.parts = append(c.parts, parts...)
	taken := c.taken
	c.mu.Unlock()
	if taken {
		c.take()
	}
}

func (c *client) take() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.taken = true
	for i := range c.parts {
		c.parts[i].Done(nil)
	}
	c.parts = nil
}

// within10 reports whether part is share of whole, to a tenth of share.
func within10(part, whole int64, share float64) bool {
	want := share * float64(whole)
	return float64(part) > 0.9*want && float64(part) < 1.1*want
}

// run lets two principals of the weights 1 and 3 compete for memory in which as many calls fit. All calls have
// the same size, so calls count for bytes. The calls that wait fit into the budget of the volume, so all
// of them wait for memory.
func (w *contention) run(fits int) {
	t := w.t
	t.Helper()
	light, heavy := newContender("light", 1), newContender("heavy", 3)
	w.all = []*contender{light, heavy}
	w.start(light, fits)
	if n := len(light.held); n != fits {
		t.Fatalf("a principal alone has the memory of %d calls; %d fit", n, fits)
	}
	w.start(heavy, fits*3/4)
	if len(heavy.held) != 0 {
		t.Fatalf("memory was taken away: the second principal has that of %d calls", len(heavy.held))
	}
	for range fits / 4 {
		w.release(light, false)
		w.start(heavy, 1)
	}
	for range fits / 2 {
		w.release(light, true)
	}
	if n := int64(len(heavy.held)); !within10(n, int64(fits), 0.75) {
		t.Errorf("after the calls of the light principal have ended, the heavy one holds the memory of %d of %d calls", n, fits)
	}
	count := func(what string, share float64, next func()) {
		t.Helper()
		before, both := heavy.granted, heavy.granted+light.granted
		for range 400 {
			next()
		}
		if n, all := heavy.granted-before, heavy.granted+light.granted-both; !within10(n, all, share) || !within10(all-n, all, 1-share) {
			t.Errorf("%s: %d of %d grants are of the heavy principal; want %v of them", what, n, all, share)
		}
	}
	count("contention", 0.75, w.releaseAny)

	// The clients of the light principal hold their memory for as long as 400 other calls.
	before, grants := len(light.held), heavy.granted
	for range 400 {
		w.release(heavy, true)
	}
	if n := len(light.held); n > before+1 || heavy.granted-grants < 399 {
		t.Errorf("slow clients hold the memory of %d calls, before of %d; the heavy principal was granted %d", n, before, heavy.granted-grants)
	}

	light.weight.Store(3) // as a reload does
	for range 8 * fits {
		w.releaseAny()
	}
	count("with equal weights", 0.5, w.releaseAny)
}

// end cancels the waiting calls, releases all memory, and checks that none is lost.
func (w *contention) end(cancel context.CancelFunc) {
	cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.clients.Wait()
	}()
	for ended := false; !ended; {
		select {
		case h := <-w.arrived:
			h.release()
		case <-done:
			ended = true
		}
	}
	for _, c := range w.all {
		for _, h := range c.held {
			h.release()
		}
	}
	// Loads that have returned may still release memory.
	for begin := time.Now(); w.arena.Stats().UsedBytes > 0 && time.Since(begin) < time.Minute; {
		runtime.Gosched()
	}
	for _, c := range w.all {
		if reads, writes := w.arena.Held(c.share.Principal); reads != 0 || writes != 0 {
			w.t.Errorf("in the end %s holds %d and %d bytes", c.share.Principal, reads, writes)
		}
	}
	if s := w.arena.Stats(); s.Waiting != 0 || s.UsedBytes != 0 || s.LongestFreeBytes != s.SizeBytes {
		w.t.Errorf("in the end: %+v", s)
	}
}

// TestMemoryByWeight: while two principals of the weights 1 and 3 want more memory than there is, the memory that
// readers keep until their clients have the blocks, and the memory of writes, are granted one quarter and three
// quarters, also if the clients of one keep it for much longer than the other's. A principal alone gets all.
// A changed weight applies. Calls that end while they wait leave nothing behind.
func TestMemoryByWeight(t *testing.T) {
	const blocks = 16 // of a call; a slot has 12 KiB
	const callBytes = blocks * 12 << 10
	const arenaBytes = 8 << 20
	for _, kind := range []string{"reads", "writes"} {
		t.Run(kind, func(t *testing.T) {
			r := newRig(t, rigOptions{capacityBytes: 64 << 20, arenaBytes: arenaBytes, edit: func(o *storage.Options) {
				o.QueueWait, o.ReservationTTL, o.HotBytes = time.Hour, time.Hour, -1
			}})
			ns := r.namespace("m", small)
			var prompts [][]kv.BlockID
			for seed := range 32 {
				prompts = append(prompts, chain(ns, blocks, 1+seed))
				r.mustPut(ns, prompts[seed])
			}
			ctx, cancel := context.WithCancel(t.Context())
			w := &contention{rig: r, ctx: ctx, arrived: make(chan holding), rng: rand.New(rand.NewPCG(1, 5))}
			defer w.end(cancel)
			if kind == "writes" {
				var seeds atomic.Int64
				seeds.Store(1000)
				w.acquire = func(ctx context.Context, of *contender, n int) (func(), error) {
					ids := chain(ns, blocks, int(seeds.Add(1)))
					res, err := r.node.Reserve(ctx, storage.ReserveRequest{Namespace: "m", Share: of.share, Epoch: ns.Epoch, Geometry: ns.Geometry.Digest(), IDs: ids})
					if err != nil {
						return nil, err
					}
					if len(res.Bytes()) != callBytes {
						return nil, fmt.Errorf("%d bytes", len(res.Bytes()))
					}
					return func() {
						if err := r.node.Abort(res.ID); err != nil {
							t.Error(err)
						}
					}, nil
				}
				w.run(arenaBytes / 2 / callBytes)
				return
			}
			w.acquire = func(ctx context.Context, of *contender, n int) (func(), error) {
				c := &client{}
				_, err := r.node.Load(ctx, storage.LoadRequest{Namespace: "m", Share: of.share, IDs: prompts[n%len(prompts)], Early: true}, c.deliver)
				if err == nil && len(c.parts) != blocks {
					err = fmt.Errorf("%d parts", len(c.parts))
				}
				if err != nil {
					c.take()
				}
				return c.take, err
			}
			w.run(arenaBytes / callBytes)
		})
	}
}

// TestWaitingWrites: at most 256 Reserves wait for memory. Another principal gets a place of theirs. A Reserve does
// not wait for memory while as many reservations are open as may be.
func TestWaitingWrites(t *testing.T) {
	const most = 256
	r := newRig(t, rigOptions{arenaBytes: 8 << 20, edit: func(o *storage.Options) {
		o.QueueWait, o.ReservationTTL, o.ReservationsMax = time.Hour, time.Hour, 1
	}})
	ns := r.namespace("m", small)
	reserve := func(ctx context.Context, of *contender) error {
		_, err := r.node.Reserve(ctx, storage.ReserveRequest{Namespace: "m", Share: of.share, Epoch: ns.Epoch, Geometry: ns.Geometry.Digest(), IDs: chain(ns, 1, 1)})
		return err
	}
	fill := func(bytes int) (release func()) {
		t.Helper()
		buf, err := r.arena.TryAllocShare(fair.Caller{}, bytes)
		if err != nil {
			t.Fatal(err)
		}
		return buf.Release
	}
	release := fill(4 << 20)
	greedy, other := newContender("greedy", 1), newContender("other", 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	results := make(chan error, most+1)
	start := func(of *contender) { go func() { results <- reserve(ctx, of) }() }
	for range most {
		start(greedy)
	}
	for r.arena.Stats().Waiting < most && ctx.Err() == nil {
		runtime.Gosched()
	}
	if err := reserve(ctx, greedy); !errors.Is(err, storage.ErrBusy) {
		t.Errorf("behind %d waiting calls: %v", most, err)
	}
	start(other)
	if err := <-results; !errors.Is(err, storage.ErrBusy) {
		t.Errorf("a waiting call when another principal comes: %v", err)
	}
	cancel()
	for range most {
		if err := <-results; !errors.Is(err, context.Canceled) {
			t.Errorf("a call that is given up: %v", err)
		}
	}
	release()

	ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := reserve(ctx, greedy); err != nil {
		t.Fatal(err)
	}
	defer fill(4<<20 - 12<<10)()
	if err := reserve(ctx, other); !errors.Is(err, storage.ErrBusy) {
		t.Errorf("while one reservation is open: %v", err)
	}
}
