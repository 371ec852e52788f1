package prfaas

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Point is one measurement: a value at a length in tokens.
type Point struct{ Tokens, Value float64 }

// Curve is a cost of one request as a function of its tokens: bytes or seconds. Within each segment
// the cost is a + b l + c l².
type Curve struct {
	segments []segment
}

// segment has the coefficients for lengths above from, up to the next segment. The first segment
// applies to all smaller lengths too.
type segment struct{ from, a, b, c float64 }

// Polynomial returns the curve a + b l + c l² for every length l.
func Polynomial(a, b, c float64) Curve {
	return Curve{segments: []segment{{from: math.Inf(-1), a: a, b: b, c: c}}}
}

// Interpolate returns the curve of straight lines between adjacent points. The first and the last
// line extend beyond the points.
func Interpolate(points []Point) (Curve, error) {
	p, err := checked(points, 2)
	if err != nil {
		return Curve{}, err
	}
	var c Curve
	for i := range len(p) - 1 {
		slope := (p[i+1].Value - p[i].Value) / (p[i+1].Tokens - p[i].Tokens)
		from := p[i].Tokens
		if i == 0 {
			from = math.Inf(-1)
		}
		c.segments = append(c.segments, segment{from: from, a: p[i].Value - slope*p[i].Tokens, b: slope})
	}
	return c, nil
}

// FitQuadratic returns the parabola with the least sum of squared differences from the points. If
// there are three points, the parabola passes through them.
func FitQuadratic(points []Point) (Curve, error) {
	p, err := checked(points, 3)
	if err != nil {
		return Curve{}, err
	}
	// The normal equations use x = tokens/scale, so that their coefficients are near 1.
	scale := p[len(p)-1].Tokens
	var m [3][4]float64
	for _, q := range p {
		x := q.Tokens / scale
		pow := [5]float64{1, x, x * x, x * x * x, x * x * x * x}
		for r := range 3 {
			for c := range 3 {
				m[r][c] += pow[r+c]
			}
			m[r][3] += q.Value * pow[r]
		}
	}
	v, ok := solve3(m)
	if !ok {
		return Curve{}, fmt.Errorf("prfaas: no parabola fits points at %v to %v tokens; measure lengths further apart", p[0].Tokens, p[len(p)-1].Tokens)
	}
	return Polynomial(v[0], v[1]/scale, v[2]/scale/scale), nil
}

// checked returns a copy of the points, sorted by tokens. It returns an error if there are fewer
// than least points, two have the same tokens, or a number is negative or not finite.
func checked(points []Point, least int) ([]Point, error) {
	if len(points) < least {
		return nil, fmt.Errorf("prfaas: a curve over %d points; it needs at least %d", len(points), least)
	}
	p := slices.Clone(points)
	slices.SortFunc(p, func(a, b Point) int { return cmp.Compare(a.Tokens, b.Tokens) })
	for i, q := range p {
		if !(q.Tokens >= 0) || math.IsInf(q.Tokens, 0) || !(q.Value >= 0) || math.IsInf(q.Value, 0) {
			return nil, fmt.Errorf("prfaas: a curve through %v at %v tokens; both must be numbers from 0 up", q.Value, q.Tokens)
		}
		if i > 0 && q.Tokens == p[i-1].Tokens {
			return nil, fmt.Errorf("prfaas: a curve with two values at %v tokens: %v and %v; keep one", q.Tokens, p[i-1].Value, q.Value)
		}
	}
	return p, nil
}

// solve3 solves three linear equations by elimination with row exchange.
func solve3(m [3][4]float64) (v [3]float64, ok bool) {
	for c := range 3 {
		pivot := c
		for r := c + 1; r < 3; r++ {
			if math.Abs(m[r][c]) > math.Abs(m[pivot][c]) {
				pivot = r
			}
		}
		if math.Abs(m[pivot][c]) < 1e-12 {
			return v, false
		}
		m[c], m[pivot] = m[pivot], m[c]
		for r := range 3 {
			if r == c {
				continue
			}
			f := m[r][c] / m[c][c]
			for k := c; k < 4; k++ {
				m[r][k] -= f * m[c][k]
			}
		}
	}
	for r := range 3 {
		v[r] = m[r][3] / m[r][r]
	}
	return v, true
}

// At returns the value at a length.
func (c Curve) At(tokens float64) float64 {
	s := c.segments[c.segmentOf(tokens)]
	return s.a + tokens*(s.b+tokens*s.c)
}

func (c Curve) segmentOf(tokens float64) int {
	i := 0
	for i+1 < len(c.segments) && c.segments[i+1].from < tokens {
		i++
	}
	return i
}

// Coefficients returns a, b and c if the curve is one polynomial; ok is false otherwise.
func (c Curve) Coefficients() (a, b, q float64, ok bool) {
	if len(c.segments) != 1 {
		return 0, 0, 0, false
	}
	s := c.segments[0]
	return s.a, s.b, s.c, true
}

// IsZero reports whether the curve is the zero value.
func (c Curve) IsZero() bool { return len(c.segments) == 0 }

// Sum returns E[c(L); lo < L <= hi]: the mean over all requests, in which requests of other lengths
// count as 0, as in Lengths.Moment.
func (c Curve) Sum(d Lengths, lo, hi float64) float64 {
	var total float64
	for i, s := range c.segments {
		from, to := max(lo, s.from), hi
		if i+1 < len(c.segments) {
			to = min(hi, c.segments[i+1].from)
		}
		if from >= to {
			continue
		}
		total += s.a*d.Moment(0, from, to) + s.b*d.Moment(1, from, to)
		if s.c != 0 {
			total += s.c * d.Moment(2, from, to)
		}
	}
	return total
}

// Mean returns E[c(L) | lo < L <= hi], the mean over the requests with these lengths; 0 if there is
// none.
func (c Curve) Mean(d Lengths, lo, hi float64) float64 {
	share := d.Moment(0, lo, hi)
	if share <= 0 {
		return 0
	}
	return c.Sum(d, lo, hi) / share
}

// Rising reports whether the curve is above 0 at lo and does not fall from lo to hi. Every cost
// must satisfy this.
func (c Curve) Rising(lo, hi float64) bool {
	if !(c.At(lo) > 0) {
		return false
	}
	for i, s := range c.segments {
		from, to := max(lo, s.from), hi
		if i+1 < len(c.segments) {
			to = min(hi, c.segments[i+1].from)
		}
		if from < to && (s.b+2*s.c*from < 0 || s.b+2*s.c*to < 0) {
			return false
		}
	}
	return true
}

// KVThroughput returns Phi_kv(l) = S_kv(l) / T_prefill(l), in bytes per second: the rate at which
// one prefill instance produces KV (PrfaaS, equation 1).
func KVThroughput(kvBytes, prefillSeconds Curve, tokens float64) float64 {
	return kvBytes.At(tokens) / prefillSeconds.At(tokens)
}

// ClusterEgress returns the bandwidth that the link of a prefill cluster needs so that prefill
// never waits for the link: N/P times the KV throughput of an instance (perInstance), for N GPUs in
// instances of P GPUs (equation 2). The unit is that of perInstance.
func ClusterEgress(gpus, gpusPerInstance int, perInstance float64) float64 {
	return float64(gpus) / float64(gpusPerInstance) * perInstance
}
