package storage

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// TestGateOrder: calls beyond the bound wait, enter in the order of their arrival, and are refused if
// as many wait. A higher bound admits waiting calls, and a lower one admits none until fewer run.
func TestGateOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(2)
		var mu sync.Mutex
		var entered []int
		enter := func(ctx context.Context, id int) {
			go func() {
				if g.enter(ctx, reader{}, 1) == nil {
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
		if err := g.enter(t.Context(), reader{}, 1); !errors.Is(err, ErrBusy) {
			t.Errorf("behind two calls that wait: %v", err)
		}
		cancel() // the call that waits longest gives up
		want(1, 2)
		g.leave()
		want(1, 2, 4)
		enter(t.Context(), 5)
		enter(t.Context(), 6)
		g.setMax(3)
		want(1, 2, 4, 5)
		g.setMax(1)
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
		if err := newGate(1).close(ended); err != nil {
			t.Errorf("an empty gate: %v", err)
		}
		g := newGate(1)
		if err := g.enter(t.Context(), reader{}, 1); err != nil {
			t.Fatal(err)
		}
		waiting, giveUp := context.WithCancel(t.Context())
		late, closed := make(chan error, 1), make(chan error, 1)
		go func() { late <- g.enter(waiting, reader{}, 1) }()
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

		g = newGate(1)
		if err := g.enter(t.Context(), reader{}, 1); err != nil {
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
	g := newGate(most)
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
					g.setMax(1 + rng.IntN(most))
					running.Add(-1)
					g.leave()
				}
				cancel()
			}
		})
	}
	wg.Wait()
	g.setMax(most)
	for range most {
		if err := g.enter(t.Context(), reader{}, 1); err != nil {
			t.Errorf("a place was lost: %v", err)
		}
	}
}

// anyReader returns one of nine readers of three principals.
func anyReader(rng *rand.Rand) reader {
	name := func() string { return string('a' + rune(rng.IntN(3))) }
	return reader{share: Share{Principal: name()}, tenant: name()}
}

// TestGateShares: a tenant whose calls wait gets every second place, however many calls of another
// tenant wait before its own.
func TestGateShares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 16
		g := newGate(most)
		entered := make(map[string]int)
		refused := make(map[string]int)
		var mu sync.Mutex
		enter := func(tenant string, n int) {
			for range n {
				go func() {
					err := g.enter(t.Context(), reader{tenant: tenant}, 1<<20)
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
		f := g.queue.flows[""]
		if a, b, c := len(f.queues["a"]), len(f.queues["b"]), len(f.queues["c"]); waiting != most || a != 4 || b != 6 || c != 6 {
			t.Errorf("%d calls wait: %d of a, %d of b, %d of c", waiting, a, b, c)
		}
		for range waiting {
			g.leave()
		}
		expect("entered in the end", entered, most+12, 10, 6)
		for range most {
			g.leave()
		}
		if running, waiting, _ := g.stats(); running != 0 || waiting != 0 || f.waiting != 0 || len(f.turns) != 0 || len(f.queues) != 0 {
			t.Errorf("%d run, %d wait, turns %v, queues %v", running, waiting, f.turns, f.queues)
		}
	})
}

// TestLaneShares: one tenant does not fill a lane, and several tenants that want more have equal parts
// of it. Loads of namespaces without a tenant may fill it.
func TestLaneShares(t *testing.T) {
	fill := func(l *lane, tenant string) (n int64) {
		for l.enter(reader{tenant: tenant}) == nil {
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
			l.leave(reader{tenant: "a"})
		} else {
			l.leave(reader{tenant: "b"})
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
	if err := l.enter(reader{tenant: "c"}); !errors.Is(err, ErrBusy) {
		t.Errorf("a full lane: %v", err)
	}
	for l.tenants["a"] > 0 {
		l.leave(reader{tenant: "a"})
	}
	if _, ok := l.tenants["a"]; ok {
		t.Error("a tenant without Loads is kept")
	}
}

// TestLaneWeights: on a node with several volumes a principal alone leaves some places of a lane free, and principals that
// want more have places by weight. On a node with one volume the gate divides the places, so a
// principal alone may have all.
func TestLaneWeights(t *testing.T) {
	heavy := reader{share: Share{Principal: "heavy", Weight: func() int { return 3 }}}
	light := reader{share: Share{Principal: "light"}}
	fill := func(l *lane, by reader) (n int64) {
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
