package prfaas

import (
	"fmt"
	"math"
	"slices"
)

// Lengths is the distribution of the uncached prompt lengths, in tokens.
type Lengths interface {
	// Moment returns E[L^k; lo < L <= hi], k from 0 to 2: the mean over all requests, in which
	// requests outside lo to hi count as 0.
	Moment(k int, lo, hi float64) float64
	// Bounds returns the least and the greatest length.
	Bounds() (least, greatest float64)
	// Quantile returns the length that a share q of the requests does not exceed.
	Quantile(q float64) float64
}

// Share returns the share of requests with lo < L <= hi.
func Share(d Lengths, lo, hi float64) float64 { return d.Moment(0, lo, hi) }

// Mean returns E[L | lo < L <= hi], the mean over the requests with these lengths; 0 if there is
// none.
func Mean(d Lengths, lo, hi float64) float64 {
	m0 := d.Moment(0, lo, hi)
	if m0 <= 0 {
		return 0
	}
	return d.Moment(1, lo, hi) / m0
}

// LogNormal is a log-normal distribution truncated to Min < L <= Max, as in PrfaaS section 4.1.
type LogNormal struct {
	// Mu and Sigma are the mean and the standard deviation of ln L before the
	// truncation.
	Mu, Sigma float64
	Min, Max  float64
}

var (
	_ Lengths = LogNormal{}
	_ Lengths = (*Sample)(nil)
)

// Validate returns an error that names the first parameter out of its range.
func (d LogNormal) Validate() error {
	switch {
	case math.IsNaN(d.Mu) || math.IsInf(d.Mu, 0):
		return fmt.Errorf("prfaas: mu is %v; the mean of ln(tokens) is a finite number, such as 9.9", d.Mu)
	case !(d.Sigma > 0) || math.IsInf(d.Sigma, 0):
		return fmt.Errorf("prfaas: sigma is %v; the standard deviation of ln(tokens) must be above 0", d.Sigma)
	case !(d.Min >= 0) || !(d.Max > d.Min) || math.IsInf(d.Max, 0):
		return fmt.Errorf("prfaas: lengths from %v to %v tokens; they must rise, from 0 or above", d.Min, d.Max)
	case !(d.mass(0, d.Min, d.Max) > 1e-12):
		return fmt.Errorf("prfaas: almost no length of a log-normal with mu %v, sigma %v lies between %v and %v tokens; widen the range", d.Mu, d.Sigma, d.Min, d.Max)
	}
	return nil
}

// Moment is exact. For a log-normal X, E[X^k; a < X <= b] is exp(k mu + k² sigma²/2) (Phi(beta - k
// sigma) - Phi(alpha - k sigma)), where alpha and beta are the standardised logarithms of a and b.
func (d LogNormal) Moment(k int, lo, hi float64) float64 {
	lo, hi = max(lo, d.Min), min(hi, d.Max)
	if !(lo < hi) {
		return 0
	}
	s := float64(k) * d.Sigma
	return math.Exp(float64(k)*d.Mu+s*s/2) * d.mass(s, lo, hi) / d.mass(0, d.Min, d.Max)
}

// mass returns Phi(beta - shift) - Phi(alpha - shift), for the standardised logarithms alpha of lo
// and beta of hi.
func (d LogNormal) mass(shift, lo, hi float64) float64 {
	alpha, beta := d.standard(lo)-shift, d.standard(hi)-shift
	if alpha > 0 { // both in the upper tail: subtract small numbers, not numbers near 1
		return upper(alpha) - upper(beta)
	}
	return upper(-beta) - upper(-alpha)
}

func (d LogNormal) standard(tokens float64) float64 {
	if tokens <= 0 {
		return math.Inf(-1)
	}
	return (math.Log(tokens) - d.Mu) / d.Sigma
}

// upper returns 1 - Phi(x).
func upper(x float64) float64 { return math.Erfc(x/math.Sqrt2) / 2 }

// Bounds returns Min and Max.
func (d LogNormal) Bounds() (least, greatest float64) { return d.Min, d.Max }

// Quantile computes the length from the inverse of erfc. Far out in a tail, where that inverse is
// not precise enough, it uses bisection to a millionth of a token.
func (d LogNormal) Quantile(q float64) float64 {
	q = min(max(q, 0), 1)
	alpha, beta := d.standard(d.Min), d.standard(d.Max)
	below := upper(-alpha) + q*d.mass(0, d.Min, d.Max) // Phi at the quantile
	if tail := min(below, 1-below); tail < 1e-6 || min(upper(alpha), upper(-beta)) < 1e-6 {
		return bisect(d.Min, d.Max, func(l float64) bool { return d.Moment(0, d.Min, l) < q })
	}
	z := -math.Sqrt2 * math.Erfcinv(2*below)
	return min(max(math.Exp(d.Mu+d.Sigma*z), d.Min), d.Max)
}

// bisect returns the point between lo and hi at which below changes from true to false.
func bisect(lo, hi float64, below func(float64) bool) float64 {
	for hi-lo > 1e-6 {
		mid := lo + (hi-lo)/2
		if mid <= lo || mid >= hi {
			break
		}
		if below(mid) {
			lo = mid
		} else {
			hi = mid
		}
	}
	return lo + (hi-lo)/2
}

// Sample is an empirical distribution of lengths, each with the same weight.
type Sample struct {
	// lengths are in ascending order. sums[k][i] is the sum of length^k over the first i lengths.
	lengths []float64
	sums    [3][]float64
}

// NewSample returns a distribution of a copy of the lengths, in tokens. All must be finite and not
// negative.
func NewSample(lengths []float64) (*Sample, error) {
	if len(lengths) == 0 {
		return nil, fmt.Errorf("prfaas: a sample without lengths; give at least one request")
	}
	s := &Sample{lengths: slices.Sorted(slices.Values(lengths))}
	if least, most := s.lengths[0], s.lengths[len(s.lengths)-1]; !(least >= 0) || math.IsInf(most, 0) {
		return nil, fmt.Errorf("prfaas: lengths from %v to %v tokens; each must be a number from 0 up", least, most)
	}
	for k := range s.sums {
		s.sums[k] = make([]float64, len(s.lengths)+1)
		for i, l := range s.lengths {
			s.sums[k][i+1] = s.sums[k][i] + math.Pow(l, float64(k))
		}
	}
	return s, nil
}

// Moment sums over the sample.
func (s *Sample) Moment(k int, lo, hi float64) float64 {
	i, j := s.upTo(lo), s.upTo(hi)
	if i >= j {
		return 0
	}
	return (s.sums[k][j] - s.sums[k][i]) / float64(len(s.lengths))
}

// upTo returns the number of lengths that do not exceed l.
func (s *Sample) upTo(l float64) int {
	i, _ := slices.BinarySearchFunc(s.lengths, l, func(have, want float64) int {
		if have <= want {
			return -1
		}
		return 1
	})
	return i
}

// Bounds returns the greatest length and, as the lower bound, a value just below the least length,
// because lower bounds are exclusive.
func (s *Sample) Bounds() (least, greatest float64) {
	return math.Nextafter(s.lengths[0], math.Inf(-1)), s.lengths[len(s.lengths)-1]
}

// Quantile returns the length at rank ceil(q n).
func (s *Sample) Quantile(q float64) float64 {
	rank := int(math.Ceil(q * float64(len(s.lengths))))
	return s.lengths[min(max(rank, 1), len(s.lengths))-1]
}

// Len returns the number of requests in the sample.
func (s *Sample) Len() int { return len(s.lengths) }
