// Package trace reads recorded inference traffic and yields it as one stream of requests in time
// order. Each prompt is described by the ids of its blocks. The package is not a load generator: it
// has no server, no clock and no bytes of KV. Traces do not contain the text of prompts.
// AppendTokens generates prompts in which two blocks are equal exactly if the trace gives them the
// same id.
//
//	file (plain or gzip) ─► lines ─► Format ─► sessions, at most Concurrency open ─► Request, Request, …
//	                                    │             ordered by time
//	                                    ├── Mooncake   one request a line, 512-token blocks, real arrival times
//	                                    ├── Agentic    one session a line, 64-token blocks, sub-agents, think time
//	                                    ├── DualPath   one trajectory a line: [append, gen] per round, no times
//	                                    └── Azure      CSV of arrivals and lengths, no prefix information
//
// A block id stands for the content of a block: the common prefix of two requests is the common
// prefix of their lists of block ids. Sessions of one file never share an id.
//
//	r, err := trace.Open("kv_cache_tester_agentic.jsonl.gz", trace.Options{Concurrency: 32})
//	…
//	defer r.Close()
//	for req, err := range r.All() {
//		prompt = req.AppendTokens(prompt[:0])
//		…
//	}
//
// Files may be larger than memory: lines are read as they are needed, and a session is in memory
// only while it is open. A malformed line ends the stream with an error that names file and line.
//
// The package starts no goroutine and has no lock; a Reader must be used by one goroutine at a
// time.
package trace
