// Package relay copies blocks between the storage of two datacenters, over a link that is thinner than
// the networks on both sides (PrfaaS, section 3.3). A copy never exceeds the link's budget of bytes per
// second.
//
//	storage there ── Read, a chunk ─► memory ─ wait for the budget ─► Write ─► storage here
//	                 verified                                          verified by the node
//
// The checksums that the first storage delivers with a block go with it to the second one, which
// refuses a block that does not match. A chunk is read when the budget allows its bytes, so the blocks
// that wait here never take more memory than Options.MemoryBytes.
//
// It does not decide which blocks to copy (package server/offload does), and it keeps no block.
//
// Copies share the memory in order of arrival, a chunk each. There is one lock, of the counters.
package relay
