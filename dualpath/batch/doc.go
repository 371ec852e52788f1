// Package batch decides what a prefill engine computes in one forward pass:
// DualPath section 6.2, intra-engine scheduling.
//
// All engines of an expert-parallel group wait for each other after the
// attention of each layer. So each packs its queue, first come first served, up
// to the same predicted attention time, the compute quota; the request that
// would exceed it is cut (chunked prefill) where the quota is used up.
//
//	queue   (cached, compute)  (cached, compute)  (cached, compute) …
//	time    ├──── 0.028 s ────┼──── 0.044 s ────┼──── 0.039 s ──┤quota
//	batch    whole              whole              first n tokens: binary search
//
// It is pure: no clock, no state. It does not choose requests (dualpath did) and
// does not know what a token is worth.
package batch
