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
// each part as soon as it is verified, with the request's immediate on every
// operation, and answers when all are confirmed; the answer says how many
// immediates there were. Of a call that came as a message the answer goes out when
// everything has been submitted, and nothing is lost so far: who counts the
// immediates knows when it is there. A write: the node opens a window over the reservation's
// arena memory; Commit revokes it, so that nothing can change the bytes between
// their check and the device.
//
// The calls of the data path, Match, Read, Reserve and Commit, come over gRPC, as
// messages over the data plane, or over the unix socket: one handler performs them
// (cacheService), and the two last have one codec (api.Call). A message finds a
// receive buffer or is refused, and then comes over gRPC; 1,024 are performed at a
// time, 128 of one peer. What a call may take beyond that, memory, loads under way,
// chain length, is bounded in server/storage, and Busy is its answer there.
//
// An engine on the same host may map the arena (handoff): its Read answers with
// places in the arena, which stay as they are until it returns the loan. Its Write, which is
// Reserve and Commit in one call, has its bytes in memory that the node lends the session: the
// node copies them into the reservation and verifies the copy.
//
// Trust: a gRPC call carries the bearer token, or comes over mutual TLS, or the
// node listens on loopback only. The data plane's token is random for each run
// and is handed out by Describe, so who may call gRPC may open a data session,
// and nobody else. Whoever has one may call over it as over gRPC, and has blocks
// written to himself only. Where the data plane is not encrypted, names and block
// ids in these calls are as readable on the way as the blocks are. Processes of the node's own user may read and write over the unix socket
// without either: they could read and write the node's files as well.
//
// Shutdown: Shutdown refuses new writes and calls by message at once, lets calls in flight finish for
// the drain timeout, then ends local sessions, and closes data plane, store and index in this order.
//
// Lock: calls.mu, which counts calls by message, is a leaf.
package server
