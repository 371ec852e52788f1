// Package server puts a storage node on the network: gRPC for control, the
// transfer engine for bytes, HTTP for metrics and health. It holds no cache
// logic; that is server/storage.
//
//	            ┌──────────────────────────── server ────────────────────────────┐
//	client ────►│ gRPC   Cache, Admin  ──┬►  storage.Node ──► trie, blockstore   │
//	client ────►│ rdma   messages: calls ┘     │ verified parts in the arena     │
//	   ▲        │                              │                                 │
//	   └════════╪═ rdma one-sided writes ◄═════╛                                 │
//	            │ HTTP  console /metrics /healthz /readyz /debug/pprof (loopback)│
//	            └────────────────────────────────────────────────────────────────┘
//
// A read: the client registers memory and sends its descriptor. The node writes each part as soon
// as the part is verified, with the request's immediate on every write. To a call over gRPC the
// node replies when all writes are confirmed, with the number of immediates. To a call by message
// it replies when all writes are submitted and none has failed; the client then counts the
// immediates to detect when the bytes have arrived. A write: the node opens a window over the
// reservation's arena memory. Commit revokes the window, so that the bytes cannot change between
// their verification and the device write.
//
// The calls of the data path (Match, Read, Reserve, Commit) come over gRPC, as messages over the
// data plane, or over the unix socket. One handler performs them (cacheService). Messages and the
// socket use the same encoding (api.Call). If no receive buffer is free for a message, the message
// is refused, and the client makes the call over gRPC. At most 1,024 calls by message are in
// progress, at most 128 of one peer. server/storage limits memory, concurrent loads and chain
// lengths, and replies Busy above these limits.
//
// An engine on the same host may map the arena (handoff). The reply to its Read has offsets in the
// arena. The bytes there stay unchanged until the engine returns the loan. The engine's Write does
// Reserve and Commit in one call. The engine puts the bytes into memory that the node lends to the
// session; the node copies them into the reservation and verifies the copy.
//
// Trust: a gRPC call carries the bearer token, or comes over mutual TLS, or the node listens on
// loopback only. With a roles file (package access), the map rules declares the role and the namespace
// that each call needs; the guard decides by it, for gRPC before the message is read and again with
// the message, for messages of the data plane with the message, and for HTTP by the path. Calls with
// the id of a lease or a reservation are decided by its namespace, and to other callers the id does
// not exist.
//
// The data plane has its own token, which is random for each run of the node. Describe returns that
// token, so exactly the callers that may use gRPC may open a data-plane session. With a roles file the
// token differs for each credential, so a session has the principal of its client (Sessions). With client certificates the
// token also differs for each certificate of auth.client_ca. A call
// of a client whose credential or CA was removed ends the session. A session may make the same calls as its
// client over gRPC, and the node writes blocks only to the session's own memory. If the data plane is
// not encrypted, names and block ids in these calls, and the blocks, can be read in transit. Processes
// of the node's own user may read and write over the unix socket without a token, because they can
// read and write the node's files too.
//
// Shutdown: Shutdown refuses new writes and calls by message at once. It lets calls in progress
// finish for the drain timeout, ends the sessions on the unix socket, and then closes the data
// plane, the store and the index, in this order.
//
// Locks: calls.mu guards the counts of calls by message. No other lock is taken while it is held.
// Sessions.mu guards the credentials of engines. Locks of the transfer engine are taken while it is
// held, and it is taken under none of them. laterCall.mu and connections.mu are leaves.
package server
