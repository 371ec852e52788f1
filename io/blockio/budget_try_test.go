package blockio

import (
	"testing"
	"testing/synctest"
)

// TestTryAcquire: TryAcquire takes bytes that are free, and never overtakes a waiting caller. Like
// Acquire, it admits a request larger than the limit when nothing else is in flight.
func TestTryAcquire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, err := NewBudget(BudgetOptions{MinBytes: 4 * Align, MaxBytes: 4 * Align})
		if err != nil {
			t.Fatal(err)
		}
		if !b.TryAcquire(3*Align) || b.TryAcquire(2*Align) {
			t.Error("3 of 4 pages must fit, 2 more must not")
		}
		granted := make(chan error)
		go func() { granted <- b.Acquire(t.Context(), 2*Align) }()
		synctest.Wait()
		if b.TryAcquire(Align) {
			t.Error("a page was taken past a caller that waits")
		}
		b.Release(3 * Align)
		if err := <-granted; err != nil {
			t.Fatal(err)
		}
		b.Release(2 * Align)
		if !b.TryAcquire(9 * Align) {
			t.Error("more than the limit was not admitted alone")
		}
		if got := b.InFlightBytes(); got != 9*Align {
			t.Errorf("%d bytes in flight; want 9 pages", got)
		}
		b.Release(9 * Align)
	})
}
