// Package advise predicts the job of a set of agents on a cluster of prefill and decode nodes: the
// job's duration, the resource that limits it (that binds), and the best numbers of prefill and
// decode nodes. The prediction is a fluid model: each agent advances at a pace. Single requests are
// not followed, and queues have no order. Package sim/agentic simulates the same cluster
// request by request, which takes ten to a hundred times as long; `penstock plan advise` reports
// the difference between the two.
//
// The package is pure: no clock, no randomness, no I/O. It does not model groups of engines or
// imbalance: it assumes that the load of all engines and NICs is equal.
//
//	          ┌──────────────── each agent, round after round ─────────────────┐
//	          ▼                                                                │
//	storage NICs ─────► prefill group ─────► compute NIC ─────► decode: batch ─┘
//	hit·kv over         work, and steps'     prompt·kv           gen·(d0 + d1 b)
//	all that may read   overhead             no queue            HBM bounds b
//
// # Model
//
// At every moment the agents, each in some round, form a closed network of two queues and two
// delays. The times at these four stations follow from the agents' paces:
//
//   - Storage: a request takes the service time once for itself and once for each request that is
//     queued before it (approximate mean value analysis: Schweitzer 1979; Lazowska et al.,
//     Quantitative System Performance, 1984, chapter 7). Several NICs are modelled as one fast NIC
//     with a delay (Seidmann 1987).
//   - Prefill: all engines run in common steps. A step processes the requests that arrived during
//     the previous step, up to the attention quota of every engine, and ends when the busiest
//     engine ends. The attention time of that engine is the mean of all engines, or the time of
//     the largest request if that is longer. A request waits for half a step if a step is running,
//     and then takes one step. If more requests arrive than fit into a step, the queue grows until
//     the agents send more slowly.
//   - Compute NIC: a delay without a queue.
//   - Decode: the size of the batch follows from the paces. Requests that do not fit into device memory (HBM) wait.
//
// How much of a prefix the prefill node and the decode node each read follows from the queues at
// the NICs of both, as in the planner.
//
// The pace of an agent is the duration of its round. The computation alternates: all agents advance
// by about one round, and then the paces are computed again.
//
// If both kinds of nodes read, the rate of the storage NICs is limited to the rate at which, by
// dualpath.Analyze, neither compute NICs nor memory saturate (DualPath section 4.2).
//
// Units: bytes, tokens, FLOP, seconds.
package advise
