// Package tcp is the transfer engine over TCP: it implements the contract of rdma with sockets
// only. A writer sends payload by writev from the registered source, and a reader reads it into
// the registered destination, so neither engine has a staging buffer. With Options.ZeroCopy the
// kernel does not copy the source either. The channel is not secure unless Options.TLS is set: the
// token keeps other engines out, but the bytes on the network are neither encrypted nor
// authenticated.
//
//	Write ─► pieces of PieceBytes ─► lane of its class ◄─ taken by connections as they can write: one writev of many frames
//	                                                          │ rails: a NIC of ours, a NIC of the peer, 1..N connections for each lane
//	Done ◄─ reader ◄── ack (batched) ◄── all pieces landed, immediate counted ◄── reader: header, key and bounds, read into place
//
// # Session, rails, lanes
//
// Two engines share at most one session. Both engines write and send on all connections of the
// session, whichever engine dialed. An engine without a listener is reached over the sessions that
// it opened. A session has a rail for each pair of NICs: rail i joins local NIC i mod n with
// remote NIC i mod m (n and m are the numbers of NICs), for i below max(n, m). A lane is the queue
// of a traffic class. There is one lane for all classes, or one for each class if the dialer marks
// classes (Options.QoS). A rail has the same number of connections for each lane.
//
// Each rail has one more connection, its control connection. It carries messages, acks and reports
// about rails, and no payload of writes. So the payload in the socket queue of a slow NIC never
// delays a request, its answer, or an ack. Nor does a message wait for the in-flight budget of
// writes: the number of messages has its own bound (MaxMessages). If the dialer marks classes, the
// control connection has the mark of the highest class.
//
// A connection takes frames from its lane when it can write. So each NIC carries as much as it
// can, even when NICs differ in speed. Large writes are cut into pieces for all NICs, and small
// writes rotate over the idle connections.
//
// A rail fails as a whole: when one of its connections breaks, when nothing arrives on it for
// NICTimeout while other rails receive, or when its interface loses its carrier. The session
// continues over the other rails, and the engine that dialed the session dials the rail again
// under a new generation. The session ends when its last rail fails, after silence for
// IdleTimeout, after a malformed frame, and when the same engine opens a new session. Then all
// connections are closed. When no goroutine touches memory any more, every operation in flight
// ends with rdma.ErrPeerDied.
//
// An engine that closes writes its queued acks first. The peer reads all connections to their
// ends. If no operation is in flight at that point, the session has ended normally and is not
// logged as a failure.
//
// The states of a rail:
//
//	up ──► dying ──► down ──► connecting ──► up
//	  │       │         └ fenced: both engines reported this
//	  │       └ its readers and writers are still running
//	  └ a connection fails, the NIC or the peer is silent, the peer took it down
//
// Frames that were given to a failed rail and not acked are sent again over the other rails, but
// only when the failed rail is fenced. A rail is fenced when each engine has reported on another
// rail that the failed rail is down. An engine reports this after its last reader and writer of
// the rail have ended. Nothing that was sent on the failed rail can land after that, so no byte is
// written after its operation has completed. Each frame has the number of its piece. An operation
// occupies one of the sender's slots. For the latest operation of each slot the target records
// which pieces arrived. So the target drops a piece that arrives twice, and counts an immediate
// once. Before it reports that the rail is down, the target repeats the acks that may have been
// lost with the rail. Connections are opened by rdma/internal/handshake with the magics "PRD3" and
// "PRC3". The fields of the hello that belong to this protocol, little-endian:
//
//	param     conn 2 | conns 2
//	more      lane 1 | lanes 1 | rail 1 | rails 1 | generation 4 | zero 8        (16 bytes)
//
// The verdict is sent when all connections of the rail have proved the token, so the peer can
// answer as soon as Connect has returned. A hello of generation g states that the dialer has
// closed all earlier generations of the rail.
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
// If a message permits it, its ack waits up to a millisecond for another frame on the connection,
// usually the answer. A request and its answer then take two system calls at each engine. A sender
// with more than half of MaxMessages in flight does not permit this delay.
//
// A frame that does not decode ends the session, because the stream can no longer be trusted. A
// frame that decodes but is not allowed (key, bounds, revoked) is refused: its payload is read and
// dropped, the operation's ack carries the reason, and the session continues.
//
// # Memory and revocation
//
// A reader enters a window before the first byte of a frame and leaves the window after the last.
// Revoke marks the window, interrupts readers inside it that wait for bytes of a slow or stalled
// peer (by a read deadline in the past), and waits until no reader is inside. The remaining
// payload of these frames is dropped. So the duration of Revoke is bounded by the time to copy
// bytes that have already arrived, not by the peer.
//
// The owner of a window may be notified of bytes that land (rdma.LandingRegion). The reader then
// reads 128 KiB at a time and calls the owner after each read, while it is inside the window.
//
// # Zero copy
//
//	source pages ──vmsplice──► pipe ──splice──► socket's queue ──► NIC, or, on one host, the peer's socket
//	      └ referred to, not copied, until the peer has received them; the ack of the operation comes later
//
// Headers and small runs are copied by a separate send (MSG_MORE), because their memory is reused.
// The pipe belongs to the engine. A connection holds it while it writes one batch.
//
// When an operation is acked, its payload has been copied out of the target's socket. When an
// operation ends because its session ends, its payload may still be in a queue. The operation's
// source is then returned in this order:
//
//	sender    reset every socket that spliced; this drops the socket's queue
//	          wait until no packet of these sockets is in a queue of this host (SO_MEMINFO)
//	          Done: the owner may overwrite the source
//	target    payload of 64 KiB and more has landed: was the connection reset meanwhile?
//	          no: count the frame. yes: end the connection and do not count the frame
//
// The target's check matters for two sockets on one host, where the receive queue refers to the
// sender's pages. Because of the check, no immediate is counted for bytes that the sender did not
// write. Such bytes can still be in the window, as part of a write that did not complete. The wait
// for packets in a queue is bounded by IdleTimeout, because a NIC without carrier never empties
// its queue. By then the peer has ended the session. The packets of a failed rail need no wait.
// The operations of that rail end only when they are acked over other rails, and the target has
// then closed its end of the failed rail.
//
// # Bounds
//
// Each session has bounds for writes and their bytes in flight (Options), messages in flight
// (MaxMessages), unsent acks, slots (MaxOps), and pieces of incomplete operations (16 Mi). The
// target enforces the last three. One frame has at most 16 MiB of payload and a table of 256 runs.
// Writers never block readers, so two engines that write to each other cannot deadlock.
//
// Lock order: Engine.core.Mu → session.Mu; window.mu, region.mu and the locks of rdma/internal are
// leaves. No lock is held across I/O or a callback. session.Mu guards the session's operations,
// rails and lanes, and the queues of its connections.
package tcp
