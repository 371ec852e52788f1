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
				if g.enter(ctx) == nil {
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
		if err := g.enter(t.Context()); !errors.Is(err, ErrBusy) {
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
		if err := g.enter(t.Context()); err != nil {
			t.Fatal(err)
		}
		waiting, giveUp := context.WithCancel(t.Context())
		late, closed := make(chan error, 1), make(chan error, 1)
		go func() { late <- g.enter(waiting) }()
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
		if err := g.enter(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := g.close(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("with a call that runs: %v", err)
		}
		g.leave()
	})
}

// TestGateBound: with calls that give up at random and a bound that changes, never more run than the
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
				if g.enter(ctx) == nil {
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
		if err := g.enter(t.Context()); err != nil {
			t.Errorf("a place was lost: %v", err)
		}
	}
}
