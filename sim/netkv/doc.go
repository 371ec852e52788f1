// Package netkv is the cluster of the NetKV paper (arXiv 2606.03910, section VI) in
// virtual time: prefill instances, a fat-tree, and decode instances with continuous
// batching and prefix caches. The Chooser of package netcost, which a planner node with a
// network runs too, chooses the decode instance of each request. The package does not
// model prefill queues (in the paper a prefill is a delay), packets, or layers that are
// transferred while others are computed.
//
//	arrival ─► prefill: c·l + d ─► netcost.Chooser ─► one flow, capped at its tier ─► landed ─► end of the step ─► batch ─► first token
//	(trace)    pure delay             ▲    │ no room: FIFO        (sim/flow)                       continuous batching: a + bβ
//	                 hits, memory,    │    ▼
//	                 queue, batch ────┘   Begin … End             oracle: refreshed every Refresh from the links' background
//
// # What the paper does not print
//
// Paper returns the parameters that its text gives or its tables pin down. The prefill
// instances are in both servers of the first rack: tiers 0 and 1 are never reached, and
// an indifferent scheduler sends a third within the pod (its Table VI). The prefill's
// line is the rest of the TTFT without the transfer. Eight NICs a server and the
// printed oversubscription give the number of uplinks; a transfer is one flow, at most
// as fast as its tier. With probability Share a request is of one of Groups groups, and
// begins with as much of the group's text as SharedPart of its own length. Background
// traffic is none unless it is the subject: then what the oracle measures is 0, and
// Full decides as Static does.
//
// A cache holds of each group its longest prefix that has landed, in whole blocks:
// with nested prefixes that is what a set of block hashes and a longest common prefix
// come to (a test compares the two). The least recently used group leaves when
// the memory is needed.
//
// # Measured
//
// The first Warmup requests and those after them arrive as the trace says; what
// arrives after the warm-up is measured, and the run goes on until all of it is
// decoded. The requests are the same at every load: a load compresses time. TTFT is
// from arrival to the end of the first step, TBT the time of the step in which a
// request entered the batch.
//
// One seed gives one run: the groups, the uplinks and the swings of the background
// each have a stream. Ties are those of the kernel and of package netcost. One
// goroutine, no lock.
package netkv
