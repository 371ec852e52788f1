// Package advise predicts the job of a set of agents on a cluster of prefill and decode nodes: its
// duration, the resource that binds, and the best division of the nodes. It is a fluid model:
// agents have a pace, but no individual requests and no places in a queue. Package sim/agentic
// simulates the same cluster request by request, which takes ten to a hundred times as long;
// `penstock plan advise` reports the difference between the two.
//
// It is pure: no clock, no randomness, no I/O. It does not model groups or imbalance: it assumes
// that load is balanced.
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
// delays. The times at the stations follow from the agents' paces:
//
//   - Storage takes the service time once for the request itself and once for each request that is
//     queued before it (approximate mean value analysis: Schweitzer 1979; Lazowska et al.,
//     Quantitative System Performance, 1984, chapter 7). Several NICs are modelled as one fast NIC
//     with a delay (Seidmann 1987).
//   - Prefill runs in steps of the whole group. A step processes the requests that arrived during
//     the last one, up to the attention quota of every engine, and ends when the busiest engine
//     does: that engine has the mean of all, or the largest request. A request waits for half a
//     step, if one is running, and takes one step. If more requests arrive than fit, they wait
//     until the agents send more slowly.
//   - The compute NIC is a delay.
//   - The decode batch follows from the paces. Requests that do not fit into HBM wait.
//
// The division of reads between the two sides follows from the queues at both NICs, as in the
// planner.
//
// The pace of an agent is the duration of its round. All agents advance by about a round, and then
// the paces are computed again.
//
// The rate of the storage NICs is limited to the rate that dualpath.Analyze allows for compute NICs
// and memory (DualPath section 4.2).
//
// Units: bytes, tokens, FLOP, seconds.
package advise
