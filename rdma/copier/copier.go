package copier

import (
	"context"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/rdma"
)

// Copier copies between memories that were registered with it. All methods may be called
// concurrently.
type Copier interface {
	// Register makes mem usable as source and destination. opts describes device memory as in
	// rdma.Engine.Register. The memory must stay allocated until Close of the Memory has returned.
	// Register returns ErrUnsupported for memory that the copier cannot access.
	Register(mem []byte, opts rdma.RegisterOptions) (Memory, error)
	// Submit starts a batch. If the queue is full it waits until ctx ends; with b.NoWait it
	// returns ErrBusy immediately. After an error nothing was submitted and Done is not called.
	// b.Spans may be reused when Submit returns.
	Submit(ctx context.Context, b Batch) error
	// Info returns a description of the copier, which does not change.
	Info() Info
	// Close ends the batches in flight, with nil or ErrClosed. It returns after the last Done has
	// returned. It may be called twice.
	Close() error
}

// Memory is a range that a copier can read and write.
type Memory interface {
	// Len is the size in bytes.
	Len() uint64
	// Close waits until no batch uses the memory and the Done of each such batch has returned.
	// Later batches fail with ErrClosed. If ctx ends first, Close may be called again to continue
	// waiting.
	Close(ctx context.Context) error
}

// Span is one part of a batch: a copy of Len bytes from the offset Src in the source to the offset
// Dst in the destination. The two ranges must not overlap.
type Span struct{ Src, Dst, Len uint64 }

// Batch is a set of copies with one completion.
type Batch struct {
	Src, Dst Memory
	Spans    []Span
	// Done is called with nil when every byte is in place, or with an error when the batch has
	// failed. It may be nil. It must not block, and may submit only with NoWait.
	Done func(error)
	// NoWait makes Submit return ErrBusy instead of waiting for a place in the queue. A batch
	// whose spans have different lengths may then also end with ErrBusy after a part of it was
	// copied.
	NoWait bool
	// After, if set, is a mark of the same DeviceCopier, not closed before Submit has returned. The
	// copies begin when the work before the mark is done. Submit does not wait for that.
	After Mark
}

// MaxSpans is the largest number of spans in one batch.
const MaxSpans = rdma.MaxPages

// Copy copies a batch and returns when the batch has ended. It ignores b.Done. ctx bounds only the
// wait for a place in the queue: Copy waits for a started batch, because the batch uses both
// memories. A Plain copies on the caller's goroutine, because the caller would otherwise only wait
// for another goroutine.
func Copy(ctx context.Context, c Copier, b Batch) error {
	if p, ok := c.(*Plain); ok {
		return p.copyHere(b)
	}
	f := rdma.NewFlag()
	b.Done = f.Set
	if err := c.Submit(ctx, b); err != nil {
		return err
	}
	return f.Wait(context.WithoutCancel(ctx))
}

// Info describes a copier.
type Info struct {
	// Kind is nic, cuda or plain.
	Kind string
	// Detail is a one-line description for logs and status.
	Detail string
}

// check returns ErrRange unless every span is within both memories.
func (b *Batch) check() error {
	if len(b.Spans) > MaxSpans {
		return fmt.Errorf("copier: batch of %d spans, at most %d: %w", len(b.Spans), MaxSpans, rdma.ErrRange)
	}
	src, dst := b.Src.Len(), b.Dst.Len()
	for i, s := range b.Spans {
		if s.Src > src || s.Len > src-s.Src {
			return fmt.Errorf("copier: span %d takes [%d, +%d) of a source of %d bytes: %w", i, s.Src, s.Len, src, rdma.ErrRange)
		}
		if s.Dst > dst || s.Len > dst-s.Dst {
			return fmt.Errorf("copier: span %d goes to [%d, +%d) of a destination of %d bytes: %w", i, s.Dst, s.Len, dst, rdma.ErrRange)
		}
	}
	return nil
}

// users counts the batches that use a memory. The zero value is not closed: it accepts batches.
type users struct {
	mu     sync.Mutex
	closed bool
	count  int
	idle   chan struct{} // closed when count reaches zero; nil unless close waits
}

func (u *users) add() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closed {
		return fmt.Errorf("copier: memory: %w", rdma.ErrClosed)
	}
	u.count++
	return nil
}

func (u *users) done() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.count--
	if u.count == 0 && u.idle != nil {
		close(u.idle)
		u.idle = nil
	}
}

// close makes add fail and waits until no batch uses the memory.
func (u *users) close(ctx context.Context) error {
	u.mu.Lock()
	u.closed = true
	if u.count == 0 {
		u.mu.Unlock()
		return nil
	}
	if u.idle == nil {
		u.idle = make(chan struct{})
	}
	idle := u.idle
	u.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("copier: close memory: batches use it: %w", ctx.Err())
	}
}

// both adds a batch to the users of its source and of its destination, which may be the same
// memory.
func both(src, dst *users) error {
	if err := src.add(); err != nil {
		return err
	}
	if err := dst.add(); err != nil {
		src.done()
		return err
	}
	return nil
}

// foreign returns the error for a memory of another copier.
func foreign(what string) error {
	return fmt.Errorf("copier: the %s was registered with another copier: %w", what, rdma.ErrForeign)
}
