package redistribute

import (
	"fmt"
	"math"
)

// MaxHoldings is the largest number of holders of one selection. It equals attention.MaxParts, the
// largest number of partial results in a merge.
const MaxHoldings = 64

// Holding is the part of a selection that one holder has.
type Holding struct {
	// Fabric is the fabric between the requester and this holder.
	Fabric Fabric
	// Tokens is the number of selected tokens that the holder has.
	Tokens int
	// Requesters is the number of requesters that this holder serves concurrently, including this
	// request; default 1. Flows is the number of other flows on the same link.
	Requesters, Flows int
	// NoRoute and NoFetch exclude a primitive.
	NoRoute, NoFetch bool
}

// Spread is the decision for a selection whose holders differ.
type Spread struct {
	// Choice is Route or Fetch for each holding.
	Choice []Primitive
	// Seconds is the time of one step. It is the sum of the following parts. Wait is the longest
	// probe, turnaround and computation of a routed holder. Bytes is the transfer time of all
	// routed queries. Merge and Host are the times of merge and host software. Fetch is the time of
	// all fetches, one after the other.
	Seconds                         float64
	Wait, Bytes, Merge, Host, Fetch float64
}

// holdingCost has the times of one holding: wait and bytes if it is routed, fetch if it is fetched.
type holdingCost struct{ wait, bytes, fetch float64 }

// Spread decides for each holder of one selection whether its part is routed or fetched, in one
// step and one round trip. Routed queries run concurrently, so only the slowest holder's probe,
// turnaround and compute count. The bytes of the routed queries cross the requester's one link one
// after the other. Fetches also run one after the other, as in the paper's prototype (section 5.4).
// m.Fabric is not used.
//
// The result is the exact minimum. Spread tries each holder as the slowest routed holder: it then
// fetches the tokens of all slower holders. For each other holder it chooses the shorter of two
// times: the transfer of the route's bytes, and the fetch.
func (m Model) Spread(rows int, holdings []Holding) (Spread, error) {
	costs, err := m.holdingCosts(rows, holdings)
	if err != nil {
		return Spread{}, err
	}
	best := Spread{Seconds: math.Inf(1)}
	try := func(slowest float64) {
		s, ok := m.spreadUnder(slowest, rows, holdings, costs)
		if ok && s.Seconds < best.Seconds {
			best = s
		}
	}
	try(math.Inf(-1)) // nothing is routed
	for i, c := range costs {
		if !holdings[i].NoRoute {
			try(c.wait)
		}
	}
	return best, nil
}

// holdingCosts checks the request and computes the cost of each holding.
func (m Model) holdingCosts(rows int, holdings []Holding) ([]holdingCost, error) {
	if len(holdings) < 1 || len(holdings) > MaxHoldings {
		return nil, fmt.Errorf("redistribute: %d holdings; it takes between 1 and %d", len(holdings), MaxHoldings)
	}
	costs := make([]holdingCost, len(holdings))
	for i, h := range holdings {
		one := m
		one.Fabric = h.Fabric
		r := Request{Rows: rows, Tokens: h.Tokens, Reuse: Selected, Requesters: h.Requesters, Flows: h.Flows}
		r.EnsureDefaults()
		err := one.Validate()
		if err == nil {
			err = r.Validate()
		}
		if err == nil && h.NoRoute && h.NoFetch {
			err = fmt.Errorf("redistribute: route and fetch are both ruled out: leave the holding out of the selection")
		}
		if err != nil {
			return nil, fmt.Errorf("holding %d: %w", i, err)
		}
		one.Fabric = h.Fabric.Under(h.Flows)
		route := one.route(r).Terms
		costs[i] = holdingCost{
			wait: route.Probe + route.Turnaround + route.Compute, bytes: route.Transfer + route.Return, fetch: one.fetch(r).Terms.Sum(),
		}
	}
	return costs, nil
}

// spreadUnder returns the best choice in which the wait for each routed holder is at most slowest.
// It returns false if the tokens of a slower holder cannot be fetched.
func (m Model) spreadUnder(slowest float64, rows int, holdings []Holding, costs []holdingCost) (Spread, bool) {
	s := Spread{Choice: make([]Primitive, len(costs))}
	routed := false
	for i, c := range costs {
		h := holdings[i]
		switch may := !h.NoRoute && c.wait <= slowest; {
		case may && (h.NoFetch || c.bytes <= c.fetch):
			routed = true
			s.Choice[i] = Route
			s.Wait = max(s.Wait, c.wait)
			s.Bytes += c.bytes
		case h.NoFetch:
			return s, false
		default:
			s.Choice[i] = Fetch
			s.Fetch += c.fetch
		}
	}
	if routed {
		s.Merge, s.Host = m.Merge, m.Host.Fixed+m.Host.Row*float64(rows)
	}
	s.Seconds = s.Wait + s.Bytes + s.Merge + s.Host + s.Fetch
	return s, true
}
