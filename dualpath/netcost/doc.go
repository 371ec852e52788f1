// Package netcost computes the cost of moving a request's KV from the instance that computed it to
// the instance that will decode it. It implements the scorer of the NetKV paper (arXiv 2606.03910)
// and the paper's oracle. Section and equation numbers in this package are those of the paper.
//
// The package is pure: no I/O, no clock, no goroutine, no lock, no randomness. It reads no
// telemetry (package server/netoracle does) and moves no bytes.
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
// The package counts the scheduler's own transfers in flight; they are not part of the congestion.
// If the operator's telemetry includes them in the congestion, Model.CongestionHasOwn must be set,
// and the cost does not count them again.
//
// A Chooser decides by one Policy: the paper's rule, that rule without some of its inputs, or a
// rule without network costs. A Planner implements dualpath.Network with a Chooser, and also
// computes the time of the two hops of a read from storage. The planner node and the simulation use
// a Planner.
//
// # Ties
//
// Among candidates of equal cost, the candidate with the fewest requests (queued and in the batch)
// is chosen. If these are equal too, the next candidate after the last choice is chosen, in the
// given order and cyclically.
//
// # Units
//
// Bytes, bytes per second, tokens. Costs are seconds as float64 and not as time.Duration, because
// costs are only added and compared.
package netcost
