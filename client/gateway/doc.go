// Package gateway serves one request at a time on a prefill/decode cluster: it finds the
// prompt's cached prefix in storage, submits the request to the planner, and returns the
// events of its course. It has no queue of its own and does not talk to engines.
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
//	                 │ planner away: Waiting, submitted again under the same id
//	                 │ refused: *RefusedError with the planner's reason
//
// The loop ends after Done or with an error. Leaving it earlier, and the end of its
// context, cancel the request: the planner aborts it on its engines. Events come in order,
// on the goroutine of the loop. A loop that takes none for long loses the planner's stream
// and no more.
//
// A deadline of the first token (Request.FirstToken) counts from the call of Serve, also when the
// request is submitted again, and ends with Prefilled.
//
// # What engines and gateway agree on
//
// The planner passes SubmitRequest (api/penstockv1) to both engines. Its lengths are
// tokens, and its hit is a multiple of the namespace's block. Its payload is Payload, which is
// JSON and which the planner does not read:
//
//	{"ids": base64 of 16 bytes a block, "extra": further data of this gateway and these engines}
//
// The ids are the chain (kv.Chain) of the prompt's full blocks, the hit first. They may
// continue with blocks of the output if the gateway has it, as in a replay. Otherwise the
// decode engine continues the chain (kv.Chain.Resume). A prompt whose KV depends on
// more than its tokens and the weights (LoRA, a cache salt, images) needs ids of a salted
// chain, which the gateway computes and passes as Request.IDs.
//
// Lock order: Gateway.mu alone, which is not held across a call.
package gateway
