package storage

import (
	"context"
	"sync"

	"github.com/penstock-kv/penstock/internal/fair"
)

// A gate bounds the units that calls hold at a time: the number of concurrent calls, or their bytes. A
// bounded number of further calls may wait; the calls beyond are refused at once. Principals have shares by
// weight while calls wait, and the tenants of a principal have equal shares:
//
//	         principal a, weight 3   4 3 2 1 ─┐
//	waiting  principal b, weight 1       2 1 ─┼─► fair.Queue ─► running (at most max units)
//	         principal c, weight 1         1 ─┘
//	           └── when too many wait, the newest call of the principal with the most calls per weight is refused
//
// Calls of one principal and tenant enter in the order of their arrival. The next call of the order enters
// first, also if a call that needs fewer units would fit, so that large calls do not starve.
type gate struct {
	mu sync.Mutex
	// max is the maximum of queue.Held, in units, and waitMax of queue.Waiting, in calls. Invariant:
	// queue.Held() <= max, unless setMax has lowered max since the calls entered.
	max     int64
	waitMax int
	queue   *fair.Queue
	// empty is nil until the gate is closed; after that no call enters. The channel is closed when
	// no call runs any more.
	empty chan struct{}
}

// A place has the units that a call holds after it has entered a gate. leave must be called once.
type place struct {
	gate  *gate
	flow  *fair.Flow
	units int64
}

func newGate(units int64, waitMax int) *gate {
	return &gate{max: units, waitMax: waitMax, queue: fair.New()}
}

// enter waits until the call, which reads bytes, may hold units, at most max. It fails with ErrBusy if
// too many calls wait, and with the error of ctx.
func (g *gate) enter(ctx context.Context, by fair.Caller, units, bytes int64) (place, error) {
	g.mu.Lock()
	if p, ok := g.tryLocked(by, units, bytes); ok {
		g.mu.Unlock()
		return p, nil
	}
	if g.queue.Waiting() >= g.waitMax && !g.queue.Refuse(by) {
		g.mu.Unlock()
		return place{}, ErrBusy
	}
	t := g.queue.Push(by, units, bytes)
	g.admitLocked() // the call may be the next one, before a larger one that waits
	g.mu.Unlock()
	select {
	case <-t.Done():
	case <-ctx.Done():
		g.mu.Lock()
		defer g.mu.Unlock()
		if !g.queue.Remove(t) && !t.Refused() {
			g.leaveLocked(g.placeOf(t)) // the call was admitted at the same time
		}
		g.admitLocked() // the next call may need fewer units
		return place{}, ctx.Err()
	}
	if t.Refused() {
		return place{}, ErrBusy
	}
	return g.placeOf(t), nil
}

func (g *gate) placeOf(t *fair.Turn) place { return place{gate: g, flow: t.Flow(), units: t.Units} }

// try enters the gate if no call waits and the units are free.
func (g *gate) try(by fair.Caller, units, bytes int64) (place, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.tryLocked(by, units, bytes)
}

func (g *gate) tryLocked(by fair.Caller, units, bytes int64) (place, bool) {
	if g.queue.Waiting() > 0 || units > g.freeLocked() || g.empty != nil {
		return place{}, false
	}
	return place{gate: g, flow: g.queue.Take(by, units, bytes), units: units}, true
}

func (p place) leave() {
	p.gate.mu.Lock()
	defer p.gate.mu.Unlock()
	p.gate.leaveLocked(p)
	p.gate.admitLocked()
}

func (g *gate) leaveLocked(p place) {
	p.flow.Release(p.units)
	if g.empty != nil && g.queue.Held() == 0 {
		close(g.empty)
	}
}

func (g *gate) freeLocked() int64 { return g.max - g.queue.Held() }

// admitLocked admits waiting calls while their units are free.
func (g *gate) admitLocked() {
	for g.empty == nil {
		t := g.queue.Next(g.freeLocked())
		if t == nil || t.Units > g.freeLocked() {
			return
		}
		g.queue.Grant(t)
	}
}

// setMax changes the bounds. Calls that run or wait stay.
func (g *gate) setMax(units int64, waitMax int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.max, g.waitMax = units, waitMax
	g.admitLocked()
}

// limit returns the maximum number of units.
func (g *gate) limit() int64 {
	_, _, limit := g.stats()
	return limit
}

// stats returns the number of units that are held, the number of waiting calls, and the maximum number of
// units.
func (g *gate) stats() (held int64, waiting int, limit int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.queue.Held(), g.queue.Waiting(), g.max
}

// waitingOf returns the number of waiting calls of a principal.
func (g *gate) waitingOf(principal string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	waiting, _ := g.queue.Of(principal)
	return waiting
}

// close waits for the running calls and admits no further call. It fails only if a call is still
// running when ctx ends. It closes an empty gate even if ctx has ended before. It is called once.
func (g *gate) close(ctx context.Context) error {
	g.mu.Lock()
	g.empty = make(chan struct{})
	if g.queue.Held() == 0 {
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
