// Package front is an OpenAI-compatible HTTP front of a cluster of inference engines
// (vLLM, SGLang). It sends requests with the same prompt prefix to the same engine, and
// passes request and answer through unchanged. It is an http.Handler; package server puts
// it on the network, and the command is `penstock gateway`.
//
// The package has no tokenizer, moves no KV, and does not translate between APIs. In front of a
// prefill/decode cluster it uses package client/gateway for the session with the planner.
//
//	client                    front                                        engines
//	──────                    ─────                                        ───────
//	POST /v1/…completions ──► token? memory for the body? JSON (fields.go)
//	                            ▼ router
//	                          pooled: prompt ─► chains of block hashes (prompt.go)
//	                          pool: choose, or wait in the queue ◄──────── GET /health, in intervals
//	                            │  index per engine: longest prefix
//	                            │  load per engine: bounded
//	                            ▼
//	                          one attempt after another ─────────────────► same body, same headers
//	                            │    until the first byte of an answer ◄── status, headers, first byte
//	status, headers, bytes ◄──  ▼ httputil.ReverseProxy, flushes each read
//
// With a planner, completions have another router:
//
//	                          models: LoRA adapter? its salt ────────────► GET /v1/models, POST /v1/completions, through pooled
//	                          unknown models ────────────────────────────► one engine, through pooled
//	                          prompt's logprobs, beam search ────────────► one engine, through pooled
//	                          planned: messages ─► tokens, and of images
//	                            │ hashes, places ────────────────────────► POST /v1/chat/completions/render, through pooled
//	                            │ no hashes ─────────────────────────────► one engine, through pooled
//	                          text, messages without an answer ─► tokens ► POST /tokenize, through pooled
//	                            │ such messages, all attempts failed ────► one engine, through pooled
//	                          session: gateway.Serve ─► storage, planner
//	                            │ Started: attempt, epoch, both engines
//	                            ├── max_tokens 1, no stream ─────────────► prefill engine; its answer is dropped
//	                            ├── the client's body ───────────────────► decode engine
//	                            │   kv_transfer_params in both             │
//	                            │ Replanned before the first byte: both are closed, the next Started
//	status, headers, bytes ◄──  ▼ httputil.ReverseProxy ◄──────────────────┘
//	                          the session goes on until Done, at most confirmWait
//
// # Which engine
//
// The prompt is cut into blocks of 256 bytes, and each block is hashed with the hash of the block
// before it. For each engine, an LRU set has the hashes of the prompts that were sent to the
// engine. It approximates the blocks in the engine's own memory. SGLang's cache-aware router
// ("SGLang v0.4", 2024) keeps such an approximation as a tree, llm-d's approximate prefix scorer as
// hashed blocks. It needs no calls to the engines, and its memory is bounded. The engine with the
// most blocks of the prompt is chosen, if it has at least half of them. Otherwise the engine with
// the fewest requests is chosen.
//
// An engine is chosen for its blocks only while its load is within the bound of consistent hashing
// with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018): LoadFactor times the mean load,
// rounded up. So the requests with a popular prefix spread over as many engines as they need.
// Consistent hashing itself is not used: it hashes a fixed part of the prompt, so all conversations
// with the same system prompt would have the same key.
//
// # Prefill and decode engines
//
// The planner chooses both engines of a request, by the load of the cluster, and keeps the queue.
// It orders the queue by priority and tenant, and refuses requests whose first token would be late.
// models.go requests the list of models from an engine and, for a LoRA adapter, the salt of its
// blocks, which comes from the adapter's weights. The ids of a prompt with a cache salt or an adapter
// are those of the vLLM connector (salt.go), and so are those of a prompt with images, of which an engine
// sends the hashes and places (media.go). A request whose ids the front cannot compute, because no engine
// sends them or identifies the adapter, is not planned.
// class.go takes priority, tenant and time limit from the request. The health of engines matters
// only for /tokenize and GET. A session has one goroutine that owns the state of a request, one
// that receives the planner's events, and one for each request to an engine.
//
// # Bounds
//
// The following are bounded: the bytes of a body (413 above the bound) and of all bodies together
// (429); the requests of an engine and the waiting requests (429 after QueueWait, or at once when
// the queue is full); the hashes of an engine (the least recently used hash is dropped); the
// attempts of a request (the last failure is the response).
//
// With a planner the following are bounded too: the response of /tokenize (64 KiB plus 8 bytes for
// each byte of the request; it counts towards the bound of all bodies); the response of render (the
// same for the text of a chat, and mediaBytes for each image); the time until the planner
// accepts a request (QueueWait, 503) and until it starts the request (QueueWait, 429); the time
// between two attempts (ReplanWait, 502); the requests that wait only for Done (maxConfirming,
// confirmWait; the planner aborts the others).
//
// # Attempts
//
// An attempt ends with a failed connection, with a status of 502, 503 or 504, with an internal error of an engine
// that does not answer the poll that follows, or with failed polls of an engine that has sent no byte of a
// response, if another engine is healthy. If no byte of a response body has arrived, the next attempt goes to another engine. The front waits for the first byte of the
// body before it passes on the status, because engines send the status before the prefill, when
// they accept the prompt.
//
// Lock order: pool.mu, planned.mu, models.mu and pauses.mu are never held together, and none is held across I/O.
package front
