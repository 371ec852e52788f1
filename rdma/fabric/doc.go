// Package fabric is a NIC of the group engine (rdma/group) over libfabric: EFA
// on AWS, and TCP or shared memory anywhere. It asks for reliable datagrams
// (FI_EP_RDM) with one-sided writes (FI_RMA) and remote CQ data.
//
// It is not built unless asked for: the tag fabric, cgo, and libfabric-dev 1.17
// or later; without them New says so. It is not the fastest way between
// processes of one host (rdma/shm is), nor over sockets where there is a choice
// (rdma/tcp is), and libfabric's own software providers are not for a network
// with strangers in it (see Providers).
//
//	 Domain ─── fi_domain, one NIC                                  peer's Domain
//	┌─────────────────────────────────────────┐           ┌─────────────────────────┐
//	│ endpoint ─ fi_endpoint ═ FI_RMA writes ═╪══════════►│ fi_endpoint ─ endpoint  │
//	│    └─ ring, op contexts, templates      │           │                         │
//	│    └───────── FI_MSG: messages ─────────╪──────────►│ hub                     │
//	│ hub ─ fi_endpoint ◄──────────────────── ╪───────────╪─ receipts, answers      │
//	│ one fi_cq, one poller                   │           │                         │
//	└─────────────────────────────────────────┘           └─────────────────────────┘
//
// # Endpoints
//
// A group.Endpoint is a fi_endpoint of its own, and not an address that a shared
// one sends to. Only closing a fi_endpoint cuts a peer off that does not
// cooperate: removing its address does not, in any provider, and Endpoint.Shut
// promises it. TCP pays 22 KiB an endpoint for that; EFA a queue pair.
//
// Works go into a ring in C memory and from there, by one call for a batch, to
// the provider, as far as it takes them; what it does not take (it is connecting,
// or full) is offered again by Poll, in order. So Post takes QueueDepth works
// whatever the provider's mood. fi_writemsg is called with FI_DELIVERY_COMPLETE:
// its completion means "in place". An immediate is the low half of the remote CQ
// data. The other half tells the length, or, where the source address beside a
// completion lies (quirks.go), whose it is. EFA has 4 bytes of CQ data: it gets
// the immediate alone.
//
// # The hub
//
// Messages go to the peer's hub, one more fi_endpoint for the whole domain, in
// frames (wire.go). It has buffers of its own and copies a message to the first
// that PostRecv lent: a provider holds up a message without a buffer, and with it
// the connection, where we must say "no buffer". Receipts say so, and by hub go
// also
//
//   - a question, when an endpoint breaks, or (shm) when a write does not end:
//     which of these would you refuse? libfabric's software providers close the
//     connection upon a bad key, or drop the write and say nothing. The target
//     looks the keys up; the first that it refuses is StatusRefused, the rest
//     StatusBroken. A window that was revoked meanwhile counts as refused.
//   - goodbye, when an endpoint is shut or broken: libfabric would have the peer
//     try to connect for ever.
//
// # Providers
//
// What was found out with 1.17.0, the library of Debian 12; quirks.go holds it as
// data:
//
//	                        net (tcp from 1.18 on)       shm
//	remote CQ data          8 bytes, without a length    8 bytes
//	source address          right                        not used
//	bad key or bounds       connection closed            dropped in silence; the two
//	                                                     endpoints are stuck
//	key of 0 bytes          checked                      dropped in silence, so an empty
//	                                                     write goes by hub
//	closing a region while  the write goes on to its     a write that is being copied
//	a write lands           end and is counted           goes on
//	traffic class           taken, changes nothing       taken, has no wire
//	order of immediates     as posted                    as posted, one write at a time
//	waiting                 descriptor, in the runtime's none: polled on for 1 ms behind
//	                        poller                       the last work, then every 50 µs
//	peer is killed          writes in flight fail        nothing: three questions
//	                                                     without an answer
//	an endpoint             22 KiB, 1 socket             8 MiB of shared memory, at most
//	                                                     256 of a host
//
// So CloseIsFinal is false, and the engine revokes by asking (group, revoke).
//
// Two defects of net to know. Closing an endpoint while a connection to it is
// half made (accepted, nothing read yet) leaves a pointer to freed memory: meet.go
// says how that is kept from happening. And fi_trywait does not reset the
// descriptor that it answers for; see pf_clear. tcp;ofi_rxm, the older way over
// TCP, is refused: it takes 69 MiB an endpoint and gives no source address. A connection to the hub
// that is half made when the domain is closed costs a descriptor for good: closing
// lingers for some milliseconds so that it is made, or fails.
//
// A write that ended because its session was cut off may still be read from its
// source: libfabric gives no sign when the last byte has left. The target may then
// count it with bytes that its owner has put there since. The checksums of the
// last hop catch that; over shm, whose target copies from the source's memory by
// itself, it is frequent, and a node refuses shm (data_plane.libfabric).
//
// Two of shm: what two endpoints of one process share is pulled from under one
// when the other is closed (neighbours.go), and a peer killed with a lock in
// shared memory held stops whoever needs it. Keys are no protection there: a
// process of the same user can write our memory by other ways too.
//
// efa could not be tried: no machine at hand has one. What it needs by its manual
// is there: FI_MR_LOCAL, keys chosen by the provider, 4 bytes of CQ data told
// apart by source address, a valid key for an immediate alone (fabric-lib,
// section 3.5; the engine always names one), no order, and no windows: a window costs a
// registration, which pins its part again, and a deregistration. The behaviour of libfabric
// 1.18 is asked for, where the library has it: from that version on efa writes by RDMA of the
// device on p5. A completion queue without a descriptor is polled as shm's is. A host with
// more domains than an engine takes (p5 has 32) has to name those to use.
//
// The library loads providers that catch SIGSEGV and print a trace of their own
// (psm, psm2); IPATH_NO_BACKTRACE=1 and HFI_NO_BACKTRACE=1 leave crashes to Go.
//
// Lock order: domain.poll → endpoint.mu → domain.noted; domain.mu and
// neighbours.mu are leaves but for calls into libfabric, whose own locks come
// last. Post takes endpoint.mu alone.
package fabric
