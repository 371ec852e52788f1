package storage

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/fair"
)

// A lane limits the reads of one volume: the number of Loads that read from the volume, and the
// bytes of arena memory that the device holds while its reads are in flight. So a volume that hangs
// exhausts only its own lane.
type lane struct {
	volume int
	max    atomic.Int64 // bounds loads

	mu sync.Mutex
	// loads counts the Loads that read from the volume or wait for budget. Invariant: loads <= max,
	// unless SetLimits has lowered max since the Loads entered.
	loads int64
	// tenants counts the Loads of each tenant that has any, and principals counts the Loads of each principal. tenants
	// has no Loads of namespaces without a tenant, and principals has no Loads without a principal.
	tenants, principals map[string]int64
	// alone is set if the node has no other volume. Then the gate, which has as many places, divides them among
	// the principals.
	alone bool

	// budget bounds the bytes of arena memory of the reads of the volume that are in flight. The bounds of the
	// Loads and of the units of each (loadDepth) bound its queue.
	budget *gate
}

// newLanes makes a lane for each volume. Their budgets together are three quarters of the arena.
func newLanes(volumes, readsMax int, arenaBytes int64) []*lane {
	lanes := make([]*lane, volumes)
	for i := range lanes {
		bytes := arenaBytes / 4 * 3 / int64(volumes)
		lanes[i] = &lane{volume: i, tenants: make(map[string]int64), principals: make(map[string]int64), alone: volumes == 1, budget: newGate(bytes, math.MaxInt)}
		lanes[i].max.Store(int64(readsMax))
	}
	return lanes
}

// tenantShare is the number of places that a tenant may have for each place that is left free. So a
// tenant alone gets eight ninths of a lane, two tenants get eight seventeenths each, and so on: there
// is room for a tenant that begins to read. A principal has this number times its weight. See
// A. Choudhury, E. Hahne: "Dynamic queue length
// thresholds for shared-memory packet switches" (IEEE/ACM ToN 6(2), 1998), section II, with the
// factor 8.
const tenantShare = 8

// enter adds a Load to the lane; leave removes the Load. enter does not wait: it fails with ErrBusy if the
// lane has max Loads, or if the tenant or the principal has its share of them.
func (l *lane) enter(by fair.Caller) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	free := l.max.Load() - l.loads
	if free <= 0 {
		return fmt.Errorf("%w: %d loads are already reading from volume %d", ErrBusy, l.loads, l.volume)
	}
	if n := l.tenants[by.Tenant]; n >= tenantShare*free {
		return fmt.Errorf("%w: %d loads of this tenant are already reading from volume %d, which has %d places left for other tenants", ErrBusy, n, l.volume, free)
	}
	if n := l.principals[by.Share.Principal]; !l.alone && float64(n) >= tenantShare*by.Share.CurrentWeight()*float64(free) {
		return fmt.Errorf("%w: %d loads of this principal are already reading from volume %d, which has %d places left for other principals", ErrBusy, n, l.volume, free)
	}
	count(l.tenants, by.Tenant, 1)
	count(l.principals, by.Share.Principal, 1)
	l.loads++
	return nil
}

// count adds n to the number of a name, unless the name is empty. It removes a name whose number is 0.
func count(of map[string]int64, name string, n int64) {
	if name == "" {
		return
	}
	if of[name] += n; of[name] == 0 {
		delete(of, name)
	}
}

func (l *lane) leave(by fair.Caller) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.loads--
	count(l.tenants, by.Tenant, -1)
	count(l.principals, by.Share.Principal, -1)
}

// acquire takes bytes from the budget. It waits up to limit, and then fails with ErrBusy. A request
// above the whole budget takes the whole budget.
func (l *lane) acquire(ctx context.Context, by fair.Caller, bytes int64, limit time.Duration) (place, error) {
	bytes = min(bytes, l.budget.limit())
	if p, ok := l.budget.try(by, bytes, bytes); ok {
		return p, nil
	}
	wait, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	p, err := l.budget.enter(wait, by, bytes, bytes)
	switch {
	case err == nil:
		return p, nil
	case ctx.Err() != nil:
		return p, context.Cause(ctx)
	}
	return p, fmt.Errorf("%w: the reads of volume %d did not release enough of their %d bytes of memory within %v", ErrBusy, l.volume, l.budget.limit(), limit)
}

// readSlots reads slots of one volume into arena memory of total bytes. It calls place with that
// memory; place sets the Buf of each read. Without an error the caller releases the hold. readSlots
// fails if there is no budget or memory, if the device has not completed within ReadWait, or if ctx
// ends. After an error the caller must not use the batch, because the device may still write to its
// memory. Until the device completes, that memory counts against the volume's budget.
func (n *Node) readSlots(ctx context.Context, l *lane, by fair.Caller, total int64, batch []blockstore.Read, place func(arena.Buffer)) (*hold, error) {
	limits := n.limits.Load()
	budget, err := l.acquire(ctx, by, total, limits.QueueWait)
	if err != nil {
		return nil, err
	}
	buf, err := n.alloc(ctx, by, total)
	if err != nil {
		budget.leave()
		return nil, err
	}
	place(buf)
	h := newHold(buf)
	done := make(chan error, 1)
	h.retain()
	n.detach(func() {
		err := n.store.Read(ctx, batch)
		h.release()
		budget.leave()
		done <- err
	})
	timer := time.NewTimer(limits.ReadWait)
	defer timer.Stop()
	select {
	case err = <-done:
	case <-timer.C:
		err = fmt.Errorf("volume %d has not completed a read within %v: %w", l.volume, limits.ReadWait, context.DeadlineExceeded)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		h.release()
		return nil, err
	}
	return h, nil
}

// detach runs f, a device request, in a goroutine, because the caller may stop waiting for it.
// Close waits for all requests that were detached before Close.
func (n *Node) detach(f func()) {
	counted := n.detached.TryAcquire(1)
	go func() {
		f()
		if counted {
			n.detached.Release(1)
		}
	}()
}

// laneUse records the lanes that one Load has entered. A Load consists of units, each a batch of
// device reads. It enters the lane of a volume with its first read of the volume, and leaves the
// lane when its last unit on that volume has ended.
type laneUse struct {
	by fair.Caller

	mu    sync.Mutex
	lanes []*lane
	// left counts the units of each volume that have not ended. Invariant: the Load is in no lane
	// of a volume whose left is 0.
	left map[int]int
	// entered maps each volume for whose lane enter was called to the error of enter, or nil.
	entered map[int]error
}

func newLaneUse(by fair.Caller, lanes []*lane) laneUse {
	return laneUse{by: by, lanes: lanes, left: make(map[int]int), entered: make(map[int]error)}
}

// begin enters the lane of a volume, unless the Load has done so before. The Load stays in the lane
// until end was called for each of its units on the volume. begin fails with ErrBusy if the lane is
// full.
func (u *laneUse) begin(volume int) (*lane, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	err, tried := u.entered[volume]
	if !tried {
		err = u.lanes[volume].enter(u.by)
		u.entered[volume] = err
	}
	return u.lanes[volume], err
}

// end records that a unit (a batch of device reads) on the volume has ended.
func (u *laneUse) end(volume int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.left[volume]--
	if err, tried := u.entered[volume]; u.left[volume] == 0 && tried && err == nil {
		u.lanes[volume].leave(u.by)
	}
}
