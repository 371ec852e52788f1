package prfaas

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// simpson integrates f numerically: the simplest model of a moment.
func simpson(f func(float64) float64, lo, hi float64) float64 {
	const n = 20000
	h := (hi - lo) / n
	sum := f(lo) + f(hi)
	for i := 1; i < n; i++ {
		w := 2.0
		if i%2 == 1 {
			w = 4
		}
		sum += w * f(lo+float64(i)*h)
	}
	return sum * h / 3
}

func TestLogNormalAgainstQuadrature(t *testing.T) {
	for _, d := range []LogNormal{{9.9, 1, 128, 128000}, {7, 0.3, 200, 4000}, {9.9, 1, 0, 5000}, {4, 0.5, 3000, 9000}, {9, 2.5, 1, 1e6}} {
		// As a function of ln L the density is smooth.
		density := func(u float64) float64 { z := (u - d.Mu) / d.Sigma; return math.Exp(-z * z / 2) }
		low := math.Log(max(d.Min, 1e-3))
		total := simpson(density, low, math.Log(d.Max))
		for _, r := range [][2]float64{{0, math.Inf(1)}, {1000, 3500}, {d.Min, d.Min + 700}, {d.Max * 0.9, d.Max}} {
			lo, hi := max(r[0], d.Min, 1e-3), min(r[1], d.Max)
			for k := range 3 {
				want := 0.0
				if lo < hi {
					want = simpson(func(u float64) float64 { return density(u) * math.Exp(float64(k)*u) }, math.Log(lo), math.Log(hi)) / total
				}
				if got := d.Moment(k, r[0], r[1]); math.Abs(got-want) > 1e-6*math.Abs(want)+1e-12 {
					t.Errorf("%+v: E[L^%d; %v]: %v, want %v", d, k, r, got, want)
				}
			}
		}
		for _, q := range []float64{0.01, 0.5, 0.9, 0.999} {
			if got := d.Moment(0, 0, d.Quantile(q)); math.Abs(got-q) > 1e-6 {
				t.Errorf("%+v: %v of the requests are below quantile %v", d, got, q)
			}
		}
	}
}

func TestBadLengths(t *testing.T) {
	nan := math.NaN()
	for word, d := range map[string]LogNormal{
		"mu is": {nan, 1, 0, 1}, "sigma is": {1, 0, 0, 1}, "they must rise": {1, 1, 10, 10}, "almost no length": {3, 0.1, 1e5, 1e6},
	} {
		if err := d.Validate(); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%+v: %v; want %q", d, err, word)
		}
	}
	for _, l := range [][]float64{nil, {-1}, {nan}, {math.Inf(1)}} {
		if _, err := NewSample(l); err == nil {
			t.Errorf("a sample of %v was accepted", l)
		}
	}
}

// FuzzSample compares sums over ranges with a loop.
func FuzzSample(f *testing.F) {
	f.Add(uint64(1), 10, 100.0, 500.0)
	f.Fuzz(func(t *testing.T, seed uint64, n int, lo, hi float64) {
		if n < 1 || n > 500 || math.IsNaN(lo) || math.IsNaN(hi) {
			return
		}
		rng := rand.New(rand.NewPCG(seed, 1))
		lengths := make([]float64, n)
		for i := range lengths {
			lengths[i] = float64(rng.IntN(1000)) // with equal values
		}
		s, err := NewSample(lengths)
		if err != nil {
			t.Fatal(err)
		}
		for k := range 3 {
			want := 0.0
			for _, l := range lengths {
				if l > lo && l <= hi {
					want += math.Pow(l, float64(k)) / float64(n)
				}
			}
			if got := s.Moment(k, lo, hi); math.Abs(got-want) > 1e-9*(1+want) {
				t.Errorf("E[L^%d; (%v, %v]]: %v, want %v", k, lo, hi, got, want)
			}
		}
		least, greatest := s.Bounds()
		if Share(s, least, greatest) != 1 || s.Quantile(0) != slices.Min(lengths) || s.Quantile(1) != slices.Max(lengths) {
			t.Errorf("bounds %v, %v hold %v of the sample; quantiles %v to %v", least, greatest, Share(s, least, greatest), s.Quantile(0), s.Quantile(1))
		}
	})
}

