// Package profile measures what the planner's constants stand for: how many tokens
// one storage NIC reads in a second, and how many one prefill engine computes
// (DualPath, section A.4: alpha is 3 s of the one, beta 5 s of the other), and fits
// the attention time that the compute quota is packed by (section 6.2).
//
//	storage node ── Runs: each block once ── Read, some at once, for a while ──► tokens/s ─┐ alpha
//	engine's log ── (tokens, context, seconds) of forward passes ──► tokens/s ─────────────┤ beta
//	                                          └── batch.Fit ──► attention model, quota     │
//	                                                              Settings ◄───────────────┘
//	                                                                  └─ Update: the planner's YAML, comments kept
//
// It runs no model: what a GPU takes comes from the operator's engine. It reads
// through the client as an engine does, over the network card that the route to the
// node leads through, and so measures whichever of disk, node, network and client is
// the slowest; on the engine's machine that is what a storage NIC reads.
//
// There is one lock, around the counts of a measurement; no call is made under it.
package profile
