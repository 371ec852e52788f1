// Package flow is a network at the level of flows, in the virtual time of package
// sim: links with a bandwidth, transfers that cross several of them, and rates that
// are max-min fair. It knows no packets, no loss and no congestion control; it is
// what a congestion control that converges at once would give, as in NetKV section
// VI-B.
//
//	Start(Spec{Path, Bytes, …}) ─┐                                  ┌─► Flow.Rate
//	Cancel ──────────────────────┤ all of an instant, ┌───────────┐ │
//	SetRate, SetBackground ──────┼───────────────────►│ max-min   ├─┤
//	a flow's last byte ──────────┘  in sim's Settle   │ (filling) │ └─► when its last byte lands ─► Done
//	                                phase, once       └───────────┘
//
// # Rates
//
// All flows rise together, each by its weight, until a link is full or a flow is at
// its cap; those on it stay there and the rest go on. Only the flows that share a
// link with a change, directly or through others, are computed anew. A path may name
// a link several times: a byte that enters and leaves a node's memory takes of its
// bandwidth twice. Background takes a share of a link before any flow.
//
// A FIFO is the other kind of link: one transfer at a time, in order, at the full
// rate, which is how a storage NIC serves its reading queue (DualPath section 6.1).
//
// # Topologies
//
//	FatTree   endpoint ═ rack ═ pod ═ core; a flow picks its uplinks uniformly (ECMP)
//	Nodes     DualPath's machines: storage NIC, compute NICs per direction, memory
//	WAN       clusters, each with an egress and an ingress, and a link per ordered pair
//
// Bandwidths are bytes a second, sizes are bytes, both as float64: 53 bits hold nine
// petabytes to the byte. A flow ends at the first nanosecond at which its last byte
// has landed. A Network serves one goroutine, that of its kernel.
package flow
