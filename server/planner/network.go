package planner

import (
	"cmp"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
)

// Network is what the operator says of the network, with machines by name.
type Network struct {
	Bandwidth  [dualpath.Tiers]float64
	Latency    [dualpath.Tiers]time.Duration
	Congestion [dualpath.Tiers]float64
	// Measured is when the congestion was; zero: it is not measured.
	Measured time.Time
	// Places are where the machines stand, by the names that leaders register; Node
	// is filled in.
	Places map[string]dualpath.NodePlace
}

// SetNetwork tells the planner what the operator says now. Without
// Options.Planner.Network it changes nothing. n must not be changed afterwards.
func (s *Service) SetNetwork(n Network) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.network = &n
	s.reportNetworkLocked()
}

// reportNetworkLocked tells the planner what was said last, of the machines that it
// knows.
func (s *Service) reportNetworkLocked() {
	n := s.network
	if n == nil {
		return
	}
	r := dualpath.NetworkReport{At: s.now(), Bandwidth: n.Bandwidth, Latency: n.Latency, Congestion: n.Congestion}
	if !n.Measured.IsZero() {
		r.Measured = n.Measured.Sub(s.start) - (s.looked - s.clock)
	}
	for name, p := range n.Places {
		if id, ok := s.nodes.ids[name]; ok {
			p.Node = dualpath.NodeID(id)
			r.Places = append(r.Places, p)
		}
	}
	slices.SortFunc(r.Places, func(a, b dualpath.NodePlace) int { return cmp.Compare(a.Node, b.Node) })
	s.stepLocked(r)
}
