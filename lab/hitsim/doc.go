// Package hitsim computes how many of a trace's prompt tokens a cache of a given size would have
// found, under each eviction policy of trie/evict and under the optimal offline policy. It moves no
// bytes and simulates only the order of requests, not their times. The result is a hit ratio and
// not a speed.
//
//	trace.Reader ──Load──► Trace: the tree of all prefixes, one leaf per request
//	                         │
//	                         ├── Run: policy × capacity ──► evict.Cache, request by request
//	                         │                         └──► Belady, offline
//	                         └── Infinite: the hits of a cache without a limit
//	                                          ▼
//	                                       Report: table or JSON
//
// The rules are those of the storage node: a hit is a leading run of whole blocks, a prefix is
// evicted leaf first, and a request's own path is not evicted while the request is served.
// Capacities are a share of the trace's distinct blocks, so that traces of different sizes can be
// compared.
//
// One Run executes its simulations on several goroutines, which have ended when Run returns. A
// Trace is read-only after Load and has no lock.
package hitsim
