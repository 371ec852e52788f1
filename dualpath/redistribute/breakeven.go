package redistribute

import "math"

// RouteRows returns the number of query rows up to which route (the query is sent to the KV) takes
// no longer than fetch (the KV is copied to the query). All terms of both costs count. It is 0 if
// fetch is always faster, and +Inf if query rows cost nothing. (Payload.BreakEvenRows compares only
// the bytes.)
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

// SpliceTokens returns the chunk length in tokens for which computing the chunk takes as long as
// the splice of a fetched chunk (its adaptation to a new position): T_splice/(L c). The transfer of
// the fetched chunk does not count (section 5.1 of the paper: 75 to 220 tokens). The result is +Inf
// if computing takes no time.
func (m Model) SpliceTokens() float64 {
	return divide(m.Splice, m.Prefill*float64(m.Payload.Layers))
}

// LocalTokens returns the chunk length in tokens up to which computing the chunk again (local)
// takes no longer than the fetch of a Moved chunk. Here the transfer of the fetched chunk counts.
// The result is +Inf if local is always faster.
func (m Model) LocalTokens() float64 {
	more := (m.Prefill - float64(m.Payload.Token)/m.Fabric.bulk()) * float64(m.Payload.Layers)
	if more <= 0 {
		return math.Inf(1)
	}
	return m.Splice / more
}

// SpliceBandwidth returns the bandwidth, in bytes per second, below which the transfer of a routed
// query and its result takes longer than the splice of a fetched chunk: Mq (q+p)/T_splice (section
// 8 of the paper, "Congestion"). The result is +Inf if the splice takes no time.
func (m Model) SpliceBandwidth(rows int) float64 {
	return divide(m.Payload.RouteBytes(rows, 1), m.Splice)
}

// AmortiseSteps returns the number of decoding steps from which fetching the KV once is cheaper
// than routing the query in each step (section 5.5 of the paper, "fetch only to amortise"). The
// result is +Inf if fetch is never cheaper, as for a selection that changes in every step. If
// agents share a prefix, the steps of all agents that use one copy of the chunk count together.
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

// divide returns a/b, or +Inf if b is 0.
func divide(a, b float64) float64 {
	if b == 0 {
		return math.Inf(1)
	}
	return a / b
}
