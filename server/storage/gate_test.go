package storage

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/penstock-kv/penstock/internal/fair"
	"github.com/penstock-kv/penstock/kv"
)

// callGate is a gate whose calls leave in the order in which they have entered.
type callGate struct {
	*gate
	mu     sync.Mutex
	places []place
}

func newCallGate(n int) *callGate { return &callGate{gate: newGate(int64(n), n)} }

// enter is a call that holds one unit.
func (g *callGate) enter(ctx context.Context, by fair.Caller, bytes int64) error {
	return g.take(ctx, by, 1, bytes)
}

func (g *callGate) take(ctx context.Context, by fair.Caller, units, bytes int64) error {
	p, err := g.gate.enter(ctx, by, units, bytes)
	if err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.places = append(g.places, p)
	return nil
}

func (g *callGate) leave() {
	g.mu.Lock()
	p := g.places[0]
	g.places = g.places[1:]
	g.mu.Unlock()
	p.leave()
}

func callerOf(principal string) fair.Caller {
	return fair.Caller{Share: fair.Share{Principal: principal}}
}

// TestGateOrder: calls beyond the bound wait, enter in the order of their arrival, and are refused if
// as many wait. A higher bound admits waiting calls, and a lower one admits none until fewer run.
func TestGateOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newCallGate(2)
		var mu sync.Mutex
		var entered []int
		enter := func(ctx context.Context, id int) {
			go func() {
				if g.enter(ctx, fair.Caller{}, 1) == nil {
					mu.Lock()
					defer mu.Unlock()
					entered = append(entered, id)
				}
			}()
			synctest.Wait()
		}
		want := func(ids ...int) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(entered, ids) {
				t.Errorf("entered %v, want %v", entered, ids)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		enter(t.Context(), 1)
		enter(t.Context(), 2)
		enter(ctx, 3)
		enter(t.Context(), 4)
		want(1, 2)
		if err := g.enter(t.Context(), fair.Caller{}, 1); !errors.Is(err, ErrBusy) {
			t.Errorf("behind two calls that wait: %v", err)
		}
		cancel() // the call that waits longest gives up
		want(1, 2)
		g.leave()
		want(1, 2, 4)
		enter(t.Context(), 5)
		enter(t.Context(), 6)
		g.setMax(3, 3)
		want(1, 2, 4, 5)
		g.setMax(1, 1)
		g.leave()
		g.leave()
		want(1, 2, 4, 5)
		g.leave()
		want(1, 2, 4, 5, 6)
		g.leave()
		if err := g.close(t.Context()); err != nil {
			t.Errorf("close: %v", err)
		}
	})
}

// TestGateCloses: close waits for the calls that run, or until its context ends, and admits no call.
func TestGateCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended, end := context.WithCancel(t.Context())
		end()
		if err := newCallGate(1).close(ended); err != nil {
			t.Errorf("an empty gate: %v", err)
		}
		g := newCallGate(1)
		if err := g.enter(t.Context(), fair.Caller{}, 1); err != nil {
			t.Fatal(err)
		}
		waiting, giveUp := context.WithCancel(t.Context())
		late, closed := make(chan error, 1), make(chan error, 1)
		go func() { late <- g.enter(waiting, fair.Caller{}, 1) }()
		synctest.Wait()
		go func() { closed <- g.close(t.Context()) }()
		synctest.Wait()
		select {
		case err := <-closed:
			t.Fatalf("close did not wait: %v", err)
		default:
		}
		g.leave()
		if err := <-closed; err != nil {
			t.Error(err)
		}
		synctest.Wait()
		giveUp()
		if err := <-late; !errors.Is(err, context.Canceled) {
			t.Errorf("a call that waited while the gate closed: %v", err)
		}

		g = newCallGate(1)
		if err := g.enter(t.Context(), fair.Caller{}, 1); err != nil {
			t.Fatal(err)
		}
		if err := g.close(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("with a call that runs: %v", err)
		}
		g.leave()
	})
}

