// Package flow is a network at the level of flows, in the virtual time of package sim: links with a
// bandwidth, transfers that cross several of them, and rates that are max-min fair. It has no
// packets, no loss and no congestion control: rates change at once, as if a congestion control
// converged without delay (as in section VI-B of the NetKV paper).
//
//	Start(Spec{Path, Bytes, …}) ─┐                                  ┌─► Flow.Rate
//	Cancel ──────────────────────┤ all of an instant, ┌───────────┐ │
//	SetRate, SetBackground ──────┼───────────────────►│ max-min   ├─┤
//	a flow's last byte ──────────┘  in sim's Settle   │ (filling) │ └─► when its last byte lands ─► Done
//	                                phase, once       └───────────┘
//
// # Rates
//
// All rates rise together, each by its weight, until a link is full or a flow reaches its cap. The
// rates of the flows on that link are then final, and the other rates rise further. After a change
// at a link, rates are computed again only for the flows on that link and for the flows that share
// a link with one of these, directly or through other flows. A path may name a link several times:
// a byte that enters and leaves a node's memory uses its bandwidth twice. Background traffic gets
// its share of a link's bandwidth first; the flows share the rest.
//
// A FIFO is the other kind of link: it serves one transfer at a time, in order, at the full rate,
// as a storage NIC serves its reading queue (DualPath section 6.1).
//
// # Topologies
//
//	FatTree   endpoint ═ rack ═ pod ═ core; a flow picks its uplinks uniformly (ECMP)
//	Nodes     DualPath's machines: storage NIC, compute NICs per direction, memory
//	WAN       clusters, each with an egress and an ingress, and a link per ordered pair
//
// Bandwidths are bytes per second, sizes are bytes, both as float64, which represents sizes up to
// nine petabytes exactly. A flow ends at the first nanosecond at which its last byte has arrived. A
// Network must be used by the goroutine of its kernel.
package flow
