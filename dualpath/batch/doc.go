// Package batch selects the tokens that a prefill engine computes in one forward pass: section 6.2
// of the DualPath paper, intra-engine scheduling.
//
// All engines of an expert-parallel group wait for each other after the attention of each layer. So
// each engine takes requests from its queue, first come first served, up to the same predicted
// attention time, the compute quota. Of the request that would exceed the quota, only the first
// tokens are taken (chunked prefill).
//
//	queue   (cached, compute)  (cached, compute)  (cached, compute) …
//	time    ├──── 0.028 s ────┼──── 0.044 s ────┼──── 0.039 s ──┤quota
//	batch    whole              whole              first n tokens: binary search
//
// The package is pure: no clock, no state. It does not assign requests to engines (package dualpath
// does).
package batch
