// Package verbs is the provider for RDMA cards (InfiniBand and RoCE) through libibverbs. It
// implements group.Domain for one port of a card, over reliable connections (RC), as fabric-lib
// does for ConnectX-7 (section 3.5 of the paper). Package group makes an engine of one or several
// domains.
//
// It is built with the tag verbs, needs cgo and libibverbs (Debian: libibverbs-dev), and links to
// libibverbs dynamically. Without the tag, New returns an error that names the tag. Only
// native_unsafe.go, which implements the interface card, needs the library; the other files are
// also tested with simulated cards. The package handles one port only: it has no sessions, tokens
// or other NICs. It does not use librdmacm. Endpoints exchange their addresses over group's
// control connection; the paper uses a UD queue pair for this.
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
// An endpoint has two queue pairs because an immediate and a message each consume an entry of the
// receive queue in the order of arrival (section 3.5). On one queue pair, an immediate would
// consume a message's buffer. So the writes of an endpoint are ordered, and its messages are
// ordered, but writes are not ordered against messages.
//
// Post writes requests into C memory and makes one cgo call for up to 64 of them. The C code
// copies the requests into work requests, whose constant fields and next pointers were set when
// the queue was created, and rings the doorbell once. Only every fourth write, large writes and
// the last write of a call request a completion: on RC, one completion means that all earlier
// requests have completed too. Post allocates nothing.
//
// # Waiting
//
// A write without an immediate is one request and one completion of the sender's own card. The
// target's process takes no part; the completion reports the acknowledgement of the target's card.
// ib_write_bw waits for the same completion, but it polls the memory of the completion queue,
// which needs no system call. A poller that sleeps instead arms the queue, is woken through the
// netpoller, and reads the event. In the guest of lab/rdmalab a sleeping poller costs about five
// context switches per write of 64 KiB, a polling one three. Sleeping takes about a sixth of the
// write's time. So if recent completions took less time than NICOptions.Spin, Wait continues to
// poll for up to that time (see spinner). fabric-lib's worker always polls (section 3.4). The
// guest's completions take milliseconds, so the default Spin is too short to matter there.
//
// # Memory
//
// Regions are registered with relaxed ordering if the device supports it: payload may then be
// placed in any order, but not after the completion that reports it. Memory of the Go heap is
// pinned for the garbage collector while it is registered. Keys are the card's 32-bit keys and can
// be guessed. Other hosts have no access, because only a peer that proved the token has a queue
// pair connected to one of this port.
//
// The table gives the steps that make and revoke a window. Each step is a command that the card's
// firmware executes, unless the driver can reuse a key. Only the bind is a work request:
//
//	window of                                   open                        revoke
//	host memory, at most 2 GiB                  memory window: allocate,    deallocate
//	                                            bind on the bind QP
//	host memory, more than 2 GiB                registration of that part   deregistration
//	a dma-buf                                   registration of that part   deregistration
//	any, on a device without memory windows     registration of that part   deregistration
//
// A registration also pins each page of its part of the memory, or maps the dma-buf once more. So
// a transfer from or to a device should use one window and not many. Memory windows are of type 1,
// whose key opens one range to every queue pair of the domain (type 2 would be limited to one
// queue pair). mlx5 binds no window over 2 GiB, and does not register a dma-buf with the right to
// bind windows. When a port is opened, the provider tests whether the device confines writes to
// its memory windows. If the device does not, no memory windows are used, and Limits reports this.
//
// After a card has invalidated a key, it places nothing with the key any more. So
// Limits.CloseIsFinal is true, and Revoke sends no request to the peers. rdma_rxe and siw copy in
// software and may finish a packet after the invalidation. For them CloseIsFinal is false, and
// group first asks the window's peer to stop.
//
// # Ends
//
// A refused write (key, bounds) breaks both queue pairs, at the sender and at the target: an RC
// queue pair can only fail. The queue pair for messages gives no right to memory. A message that
// arrives on the write queue pair breaks the endpoint too, and so does an immediate on the message
// queue pair. Shut moves the queue pairs to the error state, collects the remaining completions,
// and then destroys the queue pairs; destroying waits until no payload of these queue pairs is
// being placed, and completes Works that have no completion of their own. A port that goes down, a
// queue pair in error and a device in error are reported as asynchronous events, which are read
// through the netpoller. A port that goes down, and a device in error, end the domain. The loss of
// the port's GID, LID or partition ends it too. group then continues with its other domains and
// tries to open the domain again.
//
// Lock order: endpoint.mu, then domain.qpMu, then domain.mu; bindMu, then memMu. No other lock is
// acquired under roomMu. No command of the device runs under domain.mu or memMu, because every
// poller takes domain.mu. The package calls no callbacks.
package verbs
