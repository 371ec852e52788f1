// Package redistribute decides how a request attends to a chunk of KV that another instance (the
// holder) has: the query moves to the cache (route), the cache moves to the query (fetch), or
// nothing moves and the chunk is computed again (local). It implements the cost model and the
// decision of the paper "Move the Query, Not the Cache" (arXiv 2606.01502, sections 4 to 8).
// Section numbers in this package are those of the paper.
//
//	          requester                                   holder of c_t tokens
//	route     Mq query rows ───── Mq·q bytes ──────────►  partial attention over what it holds
//	          merge (o, m, ℓ)  ◄─ Mq·p bytes ───────────
//	fetch     splice, attend   ◄─ c_t·b_KV·L bytes ──────  all layers in one transfer
//	local     prefill c_t tokens, nothing crosses
//
//	T_route = probe + turnaround + M·Mq·(q+p)/BW + compute + merge  [+ host + row·Mq]
//	T_fetch = c_t·b_KV·L/BW  + splice                     contiguous, at a new position
//	        = c_t·b_KV·L/BW                               a prefix, where it was cached
//	        = L·(M·holder + c_t·b_KV/BW)                  selected by an indexer, on M holders
//	T_local = c_t·L·c
//
// The paper counts one round trip per decoding step for route, and all layers for fetch (section
// 4.2, and 5.4: "the holder runs the L-layer partial in place"). In a model whose next query
// depends on this layer's output, a step needs one round trip for each attending layer.
// Request.Trips is the number of round trips per step, by default 1. For a real engine, callers
// should compare the decisions for both numbers.
//
// The package is pure: no clock, no state, no I/O. Times are in seconds, sizes in bytes, bandwidths
// in bytes per second, as float64, because rounding to nanoseconds would distort the break-even
// points, which are quotients of such times. The constants of a fabric are measured (`penstock
// fabric probe`) and fitted by Calibrate. Fabrics has the constants of the paper's Table 2. The
// attention itself, and the merge that makes route exact, are in package attention.
//
// Decide chooses for one chunk or one selection of tokens. Spread chooses holder by holder for a
// selection whose holders differ in fabric, tokens and load. Request.RuleOfThumb chooses without
// any constants.
//
// The package does not find the holders of a chunk, and does not move anything.
package redistribute
