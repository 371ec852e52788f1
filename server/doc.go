// Package server puts a storage node on the network: gRPC for control, the
// transfer engine for bytes, HTTP for metrics and health. It holds no cache
// logic; that is server/storage.
//
//	            ┌──────────────────────────── server ────────────────────────────┐
//	client ────►│ gRPC   Cache, Admin  ──┬►  storage.Node ──► trie, blockstore   │
//	client ────►│ rdma   messages: calls ┘     │ verified parts in the arena     │
//	   ▲        │                              │                                 │
//	   └════════╪═ rdma one-sided writes ◄═════╛                                 │
//	            │ HTTP  /metrics /healthz /readyz /debug/pprof (loopback callers)│
//	            └────────────────────────────────────────────────────────────────┘
//
// A read: the client registers memory and sends its descriptor. The node writes
// each part as soon as the part is verified, with the request's immediate on every
// operation. The node replies over gRPC when all operations are confirmed, with the
// number of immediates. The node replies to a message when all operations are
// submitted and none has failed; the client then counts the immediates to learn
// when the bytes have arrived. A write: the node opens a window over the
// reservation's arena memory. Commit revokes the window, so that the bytes cannot
// change between their verification and the device write.
//
// The calls of the data path, Match, Read, Reserve and Commit, come over gRPC, as
// messages over the data plane, or over the unix socket. One handler performs them
// (cacheService). The last two transports have one codec (api.Call). A message that
// finds no receive buffer is refused, and the client makes the call over gRPC. At
// most 1,024 messages are performed at a time, at most 128 of one peer. Memory,
// concurrent loads and chain lengths are bounded in server/storage, which replies
// Busy.
//
// An engine on the same host may map the arena (handoff). The reply to its Read has
// places in the arena, which stay unchanged until the engine returns the loan. The
// engine's Write does Reserve and Commit in one call. Its bytes are in memory that
// the node lends to the session: the node copies them into the reservation and
// verifies the copy.
//
// Trust: a gRPC call carries the bearer token, or comes over mutual TLS, or the
// node listens on loopback only. The data plane's token is random for each run of
// the node. Describe returns it, so exactly the callers that may use gRPC may open a
// data-plane session. Such a session may make the same calls as gRPC, and the node
// writes blocks only to the session's own memory. If the data plane is not
// encrypted, names and block ids in these calls are as readable in transit as the
// blocks. Processes of the node's own user may read and write over the unix socket
// without a token, because they can read and write the node's files too.
//
// Shutdown: Shutdown refuses new writes and calls by message at once, lets calls in
// flight finish for the drain timeout, ends local sessions, and then closes data
// plane, store and index in this order.
//
// Lock: calls.mu, which counts calls by message, is a leaf.
package server
