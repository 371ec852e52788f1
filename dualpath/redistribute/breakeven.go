package redistribute

import "math"

// RouteRows is the number of query rows up to which route takes no longer than
// fetch, all terms counted; 0 if fetch always wins, +Inf if rows cost nothing.
// (Payload.BreakEvenRows is the same for bytes alone.)
func (m Model) RouteRows(r Request) float64 {
	r.EnsureDefaults()
	m.Fabric = m.Fabric.Under(r.Flows)
	// Route is a straight line in the rows: at 0 rows, and per row.
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

// SpliceTokens is the chunk that takes as long to compute again as to splice:
// T_splice/(L c), the pull left out (section 5.1: 75 to 220). +Inf if computing
// costs nothing.
func (m Model) SpliceTokens() float64 {
	return divide(m.Splice, m.Prefill*float64(m.Payload.Layers))
}

// LocalTokens is the length up to which local takes no longer than fetch of a Moved
// chunk, its pull counted; +Inf if local always wins.
func (m Model) LocalTokens() float64 {
	more := (m.Prefill - float64(m.Payload.Token)/m.Fabric.bulk()) * float64(m.Payload.Layers)
	if more <= 0 {
		return math.Inf(1)
	}
	return m.Splice / more
}

// SpliceBandwidth is the bandwidth, in bytes a second, below which routing rows
// takes longer than the splice alone: Mq (q+p)/T_splice (section 8, "Congestion").
// +Inf without a splice.
func (m Model) SpliceBandwidth(rows int) float64 {
	return divide(m.Payload.RouteBytes(rows, 1), m.Splice)
}

// AmortiseSteps is the number of decoding steps from which fetching once is cheaper
// than routing in each of them (section 5.5, "fetch only to amortise"); +Inf where
// it never is, as for a selection that changes in every step. For agents that share
// a prefix it is the number of agent-steps on one replica that repays its pull.
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

// divide is a/b, +Inf where b is 0.
func divide(a, b float64) float64 {
	if b == 0 {
		return math.Inf(1)
	}
	return a / b
}
