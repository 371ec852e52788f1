package storage_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/penstock-kv/penstock/server/storage"
)

// TestSetLimits: each limit applies to the calls that begin after it was set. Leases, reservations
// and loans that were granted before stay. The error of CheckLimits names the refused limit.
func TestSetLimits(t *testing.T) {
	now := time.Unix(1000, 0)
	r := newRig(t, rigOptions{now: func() time.Time { return now }})
	ns := r.namespace("m", small)
	limits := storage.Limits{
		ReadsMax: 1, ReservationsMax: 2, LeasesMax: 2, LeaseTTLMax: time.Minute, ReservationTTL: time.Minute,
		QueueWait: time.Second, ReadWait: time.Second, LoanBytesMax: 1 << 20,
	}
	set := func(edit func(*storage.Limits)) {
		t.Helper()
		edit(&limits)
		if err := r.node.CheckLimits(limits); err != nil {
			t.Fatal(err)
		}
		r.node.SetLimits(limits)
	}
	reserve := func(seed int) (*storage.Reservation, error) {
		return r.node.Reserve(t.Context(), storage.ReserveRequest{Namespace: "m", Geometry: small.Digest(), IDs: chain(ns, 1, seed)})
	}
	ids := chain(ns, 1, 50)
	r.mustPut(ns, ids)
	leased := func() bool {
		_, m, err := r.node.Match(storage.MatchRequest{Namespace: "m", IDs: ids, TTL: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		return m.Lease != 0
	}

	set(func(*storage.Limits) {})
	first, err := reserve(1)
	if err != nil || !first.Expires.Equal(now.Add(time.Minute)) {
		t.Fatalf("the reservation expires %v: %v", first.Expires, err)
	}
	set(func(l *storage.Limits) { l.ReservationsMax, l.ReservationTTL = 1, time.Hour })
	if _, err := reserve(2); !errors.Is(err, storage.ErrBusy) {
		t.Errorf("a second reservation at a limit of 1: %v", err)
	}
	set(func(l *storage.Limits) { l.ReservationsMax = 2 })
	if second, err := reserve(2); err != nil || !second.Expires.Equal(now.Add(time.Hour)) {
		t.Errorf("a second reservation at a limit of 2: %v", err)
	}
	if err := r.node.Abort(first.ID); err != nil {
		t.Errorf("the reservation from before the changes: %v", err)
	}

	for n, want := range []bool{true, true, false} {
		if leased() != want {
			t.Errorf("lease %d at a limit of 2 is granted: %v", n, !want)
		}
	}
	set(func(l *storage.Limits) { l.LeasesMax, l.LeaseTTLMax = 3, time.Second })
	for n, want := range []bool{true, false} {
		if leased() != want {
			t.Errorf("lease %d at a limit of 3 is granted: %v", n+2, !want)
		}
	}
	if got := r.node.LeaseTTL(time.Hour); got != time.Second {
		t.Errorf("the longest lease is %v", got)
	}

	part := func() (release func(), err error) {
		_, loadErr := r.node.Load(t.Context(), storage.LoadRequest{Namespace: "m", IDs: ids, Keep: true}, func(_ context.Context, parts []storage.Part) {
			for i := range parts {
				release, err = parts[i].Keep()
				parts[i].Done(nil)
			}
		})
		return release, errors.Join(err, loadErr)
	}
	release, err := part()
	if err != nil {
		t.Fatal(err)
	}
	set(func(l *storage.Limits) { l.LoanBytesMax = 1 })
	if _, err := part(); !errors.Is(err, storage.ErrBusy) {
		t.Errorf("a loan at a limit of 1 B: %v", err)
	}
	release()
	set(func(l *storage.Limits) { l.LoanBytesMax = 0 }) // the default
	if release, err = part(); err != nil {
		t.Errorf("a loan at the default limit: %v", err)
	} else {
		release()
	}

	// The volumes of the rig have no floor, and less free space than this one.
	set(func(l *storage.Limits) { l.ReservationsMax, l.FreeFloorBytes = 10, 1<<60 })
	if _, err := reserve(3); !errors.Is(err, storage.ErrReadOnly) {
		t.Errorf("a reservation below the floor: %v", err)
	}
	set(func(l *storage.Limits) { l.FreeFloorBytes = 0 })
	if _, err := reserve(3); err != nil {
		t.Errorf("a reservation without a floor: %v", err)
	}

	for name, edit := range map[string]func(*storage.Limits){
		"ReservationsMax":       func(l *storage.Limits) { l.ReservationsMax = 0 },
		"LeasesMax":             func(l *storage.Limits) { l.LeasesMax = 1<<24 + 1 },
		"LeaseTTLMax":           func(l *storage.Limits) { l.LeaseTTLMax = 0 },
		"ReservationTTL":        func(l *storage.Limits) { l.ReservationTTL = -1 },
		"QueueWait":             func(l *storage.Limits) { l.QueueWait = 0 },
		"ReadWait":              func(l *storage.Limits) { l.ReadWait = 0 },
		"FreeFloorBytes":        func(l *storage.Limits) { l.FreeFloorBytes = -1 },
		"ScrubBytesPerSecond":   func(l *storage.Limits) { l.ScrubBytesPerSecond = -1 },
		"RewriteBytesPerSecond": func(l *storage.Limits) { l.RewriteBytesPerSecond = -1 },
		"LoanBytesMax":          func(l *storage.Limits) { l.LoanBytesMax = 1 << 50 },
	} {
		bad := limits
		edit(&bad)
		if err := r.node.CheckLimits(bad); err == nil {
			t.Errorf("CheckLimits accepts a bad %s", name)
		}
	}
}

// TestScrubberFollowsItsRate: a scrubber that is off scrubs once it gets a rate. A scrubber between two
// passes, which are minutes apart, begins the next pass when its rate changes.
func TestScrubberFollowsItsRate(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small)
	r.mustPut(ns, chain(ns, 1, 1))
	late := time.NewTimer(time.Minute) // only a scrubber that stays off reaches it
	defer late.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for pass := 1.0; pass <= 3; pass++ {
		r.node.SetLimits(storage.Limits{
			ReadsMax: 1, ReservationsMax: 2, LeasesMax: 2, LeaseTTLMax: time.Minute, ReservationTTL: time.Minute, QueueWait: time.Second, ReadWait: time.Second,
			ScrubBytesPerSecond: int64(pass) << 30,
		})
		for testutil.ToFloat64(r.stats.ScrubbedBlocks) < pass {
			select {
			case <-late.C:
				t.Fatalf("pass %v did not begin", pass)
			case <-tick.C:
			}
		}
	}
}

// TestReadsLimitIsLive: with a higher limit, another Load reads from a volume whose places were taken.
func TestReadsLimitIsLive(t *testing.T) {
	w := newLaneRig(t, func(o *storage.Options) { o.ReadsMax, o.ReadWait, o.QueueWait = 1, time.Hour, time.Hour })
	w.hung.hang()
	ctx, cancel := context.WithCancel(t.Context())
	var stuck sync.WaitGroup
	load := func(i int) {
		stuck.Go(func() {
			if _, _, err := w.tryLoad(ctx, w.ns, w.on[1][i]); !errors.Is(err, context.Canceled) {
				t.Errorf("a Load from a volume that hangs ended: %v", err)
			}
		})
		for w.hung.reads.Load() < int64(i+1) {
			runtime.Gosched()
		}
	}
	load(0)
	if result, n, err := w.tryLoad(ctx, w.ns, w.on[1][1]); err != nil || n != 0 || !errors.Is(result.Pieces[0].Err, storage.ErrBusy) {
		t.Errorf("a second Load at a limit of 1: %+v, %v", result, err)
	}
	w.node.SetLimits(storage.Limits{
		ReadsMax: 3, ReservationsMax: 2, LeasesMax: 2, LeaseTTLMax: time.Minute, ReservationTTL: time.Minute, QueueWait: time.Hour, ReadWait: time.Hour,
	})
	load(1)
	load(2)
	cancel()
	stuck.Wait()
	w.hung.mend()
}
