// Package tcp is the transfer engine over TCP: rdma's contract with nothing but
// sockets. Payload is written by writev from the registered source and read
// straight into the registered destination; there is no staging buffer on either
// side. It is not a secure channel unless Options.TLS is set: the token keeps
// strangers out, it does not hide or protect the bytes on the way.
//
//	Write ─► pieces of PieceBytes ─► queue of the least loaded connection ─► writer: one writev of many frames
//	                                                                             │ 1..N connections, one session
//	Done ◄─ reader ◄── ack (batched) ◄── last piece landed, immediate counted ◄── reader: header, key and bounds, read into place
//
// # Session
//
// Two engines share at most one session of N connections; both sides write and
// send on all of them, whoever dialed. An engine without a listener is reached
// over the sessions that it opened. A session lives and dies as a whole: when
// one connection breaks, is malformed or silent for IdleTimeout, all are closed,
// and once no goroutine touches memory any more every operation in flight ends
// with rdma.ErrPeerDied. A new session of the same engine replaces the old one.
//
// Opening a connection, all integers little-endian, HMAC-SHA256 keyed with the
// token of the accepting engine:
//
//	dialer   → hello      magic 4 "PRD1" | conn index 2 | conns 2 | dialer's engine ID 16 | session ID 16 | nonce 32    (72 bytes)
//	acceptor → challenge  magic 4 "PRC1" | zero 4 | acceptor's engine ID 16 | nonce 32                                  (56 bytes)
//	dialer   → proof      HMAC( "penstock rdma dialer"   | hello | challenge )                                          (32 bytes)
//	acceptor → verdict    status 1 | zero 7 | HMAC( "penstock rdma acceptor" | hello | challenge | status )             (40 bytes)
//
// The verdict is sent when all connections of the session have proved the token,
// so that a Connect that returned can be answered at once. A peer that does not
// know the token learns nothing: the acceptor's proof is sent only after the
// dialer's.
//
// # Frames
//
//	0       4      5       6      8     12       16   24    32       40       48         52     60
//	┌───────┬──────┬───────┬──────┬─────┬────────┬────┬─────┬────────┬────────┬──────────┬──────┬───────────┐
//	│ magic │ type │ flags │ runs │ imm │ frames │ op │ key │ offset │ length │ tableSum │ zero │ headerSum │
//	│ 4     │ 1    │ 1     │ 2    │ 4   │ 4      │ 8  │ 8   │ 8      │ 8      │ 4        │ 8    │ 4         │ = 64
//	└───────┴──────┴───────┴──────┴─────┴────────┴────┴─────┴────────┴────────┴──────────┴──────┴───────────┘
//	magic     "PNS" and the version, 1
//	type      1 write, 2 ack, 3 message, 4 heartbeat
//	flags     bit 0: imm is present
//	runs      write: entries of the table that follows the header; 0: one run, at offset, of length bytes
//	frames    write: how many frames the operation has, on all connections together
//	op        write and message: the sender's number for the operation, echoed in its ack
//	key       write: the window to write in; offset is counted from its start
//	length    bytes of payload after header and table
//	          A field that a type does not name is zero.
//	tableSum  CRC-32C of the table; headerSum: of the first 60 bytes
//
//	table     runs x ( offset 8 | length 8 ); the lengths add up to length. Small pages of one paged write share a frame.
//	ack       payload of up to 512 x ( op 8 | status 1 | zero 7 ); status is an rdma.Reason
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
// # Bounds
//
// For each session: operations and bytes in flight (Options), unsent acks
// (MaxOps, enforced against the peer), one frame's payload (16 MiB) and table
// (256 runs). Writers never hold up readers, so two engines that write at each
// other cannot deadlock.
//
// Lock order: Engine.mu → session.mu → conn.mu; window.mu, conn.landMu and
// region.mu are leaves (window.mu → conn.landMu in Revoke). No lock is held
// across I/O or a callback.
package tcp
