package peers

import (
	"context"
	"sync"
)

// Turns lets one caller proceed at a time for each key, so that callers that connect to one
// address share a session. The zero value is ready.
type Turns[K comparable] struct {
	mu   sync.Mutex
	busy map[K]chan struct{}
}

// Take waits until no other caller holds the key, and returns a function that releases the key. If
// ctx has ended it returns the error of ctx, even if the key is free.
func (t *Turns[K]) Take(ctx context.Context, k K) (giveUp func(), _ error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		t.mu.Lock()
		before := t.busy[k]
		if before == nil {
			if t.busy == nil {
				t.busy = make(map[K]chan struct{})
			}
			mine := make(chan struct{})
			t.busy[k] = mine
			t.mu.Unlock()
			return sync.OnceFunc(func() {
				t.mu.Lock()
				delete(t.busy, k)
				t.mu.Unlock()
				close(mine)
			}), nil
		}
		t.mu.Unlock()
		select {
		case <-before:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
