package storage_test

import (
	"context"
	"sync/atomic"
	"testing"
)

// watchedContext counts the calls of Done.
type watchedContext struct {
	context.Context
	done atomic.Int32
}

func (c *watchedContext) Done() <-chan struct{} {
	c.done.Add(1)
	return c.Context.Done()
}

// TestHotLoadWaitsForNothing: a Load of hot pieces does not call Done of its context. The context of a
// call over the unix socket starts a goroutine in Done, and a timer on the context wakes a thread.
func TestHotLoadWaitsForNothing(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small)
	ids := chain(ns, 2, 1)
	if _, err := r.put(ns, ids, 0); err != nil {
		t.Fatal(err)
	}
	if _, n := r.load(ns, ids); n != 2 { // the pieces are in the hot set afterwards
		t.Fatalf("%d of 2 blocks", n)
	}
	ctx := &watchedContext{Context: t.Context()}
	if _, n, err := r.tryLoad(ctx, ns, ids); err != nil || n != 2 {
		t.Fatalf("%d of 2 blocks, %v", n, err)
	}
	if n := ctx.done.Load(); n != 0 {
		t.Errorf("the Load called Done %d times", n)
	}
}
