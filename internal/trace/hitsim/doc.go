// Package hitsim says how many of a trace's prompt tokens a cache of a given
// size would have found, under each eviction policy of trie/evict and under the
// best choice that knows the future. It moves no bytes and knows no time beyond
// the order of requests: a hit ratio, not a speed.
//
//	trace.Reader ──Load──► Trace: the tree of all prefixes, one leaf per request
//	                         │
//	                         ├── Run: policy × capacity ──► evict.Cache, request by request
//	                         │                         └──► Belady, offline
//	                         └── Infinite: what a cache without a limit would find
//	                                          ▼
//	                                       Report: table or JSON
//
// The rules are those of the storage node: a hit is a leading run of whole
// blocks, a prefix is evicted leaf first, a request's own path stays while it is
// served. Capacities are a share of the trace's distinct blocks, so that traces
// of different sizes compare.
//
// The simulations of one Run are spread over goroutines, which have ended when
// Run returns; a Trace is read-only after Load and has no lock.
package hitsim
