package storage

import (
	"context"
	"slices"
	"sync"
)

// A gate bounds the number of concurrent calls. The same number of further calls may wait; the calls
// beyond are refused at once. Tenants have equal shares while calls wait:
//
//	         tenant a  4 3 2 1 ─┐
//	waiting  tenant b        1 ─┼─► one call of each tenant in turn ─► running (at most max)
//	         tenant c      2 1 ─┘
//	           └── when too many wait, the newest call of the longest queue is refused
//
// Calls of one tenant enter in the order of their arrival.
type gate struct {
	mu sync.Mutex
	// max is the maximum of running and of waiting, the numbers of calls. Invariant: running <= max,
	// unless setMax has lowered max since the calls entered.
	max, running, waiting int
	// queues has the waiting calls of each tenant, the longest waiting first. turns has the tenants with
	// waiting calls, the one whose call enters next first.
	queues map[string][]*turn
	turns  []string
	// empty is nil until the gate is closed; after that no call enters. The channel is closed when
	// no call runs any more.
	empty chan struct{}
}

// turn is a call that waits. done is closed when the call was admitted, or refused in favour of a
// tenant with fewer waiting calls.
type turn struct {
	done    chan struct{}
	refused bool
}

func newGate(n int) *gate { return &gate{max: n, queues: make(map[string][]*turn)} }

// enter waits until the call may run, and returns nil; the call must then end with leave. It fails
// with ErrBusy if too many calls wait, and with the error of ctx.
func (g *gate) enter(ctx context.Context, tenant string) error {
	g.mu.Lock()
	if g.running < g.max && g.waiting == 0 && g.empty == nil {
		g.running++
		g.mu.Unlock()
		return nil
	}
	if g.waiting >= g.max && !g.refuseLongestLocked(len(g.queues[tenant])+1) {
		g.mu.Unlock()
		return ErrBusy
	}
	t := &turn{done: make(chan struct{})}
	g.pushLocked(tenant, t)
	g.mu.Unlock()
	select {
	case <-t.done:
	case <-ctx.Done():
		g.mu.Lock()
		defer g.mu.Unlock()
		if i := slices.Index(g.queues[tenant], t); i >= 0 {
			g.removeLocked(tenant, i)
		} else if !t.refused {
			g.leaveLocked() // the call was admitted at the same time
		}
		return ctx.Err()
	}
	if t.refused {
		return ErrBusy
	}
	return nil
}

func (g *gate) pushLocked(tenant string, t *turn) {
	if len(g.queues[tenant]) == 0 {
		g.turns = append(g.turns, tenant)
	}
	g.queues[tenant] = append(g.queues[tenant], t)
	g.waiting++
}

// removeLocked removes a call from a tenant's queue.
func (g *gate) removeLocked(tenant string, i int) *turn {
	t := g.queues[tenant][i]
	g.queues[tenant] = slices.Delete(g.queues[tenant], i, i+1)
	if len(g.queues[tenant]) == 0 {
		delete(g.queues, tenant)
		g.turns = slices.DeleteFunc(g.turns, func(other string) bool { return other == tenant })
	}
	g.waiting--
	return t
}

// refuseLongestLocked refuses the newest call of the longest queue, if that queue has more than above
// calls.
func (g *gate) refuseLongestLocked(above int) bool {
	longest, found := "", false
	for _, tenant := range g.turns {
		if n := len(g.queues[tenant]); n > above {
			above, longest, found = n, tenant, true
		}
	}
	if !found {
		return false
	}
	t := g.removeLocked(longest, above-1)
	t.refused = true
	close(t.done)
	return true
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
	for g.waiting > 0 && g.running < g.max && g.empty == nil {
		tenant := g.turns[0]
		g.turns = append(g.turns[1:], tenant) // its next call waits for the other tenants
		close(g.removeLocked(tenant, 0).done)
		g.running++
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
	return g.running, g.waiting, g.max
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
