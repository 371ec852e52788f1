package netcost

// Nearer is Proposition 1 (§IV-C, eq. 8): whether a near instance has a lower cost than a far one
// with a higher hit ratio, for a request of a given size.
type Nearer struct {
	// HitNear and HitFar are the hit ratios ρ1 and ρ2; CongestionNear and
	// CongestionFar the tiers' c1 and c3.
	HitNear, HitFar, CongestionNear, CongestionFar float64
	// Bandwidth is the near tier's, in bytes per second. Ratio is k: the near tier's bandwidth
	// divided by the far tier's.
	Bandwidth, Ratio float64
	// Bytes is the size of the request's KV. QueueNear and QueueFar are its waits at the two
	// instances, in seconds.
	Bytes, QueueNear, QueueFar float64
}

// Sides returns both sides of the inequality; the near instance wins if left < right.
func (n *Nearer) Sides() (left, right float64) {
	left = 1 - n.HitNear
	right = n.Ratio * (1 - n.CongestionNear) / (1 - n.CongestionFar) * (1 - n.HitFar)
	if wait := n.QueueFar - n.QueueNear; wait != 0 {
		right += n.Bandwidth * (1 - n.CongestionNear) / n.Bytes * wait
	}
	return left, right
}

// Wins reports whether the near instance has the lower cost.
func (n *Nearer) Wins() bool {
	left, right := n.Sides()
	return left < right
}

// StalenessBound is Proposition 2 (§V-D, eq. 9): while the error of each tier's congestion is below
// the bound, the order of two tiers by their remaining bandwidth is the true one. If the bound is
// not positive, there is no tolerance, because the tier that is faster when idle is not faster now.
func StalenessBound(bandwidthFast, bandwidthSlow, congestionFast, congestionSlow float64) float64 {
	return (bandwidthFast*(1-congestionFast) - bandwidthSlow*(1-congestionSlow)) / (bandwidthFast + bandwidthSlow)
}
