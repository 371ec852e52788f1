package datacenters

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/dualpath/prfaas"
	"github.com/penstock-kv/penstock/internal/testkit"
)

func caseStudy(t testing.TB) Options {
	t.Helper()
	s, err := prfaas.CaseStudy()
	if err != nil {
		t.Fatal(err)
	}
	return Options{System: s, Plan: prfaas.Plan{Threshold: 19400, Prefill: 3, Decode: 5}, Concurrency: 150, Duration: 3 * time.Hour, Warmup: 30 * time.Minute}
}

func run(t testing.TB, o Options, seed uint64) *Result {
	t.Helper()
	r, err := Run(context.Background(), o, seed)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestThroughput: the simulation reaches the throughput of the equations, for each of the three
// deployments and each stage that can bind.
func TestThroughput(t *testing.T) {
	testkit.Long(t, "simulates whole clusters")
	base := caseStudy(t)
	for name, change := range map[string]func(*Options){
		"prfaas": func(*Options) {},
		"layers": func(o *Options) { o.Layers = 61 },
		"homogeneous": func(o *Options) {
			o.System.RemoteInstances, o.System.LocalInstances = 0, 12
			o.Plan = prfaas.Plan{Threshold: 128000, Prefill: 9, Decode: 3}
		},
		"naive":      func(o *Options) { o.Plan = prfaas.Plan{Threshold: 0, Prefill: 0, Decode: 8} },
		"egress":     func(o *Options) { o.System.EgressBytes = prfaas.FromGbps(5) },
		"decode":     func(o *Options) { o.System.StepSeconds *= 2 },
		"pd-prefill": func(o *Options) { o.System.RemoteInstances = 12 },
	} {
		t.Run(name, func(t *testing.T) {
			o := base
			change(&o)
			o.System.Service = prfaas.Expected
			want := o.System.Evaluate(o.Plan)
			r := run(t, o, 1)
			t.Logf("%v binds: predicted %.3f, simulated %.3f req/s; used %.2f %.2f %.2f", want.Binds, want.Max, r.Throughput, r.RemoteUsed, r.PrefillUsed, r.DecodeUsed)
			if d := r.Throughput/want.Max - 1; math.Abs(d) > 0.03 {
				t.Errorf("%v req/s, predicted %v", r.Throughput, want.Max)
			}
			if d := r.EgressBytes/max(want.EgressBytes, 1) - 1; want.EgressBytes > 0 && math.Abs(d) > 0.05 {
				t.Errorf("egress of %v bytes/s, predicted %v", r.EgressBytes, want.EgressBytes)
			}
			if r.Rejected != 0 {
				t.Errorf("%d rejected in a closed loop", r.Rejected)
			}
		})
	}
}

// TestTTFT: at a low load there is no queue, and the times are those of the model.
func TestTTFT(t *testing.T) {
	o := caseStudy(t)
	o.Concurrency, o.Rate, o.Duration = 0, 0.1, 40*time.Hour
	r := run(t, o, 1)
	m := o.System.TTFT(o.Plan)
	for _, c := range []struct {
		name      string
		got, want float64
		within    float64
	}{
		{"mean", r.TTFTMean.Seconds(), m.Mean(), 0.02}, {"P50", r.TTFTP50.Seconds(), m.Quantile(0.5), 0.03}, {"P90", r.TTFTP90.Seconds(), m.Quantile(0.9), 0.02},
		{"offloaded", r.Offloaded, 0.4949, 0.02}, {"throughput", r.Throughput, 0.1, 0.03},
	} {
		if math.Abs(c.got/c.want-1) > c.within {
			t.Errorf("%s: %v, predicted %v", c.name, c.got, c.want)
		}
	}
	// With layerwise transfer, only the last layer remains at the end of the prefill.
	o.Layers = 61
	piped := run(t, o, 1)
	if saved := (r.TTFTMean - piped.TTFTMean).Seconds(); saved < 0.03 {
		t.Errorf("layer by layer saves %v s of the %v s on the link", saved, o.System.KVBytes.At(44756)/o.System.EgressBytes*r.Offloaded)
	}
}

// TestReplay: the same seed gives the same result, another seed another.
func TestReplay(t *testing.T) {
	o := caseStudy(t)
	o.Concurrency, o.Rate, o.Duration, o.Warmup, o.Layers, o.Turns, o.Think = 0, 2.5, 10*time.Minute, time.Minute, 61, 3, 10*time.Second
	o.Short, o.Long = &prfaas.ShortOptions{}, &prfaas.LongOptions{Period: 2 * time.Minute}
	o.Changes = []Change{{At: 3 * time.Minute, EgressFactor: 0.05}, {At: 6 * time.Minute, EgressFactor: 1, Rate: 1}}
	a, b, c := run(t, o, 7), run(t, o, 7), run(t, o, 8)
	if a.Digest != b.Digest || fmt.Sprint(a) != fmt.Sprint(b) {
		t.Error("two runs of one seed differ")
	}
	if a.Digest == c.Digest {
		t.Error("two seeds give one digest")
	}
	if len(a.Series) != 60 || a.Completed == 0 {
		t.Errorf("%d windows, %d completed", len(a.Series), a.Completed)
	}
}

// TestLinkAtHalf: the bandwidth of a fully used link falls to half. With a fixed threshold the
// queue in front of the link grows without bound; the short-term controller raises the threshold,
// so that it does not.
func TestLinkAtHalf(t *testing.T) {
	o := caseStudy(t)
	o.System.EgressBytes = prfaas.FromGbps(16)
	o.Concurrency, o.Rate, o.Duration, o.Warmup = 0, 2.1, 40*time.Minute, 5*time.Minute
	o.Changes = []Change{{At: 10 * time.Minute, EgressFactor: 0.5}}
	last := func(r *Result) Window { return r.Series[len(r.Series)-1] }
	for seed := range uint64(3) {
		o.Short = nil
		fixed := run(t, o, seed)
		o.Short = &prfaas.ShortOptions{}
		steered := run(t, o, seed)
		t.Logf("fixed: P90 %v, in time %.3f, last %+v", fixed.TTFTP90, fixed.SLOShare, last(fixed))
		t.Logf("steered: P90 %v, in time %.3f, last %+v, %d adjustments", steered.TTFTP90, steered.SLOShare, last(steered), len(steered.Adjustments))
		if steered.TTFTP90 > fixed.TTFTP90/2 || steered.SLOShare < fixed.SLOShare+0.05 {
			t.Errorf("seed %d: P90 %v and %.3f in time with the controller, %v and %.3f without", seed, steered.TTFTP90, steered.SLOShare, fixed.TTFTP90, fixed.SLOShare)
		}
		if last(fixed).RemoteQueue < 3*last(steered).RemoteQueue {
			t.Errorf("seed %d: in the end %d wait for the link with a fixed threshold, %d with the controller", seed, last(fixed).RemoteQueue, last(steered).RemoteQueue)
		}
		raised := false
		for _, a := range steered.Adjustments {
			raised = raised || a.At >= 10*time.Minute && a.At < 11*time.Minute && a.Threshold > o.Plan.Threshold*1.1
		}
		if !raised {
			t.Errorf("seed %d: the threshold was not raised within a minute: %+v", seed, steered.Adjustments)
		}
	}
}

// TestTrafficShifts: prompts become longer permanently. The long-term controller changes decode
// instances to prefill instances until the division is the model's optimum.
func TestTrafficShifts(t *testing.T) {
	o := caseStudy(t)
	long := o.System.Lengths
	o.System.Lengths = prfaas.LogNormal{Mu: 8, Sigma: 1, Min: 128, Max: 128000}
	best, err := prfaas.Optimize(o.System, prfaas.StepsDefault)
	if err != nil {
		t.Fatal(err)
	}
	if best.Prefill >= 3 {
		t.Fatalf("short prompts are best served by %+v; the shift would be none", best)
	}
	o.Plan, o.Changes = best.Plan, []Change{{At: 20 * time.Minute, Lengths: long}}
	o.Duration, o.Warmup = 2*time.Hour, 80*time.Minute
	fixed := run(t, o, 1)
	o.Long = &prfaas.LongOptions{}
	o.SwitchTime = 30 * time.Second
	steered := run(t, o, 1)
	last := steered.Series[len(steered.Series)-1]
	t.Logf("fixed %.3f, steered %.3f req/s, %+v", fixed.Throughput, steered.Throughput, last)
	if last.Prefill != 3 {
		t.Errorf("it ends with %d prefill instances, not 3: %+v", last.Prefill, steered.Reallocations)
	}
	if steered.Throughput < 1.3*fixed.Throughput {
		t.Errorf("%v req/s, without the controller %v", steered.Throughput, fixed.Throughput)
	}
}

// TestSessions: sessions with several turns hit cached prefixes. If bandwidth is scarce, a session
// stays in the cluster with its cache. If bandwidth is abundant, the prefix crosses the link, and
// only the number of new tokens decides where prefill runs.
func TestSessions(t *testing.T) {
	o := caseStudy(t)
	o.Concurrency, o.Rate, o.Duration, o.Turns, o.Think = 0, 1.5, time.Hour, 5, 20*time.Second
	scarce := run(t, o, 1)
	o.Abundant = true
	abundant := run(t, o, 1)
	t.Logf("scarce: hit %.3f, %d fetches, offloaded %.3f; abundant: hit %.3f, %d fetches, offloaded %.3f", scarce.Hit, scarce.Fetches, scarce.Offloaded, abundant.Hit, abundant.Fetches, abundant.Offloaded)
	if scarce.Fetches != 0 || scarce.Hit < 0.2 {
		t.Errorf("scarce: %d fetches, hit ratio %v", scarce.Fetches, scarce.Hit)
	}
	if abundant.Fetches == 0 || abundant.Hit < scarce.Hit-0.02 {
		t.Errorf("abundant: %d fetches, hit ratio %v", abundant.Fetches, abundant.Hit)
	}
	_, greatest := o.System.Lengths.Bounds()
	if share := prfaas.Share(o.System.Lengths, o.Plan.Threshold, greatest); math.Abs(abundant.Offloaded-share) > 0.03 || scarce.Offloaded < abundant.Offloaded+0.1 {
		t.Errorf("offloaded: %v where abundant (%v of the new prompts are above the threshold), %v where scarce", abundant.Offloaded, share, scarce.Offloaded)
	}
}

// TestBounds: an overloaded open system rejects requests that its queues cannot hold.
func TestBounds(t *testing.T) {
	o := caseStudy(t)
	o.Concurrency, o.Rate, o.QueueMax, o.Duration = 0, 20, 50, time.Hour
	r := run(t, o, 1)
	if r.Rejected == 0 || r.TTFTP99 > 5*time.Minute {
		t.Errorf("%d rejected, P99 %v", r.Rejected, r.TTFTP99)
	}
	for _, w := range r.Series {
		if w.LocalQueue > 50 || w.RemoteQueue > 50+4*4 {
			t.Fatalf("%+v", w)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, o, 1); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestBadOptions(t *testing.T) {
	for word, spoil := range map[string]func(*Options){
		"one of them must be above 0": func(o *Options) { o.Rate = 1 },
		"rate of NaN":                 func(o *Options) { o.Concurrency, o.Rate = 0, math.NaN() },
		"longer than the warm-up":     func(o *Options) { o.Warmup = o.Duration },
		"must add up":                 func(o *Options) { o.Plan.Decode = 4 },
		"a threshold of":              func(o *Options) { o.Plan.Threshold = -1 },
		"each is at least 1":          func(o *Options) { o.Layers = -1 },
		"allow at least as many":      func(o *Options) { o.TransfersMax = 2 },
		"hold them all":               func(o *Options) { o.QueueMax = 10 },
		"requests at a time":          func(o *Options) { o.System.DecodeBatch = 0.5 },
		"at least 1 turn":             func(o *Options) { o.Turns = 0.5 },
		"none may be negative":        func(o *Options) { o.Observe = -1 },
		"no instance prefills":        func(o *Options) { o.Plan = prfaas.Plan{Threshold: 5000, Prefill: 0, Decode: 8} },
		"no PrfaaS cluster takes":     func(o *Options) { o.System.RemoteInstances = 0 },
		"without a prefill time":      func(o *Options) { o.System.LocalPrefill = prfaas.Curve{} },
		"in order of time":            func(o *Options) { o.Changes = []Change{{At: 2}, {At: 1}} },
		"must be 0 or above":          func(o *Options) { o.Changes = []Change{{EgressFactor: math.NaN()}} },
		"in a closed loop":            func(o *Options) { o.Changes = []Change{{Rate: 1}} },
		"is to the link": func(o *Options) {
			o.System.RemoteInstances, o.Plan.Threshold = 0, 128000
			o.Changes = []Change{{EgressFactor: 1}}
		},
		"decode batch": func(o *Options) { o.System.DecodeBatch = -1 },
	} {
		o := caseStudy(t)
		spoil(&o)
		if _, err := Run(t.Context(), o, 1); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v; want %q", err, word)
		}
	}
}
