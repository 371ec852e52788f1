// Package gateway serves a request on a prefill/decode cluster: it finds the prompt's cached prefix
// in storage, submits the request to the planner, and returns the events of the request. The
// package has no queue and sends nothing to engines.
//
//	g, err := gateway.New(gateway.Options{Namespace: ns, Store: store, Planner: conn})
//	for ev, err := range g.Serve(ctx, gateway.Request{ID: "agent-7.3", Tokens: prompt, Output: 512}) {
//		…
//	}
//
//	Serve ── Match ─► storage                                     Matched: hit, epoch
//	  └───── Submit(lengths, hit, payload) ─► planner             Accepted, Started: both engines
//	                 │                           │                Replanned: Started follows again
//	                 │                           ▼                Prefilled: the first token
//	                 │                  leaders of both engines   Done
//	                 │ planner unavailable: Waiting, then submitted again with the same id
//	                 │ planner refuses: *RefusedError with the planner's reason
//
// The loop ends after Done or with an error. If the loop is left earlier or the context ends, the
// request is cancelled, and the planner aborts the request on its engines. Events are returned in
// order, on the goroutine of the loop. If the loop takes no events for a long time, the planner
// closes the stream, and the loop ends with ResourceExhausted. The request is not cancelled in this
// case: another Serve with the same ID, within the planner's GatewayWait, continues it.
//
// The time limit for the first token (Request.FirstToken) begins with the call of Serve, also if
// the request is submitted again later. It has no effect after Prefilled.
//
// # Prefix caches of decode engines
//
// A decode engine may keep the KV of prompts in its device memory, and registers with the size of
// this cache. The planner sends size and number of the cache with STARTED. For each such engine the
// gateway has an LRU set of the blocks of the prompts that it has sent to the engine, and submits the
// length of the next prompt's prefix in the set (SubmitRequest.resident). The sets are bounded, and
// begin again with other weights, and when the engine was started again. A set that differs from the
// engine's cache costs time only.
//
// # What engines and gateway agree on
//
// The planner passes SubmitRequest (api/penstockv1) to both engines. Its lengths are numbers of
// tokens, and the hit (the cached prefix) is a multiple of the namespace's block length. The
// payload is the JSON form of Payload, which the planner does not read:
//
//	{"ids": base64 of 16 bytes a block, "extra": further data of this gateway and these engines}
//
// The ids are the chained ids (kv.Chain) of the prompt's full blocks, from the first block on. Ids
// of the output's blocks may follow if the gateway already has the output, as in a replay.
// Otherwise the decode engine continues the chain (kv.Chain.Resume). A prompt whose KV depends on
// more than its tokens and the weights (LoRA, a cache salt, images) needs the ids of a salted
// chain. The caller passes the salts as Request.Salts, or computes the ids and passes them as
// Request.IDs.
//
// Lock order: Gateway.mu is the only lock. It is not held across a call.
package gateway
