// Package fabric is a NIC of the group engine (rdma/group) over libfabric: EFA
// on AWS, and TCP anywhere. It asks for reliable datagrams (FI_EP_RDM) with
// one-sided writes (FI_RMA) and remote CQ data.
//
// It is not built unless asked for: the tag fabric, cgo, and libfabric-dev 1.17
// or later; without them New says so. It is not for processes of one host
// (rdma/shm is; libfabric's shm is refused, see Providers), nor the fastest way
// over sockets (rdma/tcp is), and libfabric's provider over TCP is not for a
// network with strangers in it.
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
// the provider, as far as it takes them; what it does not take (it is full), or
// must not have yet (the endpoint has not met its peer's, meet.go), is offered
// again by Poll, in order. So Post takes QueueDepth works at any time. fi_writemsg
// is called with FI_DELIVERY_COMPLETE: its completion means "in place". An
// immediate is the low half of the remote CQ data. The other half tells the
// length, or, where there is no source address beside a completion (quirks.go,
// sourceLies), whose it is. EFA has 4 bytes of CQ data: it gets the immediate
// alone.
//
// # The hub
//
// Messages go to the peer's hub, one more fi_endpoint for the whole domain, in
// frames (wire.go). It has buffers of its own and copies a message to the first
// that PostRecv lent: a provider holds up a message without a buffer, and with it
// the connection, where we must say "no buffer". Receipts say so, and by hub go
// also
//
//   - a question, when an endpoint breaks: which of these would you refuse? Over
//     TCP libfabric closes the connection upon a bad key and does not say why.
//     The target looks the keys up; the first that it refuses is StatusRefused,
//     the rest StatusBroken. A window that was revoked meanwhile counts as
//     refused.
//   - goodbye, when an endpoint is shut or broken: libfabric would have the peer
//     try to connect for ever.
//
// # Providers
//
// What was found out about net, which is tcp from 1.18 on, with 1.17.0, the
// library of Debian 12; quirks.go holds it as data:
//
//	remote CQ data          8 bytes, without a length
//	source address          right
//	bad key or bounds       connection closed
//	key of 0 bytes          checked
//	closing a region while  the write goes on to its end and is counted
//	a write lands
//	traffic class           taken, changes nothing
//	order of immediates     as posted
//	waiting                 descriptor, in the runtime's poller
//	peer is killed          writes in flight fail
//	an endpoint             22 KiB, 1 socket
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
// libfabric's shm is refused (DomainOptions.Validate). Its target copies from the
// source's memory by itself, also after the source's endpoint was closed, and may
// then count a write with bytes that were put there after the write had ended.
//
// efa could not be tried: no machine at hand has one. What it needs by its manual
// is there: FI_MR_LOCAL, keys chosen by the provider, 4 bytes of CQ data told
// apart by source address, a valid key for an immediate alone (fabric-lib,
// section 3.5; the engine always names one), no order, and no windows: a window costs a
// registration, which pins its part again, and a deregistration. The behaviour of libfabric
// 1.18 is asked for, where the library has it: from that version on efa writes by RDMA of the
// device on p5. A completion queue without a descriptor is polled: without a pause for 1 ms
// behind the last work, then every 50 µs. A host with more domains than an engine takes
// (p5 has 32) has to name those to use.
//
// The library loads providers that catch SIGSEGV and print a trace of their own
// (psm, psm2); IPATH_NO_BACKTRACE=1 and HFI_NO_BACKTRACE=1 leave crashes to Go.
//
// Lock order: domain.poll → endpoint.mu → domain.noted; domain.mu is a leaf but
// for calls into libfabric, whose own locks come last. Post takes endpoint.mu
// alone.
package fabric
