// Package netcost prices the way of a request's KV from the instance that
// computed it to the one that will decode it: the scorer NetKV of arXiv
// 2606.03910 and the oracle that it asks. Sections and numbers below are that
// paper's.
//
// It is pure: no I/O, no clock, no goroutine, no lock, no randomness. It reads no
// file and no telemetry (server/netoracle does), moves no byte, and does not know
// whether the caller is the planner, a router or a simulator.
//
//	operator, every refresh          scheduler
//	───────────────────────          ─────────
//	tier map    (p,d) → 0…3 ┐        request: source p, tokens l, bytes s
//	bandwidth   tier → B/s  │        candidate d: hit λ, free memory m, queue q, batch β
//	latency     tier → s    ├─ Oracle ──┐
//	congestion  tier → [0,1)┘           ▼
//	in flight   (p, tier) → n ──►  C(d) =   s(1-λ/l) / Beff + L        transfer, eq. 3
//	   ▲ Begin       │ End                + max(0, q-(βmax-β)) t(β)    queue,    eq. 6
//	   └─────────────┘                    + t(β+1)                     first step, eq. 7
//	                                Beff = B (1-c) / (1+min(n, cap))               eq. 4
//	                                feasible: m ≥ s(1-λ/l) + reserve ── argmin ──► Decision, Intent
//
// What the scheduler itself has in flight is counted here and is not part of the
// congestion: an operator whose telemetry can't tell the two apart sets
// Model.CongestionHasOwn, and the count is left out.
//
// A Chooser decides by one Policy: NetKV, NetKV with a part of its signals
// withheld, or one of the rules that know no network: in simulation, and in the
// planner node, whose dualpath.Network is a Planner. It also prices the two hops of a
// read.
//
// # Ties
//
// Of equal candidates the one with the fewest requests (queued and in the batch)
// is taken, then the first behind the last choice, in the order given and going
// round.
//
// # Units
//
// Bytes, bytes a second, tokens. Costs are float64 seconds: they are compared and
// added, never waited for.
package netcost
