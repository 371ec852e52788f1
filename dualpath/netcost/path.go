package netcost

import "math"

// Hop is one hop of a path over a buffer: bytes wait behind the queued ones, and move at a
// bandwidth. One hop is from storage to the buffer of an engine, another from there to the memory
// of a device (§VII-D, multi-hop routing).
type Hop struct {
	// Bandwidth is in bytes a second, Latency in seconds, Queued in bytes.
	Bandwidth, Latency, Queued float64
}

// Seconds returns the time of bytes over all hops, one after the other: the sum of eq. 3 over the
// hops, with the bytes queued ahead at each. Hops that overlap, layer by layer, take less time;
// that rarely changes the order of two paths.
func Seconds(bytes float64, path ...Hop) float64 {
	fixed, slope := line(path)
	return fixed + bytes*slope
}

// line returns a path's time as a linear function of the bytes: fixed seconds, and seconds per
// byte.
func line(path []Hop) (fixed, slope float64) {
	for _, h := range path {
		fixed += h.Latency + h.Queued/h.Bandwidth
		slope += 1 / h.Bandwidth
	}
	return fixed, slope
}

// Balance returns the number of bytes to send over path a, so that a and b complete at the same
// time; all or none if one path completes everything before the other could begin.
func Balance(bytes float64, a, b []Hop) float64 {
	fixedA, slopeA := line(a)
	fixedB, slopeB := line(b)
	x := (fixedB - fixedA + bytes*slopeB) / (slopeA + slopeB)
	return math.Min(math.Max(x, 0), bytes)
}
