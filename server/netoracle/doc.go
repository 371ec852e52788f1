// Package netoracle collects the state of the network for package netcost: the place of each
// machine (pod, rack, host), the bandwidth and latency of each tier of the fabric, and the share of
// each tier that other traffic uses. It polls its sources and merges their readings. It makes no
// decisions and has no information about requests.
//
//	File        YAML: tiers, places, congestion ── read when it has changed ─┐  the later source
//	Kubernetes  labels of nodes: zone, rack, host ── every minute ───────────┼─► goes before ─► State ─► Watch
//	Prometheus  one instant query a tier ── every second or so ──────────────┘
//
// # A source that fails
//
// If a source fails, its last values stay in use. That is acceptable, because the tiers of machines
// change rarely, and the order of tiers in netcost tolerates congestion that is a minute old (NetKV
// paper, section VI-F). State has the time of each source's last answer and the error of its last
// poll. The metrics have both too, and the log has the beginning and the end of a failure. If any
// value of an answer is out of range, the source has failed, and no part of that answer is used.
//
// # Bounds
//
// An answer has at most 64 MiB, a request has a timeout, and each source has one request in flight.
// Congestion above CongestionMax is lowered to CongestionMax, so that a full tier still has a
// finite cost.
//
// # The file
//
//	tiers:                                          # near to far, all four or none
//	  - {bandwidth_gbps: 3600, latency: 1us}        # the same machine
//	  - {bandwidth_gbps: 100, latency: 3us}         # the same rack
//	  - {bandwidth_gbps: 50, latency: 8us}          # the same pod
//	  - {bandwidth_gbps: 25, latency: 15us}         # farther
//	congestion: [0, 0, 0.1, 0.2]                    # optional: where nothing measures it
//	places:
//	  node-a: {pod: a, rack: a1, host: node-a}      # host: default the node's own name
//
// Oracle.mu is the only lock. It is not held while a source is polled. It is held during calls of
// the function given to Watch. So the locks that this function takes are ordered after Oracle.mu:
// no call of the oracle may be made while one of them is held.
package netoracle
