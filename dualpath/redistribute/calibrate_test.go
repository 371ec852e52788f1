package redistribute

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

// sweep returns round trips of the paper's batches on a line, each repeated, with relative normal
// noise. A share of them are outliers, up to ten times as slow.
func sweep(rng *rand.Rand, at, bandwidth, noise, outliers float64) (out []Sample) {
	p := DeepSeekV2Lite()
	for rows := 1; rows <= 4096; rows *= 4 {
		for range 40 {
			bytes := p.RouteBytes(rows, 1)
			t := (at + bytes/bandwidth) * math.Exp(noise*rng.NormFloat64())
			if rng.Float64() < outliers {
				t *= 1 + 9*rng.Float64()
			}
			out = append(out, Sample{bytes, t})
		}
	}
	return out
}

// TestCalibrate: the constants of every fabric's line are found, exactly without noise, and within
// the bounds of noise and outliers otherwise.
func TestCalibrate(t *testing.T) {
	for i, f := range Fabrics() {
		for _, c := range []struct{ noise, outliers, within float64 }{{0, 0, 1e-9}, {0.05, 0, 0.03}, {0.05, 0.1, 0.03}, {0.02, 0.25, 0.03}} {
			t.Run(fmt.Sprintf("%s/noise=%v/outliers=%v", f.Name, c.noise, c.outliers), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(uint64(i), 7))
				fit, err := Calibrate(sweep(rng, f.Probe+f.Turnaround, f.Bandwidth, c.noise, c.outliers))
				if err != nil {
					t.Fatal(err)
				}
				near(t, "intercept", fit.Intercept, f.Probe+f.Turnaround, c.within)
				near(t, "bandwidth", fit.Bandwidth, f.Bandwidth, c.within)
				// The mean of |x| of normal noise is 0.8 of its standard deviation.
				if fit.MAPE > 1.2*c.noise+1e-9 || !(fit.Amortised <= 1.2*c.noise+1e-9) {
					t.Errorf("MAPE %v, amortised %v", fit.MAPE, fit.Amortised)
				}
				back := fit.Fabric("x", f.Probe)
				near(t, "probe", back.Probe, f.Probe, c.within)
				if back.Validate() != nil || math.Abs(back.Probe+back.Turnaround-fit.Intercept) > 1e-12 {
					t.Errorf("fabric %+v of fit %+v", back, fit)
				}
			})
		}
	}
}

// TestCalibratePaper: the four round trips in the paper's text give the constants in the text: the
// probe of 16 us with 9 us of turnaround, and 24.7 GB/s.
func TestCalibratePaper(t *testing.T) {
	p := DeepSeekV2Lite()
	var samples []Sample
	for rows, us := range map[int]float64{1: 24, 256: 48, 1024: 115.8, 4096: 388} {
		samples = append(samples, Sample{p.RouteBytes(rows, 1), us * 1e-6})
	}
	fit, err := Calibrate(samples)
	if err != nil {
		t.Fatal(err)
	}
	near(t, "intercept", fit.Intercept, 25e-6, 0.05)
	near(t, "bandwidth", fit.Bandwidth, 24.7e9, 0.02)
	f := fit.Fabric("h100-ibgda", 16e-6)
	near(t, "turnaround", f.Turnaround, 9e-6, 0.15)
}

// TestCalibrateFallsBack: a line through the origin is found, and a signal slower than the
// intercept gives no turnaround.
func TestCalibrateFallsBack(t *testing.T) {
	fit, err := Calibrate([]Sample{{1e6, 0.95e-3}, {1e7, 1e-2}, {2e7, 2.02e-2}})
	if err != nil {
		t.Fatal(err)
	}
	near(t, "bandwidth", fit.Bandwidth, 1e9, 0.05)
	if fit.Intercept != 0 {
		t.Errorf("intercept %v", fit.Intercept)
	}
	if f := fit.Fabric("x", 1); f.Turnaround != 0 || f.Probe != fit.Intercept {
		t.Errorf("fabric %+v", f)
	}
}

// TestFitContention finds the paper's contention from measurements with 0 to 4 other flows. A
// fabric that stays flat, or was only measured without other flows, has none.
func TestFitContention(t *testing.T) {
	p, f := DeepSeekV2Lite(), ibgda(t)
	var loaded []Fabric
	for k := range 5 {
		loaded = append(loaded, f.Under(k))
	}
	got := FitContention(p, 256, loaded)
	if got.Free != f.Contention.Free {
		t.Errorf("free %d, want %d", got.Free, f.Contention.Free)
	}
	near(t, "probe", got.Probe, f.Contention.Probe, 1e-9)
	near(t, "transfer", got.Transfer, f.Contention.Transfer, 1e-9)
	for name, flat := range map[string][]Fabric{"flat": loaded[:3], "alone": loaded[:1], "nothing": nil} {
		if got := FitContention(p, 256, flat); got != (Contention{}) {
			t.Errorf("%s: %+v", name, got)
		}
	}
	// A fabric that is slowed only through its probe, and one without a probe, are valid too.
	slow := f
	slow.Probe *= 10
	for _, pair := range [][]Fabric{{f, slow}, {{Bandwidth: 2}, {Bandwidth: 1, Probe: 1}}} {
		c := pair[0]
		if c.Contention = FitContention(p, 256, pair); c.Contention.Free != 0 || c.Validate() != nil {
			t.Errorf("%+v: %v", c.Contention, c.Validate())
		}
	}
}

func TestCalibrateRefuses(t *testing.T) {
	for name, samples := range map[string][]Sample{
		"none": nil, "two": {{1, 1}, {2, 2}}, "alike": {{5, 1}, {5, 1}, {5, 2}}, "faster when larger": {{1, 3}, {2, 2}, {3, 1}},
		"no time": {{1, 0}, {2, 1}, {3, 2}}, "NaN": {{1, math.NaN()}, {2, 1}, {3, 2}}, "negative": {{-1, 1}, {2, 1}, {3, 2}}, "infinite": {{1, 1}, {math.Inf(1), 1}, {3, 2}},
	} {
		if f, err := Calibrate(samples); err == nil {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// FuzzCalibrate: any samples give a usable fabric or an error.
func FuzzCalibrate(f *testing.F) {
	f.Add(uint64(1), uint8(5), int8(-5), int8(9))
	f.Add(uint64(2), uint8(200), int8(-60), int8(60))
	f.Fuzz(func(t *testing.T, seed uint64, n uint8, times, sizes int8) {
		rng := rand.New(rand.NewPCG(seed, 1))
		samples := make([]Sample, n)
		for i := range samples {
			samples[i] = Sample{math.Floor(math.Exp(rng.Float64() * float64(sizes) / 4)), math.Exp(rng.NormFloat64()*3 + float64(times))}
		}
		fit, err := Calibrate(samples)
		if err != nil {
			return
		}
		if err := fit.Fabric("fuzz", 1e-6).Validate(); err != nil {
			t.Fatalf("%+v: %v", fit, err)
		}
		if fit.Outliers < 0 || fit.Outliers >= fit.Samples {
			t.Fatalf("%+v: every sample is an outlier", fit)
		}
	})
}
