// Package copier copies between host and device memory of one machine, in batches: many spans with
// one completion.
//
// It does not transfer between machines, it does not order copies, and it does not check payload.
// It allocates only device memory (CUDA).
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
// Choose NIC if a GPU has its own NIC (rdma/topo, role cnic). The copies then pass through the
// NIC's arbiter with the low priority of cache traffic, so the collectives of model execution
// precede them. PCIe and the copy engine have no such arbiter (DualPath paper, section 5.2).
// Choose CUDA if the GPU has no such NIC, and Plain if source and destination are host memory.
//
// Users: client/traffic makes a Plain if its caller passes no copier. libpenstock makes two CUDA,
// for loads and for saves, for an engine whose KV is on a CUDA device
// (penstock_traffic_options.cuda), and two for the values on such a device
// (penstock_register_device). No code in this repository makes a NIC: it is for a process that embeds
// client/traffic and has a GPU with its own NIC (Options.Copier). CUDA is tested with the driver of
// copiertest, NIC over rdma/shm and, in the guest of lab/rdmalab, over rdma/verbs.
//
// NIC uses two engines on the same NIC, near and far, because an engine cannot connect to itself.
// Every memory is registered with near as a source and with far as a destination. Each batch is a
// few paged writes from near to far; a provider posts a paged write with one doorbell.
//
//	        near engine ════ RDMA writes, out of the NIC and back in ════► far engine
//	host memory, source only                                      device memory, writable
//
// Guarantees of each implementation, all tested:
//
//   - Done is called exactly once for a batch that Submit accepted, and never inside
//     Submit. After Done(nil) every byte is in place. After an error any part of the
//     bytes may be in place.
//   - The source must not change, and the destination not be used, until Done.
//   - Batches, and the spans of a batch, are copied in any order. Where the destinations
//     of two spans overlap, the bytes are those of one of the two spans.
//   - Copy returns when the batch has ended, whatever becomes of its context.
//   - Memory.Close waits for the batches that use it; Close ends all.
//
// A Batch with a Mark of a DeviceCopier is ordered after the work of an engine's stream. The device
// waits for that, and no thread does.
//
// Lock order: in CUDA, driver → mu → a memory's lock. In NIC and Plain, a memory's lock and a
// copier's lock are never held together. No lock is held while Done runs.
package copier
