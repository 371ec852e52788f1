// Package netcost computes the cost of moving a request's KV from the instance that computed it to
// the one that will decode it: the scorer NetKV of arXiv 2606.03910 and its oracle. Sections and
// numbers below are those of the paper.
//
// It is pure: no I/O, no clock, no goroutine, no lock, no randomness. It reads no file and no
// telemetry (server/netoracle does) and moves no bytes. The planner, a router or a simulator can
// call it.
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
// The scheduler's own transfers in flight are counted here and are not part of the congestion. An
// operator whose telemetry cannot distinguish the two sets Model.CongestionHasOwn, and the count is
// left out.
//
// A Chooser decides by one Policy: NetKV, NetKV without some of its signals, or a rule without
// network costs. The simulation uses it, and the planner node, whose dualpath.Network is a Planner.
// The Planner also computes the cost of the two hops of a read.
//
// # Ties
//
// Of equal candidates the one with the fewest requests (queued and in the batch) is chosen, and
// then the first one after the last choice, in the given order and cyclically.
//
// # Units
//
// Bytes, bytes per second, tokens. Costs are float64 seconds: they are compared and added, and no
// one waits for them.
package netcost
