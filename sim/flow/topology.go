package flow

import (
	"fmt"
	"math/rand/v2"
)

// FatTree describes a cluster: pods of racks, racks of servers, and on each server several
// endpoints (instances of an engine).
//
//	                        core 0 … CoreLinks-1                     a pod has CoreLinks up and as many down
//	                  ╱                              ╲
//	    spine 0 … SpineLinks-1                    spines             a rack has SpineLinks up and as many down
//	      ╱              ╲
//	  rack 0            rack 1 …
//	  ╱    ╲
//	server  server …                                                 endpoints of one server reach each other inside
//
// The tier of a path is 0 within a server, 1 within a rack, 2 within a pod, 3 across pods.
type FatTree struct {
	Pods, Racks, Servers, Endpoints int // racks of a pod, servers of a rack, endpoints of a server
	// Inside is the bandwidth of each endpoint to others in its server. Out and In are an
	// endpoint's bandwidths to and from the rack's switch. All are in bytes per second.
	Inside, Out, In float64
	// A rack has SpineLinks uplinks of SpineRate bytes per second, a pod CoreLinks of CoreRate.
	SpineLinks, CoreLinks int
	SpineRate, CoreRate   float64
}

// FatTreeNet is a fat-tree in a network.
type FatTreeNet struct {
	Spec FatTree
	Net  *Network
	// inside, out and in are indexed by endpoint. rackUp[r][i] is uplink i of rack r, and
	// rackDown[r][i] its downlink i; the same holds for pods.
	inside, out, in                []LinkID
	rackUp, rackDown, podUp, podDn [][]LinkID
}

// Build adds the links of a fat-tree to a network.
func (t FatTree) Build(n *Network) (*FatTreeNet, error) {
	for _, c := range []struct {
		what string
		n    int
	}{{"pods", t.Pods}, {"racks of a pod", t.Racks}, {"servers of a rack", t.Servers}, {"endpoints of a server", t.Endpoints}, {"uplinks of a rack", t.SpineLinks}, {"uplinks of a pod", t.CoreLinks}} {
		if c.n < 1 {
			return nil, fmt.Errorf("flow: fat-tree of %d %s; there must be at least 1: %w", c.n, c.what, ErrSpec)
		}
	}
	b := builder{n: n}
	net := &FatTreeNet{Spec: t, Net: n}
	for e := range t.Size() {
		net.inside = append(net.inside, b.link(t.Inside, "endpoint %d inside", e))
		net.out = append(net.out, b.link(t.Out, "endpoint %d out", e))
		net.in = append(net.in, b.link(t.In, "endpoint %d in", e))
	}
	for r := range t.Pods * t.Racks {
		net.rackUp = append(net.rackUp, b.bundle(t.SpineLinks, t.SpineRate, "rack %d up", r))
		net.rackDown = append(net.rackDown, b.bundle(t.SpineLinks, t.SpineRate, "rack %d down", r))
	}
	for p := range t.Pods {
		net.podUp = append(net.podUp, b.bundle(t.CoreLinks, t.CoreRate, "pod %d up", p))
		net.podDn = append(net.podDn, b.bundle(t.CoreLinks, t.CoreRate, "pod %d down", p))
	}
	return net, b.err
}

// Size returns the number of endpoints. They are numbered server by server, rack by rack and pod by
// pod.
func (t FatTree) Size() int { return t.Pods * t.Racks * t.Servers * t.Endpoints }

// Server returns the server of an endpoint.
func (t FatTree) Server(e int) int { return e / t.Endpoints }

// Rack returns the rack of an endpoint; racks are numbered across all pods.
func (t FatTree) Rack(e int) int { return t.Server(e) / t.Servers }

// Pod returns the pod of an endpoint.
func (t FatTree) Pod(e int) int { return t.Rack(e) / t.Racks }

// Tier returns the tier of the path between two endpoints: 0 to 3.
func (t FatTree) Tier(a, b int) int {
	switch {
	case t.Server(a) == t.Server(b):
		return 0
	case t.Rack(a) == t.Rack(b):
		return 1
	case t.Pod(a) == t.Pod(b):
		return 2
	}
	return 3
}

