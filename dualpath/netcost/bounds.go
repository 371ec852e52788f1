package netcost

// Nearer has the inputs of Proposition 1 of the NetKV paper (§IV-C, eq. 8): whether, for a request
// of a given size, a near instance has a lower cost than a far instance with a higher hit ratio.
type Nearer struct {
	// HitNear and HitFar are the shares of the request's KV that the two instances hold (ρ1 and
	// ρ2). CongestionNear and CongestionFar are the congestions of the network tiers to them (c1
	// and c3).
	HitNear, HitFar, CongestionNear, CongestionFar float64
	// Bandwidth is the bandwidth of the near tier, in bytes per second. Ratio is that bandwidth
	// divided by the bandwidth of the far tier (k).
	Bandwidth, Ratio float64
	// Bytes is the size of the request's KV. QueueNear and QueueFar are the request's waiting times
	// at the two instances, in seconds.
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

// StalenessBound returns the bound of Proposition 2 of the NetKV paper (§V-D, eq. 9): if the error
// of each tier's congestion is below the bound, two tiers are correctly ordered by their remaining
// bandwidth. If the bound is not positive, any error may invert the order, because the tier that is
// faster when idle is not faster under the given congestion.
func StalenessBound(bandwidthFast, bandwidthSlow, congestionFast, congestionSlow float64) float64 {
	return (bandwidthFast*(1-congestionFast) - bandwidthSlow*(1-congestionSlow)) / (bandwidthFast + bandwidthSlow)
}
