// Package profile measures the rates from which the planner's constants follow: the tokens per
// second that one storage NIC reads and that one prefill engine computes. In the DualPath paper
// (section A.4) alpha is the tokens read in 3 s, and beta the tokens computed in 5 s. The package
// also fits the attention time for the compute quota (section 6.2).
//
//	storage node ── Runs: each block once ── Read, some at once, for a while ──► tokens/s ─┐ alpha
//	engine's log ── (tokens, context, seconds) of forward passes ──► tokens/s ─────────────┤ beta
//	                                          └── batch.Fit ──► attention model, quota     │
//	                                                              Settings ◄───────────────┘
//	                                                                  └─ Update: the planner's YAML, comments kept
//
// The package runs no model: the compute times come from the log of the operator's engine. It reads
// blocks through the client as an engine does, over the network card on the route to the node. So
// it measures the slowest of disk, node, network and client. On an engine's machine, the result is
// the rate of a storage NIC.
//
// There is one lock, for the counts of a measurement. No call is made under it.
package profile