// TestGateBound: with calls of three principals and tenants that give up at random and a bound that changes, never more run than the
// highest bound, and all can enter in the end.
func TestGateBound(t *testing.T) {
	const most, calls, workers = 3, 2000, 8
	g := newCallGate(most)
	var running atomic.Int32
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(w)))
			for range calls {
				ctx, cancel := context.WithCancel(t.Context())
				if rng.IntN(3) == 0 {
					go cancel()
				}
				if g.enter(ctx, anyReader(rng), rng.Int64N(1<<20)) == nil {
					if n := running.Add(1); n > most {
						t.Errorf("%d calls run", n)
					}
					n := 1 + rng.IntN(most)
					g.setMax(int64(n), n)
					running.Add(-1)
					g.leave()
				}
				cancel()
			}
		})
	}
	wg.Wait()
	g.setMax(most, most)
	for range most {
		if err := g.enter(t.Context(), fair.Caller{}, 1); err != nil {
			t.Errorf("a place was lost: %v", err)
		}
	}
}

// anyReader returns one of nine readers of three principals.
func anyReader(rng *rand.Rand) fair.Caller {
	name := func() string { return string('a' + rune(rng.IntN(3))) }
	return fair.Caller{Share: fair.Share{Principal: name()}, Tenant: name()}
}

// TestGateShares: a tenant whose calls wait gets every second place, however many calls of another
// tenant wait before its own.
func TestGateShares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 16
		g := newCallGate(most)
		entered := make(map[string]int)
		refused := make(map[string]int)
		var mu sync.Mutex
		enter := func(tenant string, n int) {
			for range n {
				go func() {
					err := g.enter(t.Context(), fair.Caller{Tenant: tenant}, 1<<20)
					mu.Lock()
					defer mu.Unlock()
					if err == nil {
						entered[tenant]++
					} else {
						refused[tenant]++
					}
				}()
				synctest.Wait()
			}
		}
		expect := func(what string, got map[string]int, a, b, c int) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if got["a"] != a || got["b"] != b || got["c"] != c {
				t.Errorf("%s: %v; want %d, %d, %d", what, got, a, b, c)
			}
		}
		enter("a", 2*most+3) // a fills the gate and the queue
		expect("entered", entered, most, 0, 0)
		expect("refused", refused, 3, 0, 0)
		enter("b", 4)
		expect("refused when b comes", refused, 7, 0, 0)
		for range 8 {
			g.leave()
		}
		expect("entered after 8 have left", entered, most+4, 4, 0)
		for range 4 { // b has no waiting calls
			g.leave()
		}
		expect("entered while a alone waits", entered, most+8, 4, 0)
		enter("b", most)
		enter("c", most)
		_, waiting, _ := g.stats()
		if waiting != most {
			t.Errorf("%d calls wait", waiting)
		}
		for range waiting {
			g.leave()
		}
		expect("entered in the end", entered, most+12, 10, 6)
		for range most {
			g.leave()
		}
		if running, waiting, _ := g.stats(); running != 0 || waiting != 0 {
			t.Errorf("%d run, %d wait", running, waiting)
		}
	})
}

// TestLaneShares: one tenant does not fill a lane, and several tenants that want more have equal parts
// of it. Loads of namespaces without a tenant may fill it.
func TestLaneShares(t *testing.T) {
	fill := func(l *lane, tenant string) (n int64) {
		for l.enter(fair.Caller{Tenant: tenant}) == nil {
			n++
		}
		return n
	}
	const places = 256
	l := newLanes(1, places, 1<<20)[0]
	alone := fill(l, "a")
	if alone < places*8/9 || alone > places*8/9+1 {
		t.Errorf("one tenant has %d of %d places", alone, places)
	}
	if n := fill(l, "b"); n == 0 || n > places-alone {
		t.Errorf("a second tenant gets %d places", n)
	}
	// The Loads of a end, and both tenants begin others as soon as they may.
	for range 20 * places {
		if l.tenants["a"] >= l.tenants["b"] {
			l.leave(fair.Caller{Tenant: "a"})
		} else {
			l.leave(fair.Caller{Tenant: "b"})
		}
		fill(l, "a")
		fill(l, "b")
	}
	if a, b := l.tenants["a"], l.tenants["b"]; a-b > 2 || b-a > 2 || a+b > places {
		t.Errorf("a has %d places and b has %d", a, b)
	}
	if n := fill(l, ""); n != places-l.tenants["a"]-l.tenants["b"] {
		t.Errorf("Loads without a tenant got %d places", n)
	}
	if err := l.enter(fair.Caller{Tenant: "c"}); !errors.Is(err, ErrBusy) {
		t.Errorf("a full lane: %v", err)
	}
	for l.tenants["a"] > 0 {
		l.leave(fair.Caller{Tenant: "a"})
	}
	if _, ok := l.tenants["a"]; ok {
		t.Error("a tenant without Loads is kept")
	}
}

