package storage

import (
	"context"
	"sync"
)

// A budget bounds the bytes that are in use at a time. Requests wait in a fairQueue. The next request of its order
// is granted first, also if a smaller request would fit, so that large requests do not starve.
type budget struct {
	size int64

	mu    sync.Mutex
	used  int64 // Invariant: used <= size.
	queue fairQueue
}

func newBudget(size int64) *budget { return &budget{size: size, queue: newFairQueue()} }

// try takes bytes from the budget if no request waits and they fit.
func (b *budget) try(by reader, bytes int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.tryLocked(by, bytes)
}

func (b *budget) tryLocked(by reader, bytes int64) bool {
	if b.queue.waiting > 0 || bytes > b.size-b.used {
		return false
	}
	b.used += bytes
	b.queue.charge(b.queue.flowOf(by.share), bytes)
	return true
}

// acquire takes bytes, at most size, from the budget. It waits until ctx ends, and then fails with the error of ctx.
func (b *budget) acquire(ctx context.Context, by reader, bytes int64) error {
	b.mu.Lock()
	if b.tryLocked(by, bytes) {
		b.mu.Unlock()
		return nil
	}
	t := b.queue.push(by, bytes)
	b.mu.Unlock()
	select {
	case <-t.done:
		return nil
	case <-ctx.Done():
		b.mu.Lock()
		defer b.mu.Unlock()
		if !b.queue.remove(t) {
			b.used -= bytes // the request was granted at the same time
		}
		b.grantLocked() // the next request may need fewer bytes
		return ctx.Err()
	}
}

func (b *budget) release(bytes int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= bytes
	b.grantLocked()
}

// grantLocked grants waiting requests while they fit.
func (b *budget) grantLocked() {
	for t := b.queue.next(); t != nil && t.bytes <= b.size-b.used; t = b.queue.next() {
		b.used += t.bytes
		b.queue.grant(t)
	}
	if b.queue.waiting == 0 && b.used == 0 {
		b.queue.restart()
	}
}
