package netcost

import "math"

// Hop is one hop of a path through a buffer: new bytes wait until the queued bytes have moved, and
// then move at the bandwidth. The first hop is from storage to the buffer of an engine, the second
// from the buffer to the memory of a device (§VII-D of the NetKV paper, multi-hop routing).
type Hop struct {
	// Bandwidth is in bytes per second, Latency in seconds. Queued is the number of bytes ahead.
	Bandwidth, Latency, Queued float64
}

// Seconds returns the time to move bytes over all hops, one hop after the other. Each hop takes its
// latency and the time of the queued and the new bytes at its bandwidth (eq. 3). If the hops
// overlap layer by layer, the time is shorter, but that rarely changes the order of two paths.
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

// Balance returns the number of bytes to send over path a so that, with the rest over path b, both
// paths end at the same time. It returns all or none of the bytes if one path could move all bytes
// before the other begins.
func Balance(bytes float64, a, b []Hop) float64 {
	fixedA, slopeA := line(a)
	fixedB, slopeB := line(b)
	x := (fixedB - fixedA + bytes*slopeB) / (slopeA + slopeB)
	return math.Min(math.Max(x, 0), bytes)
}
