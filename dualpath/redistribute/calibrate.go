package redistribute

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Sample is one measured round trip: the sum of the bytes in both directions, and its duration in
// seconds.
type Sample struct{ Bytes, Seconds float64 }

// Fit is a line through samples: seconds = Intercept + bytes/Bandwidth.
type Fit struct {
	// Intercept is in seconds, Bandwidth in bytes per second.
	Intercept, Bandwidth float64
	// MAPE is the mean absolute relative error over all samples. Amortised is the mean over only
	// the samples whose bytes take longer than the intercept. (Table 2 of the paper has both.) A
	// mean over no samples is NaN.
	MAPE, Amortised float64
	// Samples is the number of samples, Outliers the number of samples to which the fit gave weight
	// 0. MAPE and Amortised exclude the outliers.
	Samples, Outliers int
}

// Seconds returns the time of a round trip with the given bytes.
func (f Fit) Seconds(bytes float64) float64 { return f.Intercept + bytes/f.Bandwidth }

// Fabric returns a fabric with the constants of the fit. signal is the measured round trip of an
// empty signal in seconds; the intercept minus signal becomes the turnaround.
func (f Fit) Fabric(name string, signal float64) Fabric {
	out := Fabric{Name: name, Probe: min(signal, f.Intercept), Bandwidth: f.Bandwidth}
	out.Turnaround = f.Intercept - out.Probe
	if !math.IsNaN(f.Amortised) {
		out.MAPE = f.Amortised
	}
	return out
}

// Constants of the fit. Tukey's biweight gives no weight to a residual above tukey times the scale
// of the residuals. With 4.685 the fit is 95 % as efficient as least squares if the noise is normal
// (Huber, Robust Statistics). The scale is madToSigma times the median of the absolute residuals.
const (
	tukey       = 4.685
	madToSigma  = 1.4826
	maxSamples  = 1 << 20
	fitRounds   = 50
	fitAccuracy = 1e-12
	// exact is the scale below which residuals are rounding errors.
	exact = 1e-9
)

// Calibrate fits the affine model T = T_probe + bytes/BW (section 4.3) to measured round trips. The
// fit minimises the squares of the relative errors and is robust against outliers: up to a tenth of
// the samples may be arbitrary. It starts with a line through the median times of the sizes, whose
// slope is the median of the slopes between these times. Samples far from the line then get less
// weight or none (Tukey's biweight). Calibrate needs at least three samples of at least two sizes,
// and times that grow with the size.
func Calibrate(samples []Sample) (Fit, error) {
	if len(samples) < 3 || len(samples) > maxSamples {
		return Fit{}, fmt.Errorf("redistribute: calibrate: %d samples; it takes between 3 and %d", len(samples), maxSamples)
	}
	for _, s := range samples {
		if !(s.Bytes >= 0) || !(s.Seconds > 0) || math.IsInf(s.Bytes+s.Seconds, 0) {
			return Fit{}, fmt.Errorf("redistribute: calibrate: a sample of %v bytes in %v s: leave it out; bytes are not negative, and times are positive", s.Bytes, s.Seconds)
		}
	}
	at, slope, err := start(samples)
	if err != nil {
		return Fit{}, err
	}
	weights := make([]float64, len(samples))
	residuals := make([]float64, len(samples))
	for range fitRounds {
		weigh(samples, at, slope, weights, residuals)
		a, b := line(samples, weights)
		moved := math.Abs(a-at) > fitAccuracy*math.Abs(a) || math.Abs(b-slope) > fitAccuracy*math.Abs(b)
		at, slope = a, b
		if !moved {
			break
		}
	}
	if !(slope > 0) {
		return Fit{}, fmt.Errorf("redistribute: calibrate: the times do not grow with the size: measure larger transfers")
	}
	f := Fit{Intercept: at, Bandwidth: 1 / slope, Samples: len(samples)}
	f.judge(samples, weights)
	return f, nil
}

// start returns the line with which the fit starts: the median of the slopes between the median
// times of the sizes, and the median intercept for that slope.
func start(samples []Sample) (at, slope float64, err error) {
	sizes := medians(samples)
	if len(sizes) < 2 {
		return 0, 0, fmt.Errorf("redistribute: calibrate: all samples are of %v bytes: vary the size", samples[0].Bytes)
	}
	// The number of pairs of sizes grows with the square of the sizes. Above sizesMax sizes, only
	// every k-th size is used.
	const sizesMax = 256
	if k := (len(sizes) + sizesMax - 1) / sizesMax; k > 1 {
		var some []Sample
		for i := 0; i < len(sizes); i += k {
			some = append(some, sizes[i])
		}
		sizes = some
	}
	var slopes []float64
	for i, a := range sizes {
		for _, b := range sizes[i+1:] {
			slopes = append(slopes, (b.Seconds-a.Seconds)/(b.Bytes-a.Bytes))
		}
	}
	if slope = median(slopes); !(slope > 0) {
		return 0, 0, fmt.Errorf("redistribute: calibrate: the times do not grow with the size (by %v s a byte in the median): measure larger transfers", slope)
	}
	intercepts := make([]float64, len(sizes))
	for i, s := range sizes {
		intercepts[i] = s.Seconds - slope*s.Bytes
	}
	return max(0, median(intercepts)), slope, nil
}