// Path returns the links from one endpoint to another. A flow that leaves its rack takes one of the
// rack's uplinks, chosen uniformly (ECMP). Within the pod, the spine switch at the end of the
// uplink has one downlink to each rack. A flow that leaves its pod also takes one of the pod's
// uplinks; the core switch has one downlink to each pod, and in the other pod the spine switch is
// chosen uniformly too.
func (net *FatTreeNet) Path(from, to int, rng *rand.Rand) []LinkID {
	t := net.Spec
	switch t.Tier(from, to) {
	case 0:
		return []LinkID{net.inside[from], net.inside[to]}
	case 1:
		return []LinkID{net.out[from], net.in[to]}
	case 2:
		i := rng.IntN(t.SpineLinks)
		return []LinkID{net.out[from], net.rackUp[t.Rack(from)][i], net.rackDown[t.Rack(to)][i], net.in[to]}
	}
	up, core, down := rng.IntN(t.SpineLinks), rng.IntN(t.CoreLinks), rng.IntN(t.SpineLinks)
	return []LinkID{
		net.out[from], net.rackUp[t.Rack(from)][up], net.podUp[t.Pod(from)][core],
		net.podDn[t.Pod(to)][core], net.rackDown[t.Rack(to)][down], net.in[to],
	}
}

// Uplinks returns the links of a tier, in both directions. Tier 0 has the links inside servers,
// tier 1 the links between endpoints and racks, tier 2 the uplinks and downlinks of racks, and tier
// 3 the uplinks and downlinks of pods.
func (net *FatTreeNet) Uplinks(tier int) []LinkID {
	var out []LinkID
	switch tier {
	case 0:
		return append(out, net.inside...)
	case 1:
		return append(append(out, net.out...), net.in...)
	case 2:
		for r := range net.rackUp {
			out = append(append(out, net.rackUp[r]...), net.rackDown[r]...)
		}
	case 3:
		for p := range net.podUp {
			out = append(append(out, net.podUp[p]...), net.podDn[p]...)
		}
	}
	return out
}

// SetBackground sets, for each link of a tier, the share of the bandwidth that other traffic uses.
func (net *FatTreeNet) SetBackground(tier int, share float64) error {
	for _, l := range net.Uplinks(tier) {
		if err := net.Net.SetBackground(l, share); err != nil {
			return err
		}
	}
	return nil
}

// Congestion returns the mean utilization of a tier's Uplinks, which the counters of switches would
// report.
func (net *FatTreeNet) Congestion(tier int) float64 {
	links := net.Uplinks(tier)
	sum := 0.0
	for _, l := range links {
		sum += net.Net.Utilization(l)
	}
	return sum / float64(len(links))
}

// builder adds links until one is refused.
type builder struct {
	n   *Network
	err error
}

// link adds one link.
func (b *builder) link(rate float64, format string, args ...any) LinkID {
	if b.err != nil {
		return 0
	}
	id, err := b.n.AddLink(fmt.Sprintf(format, args...), rate)
	b.err = err
	return id
}

// bundle adds count parallel links.
func (b *builder) bundle(count int, rate float64, format string, i int) []LinkID {
	out := make([]LinkID, count)
	for j := range out {
		out[j] = b.link(rate, format+" %d", i, j)
	}
	return out
}

// Nodes describes the machines of the DualPath paper (section 4.2): Prefill and Decode are the
// numbers of prefill and decode nodes. Each has GPUs, a compute NIC per GPU, one storage NIC and a
// memory. Rates are in bytes per second.
type Nodes struct {
	Prefill, Decode, GPUs int
	SNIC, CNIC, DRAM      float64
}

// NodesNet has the links of the machines of Nodes in a network.
type NodesNet struct {
	Spec Nodes
	Net  *Network
	// SNIC and DRAM are indexed by node, the prefill nodes first. Read and Write are the two
	// directions of the compute NICs, indexed by engine. Read moves bytes out of the node's memory
	// or the engine's HBM, Write moves bytes into either.
	SNIC, DRAM, Read, Write []LinkID
}

// Build adds the links of the machines to a network.
func (s Nodes) Build(n *Network) (*NodesNet, error) {
	if s.Prefill < 1 || s.Decode < 1 || s.GPUs < 1 {
		return nil, fmt.Errorf("flow: %d prefill and %d decode nodes of %d GPUs; there must be at least 1 of each: %w", s.Prefill, s.Decode, s.GPUs, ErrSpec)
	}
	b := builder{n: n}
	net := &NodesNet{Spec: s, Net: n}
	for node := range s.Prefill + s.Decode {
		net.SNIC = append(net.SNIC, b.link(s.SNIC, "node %d storage NIC", node))
		net.DRAM = append(net.DRAM, b.link(s.DRAM, "node %d memory", node))
		for g := range s.GPUs {
			net.Read = append(net.Read, b.link(s.CNIC, "node %d compute NIC %d read", node, g))
			net.Write = append(net.Write, b.link(s.CNIC, "node %d compute NIC %d write", node, g))
		}
	}
	return net, b.err
}

