// Package dualpath is the planner. For each request it chooses the prefill engine (PE), the decode
// engine (DE), and the storage NICs through which the request's cached prefix is read. It
// implements DualPath's scheduler (sections 4.2 and 6.1 of the paper) as a state machine, and
// extends that scheduler: the read of one request can be split over both sides. A side of a request
// is one of its two engines, with the storage NIC of the engine's machine.
//
// The package is pure: no I/O, no clock, no goroutine, no lock, no randomness. Each event carries
// its time, and Step returns actions. The planner node (server), the simulator (sim) and the tests
// run this same code. The planner keeps its state in memory only: after a restart the engine groups
// register again and list their requests. The same list restores the session of a group whose
// connection broke while the planner kept running ("Broken sessions").
//
//	gateway ── Submit ──┐                               ┌── Assign (engine, request) ──► leader of the group
//	leaders ── GroupUp ─┤                               │
//	        ── Fetch ───┤    ┌───────────────────────┐  ├── Start (PE, DE, parts) ─────► both leaders
//	        ── Progress ├───►│ Planner.Step(Event)   ├──┤
//	        ── Finished ┤    └───────────────────────┘  ├── Read, Cut, Drop ───────────► re-planning, hedging
//	timer   ── Tick ────┤                               │
//	admin   ── Epoch ───┤                               ├── Reject, Recompute, Abort ──► gateway, leaders
//	        ── SwitchRole                               ├── Announce, Switch ──────────► leader of the group
//	oracle  ── Network ─┘                               └── Replan, Prefilled, Done ─────► gateway
//
// The life of a request:
//
//	Submit ─► queue ─► queue of a decode group ── a prefill group fetches ─► a PE and a DE, or neither: Start
//	          (fair.go)     (least tokens)                 parts: [0,x) by the PE's storage NIC
//	                                                              [x,hit) by the DE's
//	Progress … a side is slow or fails: Cut, and the other side reads the unread tokens; a tail is read by both; neither side can read: Recompute
//	Finished (prefill) ─► Finished (decode)
//
// A request holds no memory until both engines have room for the whole request, in device memory
// and in their buffers. Then it takes all its memory at once. So no two requests wait for each
// other, whichever groups are lost. If the unread part of a prefix should move to a prefill engine
// whose buffer has no room, the part does not wait for room: the engine computes it. A request that
// no engine could ever hold is rejected when it is submitted.
//
// Requests of a higher priority are granted first. No request of a lower priority is granted while
// requests of a higher one wait and have room; deadlines bound the wait. Within a priority, tenants
// are granted work in proportion to Options.Weights while they have requests in the queue, and each
// tenant's requests are granted in the order of arrival. A full decode group delays only the
// requests in its own queue. Such a request moves to another group when that group has room for the
// request and an empty queue.
//
// When the model's weights change (Epoch), a waiting request is planned with the new weights and
// without its cached prefix. The event names a policy (Drain) for requests that have been started:
//
//	recompute   a request whose prefill has not ended is planned again, without its cached prefix,
//	            because the model may have used a part of the prefix already. Decode continues
//	finish      all continue with the old weights and their prefix, as long as storage keeps the epoch
//	abort       all are rejected
//
// An Exact request names its weights. Under each policy it keeps these weights and its prefix, as
// long as storage keeps the epoch.
//
// A group changes its role (SwitchRole) after it has been drained: the planner assigns no new
// request to the group, and the group's requests end there (finish) or are planned again
// (recompute). Then its leader gets a Switch, and the group registers in the other role or keeps
// its role. No request is lost. A group keeps its role if no other group has it, or if a request in
// progress fits into no other group. The leader registers with the switch that the planner has
// announced (Announce), so a restarted planner continues the switch.
//
// With Options.Network (package netcost) the planner chooses, among all decode engines with room,
// the engine that would produce the first token soonest, including the transfer of the KV from the
// prefill engine. When the planner splits a read over the two sides, it counts both hops of each
// side: storage to buffer, and buffer to device.
//
// # Broken sessions
//
// Actions and reports in transit are lost when the session of a group breaks. The group registers
// again (GroupUp.Again) and reports, for each request that it holds, the attempt and the last order
// that reached the group. The group's leader then repeats the last report about each read and the
// end of each attempt. The planner plans a request again only if it cannot continue:
//
//	lost                         what follows at GroupUp, or at the repeated report
//	Assign                       the group does not hold the request: planned anew
//	Start                        it holds the request with another attempt, or none: planned anew
//	Read, Cut, Drop, Recompute   numbers above the last order: sent again, with new numbers
//	Abort                        the request has ended, or other engines have it: sent again
//	Progress, Stopped            repeated; the number of the read's order shows whether it is the
//	                             read in progress, so a report counts once
//	Finished, Failed             the group lists the request as ended and repeats the report, which
//	                             counts if the attempt is the request's last one and has not ended
//
// After a restart the planner does not have the orders of the previous planner. The groups
// report the cached tokens that each engine has read, is reading or computes (Held.Parts), and
// the read in progress (Held.Reading):
//
//	lost with the planner   what follows when the groups of both engines have registered
//	Start, on one side      one engine alone has the attempt: aborted, and the request planned anew
//	Abort, on one side      the same. But a decode engine that reads nothing, and whose prefill group
//	                        had the Start, continues: prefill may have ended
//	Abort, on both sides    the request continues
//	Read, Recompute         the engines do not have all cached tokens: planned anew
//	Cut, Drop               the planner takes over the reads in progress and decides again
//
// # Accounts
//
// The state of an engine or machine is the last report of its group plus the work assigned later.
// Each action carries a sequence number, and each Fetch contains the highest number that the group
// had received. To the report the planner adds only the work of actions with higher numbers. So no
// work counts twice, even if a report arrives late.
//
// # Units
//
// Work is counted in tokens, as in the paper: reading queues, unfinished work, free device memory
// (HBM). Rates are tokens per second. Times are time.Duration since an origin that the caller
// chooses.
//
// # Cost
//
// A prefill decision is O(log n) in the engines of the fetching group. A decode decision is O(log
// g) in the groups and O(n) in the engines of one group; with a Network it is O(n) in all decode
// engines. Finding the next request is O(log t) in the tenants and priorities with waiting
// requests; between two reports of a full decode group, each tenant whose first request waits for
// that group is examined once more. A request whose decode group is full costs O(n) in all decode
// engines. Tick costs O(r) in the reads in progress, and O(log n) for each queued request whose
// deadline has passed. A request with a deadline for its first token costs O(t) in the waiting
// tenants and O(n log n) in the prefill engines, when it is submitted and when it is refused.
package dualpath
