// Package group is the engine that the providers for NICs with queue pairs share. It corresponds
// to the DomainGroup of fabric-lib (sections 3.2 and 3.4 of the paper). A provider implements
// Domain for one NIC. New makes an rdma.Engine of one or several Domains.
//
// The engine chooses the NIC of each transfer, replaces endpoints and NICs that fail, counts each
// immediate once, and stops writes to revoked windows. The package contains no code for a
// particular NIC, and a Domain does not manage sessions. rdma/tcp, which uses sockets, does not
// use this package.
//
//	caller                     engine                                            peer
//	Write ─► op: runs ─► jobs ─► lane 0 ─ endpoint ─ NIC 0 ══════ NIC 0 ─ poller ─► ImmCounters ─► Done
//	   (posted by the caller,    lane 1 ─ endpoint ─ NIC 1 ══════ NIC 1 ─ poller ─► inbox ─► handler
//	    if there is room)          ▲          poller ◄─ completions
//	                               └─────────── pump: queued jobs; Done
//	                             control connection: addresses of endpoints, heartbeats,
//	                             answers to messages, reasons of refusals, withdrawals
//
// # Goroutines
//
// Each NIC has a poller. Each control connection has a reader and a writer. The engine has one
// goroutine that accepts sessions, one that sends heartbeats and checks deadlines, and one that
// runs the handler of Recv. Connecting an endpoint, a revocation and the end of a session each
// have a short-lived goroutine. The goroutine that submits an operation also posts its Works.
// Works that the endpoint does not accept stay in the lane's queue. When a completion has made
// room, the poller posts them. The in-flight budget of the peer bounds the queue. Messages of Send
// precede all writes in the queue, so a message waits only for Works that are already posted: at
// most QueueDepth Works and at most 4 pieces of payload. The tail of a write carries the immediate
// and is sent after all other bytes of the write are in place. In the queue the tail precedes all
// other writes. Messages and writes are not ordered against each other.
//
// # Session
//
// Two engines share at most one session in each direction of dialing. A session is a control
// connection, on which both engines proved that they hold the token (rdma/internal/handshake), and
// lanes. There is one lane for each pair of NICs: NIC i is paired with NIC i, and the engine with
// fewer NICs starts again at its first. If at least one engine requests separate classes, each
// traffic class has its own lanes. When the control connection ends, the peer is declared dead.
// The engine shuts the endpoints, polls all completions, and then ends every operation in flight
// with rdma.ErrPeerDied. No NIC touches the memory of these operations after that.
//
// A lane outlives its endpoints. Each endpoint of a lane has an epoch:
//
//	dialer   NewEndpoint ── laneAddr e ──►   NewEndpoint
//	         Connect     ◄── laneAddr e ──   Connect            both in the background
//	         up          ── laneReady e ─►   up
//	                     ◄─ laneReady e ──
//	                     ◄── laneUp e ────                      the dialer's Connect may return
//	…                                                           the endpoint breaks at either engine
//	both     stop posting; move the queue to other lanes; Shut; poll until no completion is left; Close
//	         ◄─ laneDown e: arrived immediates ─►
//	both     send lost payload and immediates again
//	dialer   next epoch: at once if the last endpoint worked, otherwise after a growing pause
//
// # Immediates
//
// An immediate is counted once for each operation, after the operation's last byte. A single Work
// carries the immediate itself. If endpoints are ordered and a refusal stops all later Works of
// the endpoint (RC), the Works of a small operation are posted on one endpoint and the last Work
// carries the immediate. Otherwise the pieces go to the least loaded lanes. The tail of the last
// piece is held back until all other pieces have completed, and then carries the immediate. So the
// target's NIC checks the key of the immediate too, and no immediate is counted for a window that
// was revoked in the meantime.
//
// When an endpoint ends, the sender needs the list of immediates that arrived. For an ordered
// endpoint that stops at refusals, the number of arrived immediates is enough: the first n
// arrived. Otherwise both engines keep tallies: the target counts, for each value, the immediates
// that arrived, and the sender counts the immediates that were confirmed. A checkpoint clears the
// tallies while no immediate is in flight. If several operations have the same immediate and only
// some of these immediates arrived, the sender cannot determine which operations they belong to.
// It sends the payload of all these operations again, and then as many immediates as were lost. An
// operation that arrived as a whole is never written again, because the owner may already use the
// memory.
//
// # Refusals
//
// When the target's NIC refuses a Work, the sender requests the reason from the target's engine
// over the control connection. The target's engine counts and logs the refusal. If a refusal
// breaks the endpoint, the sender asks the target about each lost operation before it sends the
// operation again. So an operation with an invalid key breaks only one endpoint, once.
//
// # Revocation
//
// A window has its own key on each NIC. If closing the NIC's memory stops all writes
// (Limits.CloseIsFinal), Revoke closes the memory and polls the completions that had arrived.
// Otherwise Revoke first asks the peers to withdraw the keys. A peer stops posting Works with
// these keys, waits for the Works that are posted, and confirms. Revoke shuts the endpoints of a
// peer that does not confirm within RevokeTimeout. Revoke also waits for sessions that are ending.
//
// Revoke asks the peers that the window names, or all peers if the window names none. The window's
// Desc carries these names, and an engine that the Desc does not name posts no Work with the
// window's keys. Without this rule, a Work of an engine to which Revoke sent no request could land
// after Revoke.
//
// # NICs that die
//
// A domain is dead when its Poll fails. The engine then ends the lanes on this domain, moves their
// work to other NICs, closes the domain, and calls Options.Reopen for a replacement. The
// replacement has a new serial number and registers all memory again. A Desc names each NIC by its
// serial number, after '#' in the address, and a lane uses the key of the peer's NIC to which it
// is connected. A Desc made before the replacement has no key for the new NIC. If all NICs that
// the Desc names are gone, the write is refused.
//
// # Control connection
//
// The handshake is followed by frames of little-endian integers:
//
//	length 4 | type 1 | zero 3 | payload of length bytes, at most 64 KiB
//
//	 1 heartbeat   –
//	 2 setup       flags 1 (1 classes apart, 2 immediates by number) | provider length 1 | provider | NICs 1 | NICs x ( length 1 | name )
//	 3 laneAddr    lane 2 | zero 2 | epoch 4 | NIC serial 4 | address of the endpoint, to the end
//	 4 laneReady   lane 2 | zero 2 | epoch 4
//	 5 laneDown    lane 2 | flags 1 (1 another frame follows, 2 the endpoint had worked) | zero 1 | epoch 4 | arrived 8 | tallies 4 | zero 4 | tallies x ( imm 4 | count 4 )
//	 6 query       operation 8 | NIC serial 4 | zero 4 | key 8 | address 8 | length 8
//	 7 reason      operation 8 | reason 1 | zero 7
//	 8 ack         entries x ( message 8 | reason 1 | zero 7 )
//	 9 withdraw    id 8 | entries x ( NIC serial 4 | zero 4 | key 8 )
//	10 withdrawn   id 8
//	11 forget      id 8
//	12 checkpoint  lane 2 | zero 2 | epoch 4 | sent 8
//	13 checked     as 12
//	14 laneUp      as 4
//
// A frame that does not decode, or that is not valid in the current state, ends the session. At
// most 8 MiB of frames wait to be written; a peer that reads too slowly and exceeds this bound is
// disconnected.
//
// domaintest.Run is the conformance suite of Domain. rdmatest.Run is the conformance suite of the
// engine over a Domain. The tests of rdma/rdmatest/simrdma run it over thousands of simulated
// networks.
//
// Lock order: Engine.core.Mu → session.Mu → lane.mu; Engine.regMu → region.mu, Engine.regionsMu,
// window.mu. The locks of nic, stream, withdrawals, withdrawalRequests, inbound, keysMu and
// rdma/internal are leaves (window.mu → keysMu). Post runs under lane.mu, which serialises the
// posts of a lane. Memory is registered and closed while regMu is held for reading. No I/O and no
// callback runs under a lock.
package group