func TestCurves(t *testing.T) {
	line, err := Interpolate([]Point{{30, 5}, {10, 1}, {20, 4}})
	if err != nil {
		t.Fatal(err)
	}
	for x, want := range map[float64]float64{0: -2, 10: 1, 15: 2.5, 20: 4, 25: 4.5, 30: 5, 40: 6} {
		if got := line.At(x); math.Abs(got-want) > 1e-12 {
			t.Errorf("at %v: %v, want %v", x, got, want)
		}
	}
	if line.Rising(0, 40) || !line.Rising(10, 40) {
		t.Error("the line is negative below 10 tokens, and rises from there")
	}
	if Polynomial(10, -1, 0.1).Rising(0, 100) || !Polynomial(10, -1, 0.1).Rising(5, 100) || !Polynomial(1, 1, 0).Rising(0, 1) {
		t.Error("a parabola rises behind its lowest point")
	}
	exact, err := FitQuadratic([]Point{{1000, 6e3 + 1}, {2000, 24e3 + 1}, {5000, 150e3 + 1}, {100, 61}})
	if err != nil {
		t.Fatal(err)
	}
	if a, b, c, _ := exact.Coefficients(); math.Abs(a-1) > 1e-6 || math.Abs(b) > 1e-8 || math.Abs(c-6e-3) > 1e-12 {
		t.Errorf("a parabola through its own points has coefficients %v, %v, %v", a, b, c)
	}
	d := LogNormal{9, 1, 100, 50000}
	for _, c := range []Curve{exact, line, Polynomial(3, 2, 0)} {
		for _, r := range [][2]float64{{0, 1e9}, {15, 9000}, {5000, 5000}, {7000, 3000}} {
			lo, hi := max(r[0], d.Min), min(r[1], d.Max)
			want := 0.0
			if lo < hi {
				all := simpson(func(u float64) float64 { z := (u - 9); return math.Exp(-z * z / 2) }, math.Log(d.Min), math.Log(d.Max))
				want = simpson(func(u float64) float64 { z := (u - 9); return math.Exp(-z*z/2) * c.At(math.Exp(u)) }, math.Log(lo), math.Log(hi)) / all
			}
			if got := c.Sum(d, r[0], r[1]); math.Abs(got-want) > 1e-5*math.Abs(want)+1e-12 {
				t.Errorf("E[c(L); %v]: %v, want %v", r, got, want)
			}
		}
	}
	for word, points := range map[string][]Point{
		"needs at least": {{1, 1}}, "two values": {{1, 1}, {1, 2}, {2, 2}}, "numbers from 0": {{1, math.NaN()}, {2, 1}, {3, 1}},
	} {
		if _, err := FitQuadratic(points); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v: %v; want %q", points, err, word)
		}
	}
}

// anySystem makes a system from random numbers.
func anySystem(rng *rand.Rand) System {
	s := System{
		OutputTokens: 10 + 2000*rng.Float64(), DecodeBatch: 1 + 50*rng.Float64(), StepSeconds: 0.01 + 0.1*rng.Float64(),
		RemoteInstances: rng.IntN(6), LocalInstances: 1 + rng.IntN(20), EgressBytes: FromGbps(math.Exp(8 * rng.Float64())),
		RemotePrefill: Polynomial(rng.Float64(), 1e-4*rng.Float64(), 1e-8*rng.Float64()),
		LocalPrefill:  Polynomial(0.01+rng.Float64(), 3e-4*rng.Float64(), 1e-8*rng.Float64()),
		KVBytes:       Polynomial(1e6+1e9*rng.Float64(), 1e5*rng.Float64(), 0),
		Service:       Service(rng.IntN(2)),
	}
	if rng.IntN(3) == 0 {
		lengths := make([]float64, 1+rng.IntN(40))
		for i := range lengths {
			lengths[i] = float64(rng.IntN(50000))
		}
		s.Lengths, _ = NewSample(lengths)
	} else {
		s.Lengths = LogNormal{6 + 5*rng.Float64(), 0.1 + 2*rng.Float64(), 128, 128000}
	}
	return s
}

