// Package verbs is the provider for RDMA cards: InfiniBand and RoCE, through
// libibverbs. It implements group.Domain, one card's port, over reliable
// connections (RC), as fabric-lib does for ConnectX-7 (section 3.5 of the
// paper); package group makes an engine of one or several of them.
//
// It is built with the tag verbs, needs cgo and libibverbs (Debian:
// libibverbs-dev), and links to it dynamically. Without the tag,
// New returns an error that names the tag. Only native_unsafe.go, which implements the
// interface card, needs the library; the rest is also tested over cards without
// hardware. The package has no sessions, no tokens and no other NIC, and it does not
// use librdmacm: endpoints are exchanged over group's control connection, which stands
// for the paper's UD queue pair.
//
//	             one Domain: a port of a device, one PD
//	┌──────────────────────────────────────────────────────────────────────────────┐
//	│ endpoint ┬ write QP ── write, write_imm ───┐                                  │
//	│          └ message QP ── send ─────────────┤                                  │
//	│ endpoint ┬ write QP                        ├─► one CQ ─► Poll: one cgo call   │
//	│          └ message QP                      │       ▲     for up to 128 CQEs;  │
//	│ SRQ imm:  entries without a buffer ────────┤       │     it refills SRQ imm   │
//	│ SRQ msg:  the buffers of PostRecv ─────────┘    channel ─► netpoller ─► Wait  │
//	│ bind QP ── memory windows, a CQ of its own                                    │
//	└──────────────────────────────────────────────────────────────────────────────┘
//
// Why two queue pairs: an immediate and a message each consume an entry of the
// receive queue in the order of arrival (section 3.5), so on one queue pair an
// immediate would use up a message's buffer. Works of one endpoint are therefore
// ordered among writes and among messages, not between the two.
//
// Post fills requests into C memory and makes one cgo call for up to 64 of them;
// the C side copies them into work requests whose constant fields and next
// pointers were set when the queue was made, and rings the doorbell once. Only
// every fourth write, large writes and the last of a call ask for a completion:
// on RC one completion says that all before it are done. Nothing is allocated.
//
// # Waiting
//
// A write without an immediate is one request and one completion of our own card;
// the target's process takes no part, and its card's acknowledgement is what the
// completion says. ib_write_bw waits for just that too, but polls for it in the
// memory of the completion queue, where nothing enters the kernel. Who sleeps
// instead arms the queue, is woken through the netpoller, and reads the event: in
// the guest of lab/rdmalab about five context switches for a write of
// 64 KiB, three with polling, and about a sixth of its time. So Wait polls on, up to NICOptions.Spin,
// where completions lately came sooner than that (spinner says when it stops);
// fabric-lib's worker always does (section 3.4). The guest's completions take
// milliseconds: there the default is too short to matter.
//
// # Memory
//
// Regions are registered with relaxed ordering where the device has it: payload
// may then be placed in any order, but not after the completion that tells of
// it. Memory of the Go heap is pinned for the garbage collector while it is
// registered. Keys are the card's 32-bit keys and can be guessed; what keeps strangers out
// is that only peers that proved the token have a queue pair here.
//
// What a window costs; each step is a command that the card's firmware performs, unless
// the driver has a key to use again, and the bind is a work request:
//
//	window of                                   open                        revoke
//	host memory, at most 2 GiB                  memory window: allocate,    deallocate
//	                                            bind on the bind QP
//	host memory, more than 2 GiB                registration of that part   deregistration
//	a dma-buf                                   registration of that part   deregistration
//	any, on a device without memory windows     registration of that part   deregistration
//
// A registration pins each page of its part as well, or maps the dma-buf once more, so that
// a transfer from or to a device is best given one window and not many. A memory window is
// of type 1, whose key opens that range alone to any queue pair of the domain (type 2 would
// tie it to one). mlx5 binds no window over 2 GiB, and refuses a dma-buf that is to allow
// windows. A device that does not keep writes inside of its windows, which is tried when
// the port is opened, has none: Limits says so.
//
// A card that has taken a key back places nothing with it any more, so Limits.CloseIsFinal
// is true, and Revoke asks nobody. rdma_rxe and siw copy in software and may finish a packet
// after it: there it is false, and group asks the window's peer to stop first.
//
// # Ends
//
// A refused write (key, bounds) breaks both queue pairs, here and there: an RC queue pair
// can only fail. The messages' queue pair gives no right to memory, and a completion of
// the other kind than its queue pair is for breaks the endpoint too. Shut moves them to the error state, collects what is
// left in the completion queue, then destroys them, which waits until nothing of
// theirs is placed any more; Works without a completion are completed by it. A
// port that goes down, a queue pair in error or a device in error come as
// asynchronous events, read on the netpoller: the first and the last kill the
// domain, as does a port that loses its GID, its LID or its partition, and group goes on
// with the others and tries to open it again.
//
// Lock order: endpoint.mu, then domain.qpMu, then domain.mu; bindMu, then memMu; roomMu is a
// leaf. A command of the device runs under none of domain.mu and memMu, as everybody who
// polls takes the first. No callback runs under a lock: there are none.
package verbs
