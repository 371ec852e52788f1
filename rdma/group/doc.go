// Package group is the engine core of every provider that drives NICs with
// queue pairs: fabric-lib's DomainGroup (sections 3.2 and 3.4 of the paper).
// A provider implements Domain, one NIC; New makes an rdma.Engine of one or
// several of them.
//
// It knows no hardware, and no provider knows sessions: which NIC carries what,
// what happens when one dies, how often an immediate is counted and who may
// still write to a revoked window is decided here, once for all. It is no
// transport by itself: rdma/tcp, which needs no NIC, does not use it.
//
//	caller                     engine                                            peer
//	Write ─► op: runs ─► jobs ─► lane 0 ─ endpoint ─ NIC 0 ══════ NIC 0 ─ poller ─► ImmCounters ─► Done
//	   (posted by the caller,    lane 1 ─ endpoint ─ NIC 1 ══════ NIC 1 ─ poller ─► inbox ─► handler
//	    if there is room)          ▲          poller ◄─ completions
//	                               └─────────── pump: what is queued; Done
//	                             control connection: addresses of endpoints, heartbeats,
//	                             answers to messages, why a Work was refused, withdrawals
//
// # Goroutines
//
// One poller for each NIC; a reader, and a writer, of each control connection;
// one that accepts, one that watches (heartbeats, deadlines), one that runs the
// handler of Recv; and short ones, for a Connect of an endpoint, a revocation,
// the end of a session. A caller posts itself. Works for which there is no room stay in
// the lane's queue, which the peer's budget bounds, until a completion makes room and
// the poller posts them. Messages of Send come before all writes in that queue: a
// message waits only for the Works that are posted already: at most QueueDepth, and at
// most 4 pieces of payload. The tail of a write, which carries the immediate when the rest
// is in place, comes before all other writes. There is no order between a message and a
// write.
//
// # Session
//
// Two engines share at most one session in each direction of dialing: a control
// connection on which both proved the token (rdma/internal/handshake), and a
// lane for each pair of NICs (i with i; the side with fewer begins again from
// the first) and each class, if one side wants classes apart. The end of the
// control connection is the peer's death: the endpoints are shut, and when all
// completions have been polled, so that nothing touches memory any more, every
// operation in flight ends with rdma.ErrPeerDied.
//
// A lane outlives its endpoints; each has an epoch:
//
//	dialer   NewEndpoint ── laneAddr e ──►   NewEndpoint
//	         Connect     ◄── laneAddr e ──   Connect            both in the background
//	         up          ── laneReady e ─►   up
//	                     ◄─ laneReady e ──
//	                     ◄── laneUp e ────                      the dialer's Connect may return
//	…                                                           the endpoint breaks, on either side
//	both     no more posts; what is queued goes to other lanes; Shut; poll until nothing is left; Close
//	         ◄─ laneDown e: arrived immediates ─►
//	both     send again what was lost
//	dialer   next epoch: at once if the last one worked, after a pause that grows if not
//
// # Immediates
//
// An immediate is counted once for each operation, after its last byte. An
// operation that is one Work carries it in that Work. Where endpoints are
// ordered and a refusal stops what is behind it (RC), the Works of a small
// operation are chained on one endpoint and the last carries it. Otherwise the
// pieces go wherever there is least to do, and the tail of the last one, held
// back, carries the immediate once all the others have completed: so that the
// NIC checks the key of the immediate too, and a window that was revoked in
// between counts nothing.
//
// When an endpoint ends, its sender must know which immediates arrived. An
// ordered endpoint that stops at refusals needs a number: the first so many did.
// Otherwise both sides keep tallies, how often each value arrived and was
// confirmed, cleared at checkpoints when none is in flight. Of operations with
// one value of which some arrived nobody can tell which: all their payload is
// sent again, and then as many immediates as were lost. What arrived whole is
// never written again: its owner may be using the memory.
//
// # Refusals
//
// The NIC of the target refuses; its engine is asked why over the control
// connection, and counts and logs it. Where a refusal breaks the endpoint, all
// that was lost with it is asked about before it is sent again: one bad key
// breaks one endpoint once.
//
// # Revocation
//
// A window has a key of its own on each NIC. Where closing the NIC's memory is
// final, Revoke closes it and polls what had arrived. Otherwise the peers are
// asked first to withdraw the keys: they post none of them any more, wait for
// what is posted, and confirm; the endpoints of a peer that does not within
// RevokeTimeout are shut. Sessions that are ending are waited for.
//
// Revoke asks the peers that the window names; without names it asks all peers. The
// window's Desc carries the names, and an engine that the Desc does not name posts no Work
// with its keys. Otherwise a Work of an engine that Revoke does not ask could land later.
//
// # NICs that die
//
// A domain whose Poll fails is dead: its lanes end, its work goes over the
// others, it is closed, and Options.Reopen is asked for another. That one has a
// serial number of its own, under which all memory is registered again: a Desc
// names the serial of each of its NICs behind '#' in the address, and a lane
// takes the key of the NIC that it leads to. A Desc from before can't be used on
// the new NIC; that is a refusal if it knows no other.
//
// # Control connection
//
// After the handshake, frames of little-endian integers:
//
//	length 4 | type 1 | zero 3 | payload of length bytes, at most 64 KiB
//
//	 1 heartbeat   –
//	 2 setup       flags 1 (1 classes apart, 2 immediates by number) | provider length 1 | provider | NICs 1 | NICs x ( length 1 | name )
//	 3 laneAddr    lane 2 | zero 2 | epoch 4 | NIC serial 4 | address of the endpoint, to the end
//	 4 laneReady   lane 2 | zero 2 | epoch 4
//	 5 laneDown    lane 2 | flags 1 (1 more follows, 2 it had worked) | zero 1 | epoch 4 | arrived 8 | tallies 4 | zero 4 | tallies x ( imm 4 | count 4 )
//	 6 why         operation 8 | NIC serial 4 | zero 4 | key 8 | address 8 | length 8
//	 7 because     operation 8 | reason 1 | zero 7
//	 8 ack         entries x ( message 8 | reason 1 | zero 7 )
//	 9 withdraw    id 8 | entries x ( NIC serial 4 | zero 4 | key 8 )
//	10 withdrawn   id 8
//	11 forget      id 8
//	12 checkpoint  lane 2 | zero 2 | epoch 4 | sent 8
//	13 checked     as 12
//	14 laneUp      as 4
//
// One that does not decode, or makes no sense, ends the session. Frames that
// wait to be written are bounded (8 MiB); a peer that does not read is cut off.
//
// domaintest.Run is the conformance suite of Domain; rdmatest.Run that of the
// engine over it; rdma/rdmatest/simrdma runs the latter over thousands of networks.
//
// Lock order: Engine.core.Mu → session.Mu → lane.mu; Engine.regMu → region.mu,
// Engine.regionsMu, window.mu. The locks of nic, stream, withdrawals, asked,
// inbound, keysMu and rdma/internal are leaves (window.mu → keysMu). Post runs under
// lane.mu, which is what makes it one at a time, and memory is registered and
// closed under regMu, held for reading. No I/O and no callback runs under a lock.
package group
