package storage

import (
	"context"
	"slices"
	"sync"
)

// A gate bounds the number of concurrent calls. The same number of further calls may wait; any
// other call is refused at once. Waiting calls enter in the order of their arrival.
type gate struct {
	mu sync.Mutex
	// max is the maximum of running and of the number of waiting calls. Invariant: running <= max,
	// unless setMax has lowered max since the calls entered.
	max, running int
	// waiting has a channel for each call that waits, which is closed when the call may run.
	waiting []chan struct{}
	// empty is nil until the gate is closed; after that no call enters. The channel is closed when
	// no call runs any more.
	empty chan struct{}
}

func newGate(n int) *gate { return &gate{max: n} }

// enter waits until the call may run, and returns nil; the call must then end with leave. It fails
// with ErrBusy if too many calls wait already, and with the error of ctx.
func (g *gate) enter(ctx context.Context) error {
	g.mu.Lock()
	if g.running < g.max && len(g.waiting) == 0 && g.empty == nil {
		g.running++
		g.mu.Unlock()
		return nil
	}
	if len(g.waiting) >= g.max {
		g.mu.Unlock()
		return ErrBusy
	}
	turn := make(chan struct{})
	g.waiting = append(g.waiting, turn)
	g.mu.Unlock()
	select {
	case <-turn:
		return nil
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if i := slices.Index(g.waiting, turn); i >= 0 {
		g.waiting = slices.Delete(g.waiting, i, i+1)
		return ctx.Err()
	}
	g.leaveLocked() // the call was admitted at the same time
	return ctx.Err()
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

// admitLocked admits waiting calls, the longest waiting first, while fewer than max calls run.
func (g *gate) admitLocked() {
	n := 0
	for n < len(g.waiting) && g.running < g.max && g.empty == nil {
		close(g.waiting[n])
		g.running++
		n++
	}
	g.waiting = slices.Delete(g.waiting, 0, n)
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
	return g.running, len(g.waiting), g.max
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
