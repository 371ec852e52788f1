// Package batch selects the tokens that a prefill engine computes in one forward pass: DualPath
// section 6.2, intra-engine scheduling.
//
// All engines of an expert-parallel group wait for each other after the attention of each layer. So
// each packs its queue, first come first served, up to the same predicted attention time, the
// compute quota. The request that would exceed the quota is cut there (chunked prefill).
//
//	queue   (cached, compute)  (cached, compute)  (cached, compute) …
//	time    ├──── 0.028 s ────┼──── 0.044 s ────┼──── 0.039 s ──┤quota
//	batch    whole              whole              first n tokens: binary search
//
// It is pure: no clock, no state. It does not choose requests (dualpath does), and has no measure
// of a token's value.
package batch
