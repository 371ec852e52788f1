// Package agentic simulates DualPath's cluster in virtual time: agents with several rounds, prefill
// engines (PE) and decode engines (DE), storage NICs, and the production planner (package
// dualpath). It simulates lengths and times, but no KV, no storage nodes and no failures.
// lab/emulate runs a cluster with real bytes.
//
//	agents ─ round j ─► Submit ──────────────┐             ┌──► Assign, Start ─────────────────────┐
//	                                         ▼             │                                       │
//	prefill and decode groups ── Fetch ─► dualpath.Planner ┘   (policy: Options.System)             │
//	     ┌─────────────────────────────────────────────────────────────────────────────────────────┘
//	     ▼
//	storage NIC of the PE's or the DE's node, FIFO ─► ready ─► prefill group: synchronous steps,
//	  each engine packs its queue (dualpath/batch) up to the quota      ▲ │  ─► first token
//	                      hit: memory of the PE's or the DE's node ─────┘ └──► memory of the DE's node
//	                           over compute NICs, during the step        the rest of the prompt's KV
//	     DE's memory ─► DE's compute NIC ─► HBM ─► decode: the whole batch, a token a step ─► next round
//
// # The model and its sources
//
//   - A storage NIC serves one request after the other at its full rate.
//   - A compute NIC serves one transfer after the other, in each direction. A transfer occupies the
//     NICs at both ends, and is complete when both have served it (see send). The loads and stores
//     of a layerwise step run while the step computes, and the step lasts at least until its
//     slowest load has arrived. In fact the first and the last layer, 1/61 of a transfer each,
//     cannot be transferred during compute; the model ignores this.
//   - The engines of a prefill group (expert parallel) step together. The duration of a step is the
//     sum of three parts: the step's overhead, the longest attention time of an engine, and the time
//     of the rest of the model's work, spread over all engines (DualPath section 6.2). Attention of
//     n tokens after c cached tokens takes n (AttentionFixed + AttentionPerContext (c + n/2))
//     operations. A GPU does Model.FLOPS operations per second.
//   - A step of a decode engine takes StepBase + StepPer*batch; requests join and leave between
//     steps.
//   - System Basic holds HBM for a request's whole prompt, from the first byte read to the last
//     byte sent to the decode engine. Layerwise prefill needs no such HBM (section 2.1).
//   - With Options.BufferBytes, engines register their buffers with the planner, and reports have the
//     free bytes, as in production. A request takes space in the prefill engine's buffer for the KV
//     that this side reads, until its first token, and in the decode engine's buffer for its whole
//     prompt, until the prompt is in the HBM.
//   - System Oracle reads and sends no KV (section 7.2).
//   - The cached tokens are the whole blocks of the context. The appended tokens are
//     computed; with Options.RecomputeTail, so are the context's tokens after its last whole block.
//
// A decision of the planner takes no time, and its actions arrive at once. The planner's Tick is
// not called: it handles slow and dead engines, and the simulation has none.
//
// # Metrics
//
// Result has the duration of the job, the latencies of every round, and the tokens that each
// storage NIC read over time. NICBalance is the traffic of the busiest storage NIC divided by the
// mean over the NICs, in windows of time. AttentionBalance is the longest attention time of an
// engine in a step divided by the mean over the engines. Both have little meaning while the cluster
// is underloaded. So NICBalance leaves out windows below a given load, and both leave out what
// happens after a given time.
//
// One seed has one result: equal values of Result.Digest mean equal runs. A Cluster must be used by
// one goroutine.
package agentic
