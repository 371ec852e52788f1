// Package front is an OpenAI-compatible HTTP front of a cluster of inference engines
// (vLLM, SGLang). It sends requests with the same prompt prefix to the same engine, and
// passes request and answer through unchanged. It is an http.Handler; package server puts
// it on the network, and the command is `penstock gateway`.
//
// It is not package client/gateway, which is a front end's session with the planner and which
// it uses in front of a prefill/decode cluster. It has no tokenizer, moves no KV, and does not
// translate between APIs.
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
//	                          planned: text, messages ─► tokens ─────────► POST /tokenize, through pooled
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
// The prompt is cut into blocks of 256 bytes, and each block is hashed with the hash of
// the block before it. For each engine an LRU of such hashes approximates what the engine
// has in its own memory: the engine was sent these prompts. This is the approximate tree
// of SGLang's cache-aware router ("SGLang v0.4", 2024) in the form of hashed blocks that
// llm-d's approximate prefix scorer has. Nothing is asked of the engines, and the
// memory has a bound. An engine that has at least half of the prompt's blocks, and the
// most of all, is chosen. Otherwise the engine with the fewest requests is chosen.
//
// An engine is chosen for its blocks only while its load is within the bound of consistent hashing with
// bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018): LoadFactor times the mean
// load, rounded up. A popular prefix therefore spreads over as many engines as its requests
// need. Consistent hashing itself is not used: it hashes a fixed part of the prompt, and
// all conversations with one system prompt would have one key.
//
// # Prefill and decode engines
//
// The planner chooses both engines of a request, and has the load and the queue of the cluster.
// It orders the queue by priority and tenant and refuses requests whose first token would be late
// (class.go takes these from the request).
// The health of engines counts for /tokenize and for GET only. A session is one goroutine that
// owns the state of a request, one that follows the planner, and one for each request to an engine.
//
// # Bounds
//
// Bytes of a body (413), of all bodies (429), requests of an engine and waiting requests
// (429 after QueueWait, or at once when the queue is full), hashes of an engine (the least
// recently used is dropped), attempts of a request (the last failure is the answer).
//
// With a planner: the answer of /tokenize (64 KiB, and 8 bytes for each byte of the request; it
// counts towards the bound of all bodies), the time until the planner accepts a request (QueueWait,
// 503) and starts it (QueueWait, 429), the time between two attempts (ReplanWait, 502), and the
// requests that wait for Done alone (maxConfirming, confirmWait; the planner aborts the others).
//
// # Attempts
//
// A connection that fails and a 502, 503 or 504 end an attempt, and the next one goes to
// another engine, as long as no byte of an answer has arrived. front reads the first byte
// of the body before it passes on the status: engines send the status when the prompt is
// accepted, and the prefill follows.
//
// Lock order: pool.mu, or planned.mu, alone. Neither is held across I/O.
package front
