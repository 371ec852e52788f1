// Package handoff lends the node's arena to engines on the same host: over a unix
// socket an engine gets the arena's descriptor once, maps it read-only, and from
// then on a Read answers with places in it instead of moving bytes. What crosses
// between the processes for a block of any size is one offset.
//
//	engine                                            node
//	connect ────────────── unix socket ─────────────► Listener: same user?
//	   ◄──── hello{node, session} + descriptor ───────   Session
//	mmap(PROT_READ)                                        │
//	Read{local_session, loan 7} ──── gRPC ───────────────► │ Open(7), Add(part) …
//	   ◄──── offsets, checksums ───────────────────────    │
//	hash, use                                              │
//	ReturnLoans{7} ───────────────── gRPC ───────────────► │ Return(7)
//	close, exit, killed ──── the connection ends ────────► └─ every loan is returned
//
// It is not a protocol for bytes or requests: the engine sends nothing over the
// socket, and whoever sends something is hung up on. It does not know blocks: a
// loan is a list of functions that give memory back, and what may be lent at a
// time is bounded where the memory is (storage.Options.LoanBytesMax).
//
// Trust: a caller of another user than the node's is refused (SO_PEERCRED), and
// the socket's mode is 0600. Whoever is let in can read the whole arena, other
// engines' blocks included, and change none of it: the descriptor is read-only
// and its file sealed (arena.Send). The session's number is known to its engine
// alone, so no other can return its loans.
//
// pinned-stays: memory under a loan is not reused before the loan is returned or
// the connection has ended, and a connection ends only with one of the processes,
// or at the node's shutdown, after which nothing writes to the arena any more.
//
// Lock order: Listener.mu, then Session.mu. No function of a loan is called under
// either.
package handoff
