//go:build uring

package uring

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/pawelgaczynski/giouring"
	"golang.org/x/sys/unix"
)

// ring adapts a giouring.Ring. It has the calls of io_uring that this package needs, and avoids the
// defects of giouring. One goroutine at a time uses it.
type ring struct {
	g        *giouring.Ring
	features uint32
	closed   bool
	// enterHook, in tests, is called before the kernel is entered. If it returns an error, that
	// error replaces the call.
	enterHook func() error
}

// params mirrors giouring.Params, whose fields are private although the kernel
// both reads and writes them.
type params struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFd uint32
	resv                                                                   [3]uint32
	sqOff, cqOff                                                           [10]uint32
}

// The sizes are those of linux/io_uring.h. The package does not compile if they differ.
var (
	_ [120]byte                              = [unsafe.Sizeof(params{})]byte{}
	_ [unsafe.Sizeof(giouring.Params{})]byte = [unsafe.Sizeof(params{})]byte{}
	_ [64]byte                               = [unsafe.Sizeof(giouring.SubmissionQueueEntry{})]byte{}
	_ [16]byte                               = [unsafe.Sizeof(giouring.CompletionQueueEvent{})]byte{}
	_ [32]byte                               = [unsafe.Sizeof(cloneBuffers{})]byte{}
)

// featuresNeeded are the features of io_uring on which the code relies: completions are not
// dropped, and iovecs may be reused after they are submitted.
const featuresNeeded = giouring.FeatNoDrop | giouring.FeatSubmitStable

// newRing sets up a ring with the given number of entries. Its completion queue is twice as long,
// which is the default of the kernel. With SUBMIT_ALL the kernel also submits the entries after a
// malformed one. No other flag is set: none improved the bandwidth, and flags that bind a ring to a
// thread do not fit goroutines.
func newRing(entries int) (*ring, error) {
	p := params{flags: giouring.SetupSubmitAll}
	g := giouring.NewRing()
	// Safety: params has the layout of giouring.Params (asserted above), which is
	// that of struct io_uring_params.
	if err := g.QueueInitParams(uint32(entries), (*giouring.Params)(unsafe.Pointer(&p))); err != nil {
		err = os.NewSyscallError("io_uring_setup", err)
		if errors.Is(err, unix.EINVAL) {
			// The number of entries is valid, so the kernel must have refused the flag.
			err = fmt.Errorf("%w: the kernel lacks IORING_SETUP_SUBMIT_ALL (before 5.18)", err)
		}
		return nil, err
	}
	r := &ring{g: g, features: p.features}
	if p.features&featuresNeeded != featuresNeeded {
		r.close()
		return nil, fmt.Errorf("io_uring features %#x lack %#x (kernel before 5.5)", p.features, featuresNeeded&^p.features)
	}
	return r, nil
}

// close closes the ring. Nothing may be in flight.
func (r *ring) close() {
	if r.closed {
		return
	}
	r.closed = true
	r.g.QueueExit()
}

// fd returns the descriptor of the ring.
func (r *ring) fd() int { return r.g.RingFd() }

// next returns a free submission entry, all zero, or nil if the queue is full. next clears the
// entry, because giouring's Prepare functions do not reset rw_flags and other fields that an
// earlier use of the entry has set.
func (r *ring) next() *giouring.SubmissionQueueEntry {
	e := r.g.GetSQE()
	if e != nil {
		*e = giouring.SubmissionQueueEntry{}
	}
	return e
}

// unsubmitted returns the number of entries that the kernel has not accepted yet. These are the
// last entries that next returned.
func (r *ring) unsubmitted() uint32 { return r.g.SQReady() }

// enter submits the entries that next returned since the last enter, and waits until wait
// completions are available. It may return with fewer completions, so the caller must count them.
// It retries after EINTR. EAGAIN and EBUSY mean that completions must be taken from the queue
// (reap) first.
func (r *ring) enter(wait uint32) error {
	for {
		err := r.enterOnce(wait)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("io_uring_enter", err)
		}
	}
}

func (r *ring) enterOnce(wait uint32) error {
	if r.enterHook != nil {
		if err := r.enterHook(); err != nil {
			return err
		}
	}
	_, err := r.g.SubmitAndWait(wait)
	return err
}

