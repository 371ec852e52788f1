// Package handoff lends the node's arena to engines on the same host. Over a unix socket an engine
// receives the arena's descriptor once, and maps the arena read-only. The reply to a Read then has
// offsets in the arena instead of bytes: one offset for a block of any size.
//
//	engine                                            node
//	connect ────────────── unix socket ─────────────► Listener: same user?
//	   ◄──── hello{node, session} + descriptor ───────   Session
//	mmap(PROT_READ)                                        │
//	Read{local_session, loan 7} ── socket or gRPC ───────► │ Open(7), Add(part) …
//	   ◄──── offsets, checksums ───────────────────────    │
//	hash and use, or copy and hash                         │
//	ReturnLoans{7} ─────────────── socket or gRPC ───────► │ Return(7)
//	stage ──────────────────────── socket ───────────────► │ staging memory, once
//	   ◄──── descriptor ───────────────────────────────    │
//	copy and hash into it                                  │
//	Write{ids, checksums} ──────── socket ───────────────► │ Staging: copy, verify, commit
//	   ◄──── stored, exists or refused ────────────────    │
//	close, exit, killed ──── the connection ends ────────► └─ every loan is returned
//
// A call over the socket (api.Call, as on the data plane) takes two context switches. A call over
// gRPC takes several times as long. For a block of 1 MiB a call over gRPC takes most of the
// duration of the Read. A connection carries one call at a time; an engine sends concurrent calls
// over gRPC. The context of a call ends with the connection, also when the engine is killed.
//
// Writes go through staging memory. Each session has its own staging memory, which the node creates
// on request and maps for reading. Options.StagingBytesMax limits the staging memory of all
// sessions. An engine whose session gets no staging memory writes over the data plane. The size of
// the memory's file is sealed, so that an access of the node cannot fault. The Handler copies the
// bytes before it verifies them, because the engine can change them at any time. Staging memory is
// freed at the end of the session, after the last call.
//
// The package does not interpret blocks: a loan is a list of functions that release memory, the
// Handler interprets the calls, and storage.Options.LoanBytesMax limits the size of the lent
// memory.
//
// Trust: only processes of the node's user may connect (SO_PEERCRED), and the mode of the socket is
// 0600. A connected engine can read the whole arena, including other engines' blocks, and may call
// Read, Match, Exists and Write without the bearer token or the certificate that gRPC requires. It
// cannot change bytes of the arena: the descriptor is read-only and its file is sealed
// (arena.Send). Its leases expire, and it gets no pins. The id of a session is sent only to its own
// engine, so no other engine can return its loans.
//
// Invariant pinned-stays: lent memory is not reused before the loan is returned or the connection
// has ended. A connection ends only when one of the two processes ends it or exits, or when the
// node shuts down, after which nothing writes to the arena.
//
// Lock order: Listener.mu, then Session.mu. No release function of a loan is called under either
// lock.
package handoff
