// Package shm is the transfer engine between processes of one host. Its NIC is a group.Domain,
// whose poller runs in the target. The target copies the payload that a peer posted into its own
// memory. So the owner of the memory checks key and bounds itself, and can invalidate a key
// without the help of another process.
//
// Both processes must belong to one user and one network namespace, and each can read all shared
// arenas of the other. The package copies payload; server/handoff gives peers access to blocks in
// place.
//
//	   poster                                                 target
//	   ──────                                                 ──────
//	Post ─► entries ───────────► ring, one for each direction ─► Poll
//	          │                  of an endpoint (memfd)            │ key? bounds? (memory.mu)
//	          │ tail ─────────────────────────────────────────►    │
//	          │ asleep? ring its bell (eventfd)                    │ copy once, 256 KiB at a time
//	          │                                                    │   from the poster's arena, mapped read-only
//	        source in a shared arena (memfd) ═════════════════════►│   or from its process (process_vm_readv)
//	                                                               ▼
//	Poll ◄────────── statuses, done ◄────────────────────── KindImmediate, KindMessage
//
// A ring has 256 entries of one cache line. The whole protocol consists of the entries, their
// statuses, and these counters and flags:
//
//	tail                number of entries posted           written by the poster
//	done                number of entries performed        written by the target
//	performerSleeps     target sleeps: ring its bell       set by the target, cleared by the poster
//	posterSleeps        poster sleeps: ring its bell       set by the poster, cleared by the target
//	withdrawn           count no further immediates        written by the poster, in Shut
//	entries[256]        op, imm, len, segment, offset, destination, key
//	statuses[256]       the status with which each entry ended
//
// # Trust
//
// The target does not trust the contents of a ring. It reads each word of an entry once, into its
// own memory, before it checks the word. Each process keeps its own counters and only compares
// them with the counters in the ring; an impossible counter ends the endpoint. A file received
// over the socket must be a memfd of sealed size, so that it cannot be truncated under a mapping
// (SIGBUS). A bell must be an eventfd. The addresses of endpoints are random numbers, which only
// processes that have proved the engine's token receive.
//
// # Where a source may lie
//
// A source may be in an arena.Arena that was made with Options.Shared and is listed in
// Options.Arenas, or in memory from the engine's own allocator. Peers map such memory once and
// read it like their own. A peer reads a source in other memory by process_vm_readv, with one
// system call per chunk. The kernel must permit this call: both processes belong to one user and
// kernel.yama.ptrace_scope is 0, or the process has the capability SYS_PTRACE. Each endpoint tests
// the permission when it connects. Without the permission, a Work from such a source is refused,
// and the poster logs the reason. A destination may be anywhere.
//
// # Sleep
//
// A poller that finds no work continues to poll for 2 to 50 µs; the time is longer if recent polls
// found work. Then it marks its rings (performerSleeps, posterSleeps) and sleeps on its bell in
// the runtime's network poller. A process that changes a ring checks the mark afterwards, and a
// poller that goes to sleep checks the ring after marking it. So at least one of the two detects
// the other's action.
//
// # Death
//
// Each endpoint has a socket, over which the descriptors are sent. The kernel closes the socket
// when the peer's process ends. Entries that the peer posted before its end are not performed any
// more. Bytes read by process_vm_readv count only if the pidfd shows afterwards that the process
// is still alive: otherwise the process id may belong to another process.
//
// Lock order: Domain.pollMu, endpoint.recvMu, then endpoint.sendMu or memory.mu. Domain.mu comes
// before endpoint.sendMu; Domain.keysMu is held alone. Post takes only sendMu. Shut takes sendMu
// and recvMu one after the other, so it waits for one chunk to be placed and not for a whole Poll.
package shm
