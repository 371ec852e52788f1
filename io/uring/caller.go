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

// caller is a ring that one goroutine at a time drives: it submits its batch and
// sleeps in the kernel until the last completion.
type caller struct {
	ring *ring
	env  *env
	// registered is whether the ring knows env.regions.
	registered bool
	// ops is the table of requests of the batch that runs; todo are the indices
	// of those to be submitted, the next one last.
	ops  []op
	todo []uint32
	// inFlight counts the entries handed to the kernel or about to be.
	inFlight uint32
	// batch numbers the batches, in the upper half of user_data: a completion
	// of another batch would be a bug in the kernel or here.
	batch uint32
	// handed are the ops of the entries handed to the ring since the kernel last
	// took all of them, in order.
	handed []uint32
	// broken is why the kernel refused the ring for good, if it did: the kernel
	// is not entered with it again.
	broken error
}

// start makes room for n ops and returns them, to be started by the caller.
func (c *caller) start(n int) []op {
	c.ops = resize(c.ops, n)
	c.batch++
	c.todo = c.todo[:0]
	for i := range n {
		c.todo = append(c.todo, uint32(n-1-i))
	}
	return c.ops
}

// run performs the ops and returns when every one has its outcome and none is in
// flight any more.
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

// submit hands as many ops to the ring as there are entries, and as the budget
// allows; a broken ring takes none.
func (c *caller) submit() {
	if c.ring.unsubmitted() == 0 {
		c.handed = c.handed[:0]
	}
	for len(c.todo) > 0 {
		i := c.todo[len(c.todo)-1]
		if c.broken != nil {
			c.todo = c.todo[:len(c.todo)-1]
			c.ops[i].end(c.broken, c.env)
			continue
		}
		// With nothing in flight, only others can make room in the budget; else
		// completions of our own will.
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
		c.handed = append(c.handed, i)
		c.inFlight++
	}
}

// wait enters the kernel. A shortage there passes once completions are reaped.
// After any other error the ring is broken: the entries that the kernel has not
// taken fail now, and those that it has are waited for without entering again
// (which would submit the rest), since their buffers are in its hands.
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

// abandon fails the ops whose entries the kernel has not taken: the last ones.
func (c *caller) abandon() {
	left := int(c.ring.unsubmitted())
	for _, i := range c.handed[len(c.handed)-left:] {
		c.inFlight--
		c.ops[i].end(c.broken, c.env)
	}
	c.handed = c.handed[:0]
}

// waitFor returns how many completions to wait for: all of the last step; half of
// an earlier one, so that the device does not run dry between steps.
func (c *caller) waitFor() uint32 {
	if len(c.todo) == 0 {
		return c.inFlight
	}
	return max(1, c.inFlight/2)
}

// reap takes the completions that are there.
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

// pause gives the kernel time to recover; if idle, nothing of ours is in flight
// whose completion could be waited for instead.
func pause(idle bool) {
	if idle {
		time.Sleep(100 * time.Microsecond)
		return
	}
	runtime.Gosched()
}

// pool lends callers, the one used last first, because its memory is in the
// caches; it makes them as needed, up to its bound.
type pool struct {
	make func() (*caller, error)
	// tickets holds one for each caller that may be lent.
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

// get lends a caller; it waits for one, or for ctx.
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

// put takes a caller back; a broken one is closed.
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

// close closes the rings, all of which have been put back.
func (p *pool) close() {
	for c := p.pop(); c != nil; c = p.pop() {
		c.ring.close()
	}
}
