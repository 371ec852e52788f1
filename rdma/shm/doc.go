// Package shm is the transfer engine between processes of one host: a
// group.Domain whose NIC is the target's own poller. The target places what a
// peer posted in its memory, so that key and bounds are checked by the memory's
// owner, and taking a key back concerns no other process.
//
// It is not a way around the hosts' isolation: both processes are of one user and
// in one network namespace, and each gives the other its shared arenas to read,
// all of them. It does not lend memory in place either; that is server/handoff.
//
//	   poster                                                 target
//	   ──────                                                 ──────
//	Post ─► entries ───────────► ring, one for each direction ─► Poll
//	          │                  of an endpoint (memfd)            │ key? bounds? (memory.mu)
//	          │ tail ─────────────────────────────────────────►    │
//	          │ asleep? its bell (eventfd)                         │ copy once, 256 KiB at a time
//	          │                                                    │   from the poster's arena, mapped read-only
//	        source in a shared arena (memfd) ═════════════════════►│   or from its process (process_vm_readv)
//	                                                               ▼
//	Poll ◄────────── statuses, done ◄────────────────────── KindImmediate, KindMessage
//
// A ring has 256 entries of one cache line; entry, status and the two counters
// are the whole protocol:
//
//	tail                counts entries posted              written by the poster
//	done                counts entries performed           written by the target
//	performerSleeps     ring my bell when you post         set by the target, cleared by who rings
//	posterSleeps        ring my bell when you are done     set by the poster, cleared by who rings
//	withdrawn           count nothing more                 written by the poster, in Shut
//	entries[256]        op, imm, len, segment, offset, destination, key
//	statuses[256]       how each entry ended
//
// # Trust
//
// What a ring holds is a claim. The target reads each word of an entry once, into
// its own memory, before it checks it; both sides count for themselves and only
// compare with what the other wrote, and a counter that can't be ends the
// endpoint. A file that comes over the socket must be a memfd of sealed size, so
// that nobody can truncate it under a mapping (SIGBUS), a bell must be an
// eventfd. The addresses of endpoints are random numbers that only those know who
// have proved the engine's token.
//
// # Where a source may lie
//
// In an arena.Arena made with Options.Shared and named in Options.Arenas, or got
// from the engine's own allocator: peers map it once, and read it like their own
// memory. Anywhere else the peer reads it by process_vm_readv, a system call for
// each chunk, if the kernel lets it (both of one user and kernel.yama.ptrace_scope
// 0, or the capability SYS_PTRACE); whether it does is tried when an endpoint
// connects. Where it doesn't, a Work from such a source is refused, and the log of
// the poster is told why. A destination may lie anywhere.
//
// # Sleep
//
// A poller that finds nothing looks again for 2 to 50 µs, longer while that pays
// off, then marks its rings and sleeps on its bell in the runtime's network
// poller. Who changes a ring looks at the mark afterwards, who sleeps looks at the
// ring after marking: one of the two sees the other.
//
// # Death
//
// A socket for each endpoint brings the descriptors, and its end is the peer's: the
// kernel closes it with the process. What had been posted then is not performed
// any more. A source read by process_vm_readv counts only if the process was
// still alive afterwards, by its pidfd: its number may be another's by then.
//
// Lock order: Domain.pollMu, endpoint.recvMu, then endpoint.sendMu or memory.mu.
// Domain.mu comes before endpoint.sendMu; Domain.keysMu is taken alone. Post takes
// sendMu only, Shut sendMu and recvMu one after the other: it waits for a chunk,
// not for a Poll.
package shm