// FuzzOptimize: the fast search returns exactly the result of the exhaustive one, and Evaluate
// gives no plan of the grid a higher throughput.
func FuzzOptimize(f *testing.F) {
	for seed := range uint64(50) {
		f.Add(seed, 37)
	}
	f.Fuzz(func(t *testing.T, seed uint64, steps int) {
		if steps < 1 || steps > 200 {
			return
		}
		s := anySystem(rand.New(rand.NewPCG(seed, 2)))
		if s.Validate() != nil {
			return
		}
		fast, err := Optimize(s, steps)
		if err != nil {
			t.Fatal(err)
		}
		slow, err := Exhaustive(s, steps)
		if err != nil {
			t.Fatal(err)
		}
		if fast != slow {
			t.Errorf("fast %+v\nslow %+v", fast, slow)
		}
		least, greatest := s.Lengths.Bounds()
		for n := range s.LocalInstances {
			for i := range steps + 1 {
				p := Plan{Threshold: least + (greatest-least)*float64(i)/float64(steps), Prefill: n, Decode: s.LocalInstances - n}
				if x := s.Evaluate(p); x.Max > fast.Max {
					t.Errorf("%+v is better than %+v", x, fast)
				}
			}
		}
		check(t, s, fast)
	})
}

// check checks every evaluated plan: the maximum is the least of its terms, and at the maximum no
// stage exceeds its capacity.
func check(t *testing.T, s System, x Throughput) {
	t.Helper()
	if math.IsNaN(x.Max) || x.Max < 0 || x.Offloaded < 0 || x.Offloaded > 1+1e-12 {
		t.Errorf("%+v", x)
	}
	for _, u := range []float64{x.Max * x.Offloaded / x.Remote, x.Max * (1 - x.Offloaded) / x.LocalPrefill, x.Max / x.DecodeRate} {
		if u > 1+1e-9 {
			t.Errorf("a stage is used %v times: %+v", u, x)
		}
	}
	if x.Max > 0 && x.EgressBytes > s.EgressBytes*(1+1e-9) {
		t.Errorf("egress of %v over a link of %v", x.EgressBytes, s.EgressBytes)
	}
}

// TestBinds: each stage becomes the binding one when it is made slow.
func TestBinds(t *testing.T) {
	base := caseStudy(t)
	plan := Plan{Threshold: 19400, Prefill: 3, Decode: 5}
	for want, slow := range map[Stage]func(*System){
		StageRemoteCompute: func(s *System) { s.RemoteInstances = 1 },
		StageEgress:        func(s *System) { s.EgressBytes = FromGbps(5) },
		StageLocalPrefill:  func(s *System) { s.RemoteInstances = 40 },
		StageDecode:        func(s *System) { s.StepSeconds *= 3 },
	} {
		s := base
		slow(&s)
		if got := s.Evaluate(plan); got.Binds != want {
			t.Errorf("%v binds, not %v: %+v", got.Binds, want, got)
		}
	}
	// Check equation 7 at the balance, and that the service time by the mean is longer.
	b := base.Evaluate(Plan{Threshold: Balance(base, 3), Prefill: 3, Decode: 5})
	near(t, "eq. 7", b.Remote/b.Offloaded, b.LocalPrefill/(1-b.Offloaded), 1e-6)
	expected := base
	expected.Service = Expected
	if e := expected.Evaluate(plan); e.RemoteCompute >= base.Evaluate(plan).RemoteCompute {
		t.Error("the mean time of convex costs is not above the time at the mean length")
	}
}

func TestBadSystems(t *testing.T) {
	for word, spoil := range map[string]func(*System){
		"no distribution":               func(s *System) { s.Lengths = nil },
		"output tokens":                 func(s *System) { s.OutputTokens = math.NaN() },
		"decode batch":                  func(s *System) { s.DecodeBatch = -1 },
		"seconds of a decode step":      func(s *System) { s.StepSeconds = math.Inf(1) },
		"instances of the PD":           func(s *System) { s.LocalInstances = 0 },
		"-1 PrfaaS instances":           func(s *System) { s.RemoteInstances = -1 },
		"egress of 0":                   func(s *System) { s.EgressBytes = 0 },
		"KV size must be":               func(s *System) { s.KVBytes = Polynomial(1, -1, 0) },
		"time of the PrfaaS":            func(s *System) { s.RemotePrefill = Curve{} },
		"time of the PD":                func(s *System) { s.LocalPrefill = Polynomial(-1, 0, 0) },
		"neither the PrfaaS nor the PD": func(s *System) { s.RemoteInstances, s.LocalPrefill = 0, Curve{} },
	} {
		s := caseStudy(t)
		spoil(&s)
		if _, err := Optimize(s, 10); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v; want %q", err, word)
		}
	}
	large := caseStudy(t)
	large.LocalInstances = InstancesMax
	if _, err := Optimize(large, stepsMax); err == nil || !strings.Contains(err.Error(), "take fewer steps") {
		t.Error(err)
	}
	large.LocalInstances++
	if _, err := Optimize(large, 1); err == nil || !strings.Contains(err.Error(), "at most 65536") {
		t.Error(err)
	}
	if _, err := Optimize(caseStudy(t), 0); err == nil {
		t.Error("0 steps were taken")
	}
	if _, err := Homogeneous(caseStudy(t), 1); err == nil {
		t.Error("one instance both prefills and decodes")
	}
	s := caseStudy(t)
	s.RemoteInstances = 0
	if _, err := Naive(s); err == nil {
		t.Error("no PrfaaS cluster takes every prefill")
	}
}

