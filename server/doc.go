// Package server puts a storage node on the network: gRPC for control, the
// transfer engine for bytes, HTTP for metrics and health. It holds no cache
// logic; that is server/storage.
//
//	            ┌──────────────────────────── server ────────────────────────────┐
//	client ────►│ gRPC  Cache, Admin   ──►  storage.Node ──► trie, blockstore    │
//	   ▲        │                              │ verified parts in the arena     │
//	   └════════╪═ rdma one-sided writes ◄═════╛                                 │
//	            │ HTTP  /metrics /healthz /readyz /debug/pprof (loopback callers)│
//	            └────────────────────────────────────────────────────────────────┘
//
// A read: the client registers memory and sends its descriptor. The node writes
// each part as soon as it is verified, with the request's immediate on every
// operation, and answers when all are confirmed; the answer says how many
// immediates there were. A write: the node opens a window over the reservation's
// arena memory; Commit revokes it, so that nothing can change the bytes between
// their check and the device.
//
// An engine on the same host may map the arena (handoff): its Read answers with
// places in the arena, which stay as they are until it returns the loan.
//
// Trust: a gRPC call carries the bearer token, or comes over mutual TLS, or the
// node listens on loopback only. The data plane's token is random for each run
// and is handed out by Describe, so who may call gRPC may open a data session,
// and nobody else. Processes of the node's own user may read over the unix socket
// without either: they could read the node's files as well.
//
// Shutdown: Shutdown refuses new writes at once, lets calls in flight finish for
// the drain timeout, then ends local sessions, and closes data plane, store and index in this order.
//
// Locks: none of its own.
package server
