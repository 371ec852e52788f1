package redistribute

import "math"

// RouteRows returns the number of query rows up to which route takes no longer than fetch, with all
// terms included; 0 if fetch always wins, +Inf if rows cost nothing. (Payload.BreakEvenRows is the
// same for bytes alone.)
func (m Model) RouteRows(r Request) float64 {
	r.EnsureDefaults()
	m.Fabric = m.Fabric.Under(r.Flows)
	// The time of route is linear in the rows. Compute it for 0 rows, and the slope.
	r.Rows = 0
	zero, fetch := m.route(r).Terms.Sum(), m.fetch(r).Terms.Sum()
	r.Rows = 1
	slope := m.route(r).Terms.Sum() - zero
	switch left := fetch - zero; {
	case left < 0:
		return 0
	case slope <= 0:
		return math.Inf(1)
	default:
		return left / slope
	}
}

// SpliceTokens returns the chunk length for which computing takes as long as the splice:
// T_splice/(L c), without the pull (section 5.1: 75 to 220). +Inf if computing costs nothing.
func (m Model) SpliceTokens() float64 {
	return divide(m.Splice, m.Prefill*float64(m.Payload.Layers))
}

// LocalTokens returns the length up to which local takes no longer than fetch of a Moved chunk,
// pull included; +Inf if local always wins.
func (m Model) LocalTokens() float64 {
	more := (m.Prefill - float64(m.Payload.Token)/m.Fabric.bulk()) * float64(m.Payload.Layers)
	if more <= 0 {
		return math.Inf(1)
	}
	return m.Splice / more
}

// SpliceBandwidth returns the bandwidth, in bytes per second, below which routing rows takes longer
// than the splice alone: Mq (q+p)/T_splice (section 8, "Congestion"). +Inf without a splice.
func (m Model) SpliceBandwidth(rows int) float64 {
	return divide(m.Payload.RouteBytes(rows, 1), m.Splice)
}

// AmortiseSteps returns the number of decoding steps from which fetching once is cheaper than
// routing in each step (section 5.5, "fetch only to amortise"); +Inf if it never is, as for a
// selection that changes in every step. For agents that share a prefix it is the number of
// agent-steps on one replica that repays its pull.
func (m Model) AmortiseSteps(r Request) float64 {
	r.EnsureDefaults()
	r.Steps = 1
	m.Fabric = m.Fabric.Under(r.Flows)
	route, fetch := m.route(r).Terms.Sum(), m.fetch(r).Terms.Sum()
	switch {
	case fetch < route:
		return 1
	case r.Reuse == Selected:
		return math.Inf(1)
	}
	return math.Floor(divide(fetch, route)) + 1
}

// divide returns a/b, +Inf if b is 0.
func divide(a, b float64) float64 {
	if b == 0 {
		return math.Inf(1)
	}
	return a / b
}
