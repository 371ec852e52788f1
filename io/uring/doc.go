// Package uring is the preferred blockio.Device on Linux: io_uring with O_DIRECT, through
// github.com/pawelgaczynski/giouring. Package posixio is the replacement where io_uring is refused;
// it uses preadv and pwritev. Both packages share the code for directories.
//
// The package does not serve sockets, and uses no kernel polling thread, because SQPOLL halves the
// bandwidth on few cores. The module giouring needs a linker flag:
//
//	go build -tags uring -ldflags=-checklinkname=0
//
// Without the build tag, the package has only an Open that returns blockio.ErrUnsupported and a
// Probe that returns the reason. A plain build works, with posixio.
//
//	Do(batch) ─ check ─ gates ─┬─ WaitCaller ─► a ring from the pool ─ submit and wait ─┐
//	                           │               (this goroutine enters the kernel)       │
//	                           └─ WaitShared ─► the shared ring ─ submit, park ─┐       ▼
//	                                            reaper ◄─ netpoller ◄─ ring fd ─┘    outcomes
//
// Each request takes its bytes from the device's budget before it is submitted, so a batch larger
// than the budget is submitted in parts.
//
// # Kernels
//
// Probe and Open test the features that they need; they do not read the kernel's version.
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
// A goroutine can wait for its completions in two ways, which docs/benchmarks.md compares:
//
//   - WaitCaller: the goroutine takes a ring from the pool, submits its batch and sleeps in the
//     kernel until the last completion. No other goroutine is involved, so the speed is the same
//     when other goroutines use all CPUs.
//   - WaitShared: all goroutines submit to one ring, whose descriptor waits in the runtime's
//     poller. This needs the least CPU when many requests are in flight, but a completion reaches
//     its goroutine through the scheduler.
//
// The user_data of an entry is a number, never a pointer: an index into a table of requests with a
// sequence number. The table keeps the request, and so the buffers, alive until the completion. The
// ring owns a buffer from the admission in Do until Do returns. Do returns only after the last
// completion, even if ctx ends. After an early return the caller could reuse memory to which the
// device still writes.
//
// A short completion is continued from the byte at which it stopped. EAGAIN, EINTR and ECANCELED
// are retried a limited number of times.
//
// Only ring_unsafe.go calls giouring, and it avoids the module's defects. defects_unsafe_test.go
// shows each defect and how it is avoided.
//
// Lock order: sharedRing.mu, which guards the submission queue, then the mutex of the budget.
// sharedRing.mu is held during the system call that submits, and never during a wait. pool.mu
// guards a list and is not held during calls.
package uring
