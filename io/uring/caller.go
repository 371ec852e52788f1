//go:build uring

package uring

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/invariants"
)

// caller is a ring that one goroutine at a time uses. The goroutine submits its batch and sleeps in
// the kernel until the last completion.
type caller struct {
	ring *ring
	env  *env
	// registered is set if env.regions are registered with the ring.
	registered bool
	// ops is the table of requests of the batch in progress. todo has the indices in ops of the
	// requests that are not submitted yet; the last element is submitted next.
	ops  []op
	todo []uint32
	// inFlight counts the entries submitted to the kernel or queued for it.
	inFlight uint32
	// batch is the number of the batch in progress. It is the upper half of each entry's user_data.
	// A completion with the number of another batch would be a bug of the kernel or of this
	// package.
	batch uint32
	// queued has the indices in ops of the queued entries, in order. It is cleared when the kernel
	// has accepted all queued entries.
	queued []uint32
	// broken is the error with which the kernel refused the ring permanently, or nil. If it is set,
	// the goroutine does not enter the kernel again.
	broken error
}

// start makes room for n ops and returns them. The caller starts them.
func (c *caller) start(n int) []op {
	c.ops = resize(c.ops, n)
	c.batch++
	c.todo = c.todo[:0]
	for i := range n {
		c.todo = append(c.todo, uint32(n-1-i))
	}
	return c.ops
}

// run performs the ops. It returns when each has its outcome and none is in flight.
func (c *caller) run() {
	for {
		c.submit()
		if c.inFlight == 0 {
			break
		}
		c.wait()
		c.reap()
	}
	forget(c.ops)
}

// submit queues ops while there are free entries and the budget allows it. If the ring is broken,
// it fails all remaining ops instead.
func (c *caller) submit() {
	if c.ring.unsubmitted() == 0 {
		c.queued = c.queued[:0]
	}
	for len(c.todo) > 0 {
		i := c.todo[len(c.todo)-1]
		if c.broken != nil {
			c.todo = c.todo[:len(c.todo)-1]
			c.ops[i].end(c.broken, c.env)
			continue
		}
		// If nothing of this batch is in flight, only other batches can release budget, so admit
		// waits. Otherwise completions of this batch will release budget.
		if !c.ops[i].admit(c.env, c.inFlight == 0) {
			return
		}
		e := c.ring.next()
		if e == nil {
			return
		}
		c.todo = c.todo[:len(c.todo)-1]
		c.ops[i].prepare(e, c.env, c.registered)
		e.UserData = uint64(c.batch)<<32 | uint64(i)
		c.queued = append(c.queued, i)
		c.inFlight++
	}
}

// wait enters the kernel. A shortage of resources in the kernel ends when completions are taken
// from the queue. After any other error the ring is broken, and the entries that the kernel has not
// accepted fail at once. The accepted entries are awaited, because the kernel uses their buffers.
// wait awaits them without entering the kernel, because entering would submit the other entries.
func (c *caller) wait() {
	if c.broken != nil {
		pause(true)
		return
	}
	err := c.ring.enter(c.waitFor())
	switch {
	case err == nil:
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EBUSY):
		pause(c.inFlight == c.ring.unsubmitted())
	default:
		c.broken = fmt.Errorf("the kernel refused the ring: %w", err)
		c.abandon()
	}
}

// abandon fails the ops whose entries the kernel has not accepted. These are the last entries of
// queued.
func (c *caller) abandon() {
	left := int(c.ring.unsubmitted())
	for _, i := range c.queued[len(c.queued)-left:] {
		c.inFlight--
		c.ops[i].end(c.broken, c.env)
	}
	c.queued = c.queued[:0]
}

// waitFor returns the number of completions to wait for: all if every op is submitted, and
// otherwise half, so that the device does not idle before the next submission.
func (c *caller) waitFor() uint32 {
	if len(c.todo) == 0 {
		return c.inFlight
	}
	return max(1, c.inFlight/2)
}

// reap takes the available completions.
func (c *caller) reap() {
	c.ring.reap(func(userData uint64, res int32) {
		i := uint32(userData)
		if invariants.Enabled {
			invariants.Assert(uint32(userData>>32) == c.batch && int(i) < len(c.ops), "completion %#x in batch %d of %d", userData, c.batch, len(c.ops))
		}
		c.inFlight--
		if !c.ops[i].complete(res, c.env) {
			c.todo = append(c.todo, i)
		}
	})
}

// pause gives the kernel time to recover. idle is set if nothing of this batch is in flight, so
// that there is no completion to wait for.
func pause(idle bool) {
	if idle {
		time.Sleep(100 * time.Microsecond)
		return
	}
	runtime.Gosched()
}

// pool has the idle callers. get takes the last used caller first, because that caller's memory is
// in the CPU caches. The pool creates callers as needed, up to a maximum number.
type pool struct {
	make func() (*caller, error)
	// tickets has one element for each caller that get may still return.
	tickets chan struct{}

	mu   sync.Mutex
	idle []*caller
}

func newPool(n int, makeCaller func() (*caller, error)) *pool {
	p := &pool{make: makeCaller, tickets: make(chan struct{}, n)}
	for range n {
		p.tickets <- struct{}{}
	}
	return p
}

// get returns a caller for exclusive use until put. It waits until a caller is free or ctx is done.
func (p *pool) get(ctx context.Context) (*caller, error) {
	select {
	case <-p.tickets:
	default:
		select {
		case <-p.tickets:
		case <-ctx.Done():
			return nil, fmt.Errorf("uring: wait for one of %d rings: %w", cap(p.tickets), context.Cause(ctx))
		}
	}
	if c := p.pop(); c != nil {
		return c, nil
	}
	c, err := p.make()
	if err != nil {
		p.tickets <- struct{}{}
		return nil, fmt.Errorf("uring: another ring: %w", err)
	}
	return c, nil
}

func (p *pool) pop() *caller {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.idle) == 0 {
		return nil
	}
	c := p.idle[len(p.idle)-1]
	p.idle = p.idle[:len(p.idle)-1]
	return c
}

// put returns a caller to the pool. It closes a broken caller instead.
func (p *pool) put(c *caller) {
	if c.broken != nil {
		c.ring.close()
	} else {
		p.mu.Lock()
		p.idle = append(p.idle, c)
		p.mu.Unlock()
	}
	p.tickets <- struct{}{}
}

// close closes the rings, all of which must have been returned.
func (p *pool) close() {
	for c := p.pop(); c != nil; c = p.pop() {
		c.ring.close()
	}
}
