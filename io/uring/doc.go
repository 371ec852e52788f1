// Package uring is the blockio.Device of choice on Linux: io_uring with O_DIRECT,
// through github.com/pawelgaczynski/giouring. Package posixio does the same with
// preadv and pwritev where io_uring is refused, and shares its directory code.
//
// It is not for sockets, has no kernel polling thread (SQPOLL halves the
// bandwidth on few cores), and links a module that needs a linker flag:
//
//	go build -tags uring -ldflags=-checklinkname=0
//
// Without the tag the package is this page and an Open that says
// blockio.ErrUnsupported and whose Probe says why: a plain build works, on posixio.
//
//	Do(batch) ─ check ─ gates ─┬─ WaitCaller ─► a ring from the pool ─ submit and wait ─┐
//	                           │               (this goroutine enters the kernel)       │
//	                           └─ WaitShared ─► the shared ring ─ submit, park ─┐       ▼
//	                                            reaper ◄─ netpoller ◄─ ring fd ─┘    outcomes
//
// Each request takes its bytes from the device's budget before it is submitted, so
// a batch larger than the budget goes in parts.
//
// # Kernels
//
// Probe and Open try the features that they need; they do not look at the kernel's
// version.
//
//	before 5.18   The kernel lacks IORING_SETUP_SUBMIT_ALL. Open returns
//	              blockio.ErrUnsupported and names the flag. The node uses posixio, or
//	              does not start if io is uring.
//	5.18 to 6.11  The kernel cannot clone a registration of buffers. Four rings of each
//	              device register the arena themselves. Each registration takes 16 bytes
//	              of kernel memory for a page of 4 KiB and, without CAP_IPC_LOCK, counts
//	              against ulimit -l. The other rings pin the pages of each request.
//	from 6.12     All rings of a device share one registration.
//
// make test-disks runs this package's tests on Debian's 6.1, on ext4 and on xfs.
//
// # Waiting
//
// The two ways to wait, measured in docs/benchmarks.md:
//
//   - WaitCaller: the goroutine takes a ring of its own, submits its batch and
//     sleeps in the kernel until the last completion. No hand-over between
//     goroutines, so it keeps its speed when other goroutines use up the CPUs.
//   - WaitShared: all goroutines submit to one ring, whose descriptor waits in the
//     runtime's poller. The least CPU when many requests are in flight, but a
//     completion reaches its goroutine through the scheduler.
//
// What the kernel knows of us is a number in user_data, an index into a table of
// requests with a sequence number, never a pointer; the table keeps the request,
// and with it the buffers, alive until the completion. A buffer belongs to the ring
// from Do's admission until Do returns, and Do returns only after the last
// completion, whatever ctx says: an early return would let the caller reuse memory
// that the device still writes.
//
// A completion shorter than asked for is continued from where it stopped; EAGAIN,
// EINTR and ECANCELED are tried again, a bounded number of times.
//
// giouring's defects are kept out by ring_unsafe.go, through which alone it is
// called; defects_unsafe_test.go shows each of them and how the shim avoids it.
//
// Lock order: sharedRing.mu (the submission queue), then the budget's. The first
// is held over the submitting system call and over nothing that waits; pool.mu
// guards a list and is held over nothing.
package uring
