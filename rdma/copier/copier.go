package copier

import (
	"context"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/rdma"
)

// Copier copies between memories that were registered with it. All methods may
// be called concurrently.
type Copier interface {
	// Register makes mem usable as source and destination; opts names device
	// memory, as for an engine. The memory must stay allocated until Close of
	// the Memory has returned. ErrUnsupported for memory that it can't reach.
	Register(mem []byte, opts rdma.RegisterOptions) (Memory, error)
	// Submit starts a batch. It waits for room until ctx ends, or answers
	// ErrBusy at once where b.NoWait is set. A non-nil error: nothing was
	// submitted, Done is not called. b.Spans may be reused when it returns.
	Submit(ctx context.Context, b Batch) error
	// Info says what it is; it does not change.
	Info() Info
	// Close ends what is in flight, with nil or ErrClosed, and returns when the
	// last Done has. It may be called twice.
	Close() error
}

// Memory is a range that a copier reads and writes.
type Memory interface {
	// Len is the size in bytes.
	Len() uint64
	// Close waits until the last Done of a batch that uses the memory has
	// returned. Later batches answer
	// ErrClosed. If ctx ends first, Close may be called again to wait on.
	Close(ctx context.Context) error
}

// Span is one piece of a batch: Len bytes from Src, an offset in the source, to
// Dst, an offset in the destination. The two ranges must not overlap.
type Span struct{ Src, Dst, Len uint64 }

// Batch is copied as a whole.
type Batch struct {
	Src, Dst Memory
	Spans    []Span
	// Done is called when every byte is in place (nil), or the batch has failed.
	// May be nil. It must not block, and submits only with NoWait.
	Done func(error)
	// NoWait answers ErrBusy instead of waiting for room. A batch whose spans
	// have several lengths may then also end with ErrBusy, half done.
	NoWait bool
}

// MaxSpans is the largest number of spans in one batch.
const MaxSpans = rdma.MaxPages

// Copy copies a batch and returns when it has ended; b.Done is not used. ctx
// bounds the wait for room alone: what is under way uses both memories, and is
// waited for. A Plain copies on the goroutine of the caller, who would wait for
// another one otherwise.
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
	// Detail is one line for people.
	Detail string
}

// check returns ErrRange unless every span lies in both memories.
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

// users counts the batches that use a memory. The zero value is open.
type users struct {
	mu     sync.Mutex
	closed bool
	count  int
	idle   chan struct{} // closed when count reaches zero; nil unless waited for
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

// close lets no batch in any more, and waits for those that are.
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

// both enters a batch with two memories, which may be one.
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

// foreign is the error about a memory of another copier.
func foreign(what string) error {
	return fmt.Errorf("copier: the %s was registered with another copier: %w", what, rdma.ErrForeign)
}
