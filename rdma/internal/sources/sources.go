// Package sources counts the operations that read from a region, so that its Close can wait for
// them. Writes into a region are not counted here; windows handle them.
//
//	Acquire ─► reads from the region ─► Release
//	Close: no Acquire succeeds from here on ─► Wait: returns with the last Release
//
// Lock order: the mutex is a leaf.
package sources

import (
	"context"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/rdma"
)

// Readers counts the operations that read from one region. The zero value counts none.
type Readers struct {
	mu     sync.Mutex
	closed bool
	count  int
	// idle, if set, is closed when count reaches zero.
	idle chan struct{}
}

// Acquire adds an operation. It returns ErrClosed after Close.
func (r *Readers) Acquire() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return fmt.Errorf("rdma: write from a region: %w", rdma.ErrClosed)
	}
	r.count++
	return nil
}

// Release removes an operation that Acquire added.
func (r *Readers) Release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count--
	if r.count == 0 && r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
}

// Close makes later calls of Acquire fail. It may be called again.
func (r *Readers) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
}

// Wait returns nil when no operation is left. If ctx ends first, it returns the error of ctx.
func (r *Readers) Wait(ctx context.Context) error {
	r.mu.Lock()
	if r.count == 0 {
		r.mu.Unlock()
		return nil
	}
	if r.idle == nil {
		r.idle = make(chan struct{})
	}
	idle := r.idle
	r.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("rdma: close region: writes from it are in flight: %w", ctx.Err())
	}
}
