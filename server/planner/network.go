package planner

import (
	"cmp"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
)

// Network is the operator's description of the network, with machines by name.
type Network struct {
	Bandwidth  [dualpath.Tiers]float64
	Latency    [dualpath.Tiers]time.Duration
	Congestion [dualpath.Tiers]float64
	// Measured is the time at which the congestion was measured. Zero means that it is not
	// measured.
	Measured time.Time
	// Places are the positions of the machines, by the machine names that leaders register. The
	// service sets the field Node.
	Places map[string]dualpath.NodePlace
}

// SetNetwork replaces the description of the network. Without Options.Planner.Network it has no
// effect. The caller must not change n afterwards.
func (s *Service) SetNetwork(n Network) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.network = &n
	s.reportNetworkLocked()
}

// reportNetworkLocked passes the last description to the planner, restricted to the machines that
// have registered.
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
