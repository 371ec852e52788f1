package storage

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/semaphore"
)

// TestTurnCanBeGivenUp: a writer that waits for another writer's eviction returns when its context
// ends, or as Busy after QueueWait. If roomWaiters writers wait already, it is Busy at once.
func TestTurnCanBeGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limits := Limits{QueueWait: 2 * time.Second}
		n := &Node{}
		n.limits.Store(&limits)
		r := roomMaker{node: n, turn: semaphore.NewWeighted(roomAlone)}
		if err := r.wait(t.Context(), r.turn, roomAlone); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		cancelled, late := make(chan error, 1), make(chan error, roomWaiters)
		go func() { cancelled <- r.wait(ctx, r.turn, roomAlone) }()
		for range roomWaiters - 1 {
			go func() { late <- r.wait(t.Context(), r.turn, 1) }()
		}
		synctest.Wait()
		if err := r.wait(t.Context(), r.turn, 1); !errors.Is(err, ErrBusy) || time.Since(start) != 0 {
			t.Errorf("behind %d waiters: %v after %v; want Busy at once", roomWaiters, err, time.Since(start))
		}
		cancel()
		if err := <-cancelled; !errors.Is(err, context.Canceled) || time.Since(start) != 0 {
			t.Errorf("cancelled: %v after %v", err, time.Since(start))
		}
		for range roomWaiters - 1 {
			if err := <-late; !errors.Is(err, ErrBusy) || time.Since(start) != limits.QueueWait {
				t.Fatalf("%v after %v; want Busy after %v", err, time.Since(start), limits.QueueWait)
			}
		}
		r.turn.Release(roomAlone)
		if err := r.wait(t.Context(), r.turn, roomAlone); err != nil {
			t.Errorf("after all have gone: %v", err)
		}
		r.turn.Release(roomAlone)
	})
}
