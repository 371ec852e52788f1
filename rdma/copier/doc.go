// Package copier copies between host and device memory of one machine, in
// batches: many spans, one completion.
//
// It is not a transfer between machines, orders nothing, and checks no payload.
// It allocates no memory but a device's (CUDA).
//
//	       Batch{Src, Dst, Spans, Done}
//	                   │
//	NIC ───────────────┼──────────────── CUDA ─────────────── Plain
//	RDMA writes over   │                 the GPU's copy       memmove, on a
//	loopback of the    │                 engine, one stream   goroutine of
//	GPU's own NIC      │                                      its own
//	                   ▼
//	           Done(nil): every byte is in place
//
// Which one: NIC where a GPU has a NIC of its own (rdma/topo, role cnic). The
// copies then pass the NIC's arbiter, on the lane of cache traffic, so that they
// give way to the collectives of model execution; PCIe and the copy engine have
// no such arbiter (DualPath, section 5.2). CUDA where there is no such NIC. Plain
// where both sides are host memory.
//
// Who makes one: client/traffic makes a Plain where its caller gives it no copier. libpenstock
// makes a CUDA for an engine whose KV is on a CUDA device (penstock_traffic_options.cuda).
// Nothing in this repository makes a NIC: it is for a process that embeds client/traffic
// beside a GPU with a NIC of its own (Options.Copier). CUDA is tested against the driver of
// copiertest; NIC over rdma/shm and, in the guest of lab/rdmalab, over rdma/verbs.
//
// NIC takes two engines on the same NIC, near and far, since an engine does not
// connect to itself: near holds every memory as a source, far as a destination,
// and each batch is a few paged writes from the one to the other; a provider
// posts a paged write with one doorbell.
//
//	        near engine ════ RDMA writes, out of the NIC and back in ════► far engine
//	host memory, source only                                      device memory, writable
//
// What is promised of each implementation, and tested of all:
//
//   - Done is called exactly once for a batch that Submit took, never from inside
//     Submit; after nil every byte is in place, after an error any part may be.
//   - The source must not change, and the destination not be used, until Done.
//   - Spans of a batch may be done in any order, and batches too. Spans that
//     overlap at their destinations leave the bytes of either.
//   - Copy returns when the batch has ended, whatever becomes of its context.
//   - Memory.Close waits for the batches that use it; Close ends all.
//
// Lock order: of CUDA, driver → mu → a memory's; of the others, a memory's lock
// and a copier's are never held together. None is held while Done runs.
package copier