// medians returns the median time of each size, ordered by size.
func medians(samples []Sample) []Sample {
	sorted := slices.Clone(samples)
	slices.SortFunc(sorted, func(a, b Sample) int { return cmp.Compare(a.Bytes, b.Bytes) })
	var out []Sample
	for len(sorted) > 0 {
		n := 1
		for n < len(sorted) && sorted[n].Bytes == sorted[0].Bytes {
			n++
		}
		times := make([]float64, n)
		for i, s := range sorted[:n] {
			times[i] = s.Seconds
		}
		out = append(out, Sample{sorted[0].Bytes, median(times)})
		sorted = sorted[n:]
	}
	return out
}

// median sorts values and returns their median. If the number of values is even, that is the mean
// of the middle two.
func median(values []float64) float64 {
	slices.Sort(values)
	n := len(values)
	if n%2 == 1 {
		return values[n/2]
	}
	return values[n/2-1]/2 + values[n/2]/2
}

// weigh sets weights to the biweight of each sample's relative residual.
func weigh(samples []Sample, at, slope float64, weights, residuals []float64) {
	for i, s := range samples {
		residuals[i] = math.Abs((at+slope*s.Bytes)/s.Seconds - 1)
		weights[i] = residuals[i]
	}
	cut := tukey * max(exact, madToSigma*median(residuals))
	for i, r := range weights {
		if u := r / cut; u < 1 {
			weights[i] = (1 - u*u) * (1 - u*u)
		} else {
			weights[i] = 0
		}
	}
}

// line returns the line that minimises sum w ((at + slope bytes)/seconds - 1)^2, where neither at
// nor slope may be negative.
func line(samples []Sample, weights []float64) (at, slope float64) {
	// The bytes of each sample are divided by the largest bytes, so that the sums have the same
	// order of magnitude.
	scale := 0.0
	for _, s := range samples {
		scale = max(scale, s.Bytes)
	}
	var xx, xy, yy, x1, y1 float64
	for i, s := range samples {
		w, x, y := weights[i], 1/s.Seconds, s.Bytes/scale/s.Seconds
		xx, xy, yy, x1, y1 = xx+w*x*x, xy+w*x*y, yy+w*y*y, x1+w*x, y1+w*y
	}
	det := xx*yy - xy*xy
	if det > 1e-12*xx*yy {
		at, slope = (x1*yy-y1*xy)/det, (y1*xx-x1*xy)/det
	}
	// Noise can make a constant negative. That constant is set to 0, and the other constant is
	// fitted alone.
	switch {
	case slope <= 0 && xx > 0:
		at, slope = x1/xx, 0
	case at < 0 && yy > 0:
		at, slope = 0, y1/yy
	}
	return at, slope / scale
}

// judge computes the errors of the fit over the samples whose weight is not 0.
func (f *Fit) judge(samples []Sample, weights []float64) {
	var all, large, kept, keptLarge float64
	for i, s := range samples {
		if weights[i] == 0 {
			f.Outliers++
			continue
		}
		e := math.Abs(f.Seconds(s.Bytes)/s.Seconds - 1)
		all, kept = all+e, kept+1
		if s.Bytes/f.Bandwidth > f.Intercept {
			large, keptLarge = large+e, keptLarge+1
		}
	}
	f.MAPE, f.Amortised = all/kept, large/keptLarge
}

// flat is a relative increase of a round trip's time. If other flows cause a larger increase, they
// fill the link.
const flat = 0.15

// FitContention returns the contention of a fabric that was measured without other flows
// (loaded[0]) and with 1, 2, … other flows. Free is the largest number of other flows that increase
// the time of a round trip of rows query rows by at most flat. The factors state how much longer
// the probe and the transfer of a byte take with Free+1 other flows. The result is zero if no
// measured number of flows increases the time by more than flat.
func FitContention(p Payload, rows int, loaded []Fabric) Contention {
	bytes := p.RouteBytes(rows, 1)
	for k, f := range loaded {
		if k == 0 || f.RoundTrip(bytes) <= (1+flat)*loaded[0].RoundTrip(bytes) {
			continue
		}
		alone := loaded[0]
		factor := func(of, than float64) float64 {
			if than <= 0 {
				return 1
			}
			return max(1, of/than)
		}
		return Contention{Free: k - 1, Probe: factor(f.Probe, alone.Probe), Transfer: factor(alone.Bandwidth, f.Bandwidth)}
	}
	return Contention{}
}