// Engines returns the number of the first prefill engine, the number of the first decode engine,
// and the number of all engines. Engines are numbered node by node.
func (s Nodes) Engines() (prefill, decode, end int) {
	return 0, s.Prefill * s.GPUs, (s.Prefill + s.Decode) * s.GPUs
}

// PrefillPath returns the links that a cached byte crosses if the node of the prefill engine (PE)
// reads it, as in Figure 4(a) of the DualPath paper: from storage to the memory of the PE's node;
// to the PE's HBM (3, 4); with the computed KV to the memory of the decode engine's (DE's) node (5,
// 6, 7); to the DE's HBM (8, 9). The numbers are the steps in the figure. A copy through a NIC's
// loopback counts as a read and a write of the NIC; a byte that passes through memory counts as a
// write and a read of the memory.
func (net *NodesNet) PrefillPath(pe, de int) []LinkID {
	g := net.Spec.GPUs
	p, d := pe/g, de/g
	return []LinkID{
		net.SNIC[p], net.DRAM[p],
		net.DRAM[p], net.Read[pe], net.Write[pe],
		net.Read[pe], net.Write[de], net.DRAM[d],
		net.DRAM[d], net.Read[de], net.Write[de],
	}
}

// DecodePath returns the links that a cached byte crosses if the node of the decode engine (DE)
// reads it (Figure 4(b)): from storage to the memory of the DE's node; to the HBM of the prefill
// engine (3, 4, 5); to the DE's HBM (6, 7).
func (net *NodesNet) DecodePath(pe, de int) []LinkID {
	d := de / net.Spec.GPUs
	return []LinkID{
		net.SNIC[d], net.DRAM[d],
		net.DRAM[d], net.Read[de], net.Write[pe],
		net.DRAM[d], net.Read[de], net.Write[de],
	}
}

// WAN describes clusters that are connected by one link for each ordered pair.
type WAN struct {
	Clusters []WANCluster
	// Links[i][j] is the bandwidth from cluster i to j, in bytes per second; 0 means no link.
	Links [][]float64
}

// WANCluster has the total bandwidths at which one cluster can send and receive, in bytes per
// second.
type WANCluster struct {
	Name            string
	Egress, Ingress float64
}

// WANNet has the links of clusters in a network.
type WANNet struct {
	Spec            WAN
	Egress, Ingress []LinkID
	between         [][]LinkID
}

// noLink marks a pair without a link.
const noLink LinkID = -1

// Build adds the links of the clusters to a network.
func (w WAN) Build(n *Network) (*WANNet, error) {
	if len(w.Clusters) < 2 || len(w.Links) != len(w.Clusters) {
		return nil, fmt.Errorf("flow: %d clusters with %d rows of links; there must be 2 or more, and a row for each: %w", len(w.Clusters), len(w.Links), ErrSpec)
	}
	b := builder{n: n}
	net := &WANNet{Spec: w}
	for i, c := range w.Clusters {
		if len(w.Links[i]) != len(w.Clusters) {
			return nil, fmt.Errorf("flow: row %d of the links has %d entries; there must be %d: %w", i, len(w.Links[i]), len(w.Clusters), ErrSpec)
		}
		net.Egress = append(net.Egress, b.link(c.Egress, "%s egress", c.Name))
		net.Ingress = append(net.Ingress, b.link(c.Ingress, "%s ingress", c.Name))
		row := make([]LinkID, len(w.Clusters))
		for j, rate := range w.Links[i] {
			row[j] = noLink
			if rate != 0 && i != j {
				row[j] = b.link(rate, "%s to %s", c.Name, w.Clusters[j].Name)
			}
		}
		net.between = append(net.between, row)
	}
	return net, b.err
}

// Path returns the links from one cluster to another, or an error if no link connects them.
func (net *WANNet) Path(from, to int) ([]LinkID, error) {
	if from < 0 || to < 0 || from >= len(net.between) || to >= len(net.between) || net.between[from][to] == noLink {
		return nil, fmt.Errorf("flow: no link from cluster %d to cluster %d: %w", from, to, ErrSpec)
	}
	return []LinkID{net.Egress[from], net.between[from][to], net.Ingress[to]}, nil
}

// Between returns the link from one cluster to another.
func (net *WANNet) Between(from, to int) LinkID { return net.between[from][to] }
