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
// # Parameters that the paper does not print
//
// Paper returns the parameters that the paper's text gives or its tables determine. The prefill
// instances are in both servers of the first rack: tiers 0 and 1 are never used, and a scheduler
// without preferences sends a third of the requests within the pod (its Table VI). The prefill's
// line is the TTFT without the transfer. Eight NICs per server and the printed oversubscription
// give the number of uplinks; a transfer is one flow, at most as fast as its tier. With probability
// Share a request belongs to one of Groups groups, and begins with a prefix of the group's text of
// SharedPart of its own length. There is no background traffic unless it is studied; the oracle
// then measures 0, and Full decides as Static does.
//
// A cache holds the longest prefix of each group that has arrived, in whole blocks. For nested
// prefixes this is equivalent to a set of block hashes with a longest common prefix (a test
// compares the two). The least recently used group is dropped when the memory is needed.
//
// # Measured
//
// The requests arrive at the times of the trace. Requests after the first Warmup ones are measured,
// and the run continues until all of them are decoded. The requests are the same at every load: a
// load compresses the times. TTFT is the time from arrival to the end of the first step, TBT the
// duration of the step in which a request entered the batch.
//
// One seed has one run: the groups, the uplinks and the changes of the background each have a
// random stream. Ties are decided by the kernel and by package netcost. There is one goroutine and
// no lock.
package netkv
