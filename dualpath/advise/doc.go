// Package advise predicts what a cluster of prefill and decode nodes will do with a
// set of agents: how long the job takes, what binds first, and how the nodes are best
// divided. It is a fluid: agents have a pace, no requests and no places in a queue.
// Package sim/agentic simulates the same cluster request by request, which takes
// ten to a hundred times as long; `penstock plan advise` says how far apart the two are.
//
// It is pure: no clock, no randomness, no I/O. It does not know groups, or what a
// scheduler does wrong: it assumes that load is balanced.
//
//	          ┌──────────────── each agent, round after round ─────────────────┐
//	          ▼                                                                │
//	storage NICs ─────► prefill group ─────► compute NIC ─────► decode: batch ─┘
//	hit·kv over         work, and steps'     prompt·kv           gen·(d0 + d1 b)
//	all that may read   overhead             no queue            HBM bounds b
//
// # Model
//
// At every moment the agents, each in some round, are a closed network of two queues and
// two delays, and every station is as slow as the agents' paces make it:
//
//   - Storage takes the service time once for the request itself and once for each that
//     it finds there (approximate mean value analysis: Schweitzer 1979; Lazowska et al.,
//     Quantitative System Performance, 1984, chapter 7). Several NICs are a fast one
//     behind a delay (Seidmann 1987).
//   - Prefill goes in steps of the whole group. A step takes what has come during the
//     last one, up to the attention quota of every engine, and ends when the busiest
//     engine does: that has the mean of all, or the one largest request. A request waits
//     for half a step, if one is under way, and takes one; when more comes than fits, it
//     waits until the agents come more slowly.
//   - The compute NIC is a delay.
//   - The decode batch is as large as the paces make it. What does not fit into HBM
//     waits.
//
// Which side reads how much follows from the queues at both NICs, as the planner's split
// does.
//
// The pace of an agent is the time of its round. The paces move all agents on for about a
// round, then they are computed anew.
//
// Storage NICs carry as much as dualpath.Analyze says that compute NICs and memory let
// them (DualPath section 4.2).
//
// Units: bytes, tokens, FLOP, seconds.
package advise
