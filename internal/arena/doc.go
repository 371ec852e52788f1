// Package arena is the memory that block bytes pass through: one region outside
// the Go heap, backed by huge pages, made resident at start, and lent out in
// contiguous, 4 KiB-aligned pieces. The device reads into it, the transfer engine
// sends from it: one copy of the bytes between the disk and the NIC.
//
// It is not a cache (a released piece has no content), not a general allocator
// (no piece grows, shrinks or moves), and it never gives memory back before Close.
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
// Why huge pages: direct I/O into 4 KiB pages moves half the bytes per second at
// three to seven times the CPU (docs/benchmarks.md); and a resident region cannot
// fault, or be killed for lack of memory, in the middle of a transfer. Kind says
// which pages the kernel really gave.
//
// Waiting is fair: requests that do not fit queue in order of arrival and the
// first of them is served first, so a large one is not starved by small ones.
// The queue is bounded; when it is full Alloc answers ErrBusy at once.
//
// The end of the region can be a share, for requests that should neither hold up
// the others nor be starved by them: they queue by themselves, and what others
// hold of the share only comes free while one of them waits.
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
// Lock order: there is one lock.
package arena
