// Package agentic is DualPath's cluster in virtual time: agents that speak round
// after round, prefill and decode engines, storage NICs, and the production planner
// (package dualpath) that decides. It is lengths and times: no KV, no storage node,
// no failure. What a real cluster does with real bytes is internal/emulate's.
//
//	agents ─ round j ─► Submit ──────────────┐             ┌──► Assign, Start ─────────────────────┐
//	                                         ▼             │                                       │
//	prefill and decode groups ── Fetch ─► dualpath.Planner ┘   its policy is the system's           │
//	     ┌─────────────────────────────────────────────────────────────────────────────────────────┘
//	     ▼
//	storage NIC of the PE's or the DE's node, FIFO ─► ready ─► prefill group: synchronous steps,
//	  each engine packs its queue (dualpath/batch) up to the quota      ▲ │  ─► first token
//	                      hit: memory of the PE's or the DE's node ─────┘ └──► memory of the DE's node
//	                           over compute NICs, during the step        what it does not have, likewise
//	     DE's memory ─► DE's compute NIC ─► HBM ─► decode: the whole batch, a token a step ─► next round
//
// # What is modelled, and where it comes from
//
//   - A storage NIC serves one request after the other at its full rate.
//   - A compute NIC serves one transfer after the other, in each direction. A transfer
//     occupies the NICs at both its ends, at the same time, and is over when both have
//     served it (see send). Loads and stores of a layerwise step run while it computes; the
//     step lasts until the slowest load is there. What the first and the last layer cannot
//     overlap, 1/61 of a transfer, is left out.
//   - A prefill group (expert parallel) steps together: a step takes its overhead, the
//     longest attention of its engines, and the rest of the model's work spread over
//     all of them (DualPath section 6.2). Attention of n tokens after c cached ones is
//     n (fixed + perContext (c + n/2)) operations; GPUs do Model.FLOPS a second.
//   - A decode engine takes d0 + d1*batch a step; requests join and leave between steps.
//   - Basic needs a request's HBM from the first byte read to the last byte sent to
//     the decode engine; layerwise prefill does not (section 2.1).
//   - An Oracle reads and sends nothing (section 7.2).
//   - Cached tokens are the whole blocks of the context. What is computed are the
//     appended tokens; Options.RecomputeTail adds the rest of the last block.
//
// A step of the planner takes no time, and its actions arrive at once. Its Tick, which
// deals with what is slow or dead, is not called: nothing is.
//
// # Metrics
//
// Result has the job's time, the latencies of every round, what each storage NIC
// read and when. NICBalance is max/avg over the NICs in windows, attention max/avg over
// the engines of a step; both mean little when the cluster is underloaded, so both say
// from which part of the job and above which load they are taken.
//
// One seed, one result: Result.Digest tells two runs apart. A Cluster serves one
// goroutine.
package agentic
