// Package netoracle gathers what package netcost is told of the network: where the
// machines stand, what each tier of the fabric carries, and how much of it others use
// now. It asks its sources again and again, and joins their answers. It decides
// nothing, and knows no request.
//
//	File        YAML: tiers, places, congestion ── read when it has changed ─┐  the later source
//	Kubernetes  labels of nodes: zone, rack, host ── every minute ───────────┼─► goes before ─► State ─► Watch
//	Prometheus  one instant query a tier ── every second or so ──────────────┘
//
// # A source that fails
//
// keeps its last values: a tier map does not age, and netcost's order of tiers stands
// up to congestion that is a minute old (NetKV, section VI-F). State says of every
// source when it last answered and what was wrong since; the metrics say so too,
// and the log when it begins and when it is over. A source whose answer is out of
// range has failed: none of that answer is taken.
//
// # Bounds
//
// An answer has at most 64 MiB, a request has a timeout, each source one request at a
// time. A congestion of more than CongestionMax is taken as that: a tier that
// is full still has a price.
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
// Oracle.mu is the one lock; it is not held while a source is asked, and held while
// the watcher is told: what that locks comes after it.
package netoracle