// TestTTFT compares quantiles with a count over many lengths.
func TestTTFT(t *testing.T) {
	s := caseStudy(t)
	for _, threshold := range []float64{0, 128, 5000, 19400, 90000, 128000, 1e9} {
		x := s.TTFT(Plan{Threshold: threshold, Prefill: 3, Decode: 5})
		const n = 20000
		times := make([]float64, n)
		sum := 0.0
		for i := range times {
			times[i] = x.Of(s.Lengths.Quantile((float64(i) + 0.5) / n))
			sum += times[i]
		}
		slices.Sort(times)
		near(t, "mean", x.Mean(), sum/n, 1e-3)
		for _, q := range []float64{0.1, 0.5, 0.9, 0.99} {
			near(t, "quantile", x.Quantile(q), times[int(q*n)], 5e-3)
		}
	}
}

func TestProfiles(t *testing.T) {
	names := ProfileNames()
	if len(names) < 7 {
		t.Error(names)
	}
	for _, n := range names {
		p, err := BuiltIn(n)
		if err != nil {
			t.Error(err)
			continue
		}
		if p.Name != n || p.About == "" || p.Source == "" {
			t.Errorf("%s: %+v", n, p)
		}
		if phi, ok := p.KVThroughput("h200", 32000); !ok || phi <= 0 {
			t.Errorf("%s: %v, %v", n, phi, ok)
		}
	}
	if _, err := BuiltIn("../oracle_test.go"); err == nil || !strings.Contains(err.Error(), "prfaas-1t") {
		t.Error(err)
	}
	const good = "name: m\ngpus_per_instance: 8\nkv: {points: [{tokens: 1, mib: 1}, {tokens: 2, mib: 2}]}\naccelerators:\n  x:\n    fit: linear\n    prefill: [{tokens: 1, seconds: 1}, {tokens: 9, seconds: 2}]\n"
	if _, err := ParseProfile("p.yaml", []byte(good)); err != nil {
		t.Error(err)
	}
	for want, change := range map[string][2]string{
		"p.yaml:1: name: is missing":                                                  {"name: m", "about: m"},
		"p.yaml:2: gpus_per_instance: is 0":                                           {"instance: 8", "instance: 0"},
		"p.yaml:6: accelerators.x.fit: is \"cubic\"":                                  {"fit: linear", "fit: cubic"},
		"p.yaml:5: accelerators.x: a curve over 2 points":                             {"fit: linear", "fit: quadratic"},
		"p.yaml:3: kv: a curve with two values":                                       {"tokens: 2", "tokens: 1"},
		"p.yaml:7: accelerators.x: unknown key \"prefil\"; did you mean \"prefill\"?": {"    prefill:", "    prefil:"},
		"accelerators.x.decode: a batch of 0":                                         {"fit: linear", "decode: {step_seconds: 1}"},
		"p.yaml:3: kv: unknown key":                                                   {"kv: {points", "kv: {point"},
		"neither accelerators nor kv_throughput":                                      {good[len("name: m\ngpus_per_instance: 8\n"):], ""},
	} {
		if _, err := ParseProfile("p.yaml", []byte(strings.Replace(good, change[0], change[1], 1))); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %s", err, want)
		}
	}
}

func BenchmarkOptimize(b *testing.B) {
	s := caseStudy(b)
	s.LocalInstances = 2000
	for name, search := range map[string]func(System, int) (Throughput, error){"fast": Optimize, "exhaustive": Exhaustive} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := search(s, 1000); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
