package binding

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/lab/testnode"
)

// TestLeasesThatEnd: the handles of leases that are not released are bounded by the leases that last, and
// a lease that is renewed stays.
func TestLeasesThatEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLibrary()
		s := &Store{library: l}
		kept := &Lease{store: s}
		l.addLease(kept, time.Second)
		for range 10 * sweepMin {
			l.renewed(kept, time.Second)
			l.addLease(&Lease{store: s}, time.Second)
			<-time.After(time.Second) // of the bubble's time: each lease ends then
		}
		if n := len(l.open); n > sweepMin || n != l.leases {
			t.Errorf("%d handles, %d leases; want at most %d", n, l.leases, sweepMin)
		}
		if _, err := l.Lease(kept.handle); err != nil {
			t.Errorf("a renewed lease: %v", err)
		}
		l.removeOf(s)
		if len(l.open) != 0 || l.leases != 0 {
			t.Errorf("%d handles, %d leases after the store was closed", len(l.open), l.leases)
		}
	})
}

// TestHandlesOfCallsDuringClose: a call that ends during Close leaves no handle.
func TestHandlesOfCallsDuringClose(t *testing.T) {
	r := newRig(t, testnode.Start(t, testnode.Options{}).Addr)
	if err := r.store.begin(); err != nil { // a match with a lease
		t.Fatal(err)
	}
	closed := make(chan error)
	go func() { closed <- r.store.Close() }()
	<-r.store.ctx.Done()
	r.library.addLease(&Lease{store: r.store}, time.Minute)
	r.store.calls.Done()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if n := len(r.library.open); n != 0 {
		t.Errorf("%d handles are left", n)
	}
}
