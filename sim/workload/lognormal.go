package workload

import (
	"fmt"
	"math"
	"math/rand/v2"
)

// LogNormal is a log-normal distribution cut at both ends: lengths in tokens.
type LogNormal struct {
	// Mu and Sigma are of the logarithm.
	Mu, Sigma float64
	Min, Max  float64
}

// PrfaaSLengths is the distribution of PrfaaS section 4.1.
func PrfaaSLengths() LogNormal { return LogNormal{Mu: 9.90, Sigma: 1.00, Min: 128, Max: 128_000} }

// Validate returns an error that names what is out of range.
func (d LogNormal) Validate() error {
	if !(d.Sigma > 0) || !(d.Min > 0) || !(d.Max > d.Min) || math.IsInf(d.Max, 0) || math.IsNaN(d.Mu) || math.IsInf(d.Mu, 0) {
		return fmt.Errorf("workload: log-normal with mu %v, sigma %v on [%v, %v]: sigma and the lower end must be positive, the upper end above it", d.Mu, d.Sigma, d.Min, d.Max)
	}
	if !(d.below(d.Max) > d.below(d.Min)) {
		return fmt.Errorf("workload: log-normal with mu %v, sigma %v has nothing on [%v, %v]; widen the interval", d.Mu, d.Sigma, d.Min, d.Max)
	}
	return nil
}

// phi is the standard normal distribution function.
func phi(z float64) float64 { return 0.5 * math.Erfc(-z/math.Sqrt2) }

// below is the untruncated distribution function.
func (d LogNormal) below(x float64) float64 { return phi((math.Log(x) - d.Mu) / d.Sigma) }

// mass is the integral of x over the untruncated density below x, as a share of
// its mean.
func (d LogNormal) mass(x float64) float64 { return phi((math.Log(x)-d.Mu)/d.Sigma - d.Sigma) }

// CDF is the probability of a length of at most x.
func (d LogNormal) CDF(x float64) float64 {
	x = min(max(x, d.Min), d.Max)
	return (d.below(x) - d.below(d.Min)) / (d.below(d.Max) - d.below(d.Min))
}

// Quantile is the length with CDF u.
func (d LogNormal) Quantile(u float64) float64 {
	lo, hi := d.below(d.Min), d.below(d.Max)
	return min(max(math.Exp(d.Mu+d.Sigma*normal(lo+u*(hi-lo))), d.Min), d.Max)
}

// Mean is the mean length.
func (d LogNormal) Mean() float64 { return d.MeanBetween(d.Min, d.Max) }

// TailMean is the mean of the lengths above x.
func (d LogNormal) TailMean(x float64) float64 { return d.MeanBetween(x, d.Max) }

// MeanBetween is the mean of the lengths in [lo, hi]; NaN if there are none.
func (d LogNormal) MeanBetween(lo, hi float64) float64 {
	lo, hi = min(max(lo, d.Min), d.Max), min(max(hi, d.Min), d.Max)
	return math.Exp(d.Mu+d.Sigma*d.Sigma/2) * (d.mass(hi) - d.mass(lo)) / (d.below(hi) - d.below(lo))
}

// Sample returns a random length.
func (d LogNormal) Sample(rng *rand.Rand) float64 { return d.Quantile(rng.Float64()) }
