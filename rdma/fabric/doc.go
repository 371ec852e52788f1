// Package fabric is a NIC of the group engine (rdma/group) over libfabric: EFA on AWS, and TCP
// anywhere. It requests reliable datagrams (FI_EP_RDM) with one-sided writes (FI_RMA) and remote
// CQ data.
//
// It is built with the tag fabric, cgo, and libfabric-dev 1.17 or later only; otherwise New
// returns an error with this reason. Between processes of one host use rdma/shm instead
// (libfabric's shm is refused, see Providers). Over sockets rdma/tcp is faster. Do not use
// libfabric's provider over TCP in a network that others can reach: libfabric does not
// authenticate peers there.
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
// Each group.Endpoint has its own fi_endpoint; endpoints do not share one. The reason is
// Endpoint.Shut, which has to cut off a peer that does not cooperate. Only closing the fi_endpoint
// does that; removing the peer's address is not enough in any provider. A separate fi_endpoint
// costs 22 KiB per endpoint over TCP, and one queue pair per endpoint over EFA.
//
// Post puts works into a ring in C memory and gives them to the provider by one call for a batch.
// Works stay in the ring while the provider is full, or before the handshake with the peer's
// endpoint (handshake.go). Poll offers these works to the provider again, in order. So Post always
// accepts up to QueueDepth works. fi_writemsg is called with FI_DELIVERY_COMPLETE: the completion
// of a write then means that the bytes are in place. The low half of the remote CQ data is the
// immediate. The high half is the length of the payload. For a provider without source addresses
// (quirks.go, noSourceAddress) the high half is instead the tag that identifies the target's
// endpoint. EFA has only 4 bytes of CQ data, which hold the immediate.
//
// # The hub
//
// Messages are sent in frames (wire.go) to the peer's hub, one more fi_endpoint for the whole
// domain. The hub has its own buffers and copies a message to the first buffer of PostRecv. A
// group.Domain has to report to the sender that the receiver has no buffer. Without the hub, a
// provider would instead delay the message, and with it the whole connection. The hub reports the
// result of each message in a receipt. The hub also sends
//
//   - a key query, when an endpoint breaks: it lists the writes in flight, and the target
//     replies which of these writes it would refuse. Over TCP, libfabric closes the
//     connection after a bad key and gives no reason. The first write that the target
//     would refuse ends with StatusRefused, the others with StatusBroken. The key of a
//     window that was revoked in the meantime is refused.
//   - a closed frame, when an endpoint is shut or broken. Without this frame the peer's
//     libfabric would try to connect forever.
//
// # Providers
//
// These properties of the provider net were measured with libfabric 1.17.0, the version of Debian
// 12. From 1.18 on, net is called tcp. quirks.go holds these properties as data:
//
//	remote CQ data          8 bytes, without a length
//	source address          correct
//	bad key or bounds       closes the connection
//	key of a 0-byte write   checked
//	closing a region while  the write completes and is counted
//	a write arrives
//	traffic class           accepted, without effect
//	order of immediates     as posted
//	waiting                 by a descriptor, in the runtime's poller
//	peer is killed          writes in flight fail
//	an endpoint             22 KiB, 1 socket
//
// So CloseIsFinal is false, and to revoke a window the engine asks its peers (group, revoke).
//
// net has three defects. If an endpoint is closed while a connection to it is half open (accepted,
// nothing read yet), net uses freed memory; handshake.go prevents that. fi_trywait does not reset
// the descriptor of the completion queue; pf_clear does. A connection to the hub that is half open
// when the domain is closed leaks a descriptor; Close therefore polls for some milliseconds first,
// so that the connection is made or fails. tcp;ofi_rxm, libfabric's older provider over TCP, is
// refused: it takes 69 MiB for each endpoint and reports no source addresses.
//
// libfabric's shm is refused (DomainOptions.Validate). There the target copies from the source's
// memory, even after the source's endpoint was closed. If the source's owner then changes the
// memory, the target counts a write with wrong bytes.
//
// efa is untested, because no machine with EFA was available. The package implements the
// requirements of efa's manual: FI_MR_LOCAL, keys chosen by the provider, 4 bytes of CQ data with
// a source address, a valid key also for an immediate without payload (fabric-lib, section 3.5;
// the engine always gives one), and no assumption of order. Windows are off, because each would
// cost a registration, which pins its pages again, and a deregistration. The package asks for the
// behaviour of libfabric 1.18 if the library has it: from that version on, efa uses the device's
// RDMA writes on p5. A completion queue without a descriptor is polled: without a pause until 1 ms
// after the last work, then every 50 µs. On a host with more domains than an engine takes (p5 has
// 32), the domains to use have to be named.
//
// The library loads the providers psm and psm2, which catch SIGSEGV and print their own trace.
// IPATH_NO_BACKTRACE=1 and HFI_NO_BACKTRACE=1 leave SIGSEGV to Go.
//
// Lock order: domain.poll → endpoint.mu → domain.noted. domain.mu is acquired last and held only
// across calls into libfabric, which takes its own locks. Post takes endpoint.mu only.
package fabric
