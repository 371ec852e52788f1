package prfaas

import (
	"strings"
	"testing"
	"time"
)

func short(t *testing.T) (*Short, System, Plan) {
	t.Helper()
	s := caseStudy(t)
	plan := Plan{Threshold: Balance(s, 3), Prefill: 3, Decode: 5}
	c, err := NewShort(s, plan, ShortOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return c, s, plan
}

// TestShortQuiet: a link with spare bandwidth does not change the threshold.
func TestShortQuiet(t *testing.T) {
	c, _, plan := short(t)
	for i := range 100 {
		a := c.Observe(EgressSample{At: time.Duration(i) * time.Second, Utilization: 0.12, CapacityBytes: FromGbps(100), Queue: 1})
		if a.Router.Threshold != plan.Threshold {
			t.Fatalf("at %d s: %+v", i, a)
		}
		if a.Router.Abundant != (i >= 5) {
			t.Fatalf("at %d s: abundant is %v", i, a.Router.Abundant)
		}
	}
}

// TestShortCongested: when the link's capacity decreases so that egress binds, the threshold rises
// to the best one for the remaining capacity. It returns with the bandwidth.
func TestShortCongested(t *testing.T) {
	c, s, plan := short(t)
	at := time.Duration(0)
	observe := func(utilization float64, gbps float64, queue int) Adjustment {
		at += time.Second
		return c.Observe(EgressSample{At: at, Utilization: utilization, CapacityBytes: FromGbps(gbps), Queue: queue})
	}
	a := observe(1, 6, 40)
	if !a.Changed || a.Router.Abundant || !strings.Contains(a.Why, "6.0 Gbps") {
		t.Fatalf("%+v", a)
	}
	narrow := s
	narrow.EgressBytes = FromGbps(6)
	near(t, "threshold", a.Router.Threshold, Balance(narrow, 3), 1e-9)
	if x := narrow.Evaluate(Plan{a.Router.Threshold, 3, 5}); x.Max <= narrow.Evaluate(plan).Max {
		t.Errorf("the new threshold makes %v req/s, the old one %v", x.Max, narrow.Evaluate(plan).Max)
	}
	// During the hold the threshold does not change, for any samples.
	if b := observe(1, 6, 80); b.Changed {
		t.Errorf("changed within the hold: %+v", b)
	}
	for range 30 {
		a = observe(0.3, 100, 0)
	}
	near(t, "threshold when the link is back", a.Router.Threshold, plan.Threshold, 0.02)
	if !a.Router.Abundant {
		t.Error("a calm link is not abundant")
	}
}

// TestShortAgainstTheModel: a queue that the model does not predict reduces the offloading, down to
// a bound.
func TestShortAgainstTheModel(t *testing.T) {
	c, s, plan := short(t)
	last := plan.Threshold
	_, greatest := s.Lengths.Bounds()
	for i := range 200 {
		a := c.Observe(EgressSample{At: time.Duration(i*6) * time.Second, Utilization: 0.1, CapacityBytes: FromGbps(100), Queue: 1000})
		if a.Router.Threshold < last || a.Router.Threshold > greatest {
			t.Fatalf("step %d: from %v to %v", i, last, a.Router.Threshold)
		}
		last = a.Router.Threshold
	}
	if share := Share(s.Lengths, last, greatest); share > 0.01 {
		t.Errorf("%v of the requests are still offloaded", share)
	}
	for i := range 400 {
		last = c.Observe(EgressSample{At: time.Duration(2000+i*6) * time.Second, Utilization: 0.1, CapacityBytes: FromGbps(100)}).Router.Threshold
	}
	near(t, "threshold in the end", last, plan.Threshold, 0.05)
	// A surge that is shorter than the queue of the other side moves no requests there.
	a := c.Observe(EgressSample{At: time.Hour * 2, Utilization: 0.1, CapacityBytes: FromGbps(100), Queue: 50, LocalQueue: 60})
	if a.Router.Threshold > last {
		t.Errorf("the threshold rises to %v although the PD cluster is busier", a.Router.Threshold)
	}
}

func TestLong(t *testing.T) {
	s := caseStudy(t)
	busyPrefill := Load{Prefill: 1, PrefillQueue: 50, Decode: 0.5}
	busyDecode := Load{Prefill: 0.5, Decode: 1, DecodeQueue: 50}
	for _, c := range []struct {
		name    string
		prefill int
		load    Load
		want    int
		why     string
	}{
		{"at the optimum", 3, busyPrefill, 0, "is the best"},
		{"too little prefill", 1, busyPrefill, 1, "would gain"},
		{"too much prefill", 6, busyDecode, -1, "would gain"},
		{"the measurement disagrees", 1, busyDecode, 0, "the model wants"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, err := NewLong(s, Plan{Threshold: 19400, Prefill: c.prefill, Decode: 8 - c.prefill}, LongOptions{})
			if err != nil {
				t.Fatal(err)
			}
			r, err := l.Observe(c.load)
			if err != nil {
				t.Fatal(err)
			}
			if r.ToPrefill != c.want || !strings.Contains(r.Why, c.why) || r.Plan.Prefill != c.prefill+c.want || r.Plan.Prefill+r.Plan.Decode != 8 {
				t.Errorf("%+v", r)
			}
		})
	}
	l, err := NewLong(s, Plan{Threshold: 19400, Prefill: 1, Decode: 7}, LongOptions{Period: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	// The division reaches the optimum step by step, and stays there.
	for i := range 10 {
		at := time.Duration(i) * time.Minute
		if !l.Due(at) {
			t.Fatal("a period later it is not due")
		}
		load := busyPrefill
		load.At = at
		if _, err := l.Observe(load); err != nil {
			t.Fatal(err)
		}
		if l.Due(at + time.Second) {
			t.Error("due within the period")
		}
	}
	if l.plan.Prefill != 3 {
		t.Errorf("it ends at %+v", l.plan)
	}
	// Shorter requests need fewer prefill instances.
	r, err := l.Observe(Load{At: time.Hour, Lengths: LogNormal{Mu: 7.5, Sigma: 0.5, Min: 128, Max: 128000}, Decode: 1, DecodeQueue: 9})
	if err != nil || r.ToPrefill != -1 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestBadControllers(t *testing.T) {
	s := caseStudy(t)
	plan := Plan{19400, 3, 5}
	for word, o := range map[string]ShortOptions{"high": {High: 2}, "low": {Low: 0.95}, "surge": {QueueHigh: -1}, "backoff": {Backoff: 1}, "hold": {Hold: -1}} {
		if _, err := NewShort(s, plan, o); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v; want %q", err, word)
		}
	}
	if _, err := NewShort(System{}, plan, ShortOptions{}); err == nil {
		t.Error("no system")
	}
	if _, err := NewLong(s, Plan{19400, 3, 4}, LongOptions{}); err == nil || !strings.Contains(err.Error(), "add up") {
		t.Error(err)
	}
	if _, err := NewLong(s, plan, LongOptions{MaxMoves: -1}); err == nil {
		t.Error("-1 moves")
	}
}
