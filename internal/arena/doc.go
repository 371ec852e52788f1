// Package arena is the memory that the bytes of blocks pass through. It is one region outside the
// Go heap, backed by huge pages, made resident at start, and lent in contiguous pieces that are
// aligned to 4 KiB. The device reads into a piece, and the transfer engine sends from the same
// piece. So the bytes are written to memory only once between the disk and the NIC.
//
// An arena is not a cache: the content of a released piece is undefined. It is not a general
// allocator: no piece grows, shrinks or moves. It returns no memory to the system before Close.
//
//	             one mapping, start a multiple of 2 MiB, size fixed
//	┌─────────┬──────┬───────────────┬────┬──────────────────────────┐
//	│ Buffer  │ free │    Buffer     │free│          Buffer          │   granule 4 KiB
//	└─────────┴──────┴───────────────┴────┴──────────────────────────┘
//	      ▲       ▲ first fit: the first free run that is long enough
//	      │
//	device, rdma  (Buffer.Offset is the address of a piece for another process
//	               that mapped the same memfd: Send, Receive)
//
// Huge pages are used because direct I/O into 4 KiB pages has half the bandwidth at three to seven
// times the CPU (docs/benchmarks.md). The region is resident so that a transfer can neither fault
// nor fail for lack of memory. Kind reports the pages that the kernel really provided.
//
// Waiting is fair: requests that do not fit wait in the order of package fair, by the weights of
// their principals, and the first one is served first, so small requests do not starve a large one.
// While several principals wait, one that holds more than its weighted share gets no more memory.
// Memory that is lent is not taken away. The length of the queue is limited. When the queue is
// full, the newest request of the principal with the most requests for its weight gets ErrBusy.
//
// The last part of the region can be a share. It is for requests that should neither delay other
// requests nor be starved by them. Requests for the share have a separate queue. While one of them
// waits, released memory of the share is not lent to other requests.
//
// Example:
//
//	a, err := arena.New(arena.Options{SizeBytes: 256 << 20})
//	buf, err := a.Alloc(ctx, 4<<20)
//	defer buf.Release()
//	n, err := unix.Pread(fd, buf.Bytes(), 0)
//
// Under the build tag invariants a released piece is filled with 0xCC, a double
// release panics, and Close names the place where each leaked Buffer was taken.
//
// There is one lock.
package arena
