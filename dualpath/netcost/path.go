package netcost

import "math"

// Hop is one leg of a path that goes over a buffer: bytes wait behind those that
// are queued, and move at a bandwidth. Storage to the buffer of an engine is one,
// from there to the memory of a device another (§VII-D, multi-hop routing).
type Hop struct {
	// Bandwidth is in bytes a second, Latency in seconds, Queued in bytes.
	Bandwidth, Latency, Queued float64
}

// Seconds is how long bytes take over all hops, one after the other: the sum of
// eq. 3 over the hops, with what is queued ahead at each. Hops that overlap, layer
// by layer, take less; the order of two paths rarely depends on it.
func Seconds(bytes float64, path ...Hop) float64 {
	fixed, slope := line(path)
	return fixed + bytes*slope
}

// line is a path's time as a function of the bytes: fixed seconds, and seconds a
// byte.
func line(path []Hop) (fixed, slope float64) {
	for _, h := range path {
		fixed += h.Latency + h.Queued/h.Bandwidth
		slope += 1 / h.Bandwidth
	}
	return fixed, slope
}

// Balance is how many of the bytes go over path a, so that a and b are done at the
// same time; all or none where one is done with everything before the other could
// begin.
func Balance(bytes float64, a, b []Hop) float64 {
	fixedA, slopeA := line(a)
	fixedB, slopeB := line(b)
	x := (fixedB - fixedA + bytes*slopeB) / (slopeA + slopeB)
	return math.Min(math.Max(x, 0), bytes)
}
