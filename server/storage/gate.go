package storage

import (
	"context"
	"sync"
)

// A gate bounds the number of concurrent calls. The same number of further calls may wait; the calls
// beyond are refused at once. Principals have shares by weight while calls wait, and the tenants of a
// principal have equal shares:
//
//	         principal a, weight 3   4 3 2 1 ─┐
//	waiting  principal b, weight 1       2 1 ─┼─► fairQueue ─► running (at most max)
//	         principal c, weight 1         1 ─┘
//	           └── when too many wait, the newest call of the principal with the most calls per weight is refused
//
// Calls of one principal and tenant enter in the order of their arrival.
type gate struct {
	mu sync.Mutex
	// max is the maximum of running and of queue.waiting, the numbers of calls. Invariant: running <= max,
	// unless setMax has lowered max since the calls entered.
	max, running int
	queue        fairQueue
	// empty is nil until the gate is closed; after that no call enters. The channel is closed when
	// no call runs any more.
	empty chan struct{}
}

func newGate(n int) *gate { return &gate{max: n, queue: newFairQueue()} }

// enter waits until the call, which reads bytes, may run, and returns nil; the call must then end with
// leave. It fails with ErrBusy if too many calls wait, and with the error of ctx.
func (g *gate) enter(ctx context.Context, by reader, bytes int64) error {
	g.mu.Lock()
	if g.running < g.max && g.queue.waiting == 0 && g.empty == nil {
		g.running++
		g.queue.charge(g.queue.flowOf(by.share), bytes)
		g.mu.Unlock()
		return nil
	}
	if g.queue.waiting >= g.max && !g.queue.refuse(by) {
		g.mu.Unlock()
		return ErrBusy
	}
	t := g.queue.push(by, bytes)
	g.mu.Unlock()
	select {
	case <-t.done:
	case <-ctx.Done():
		g.mu.Lock()
		defer g.mu.Unlock()
		if !g.queue.remove(t) && !t.refused {
			g.leaveLocked() // the call was admitted at the same time
		}
		return ctx.Err()
	}
	if t.refused {
		return ErrBusy
	}
	return nil
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.leaveLocked()
}

func (g *gate) leaveLocked() {
	g.running--
	if g.empty != nil && g.running == 0 {
		close(g.empty)
	}
	g.admitLocked()
}

// admitLocked admits waiting calls while fewer than max calls run.
func (g *gate) admitLocked() {
	for g.queue.waiting > 0 && g.running < g.max && g.empty == nil {
		g.queue.grant(g.queue.next())
		g.running++
	}
	if g.queue.waiting == 0 && g.running == 0 {
		g.queue.restart()
	}
}

// setMax changes the bound. Calls that run or wait stay.
func (g *gate) setMax(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.max = n
	g.admitLocked()
}

// limit returns the bound.
func (g *gate) limit() int {
	_, _, limit := g.stats()
	return limit
}

// stats returns the number of running and of waiting calls, and the bound.
func (g *gate) stats() (running, waiting, limit int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.running, g.queue.waiting, g.max
}

// waitingOf returns the number of waiting calls of a principal.
func (g *gate) waitingOf(principal string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	if f := g.queue.flows[principal]; f != nil {
		return f.waiting
	}
	return 0
}

// close waits for the running calls and admits no further call. It fails only if a call is still
// running when ctx ends. It closes an empty gate even if ctx has ended before. It is called once.
func (g *gate) close(ctx context.Context) error {
	g.mu.Lock()
	g.empty = make(chan struct{})
	if g.running == 0 {
		close(g.empty)
	}
	empty := g.empty
	g.mu.Unlock()
	select {
	case <-empty:
		return nil
	default:
	}
	select {
	case <-empty:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