// TestLaneWeights: on a node with several volumes a principal alone leaves some places of a lane free, and principals that
// want more have places by weight. On a node with one volume the gate divides the places, so a
// principal alone may have all.
func TestLaneWeights(t *testing.T) {
	heavy := fair.Caller{Share: fair.Share{Principal: "heavy", Weight: func() int { return 3 }}}
	light := fair.Caller{Share: fair.Share{Principal: "light"}}
	fill := func(l *lane, by fair.Caller) (n int64) {
		for l.enter(by) == nil {
			n++
		}
		return n
	}
	const places = 1024
	if n := fill(newLanes(1, places, 1<<20)[0], light); n != places {
		t.Errorf("a principal alone gets %d of the %d places of the only volume", n, places)
	}
	l := newLanes(2, places, 1<<20)[0]
	if n := fill(l, light); n < places*8/9 || n > places*8/9+1 {
		t.Errorf("a principal alone gets %d of %d places", n, places)
	}
	if fill(l, heavy) == 0 {
		t.Error("a second principal gets no place")
	}
	for i := range 20 * places { // Loads of both end, and both begin others as soon as they may
		by := heavy
		if i%2 == 0 {
			by = light
		}
		l.leave(by)
		fill(l, heavy)
		fill(l, light)
	}
	if h, n := l.principals["heavy"], l.principals["light"]; h < 27*n/10 || h > 33*n/10 || h+n < places*9/10 {
		t.Errorf("weight 3 has %d places, and weight 1 has %d", h, n)
	}
	for l.principals["light"] > 0 {
		l.leave(light)
	}
	if _, ok := l.principals["light"]; ok {
		t.Error("a principal without Loads is kept")
	}
}

// TestGreedyAtGate: one principal alone has all places and the whole queue of a gate. Its 10,000 calls beyond are refused, and
// so is a waiting one when another principal comes, whose call enters as soon as a place is free.
func TestGreedyAtGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const places = 4
		g := newCallGate(places)
		greedy, other := callerOf("greedy"), callerOf("other")
		var entered, busy, others atomic.Int64
		for range 10_000 {
			go func() {
				switch err := g.enter(t.Context(), greedy, 64<<20); {
				case err == nil:
					entered.Add(1)
				case errors.Is(err, ErrBusy):
					busy.Add(1)
				}
			}()
		}
		synctest.Wait()
		if running, waiting, _ := g.stats(); running != places || waiting != places || busy.Load() != 10_000-2*places {
			t.Errorf("alone: %d run, %d wait, %d are refused", running, waiting, busy.Load())
		}
		go func() {
			if g.enter(t.Context(), other, 64<<20) == nil {
				others.Add(1)
			}
		}()
		synctest.Wait()
		if n, waiting := busy.Load(), g.waitingOf("other"); n != 10_000-2*places+1 || waiting != 1 || others.Load() != 0 {
			t.Errorf("%d calls are refused, %d of the other principal wait", n, waiting)
		}
		g.leave()
		synctest.Wait()
		if entered.Load() != places || others.Load() != 1 {
			t.Errorf("after one has left, %d calls have entered, and %d of the other principal", entered.Load(), others.Load())
		}
		for range 2*places - 1 {
			g.leave()
			synctest.Wait()
		}
		if running, waiting, _ := g.stats(); running != 0 || waiting != 0 || entered.Load() != 2*places-1 {
			t.Errorf("in the end %d run, %d wait, %d have entered", running, waiting, entered.Load())
		}
	})
}

