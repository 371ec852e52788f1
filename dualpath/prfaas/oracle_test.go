package prfaas

import (
	"math"
	"testing"
)

// near fails the test unless got differs from want by at most the share tolerance.
func near(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if !(math.Abs(got-want) <= tolerance*math.Abs(want)) {
		t.Errorf("%s: %v; want %v within %v %%", what, got, want, 100*tolerance)
	}
}

func caseStudy(t testing.TB) System {
	t.Helper()
	s, err := CaseStudy()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestPublished compares with the numbers of PrfaaS, Tables 5 and 6 and sections 2.3 and 4.
func TestPublished(t *testing.T) {
	s := caseStudy(t)
	p, err := BuiltIn("prfaas-1t")
	if err != nil {
		t.Fatal(err)
	}
	// The parabola is a fit of four points, with a deviation of at most 2 % from each.
	for tokens, seconds := range map[float64]float64{1000: 0.44, 8000: 0.72, 32000: 1.84, 128000: 7.40} {
		near(t, "T_H200", s.RemotePrefill.At(tokens), seconds, 0.025)
	}
	for i, want := range []float64{3.61, 3.59, 3.19, 2.62} { // PF-1, from the printed sizes and times
		tokens := []float64{1000, 8000, 32000, 128000}[i]
		near(t, "PF-1", Gbps(p.KVBytes.At(tokens)/[]float64{0.44, 0.72, 1.84, 7.40}[i]), want, 0.012)
	}
	least, greatest := s.Lengths.Bounds()
	near(t, "PF-2 mean", Mean(s.Lengths, least, greatest), 27000, 0.025)
	near(t, "PF-2 share", Share(s.Lengths, 19400, greatest), 0.496, 0.025)
	near(t, "PF-2 long", Mean(s.Lengths, 19400, greatest), 44000, 0.025)

	plan := Plan{Threshold: 19400, Prefill: 3, Decode: 5}
	x := s.Evaluate(plan)
	near(t, "PF-3 prfaas", x.Remote, 1.61, 0.015)
	near(t, "PF-3 pd-p", x.LocalPrefill, 1.64, 0.015)
	near(t, "PF-3 pd-d", x.DecodeRate, 3.91, 0.004)
	near(t, "PF-5", x.Max, 3.24, 0.015)
	near(t, "PF-6", Gbps(x.EgressBytes), 13, 0.10)
	homogeneous, err := Homogeneous(s, 12)
	if err != nil {
		t.Fatal(err)
	}
	naive, err := Naive(s)
	if err != nil {
		t.Fatal(err)
	}
	near(t, "PF-3 pd-d of 3", homogeneous.DecodeRate, 2.35, 0.004)
	near(t, "PF-3 pd-d of 8", naive.DecodeRate, 6.25, 0.004)
	near(t, "PF-3 naive", naive.Remote, 2.45, 0.015)
	near(t, "PF-5 ratio", x.Max/homogeneous.Max, 1.54, 0.015)
	near(t, "PF-5 ratio to naive", x.Max/naive.Max, 1.32, 0.015)
	near(t, "PF-5 ratio of naive", naive.Max/homogeneous.Max, 1.16, 0.015)

	near(t, "PF-4 mean", s.TTFT(plan).Mean(), 2.22, 0.015)
	near(t, "PF-4 P90", s.TTFT(plan).Quantile(0.9), 3.51, 0.015)
	near(t, "PF-4 mean, homogeneous", s.TTFT(homogeneous.Plan).Mean(), 4.44, 0.015)
	near(t, "PF-4 P90, homogeneous", s.TTFT(homogeneous.Plan).Quantile(0.9), 9.73, 0.015)
	near(t, "PF-4 mean, naive", s.TTFT(naive.Plan).Mean(), 1.74, 0.015)
	near(t, "PF-4 P90, naive", s.TTFT(naive.Plan).Quantile(0.9), 3.51, 0.015)

	best, err := Optimize(s, StepsDefault)
	if err != nil {
		t.Fatal(err)
	}
	near(t, "PF-7", best.Max, 3.24, 0.015)
	near(t, "PF-7 threshold", best.Threshold, 19400, 0.03)
	if best.Prefill != 3 || best.Decode != 5 {
		t.Errorf("PF-7: %d/%d; want 3/5", best.Prefill, best.Decode)
	}
	if homogeneous.Prefill != 9 || homogeneous.Decode != 3 {
		t.Errorf("PF-7 homogeneous: %d/%d; want 9/3", homogeneous.Prefill, homogeneous.Decode)
	}
	near(t, "PF-7 homogeneous", homogeneous.Max, 2.11, 0.01)
	t.Logf("%+v", best)

	for _, c := range []struct {
		profile    string
		gpus       int
		tokens     float64
		want, tbps float64
	}{
		{"minimax-m2.5", 512, 32000, 3800, 0}, {"qwen3-235b", 512, 32000, 2100, 0}, {"ring-2.5-1t", 512, 32000, 170, 0}, {"ring-2.5-1t", 10000, 128000, 1800, 0},
	} {
		p, err := BuiltIn(c.profile)
		if err != nil {
			t.Fatal(err)
		}
		phi, ok := p.KVThroughput("h200", c.tokens)
		if !ok {
			t.Fatal(c.profile)
		}
		near(t, "PF-8 "+c.profile, ClusterEgress(c.gpus, p.GPUsPerInstance, Gbps(phi)), c.want, 0.03)
	}
}

// TestReference compares with the values of the shared oracles, which have more digits than the
// paper.
func TestReference(t *testing.T) {
	s := caseStudy(t)
	a, b, c, _ := s.RemotePrefill.Coefficients()
	near(t, "T_H200 a", a, 0.3891, 2e-3)
	near(t, "T_H200 b", b*1e3, 0.04206, 2e-3)
	near(t, "T_H200 c", c*1e6, 9.937e-5, 2e-3)
	a, b, c, _ = s.LocalPrefill.Coefficients()
	near(t, "T_H20 a", a, 0.4534, 2e-3)
	near(t, "T_H20 b", b*1e3, 0.13159, 2e-3)
	near(t, "T_H20 c", c*1e6, 2.922e-4, 2e-3)
	_, greatest := s.Lengths.Bounds()
	near(t, "mean", Mean(s.Lengths, 0, greatest), 27313, 1e-4)
	near(t, "share", Share(s.Lengths, 19400, greatest), 0.4949, 2e-4)
	near(t, "long", Mean(s.Lengths, 19400, greatest), 44756, 1e-4)
	plan := Plan{Threshold: 19400, Prefill: 3, Decode: 5}
	x := s.Evaluate(plan)
	near(t, "prfaas", x.Remote, 1.619, 1e-3)
	near(t, "max", x.Max, 3.247, 1e-3)
	near(t, "egress", Gbps(x.EgressBytes), 12.4, 5e-3)
	near(t, "TTFT", s.TTFT(plan).Mean(), 2.217, 1e-3)
	near(t, "P90", s.TTFT(plan).Quantile(0.9), 3.478, 1e-3)
	best, err := Optimize(s, StepsDefault)
	if err != nil {
		t.Fatal(err)
	}
	near(t, "best", best.Max, 3.265, 1e-3)
	near(t, "best threshold", best.Threshold, 19300, 1e-3)
	near(t, "balance", Balance(s, 3), 19350, 1e-2)
}
