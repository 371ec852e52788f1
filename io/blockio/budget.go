package blockio

import (
	"container/list"
	"context"
	"fmt"
	"sync"
	"time"
)

// BudgetOptions bound the bytes that a device lets be in flight. The zero value
// works; equal MinBytes and MaxBytes fix the limit.
type BudgetOptions struct {
	// MinBytes is the least the limit may become; default 1 MiB. Below two of the
	// largest requests it does not go either, unless MaxBytes is less.
	MinBytes int64
	// MaxBytes is the most; default 256 MiB: 64 reads of 4 MiB keep the
	// deepest NVMe array busy.
	MaxBytes int64
	// StartBytes is the first limit; default 8 MiB, kept inside the bounds.
	StartBytes int64
}

// EnsureDefaults fills the fields that are zero.
func (o *BudgetOptions) EnsureDefaults() {
	if o.MinBytes == 0 {
		o.MinBytes = 1 << 20
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = max(256<<20, o.MinBytes)
	}
	if o.StartBytes == 0 {
		o.StartBytes = min(max(8<<20, o.MinBytes), o.MaxBytes)
	}
}

// Validate says which field cannot be used.
func (o *BudgetOptions) Validate() error {
	if o.MinBytes < Align || o.MaxBytes < o.MinBytes || o.StartBytes < o.MinBytes || o.StartBytes > o.MaxBytes {
		return fmt.Errorf("blockio: in-flight budget of %d to %d bytes starting at %d; want %d <= min <= start <= max",
			o.MinBytes, o.MaxBytes, o.StartBytes, Align)
	}
	return nil
}

// Budget is a semaphore in bytes whose size follows the device: it grows while
// more bytes in flight bring more throughput, and shrinks when fewer bring as
// much, because then they only wait in the device's queue, where they cost
// latency and cannot be reordered (see tuner for the rule). It is first come,
// first served: a large request is not overtaken for ever by small ones. All
// methods may be called concurrently.
type Budget struct {
	mu       sync.Mutex
	tuner    tuner
	start    time.Time
	inFlight int64
	// waiting holds *waiter in order of arrival; each is one blocked caller, so
	// its length is bounded by the callers.
	waiting list.List
}

type waiter struct {
	bytes   int64
	granted chan struct{} // closed under Budget.mu when the bytes are taken
}

// NewBudget returns a Budget, or the reason why opts cannot be used.
func NewBudget(opts BudgetOptions) (*Budget, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	return &Budget{tuner: newTuner(opts), start: time.Now()}, nil
}

// Acquire takes n bytes, waiting its turn until they are free or ctx is done.
// More than the whole limit is admitted once nothing else is in flight. If ctx
// is done nothing is taken and the error is ctx's.
func (b *Budget) Acquire(ctx context.Context, n int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	if b.takeLocked(n) {
		b.mu.Unlock()
		return nil
	}
	w := &waiter{bytes: n, granted: make(chan struct{})}
	place := b.waiting.PushBack(w)
	b.mu.Unlock()
	select {
	case <-w.granted:
		return nil
	case <-ctx.Done():
		return b.giveUp(ctx, w, place)
	}
}

// TryAcquire takes n bytes if that needs no waiting, and reports whether it did.
func (b *Budget) TryAcquire(n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.takeLocked(n)
}

// takeLocked takes n bytes for a newcomer: only if nobody waits.
func (b *Budget) takeLocked(n int64) bool {
	if b.waiting.Len() > 0 || !b.fitsLocked(n) {
		return false
	}
	b.inFlight += n
	return true
}

// giveUp leaves the queue, unless the bytes were granted in the same moment.
func (b *Budget) giveUp(ctx context.Context, w *waiter, place *list.Element) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-w.granted:
		return nil
	default:
	}
	b.waiting.Remove(place)
	b.grantLocked() // w may have been a large one in front of small ones that fit
	return ctx.Err()
}

// Release gives back n bytes whose transfer has completed.
func (b *Budget) Release(n int64) {
	now := time.Since(b.start)
	b.mu.Lock()
	defer b.mu.Unlock()
	used := b.waiting.Len() > 0 || b.inFlight >= b.tuner.limit/4*3
	b.inFlight -= n
	b.tuner.observe(now, n, used)
	b.grantLocked()
}

func (b *Budget) fitsLocked(n int64) bool {
	return b.inFlight == 0 || b.inFlight+n <= b.tuner.limit
}

func (b *Budget) grantLocked() {
	for front := b.waiting.Front(); front != nil; front = b.waiting.Front() {
		w := front.Value.(*waiter)
		if !b.fitsLocked(w.bytes) {
			return
		}
		b.waiting.Remove(front)
		b.inFlight += w.bytes
		close(w.granted)
	}
}

// InFlightBytes returns what is taken now.
func (b *Budget) InFlightBytes() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.inFlight
}

// LimitBytes returns the present limit.
func (b *Budget) LimitBytes() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.tuner.limit
}