// reap passes every completion in the queue to done, in order, and returns their number. It frees
// the queue entry of a completion before it calls done, because done may let another goroutine
// submit, and the queue must not overflow. If the queue has overflowed, PeekBatchCQE makes the
// kernel deliver the completions that it has kept.
func (r *ring) reap(done func(userData uint64, res int32)) (n uint32) {
	var one [1]*giouring.CompletionQueueEvent
	for r.g.PeekBatchCQE(one[:]) == 1 {
		userData, res := one[0].UserData, one[0].Res
		r.g.CQAdvance(1)
		n++
		done(userData, res)
	}
	return n
}

// register calls io_uring_register for the ring. It replaces the methods of giouring, which return
// an error as a large number or pass arguments of the wrong width.
func (r *ring) register(opcode uint32, arg unsafe.Pointer, n int) error {
	if _, errno := r.g.Register(r.fd(), opcode, arg, uint32(n)); errno != 0 {
		return os.NewSyscallError("io_uring_register", errno)
	}
	return nil
}

// registerBuffers registers regions, so that requests can refer to a region by its index in regions
// (fixed buffers). The regions must stay mapped until the ring is closed.
func (r *ring) registerBuffers(regions [][]byte) error {
	vecs := make([]unix.Iovec, len(regions))
	for i, b := range regions {
		// Safety: the kernel reads the address during the call below.
		vecs[i].Base = unsafe.SliceData(b)
		vecs[i].SetLen(len(b))
	}
	return r.register(giouring.RegisterBuffers, unsafe.Pointer(unsafe.SliceData(vecs)), len(vecs))
}

// registerCloneBuffers is IORING_REGISTER_CLONE_BUFFERS (kernel 6.12), which giouring does not
// define.
const registerCloneBuffers = 30

// cloneBuffers is struct io_uring_clone_buffers; zero offsets and count mean all.
type cloneBuffers struct {
	sourceFD, flags, sourceOffset, offset, count uint32
	_                                            [3]uint32
}

// cloneBuffers registers with this ring the regions that another ring has registered. The kernel
// does not pin the pages again, and does not count them again against the limit of locked memory.
func (r *ring) cloneBuffers(source *ring) error {
	arg := cloneBuffers{sourceFD: uint32(source.fd())}
	return r.register(registerCloneBuffers, unsafe.Pointer(&arg), 1)
}

// prepareSpan fills e with one read or write of b at offset. buffer is the index of the registered
// region that contains b, or -1.
func prepareSpan(e *giouring.SubmissionQueueEntry, write bool, fd int, b []byte, offset int64, buffer int) {
	// Safety: the table of requests keeps b reachable until the completion.
	addr := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	n := uint32(len(b))
	switch {
	case buffer >= 0 && write:
		e.PrepareWriteFixed(fd, addr, n, uint64(offset), buffer)
	case buffer >= 0:
		e.PrepareReadFixed(fd, addr, n, uint64(offset), buffer)
	case write:
		e.PrepareWrite(fd, addr, n, uint64(offset))
	default:
		e.PrepareRead(fd, addr, n, uint64(offset))
	}
}

// prepareVecs fills e with one read or write of several buffers at offset. The
// kernel copies vecs when the entry is submitted.
func prepareVecs(e *giouring.SubmissionQueueEntry, write bool, fd int, vecs []unix.Iovec, offset int64) {
	// Safety: vecs belong to the table of requests, which outlives the submission.
	addr := uintptr(unsafe.Pointer(unsafe.SliceData(vecs)))
	if write {
		e.PrepareWritev(fd, addr, uint32(len(vecs)), uint64(offset))
	} else {
		e.PrepareReadv(fd, addr, uint32(len(vecs)), uint64(offset))
	}
}

// vec returns the iovec of b.
func vec(b []byte) unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(b)}
	v.SetLen(len(b))
	return v
}

// within returns the index of the region that holds all of b, or -1.
func within(regions [][]byte, b []byte) int {
	// Safety: addresses are compared, not dereferenced.
	from := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	for i, r := range regions {
		start := uintptr(unsafe.Pointer(unsafe.SliceData(r)))
		if from >= start && from+uintptr(len(b)) <= start+uintptr(len(r)) {
			return i
		}
	}
	return -1
}
