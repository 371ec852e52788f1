// Package handoff lends the node's arena to engines on the same host: over a unix
// socket an engine gets the arena's descriptor once, maps it read-only, and from
// then on a Read answers with places in it instead of moving bytes. What crosses
// between the processes for a block of any size is one offset.
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
// A call over the socket (api.Call, as on the data plane) takes two changes of
// process and nothing else; one over gRPC takes several times as long, which for a
// block of 1 MiB is most of the time. A connection carries one call at a time: an
// engine that has more under way sends the others over gRPC. The context of a call
// ends with the connection, also of an engine that is killed meanwhile.
//
// Staging memory is the way of blocks to the node. Each session has its own, which the node
// makes on request and maps for reading. Options.StagingBytesMax bounds that of all sessions: a session
// that gets none writes over the data plane. The size is sealed, so the node cannot fault
// there, and the Handler copies the bytes before it looks at them, because the engine can change
// them at any time. Its end is the session's, after the last call.
//
// The package has no notion of blocks: a loan is a list of functions that give memory back,
// the Handler interprets the calls, and storage.Options.LoanBytesMax bounds the memory that is
// lent at a time.
//
// Trust: a caller of another user than the node's is refused (SO_PEERCRED), and
// the socket's mode is 0600. A caller of the node's user can read the whole arena, other
// engines' blocks included, and may call Read, Match, Exists and Write without the bearer token or the
// certificate that gRPC asks for. It can change no bytes of the arena: the descriptor is read-only
// and its file sealed (arena.Send). Its leases end by themselves, and it gets no pins. The session's number is known to its engine
// alone, so no other can return its loans.
//
// pinned-stays: memory under a loan is not reused before the loan is returned or
// the connection has ended, and a connection ends only with one of the processes,
// or at the node's shutdown, after which nothing writes to the arena any more.
//
// Lock order: Listener.mu, then Session.mu. No function of a loan is called under
// either.
package handoff
