// Package netkv is the cluster of the NetKV paper (arXiv 2606.03910, section VI) in virtual time:
// prefill instances, a fat-tree, and decode instances with continuous batching and prefix caches.
// The Chooser of package netcost chooses the decode instance of each request; a planner node with a
// network runs the same Chooser. The package does not model prefill queues (in the paper a prefill
// is a delay), packets, or layers that are transferred while others are computed.
//
//	arrival ─► prefill: c·l + d ─► netcost.Chooser ─► one flow, capped at its tier ─► landed ─► end of the step ─► batch ─► first token
//	(trace)    pure delay             ▲    │ no room: FIFO        (sim/flow)                       continuous batching: a + bβ
//	                 hits, memory,    │    ▼
//	                 queue, batch ────┘   Begin … End             oracle: refreshed every Refresh from the links' background
//
// # Parameters that the paper does not print
//
// Paper returns the parameters that the paper's text gives or its tables determine. The prefill
// instances are in both servers of the first rack. So no transfer stays within a server or a rack
// (tiers 0 and 1), and a scheduler without preferences sends a third of the requests within the pod
// (Table VI of the paper). The duration of a prefill is a linear function of the prompt length; it
// equals the TTFT without the transfer. Eight NICs per server and the printed oversubscription give
// the number of uplinks; a transfer is one flow, at most as fast as its tier. With probability
// Share a request belongs to one of Groups groups: a part SharedPart of its prompt is a prefix of
// the group's text. By default there is no background traffic. The oracle then measures 0, and
// policy Full makes the same decisions as policy Static.
//
// A cache holds, for each group, the longest prefix that has arrived, in whole blocks. The prefixes
// of a group are nested, so this gives the same hits as a set of block hashes in which the longest
// common prefix is searched (a test compares the two). The least recently used group is dropped
// when its memory is needed.
//
// # Measured
//
// The requests arrive at the times of the trace. Requests after the first Warmup ones are measured,
// and the run continues until all of them are decoded. The requests are the same at every load: a
// higher load compresses their arrival times. TTFT is the time from arrival to the end of the first
// step, TBT the duration of the step in which a request entered the batch.
//
// Equal seeds give equal runs: the groups, the uplinks and the changes of the background each have
// a random stream. Ties are decided by the kernel and by package netcost. There is one goroutine
// and no lock.
package netkv
