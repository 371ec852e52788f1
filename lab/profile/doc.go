// Package profile measures the constants of the planner: the tokens per second that one storage NIC
// reads and that one prefill engine computes (DualPath, section A.4: alpha is 3 s of the
// former, beta 5 s of the latter). It also fits the attention time for the compute quota (section
// 6.2).
//
//	storage node ── Runs: each block once ── Read, some at once, for a while ──► tokens/s ─┐ alpha
//	engine's log ── (tokens, context, seconds) of forward passes ──► tokens/s ─────────────┤ beta
//	                                          └── batch.Fit ──► attention model, quota     │
//	                                                              Settings ◄───────────────┘
//	                                                                  └─ Update: the planner's YAML, comments kept
//
// It runs no model: the compute times come from the log of the operator's engine. It reads through
// the client as an engine does, over the network card on the route to the node. So it measures the
// slowest of disk, node, network and client; on the engine's machine, that is the rate of a storage
// NIC.
//
// There is one lock, for the counts of a measurement. No call is made under it.
package profile
