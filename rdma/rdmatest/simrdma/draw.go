package simrdma

import "time"

// Span is a range of durations. Both ends are included.
type Span struct {
	Min, Max time.Duration
}

// draws is a stream of random numbers. Its state is so small that each Work can have a stream. The
// generator is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
// OOPSLA 2014).
type draws struct {
	state uint64
}

// drawsOf returns the stream that the seed and the coordinates determine.
func drawsOf(seed uint64, coordinates ...uint64) draws {
	d := draws{state: seed}
	for _, c := range coordinates {
		d.state = d.next() ^ c
	}
	return d
}

// next returns a 64-bit number.
func (d *draws) next() uint64 {
	d.state += 0x9e3779b97f4a7c15
	z := d.state
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// chance returns true with probability p.
func (d *draws) chance(p float64) bool { return float64(d.next()>>11)/(1<<53) < p }

// below returns a random number from 0 to n-1; n is at least 1. The bias of the remainder is
// negligible for small n.
func (d *draws) below(n int) int { return int(d.next() % uint64(n)) }

// within returns a random duration in s.
func (d *draws) within(s Span) time.Duration {
	if s.Max <= s.Min {
		return s.Min
	}
	return s.Min + time.Duration(d.next()%uint64(s.Max-s.Min+1))
}

// hash returns the FNV-1a hash of a name.
func hash(name string) uint64 {
	h := uint64(14695981039346656037)
	for _, c := range []byte(name) {
		h = (h ^ uint64(c)) * 1099511628211
	}
	return h
}