// TestReadBytes: a read counts the layers that it requests, and one that names no pieces counts the whole chain.
func TestReadBytes(t *testing.T) {
	g := kv.Geometry{BlockTokens: 16, Groups: []kv.Group{{Kind: kv.Full, Layers: 4, TokenBytes: 256}}}
	layer, pieces := g.LayerBytes(0), []PieceRef{{}, {Block: 1}}
	for want, req := range map[int64]LoadRequest{
		8 * layer:  {Pieces: pieces},
		6 * layer:  {Pieces: pieces, FirstLayer: 1},
		4 * layer:  {Pieces: pieces, FirstLayer: 1, Layers: 2},
		12 * layer: {IDs: make([]kv.BlockID, 3)},
	} {
		if got := req.bytes(g); got != want || layer == 0 {
			t.Errorf("%+v: %d bytes; want %d", req, got, want)
		}
	}
}

// TestBudget: requests beyond the budget wait and are granted by weight; a large one is granted although smaller ones of another
// principal would fit in its place; one that is given up holds nothing.
func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const unit = 1 << 20
		b := &callGate{gate: newGate(4*unit, 100)}
		small, large := callerOf("small"), callerOf("large")
		var mu sync.Mutex
		var order []string
		acquire := func(ctx context.Context, p fair.Caller, units int64) {
			go func() {
				if b.take(ctx, p, units*unit, units*unit) == nil {
					mu.Lock()
					defer mu.Unlock()
					order = append(order, p.Share.Principal)
				}
			}()
			synctest.Wait()
		}
		expect := func(what string, used int64, want ...string) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if fmt.Sprint(order) != fmt.Sprint(want) || b.queue.Held() != used*unit {
				t.Errorf("%s: granted %v with %d bytes in use; want %v with %d", what, order, b.queue.Held(), want, used*unit)
			}
			order = nil
		}
		for range 4 {
			acquire(t.Context(), small, 1)
		}
		expect("one principal alone", 4, "small", "small", "small", "small")
		acquire(t.Context(), large, 4)
		for range 8 {
			acquire(t.Context(), small, 1)
		}
		if _, ok := b.try(small, 0, 0); ok {
			t.Error("try passes waiting requests")
		}
		for range 3 {
			b.leave()
		}
		expect("while the large request does not fit", 1)
		b.leave()
		expect("when it fits", 4, "large")
		b.leave()
		expect("after it", 4, "small", "small", "small", "small")
		ctx, cancel := context.WithCancel(t.Context())
		acquire(ctx, large, 4)
		for range 3 {
			b.leave()
		}
		expect("while the second large request does not fit", 1)
		cancel()
		expect("after the second large request was given up", 4, "small", "small", "small")
		b.leave()
		expect("the last one", 4, "small")
		for range 4 {
			b.leave()
		}
		if held, waiting, _ := b.stats(); held != 0 || waiting != 0 {
			t.Errorf("in the end %d bytes are in use, %d requests wait", held, waiting)
		}
	})
}

// TestNextEntersAtOnce: a call that comes while a larger call of another principal waits enters at once, if it is the
// next one of the order and its units are free.
func TestNextEntersAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &callGate{gate: newGate(4, 100)}
		if err := b.take(t.Context(), callerOf("large"), 3, 3<<20); err != nil {
			t.Fatal(err)
		}
		large, small := make(chan error, 1), make(chan error, 1)
		go func() { large <- b.take(t.Context(), callerOf("large"), 2, 2<<20) }()
		synctest.Wait()
		go func() { small <- b.take(t.Context(), callerOf("small"), 1, 1<<20) }()
		synctest.Wait()
		if held, waiting, _ := b.stats(); held != 4 || waiting != 1 || len(small) != 1 {
			t.Errorf("%d units are held, %d calls wait", held, waiting)
		}
		b.leave()
		synctest.Wait()
		if len(small) != 1 || len(large) != 1 {
			t.Error("a call waits in a gate with free units")
		}
		b.leave()
		b.leave()
	})
}
