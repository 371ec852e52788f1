package blockio

import (
	"container/list"
	"context"
	"fmt"
	"sync"
	"time"
)

// BudgetOptions are the limits of a Budget, the adaptive limit of the bytes in flight of a device.
// The zero value works. If MinBytes and MaxBytes are equal, the limit is fixed.
type BudgetOptions struct {
	// MinBytes is the lower bound of the limit; default 1 MiB. The limit is also at least twice the
	// size of the largest request, unless MaxBytes is less.
	MinBytes int64
	// MaxBytes is the upper bound of the limit; default 256 MiB. That is 64 reads of 4 MiB, enough
	// to keep the deepest NVMe array busy.
	MaxBytes int64
	// StartBytes is the first limit; default 8 MiB, clamped to the bounds.
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

// Validate reports the first invalid field.
func (o *BudgetOptions) Validate() error {
	if o.MinBytes < Align || o.MaxBytes < o.MinBytes || o.StartBytes < o.MinBytes || o.StartBytes > o.MaxBytes {
		return fmt.Errorf("blockio: in-flight budget of %d to %d bytes starting at %d; want %d <= min <= start <= max",
			o.MinBytes, o.MaxBytes, o.StartBytes, Align)
	}
	return nil
}

// Budget is a semaphore in bytes whose limit adapts to the device. The limit grows while more bytes
// in flight increase the throughput. It shrinks if fewer bytes give the same throughput: the
// surplus would only wait in the queue of the device, where it adds latency and cannot be reordered
// (tuner has the rule). Waiting requests are served in order of arrival, so small requests do not
// starve a large one. All methods may be called concurrently.
type Budget struct {
	mu       sync.Mutex
	tuner    tuner
	start    time.Time
	inFlight int64
	// waiting holds a *waiter for each blocked caller, in order of arrival.
	waiting list.List
}

type waiter struct {
	bytes   int64
	granted chan struct{} // closed under Budget.mu when the bytes are taken
}

// NewBudget returns a Budget, or an error for invalid opts.
func NewBudget(opts BudgetOptions) (*Budget, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	return &Budget{tuner: newTuner(opts), start: time.Now()}, nil
}

// Acquire takes n bytes from the budget. It waits, in order of arrival, until they are free or ctx
// is done. A request larger than the limit is admitted when nothing else is in flight. If ctx is
// done, Acquire takes nothing and returns ctx's error.
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

// TryAcquire takes n bytes if they are free, without waiting. It reports whether it took them.
func (b *Budget) TryAcquire(n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.takeLocked(n)
}

// takeLocked takes n bytes for a new request if no other request waits and the bytes are free.
func (b *Budget) takeLocked(n int64) bool {
	if b.waiting.Len() > 0 || !b.fitsLocked(n) {
		return false
	}
	b.inFlight += n
	return true
}

// giveUp is called when ctx has ended while w waits. It removes w from the queue and returns ctx's
// error. If the bytes were granted at the same moment, w keeps them and giveUp returns nil.
func (b *Budget) giveUp(ctx context.Context, w *waiter, place *list.Element) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-w.granted:
		return nil
	default:
	}
	b.waiting.Remove(place)
	b.grantLocked() // w may have been too large to fit, and the requests behind it may fit
	return ctx.Err()
}

// Release returns n bytes whose transfer has completed.
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

// InFlightBytes returns the bytes taken now.
func (b *Budget) InFlightBytes() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.inFlight
}

// LimitBytes returns the current limit.
func (b *Budget) LimitBytes() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.tuner.limit
}
