// Package tcp is the transfer engine over TCP: rdma's contract with nothing but
// sockets. Payload is written by writev from the registered source and read
// straight into the registered destination; there is no staging buffer on either
// side. With Options.ZeroCopy the kernel's copy of the source is left out as well. It
// is not a secure channel unless Options.TLS is set: the token keeps strangers out, it
// does not hide or protect the bytes on the way.
//
//	Write ─► pieces of PieceBytes ─► lane of its class ◄─ taken by connections as they can write: one writev of many frames
//	                                                          │ rails: a NIC of ours, a NIC of the peer, 1..N connections for each lane
//	Done ◄─ reader ◄── ack (batched) ◄── all pieces landed, immediate counted ◄── reader: header, key and bounds, read into place
//
// # Session, rails, lanes
//
// Two engines share at most one session; both sides write and send on all of its
// connections, whoever dialed. An engine without a listener is reached over the
// sessions that it opened. A session has a rail for each pair of NICs: rail i
// joins NIC i mod ours with NIC i mod theirs, for i below the larger count. A
// rail has a number of connections for each lane; there is one lane for all
// classes, or, where the dialer marks them (Options.QoS), one for each.
//
// One connection of a rail more is the rail's control connection: it carries messages,
// acks and what is said of rails, and no payload of writes. What waits in the socket's
// queue of a slow NIC is therefore never ahead of a call, its answer, or the ack that
// lets the next step begin. Where the dialer marks classes it has the mark of the
// highest.
//
// A lane is a queue from which connections take when they can write. So a NIC
// carries what it can, however unequal they are; large writes are cut over all
// of them, and small ones rotate over whoever is idle.
//
// A rail dies as a whole, when one of its connections breaks, is silent for
// NICTimeout while other rails are not, or its interface loses its carrier. The
// session goes on over the others, and its dialer tries the rail again, under a
// new generation. The last rail's death is the session's, as is silence for
// IdleTimeout, a malformed frame and a new session of the same engine: all
// connections are closed, and once no goroutine touches memory any more every
// operation in flight ends with rdma.ErrPeerDied.
//
// An engine that closes writes the acks that it owes first. Its peer reads all
// connections to their ends, and if nothing is in flight then the session has ended in
// order: that is not logged as a death.
//
//	up ──► dying ──► down ──► connecting ──► up
//	  │       │         └ fenced: both sides said so
//	  │       └ its readers and writers are in the middle of something
//	  └ a connection fails, the NIC or the peer is silent, the peer took it down
//
// What a dead rail had taken and was not acked is sent again over the others, but
// only when the rail is fenced: each side says on another rail that it is down,
// after its last reader and writer of it have ended. Nothing that was sent before
// can land afterwards, so no byte is written behind a completed operation. Each
// frame has the number of its piece, and the target remembers, for the latest
// operation of each slot, which pieces it had: a piece that comes twice is
// dropped, and an immediate is counted once. A target sends the acks again that
// may have been lost with the rail, before it says that the rail is down.
//
// Opening a connection is rdma/internal/handshake, by the magics "PRD3" and "PRC3".
// What its hello has of this protocol's, little-endian:
//
//	param     conn 2 | conns 2
//	more      lane 1 | lanes 1 | rail 1 | rails 1 | generation 4 | zero 8        (16 bytes)
//
// The verdict is sent when all connections of the rail have proved the token, so
// that a Connect that returned can be answered at once. A hello of generation g
// says that nothing of the rail's earlier generations is left on the dialer's
// side.
//
// # Frames
//
//	0       4      5       6      8     12       16   24    32       40       48         52      56     60
//	┌───────┬──────┬───────┬──────┬─────┬────────┬────┬─────┬────────┬────────┬──────────┬───────┬──────┬───────────┐
//	│ magic │ type │ flags │ runs │ imm │ frames │ op │ key │ offset │ length │ tableSum │ piece │ zero │ headerSum │
//	│ 4     │ 1    │ 1     │ 2    │ 4   │ 4      │ 8  │ 8   │ 8      │ 8      │ 4        │ 4     │ 4    │ 4         │ = 64
//	└───────┴──────┴───────┴──────┴─────┴────────┴────┴─────┴────────┴────────┴──────────┴───────┴──────┴───────────┘
//	magic     "PNS" and the version, 3
//	type      1 write, 2 ack, 3 message, 4 heartbeat, 5 rail down
//	flags     write, bit 0: imm is present; message, bit 1: its ack may wait
//	runs      write: entries of the table that follows the header; 0: one run, at offset, of length bytes
//	frames    write: how many frames the operation has, on all connections together; rail down: the rail
//	op        write and message: slot 4 | generation 4, the sender's number for the operation, echoed in its ack. A slot
//	          is used again, under the next generation from 1, when its operation has been acked
//	key       write: the window to write in; offset is counted from its start
//	length    bytes of payload after header and table
//	piece     write: the frame's number, from 0; rail down: the generation of which nothing is left
//	          A field that a type does not name is zero.
//	tableSum  CRC-32C of the table; headerSum: of the first 60 bytes
//
//	table     runs x ( offset 8 | length 8 ); the lengths add up to length. Small pages of one paged write share a frame.
//	ack       payload of up to 512 x ( op 8 | status 1 | zero 7 ); status is an rdma.Reason. It may come twice.
//
// The ack of a message that allows it waits up to a millisecond for something else that
// is written on the connection: an answer, mostly, so that a call and its answer are
// two system calls on each side. A sender that has half of what it may in flight does
// not allow it.
//
// A frame that does not decode ends the session: the stream cannot be trusted
// any more. A frame that decodes but may not be performed (key, bounds,
// revoked) is refused: its payload is read and dropped, the operation's ack says
// why, the session goes on.
//
// # Memory and revocation
//
// A reader enters a window before the first byte and leaves it after the last.
// Revoke marks the window, interrupts readers that wait inside it for bytes of a
// slow or stalled peer (read deadline in the past), and waits until none is
// inside; what remains of their payload is dropped. So Revoke takes as long as
// the copy of bytes that have already arrived, not as long as the peer likes.
//
// A window may be told what lands in it (rdma.LandingRegion): its reader then reads
// 128 KiB at a time and calls back behind each, still inside.
//
// # Zero copy
//
//	source pages ──vmsplice──► pipe ──splice──► socket's queue ──► NIC, or, on one host, the peer's socket
//	      └ referred to, not copied, until the peer has them: the ack of the operation comes after that
//
// What comes before a run, its header and what else is small, goes by a send of its own
// (MSG_MORE): it must not stay where it is. The pipe belongs to the engine; a connection
// has it while it writes one batch.
//
// An operation that is acked has been copied out of the target's socket. One that ends with
// its session has not, and its source is given back all the same, in this order:
//
//	sender    reset every socket that spliced: its queue is dropped
//	          wait until no packet of theirs is in a queue of this host (SO_MEMINFO)
//	          Done: the owner may overwrite the source
//	target    payload of 64 KiB and more has landed: was the connection reset meanwhile?
//	          no: count the frame. yes: the connection has ended, the frame counts nothing
//
// The target's question is for sockets on one host, where its receive queue has the
// sender's pages. So no immediate is counted for bytes that were not written, though a
// window may hold such bytes of a write that did not complete. A packet that stays in
// a queue for longer than IdleTimeout, on a NIC without carrier, is waited for no longer:
// the peer has ended the session by then. The packets of a dead rail need no wait: its
// operations end only when they are acked over others, and the target's side is closed.
//
// # Bounds
//
// For each session: operations and bytes in flight (Options), unsent acks,
// remembered slots (MaxOps) and pieces of operations that are not complete (16
// Mi; all three enforced against the peer), one frame's payload (16 MiB) and
// table (256 runs). Writers never hold up readers, so two engines that write at
// each other cannot deadlock.
//
// Lock order: Engine.core.Mu → session.Mu; window.mu, region.mu and the locks of
// rdma/internal are leaves. No
// lock is held across I/O or a callback. session.Mu guards the session's
// operations, rails and lanes, and what its connections have queued.
package tcp
