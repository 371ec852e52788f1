// Package front is an OpenAI-compatible HTTP front of a cluster of inference engines
// (vLLM, SGLang). It sends requests with the same prompt prefix to the same engine, and
// passes request and answer through unchanged. It is an http.Handler; package server puts
// it on the network, and the command is `penstock gateway`.
//
// It is not package client/gateway, which is a front end's session with the planner. It
// has no tokenizer, moves no KV, does not join prefill and decode engines, and does not
// translate between APIs.
//
//	client                    front                                        engines
//	──────                    ─────                                        ───────
//	POST /v1/…completions ──► token? memory for the body? JSON?
//	                          prompt ─► chains of block hashes (prompt.go)
//	                          pool: choose, or wait in the queue ◄──────── GET /health, in intervals
//	                            │  index per engine: longest prefix
//	                            │  load per engine: bounded
//	                            ▼
//	                          route: one attempt after another ──────────► same body, same headers
//	                            │    until the first byte of an answer ◄── status, headers, first byte
//	status, headers, bytes ◄──  ▼ httputil.ReverseProxy, flushes each read
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
// # Bounds
//
// Bytes of a body (413), of all bodies (429), requests of an engine and waiting requests
// (429 after QueueWait, or at once when the queue is full), hashes of an engine (the least
// recently used is dropped), attempts of a request (the last failure is the answer).
//
// # Attempts
//
// A connection that fails and a 502, 503 or 504 end an attempt, and the next one goes to
// another engine, as long as no byte of an answer has arrived. front reads the first byte
// of the body before it passes on the status: engines send the status when the prompt is
// accepted, and the prefill follows.
//
// Lock order: pool.mu alone. It is never held across I/O.
package front
