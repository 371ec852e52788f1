//go:build uring

package uring

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/invariants"
)

// sharedRing is one ring to which all goroutines submit. The Go runtime's poller watches its
// descriptor. One goroutine, the reaper, waits for the poller, takes the completions, and wakes the
// other goroutines.
//
//	goroutine ── slot ── entry ──► submission queue ──► kernel
//	    ▲ last completion of its batch                    │
//	    └──────── reaper ◄── poller ◄── completion queue ◄┘
type sharedRing struct {
	env        *env
	registered bool
	// slots is the table of requests, and free has the indices of the unused slots. Invariant: each
	// slot is unused (its index is in free), in flight, or about to be submitted by its goroutine
	// or by the reaper.
	slots []slot
	free  chan uint32
	// polled is a second descriptor of the ring, registered with the poller. stopped is closed when
	// the reaper (the goroutine that takes the completions) has returned.
	polled  *os.File
	stopped chan struct{}
	// again has the slots whose requests the reaper will submit again, because they are not
	// complete. Only the reaper uses again.
	again []uint32

	mu   sync.Mutex
	ring *ring
	// broken is the error with which the kernel refused the ring permanently, or nil. refused is
	// set together with broken, and can be read without the lock.
	broken  error
	refused atomic.Bool
	// queued has the slots of entries that the kernel may not have accepted yet.
	queued []uint32
}

// slot is one place in the table of requests.
type slot struct {
	op    *op
	batch *batch
	// turn counts the uses of the slot, and is the upper half of user_data. The submitter stores
	// turn after the other fields and before the submission. The reaper loads turn after the
	// completion and before the other fields. This gives the happens-before edge between submitter
	// and reaper, which the kernel does not provide for the Go memory model.
	turn atomic.Uint32
}

// batch is the state of one call of Do on the shared ring.
type batch struct {
	ops  []op
	left atomic.Int64
	// last receives one value when left reaches 0.
	last chan struct{}
}

// start makes room for n ops.
func (b *batch) start(n int) {
	b.ops = resize(b.ops, n)
	b.left.Store(int64(n))
}

// newShared sets up the ring and starts its reaper. register tries to register the regions with the
// ring, and reports success.
func newShared(entries int, v *env, register func(*ring) bool) (*sharedRing, error) {
	r, err := newRing(entries)
	if err != nil {
		return nil, err
	}
	s := &sharedRing{
		env: v, ring: r, registered: register(r), slots: make([]slot, entries),
		free: make(chan uint32, entries), stopped: make(chan struct{}),
	}
	for i := range s.slots {
		s.free <- uint32(i)
	}
	if s.polled, err = polled(r.fd()); err != nil {
		r.close()
		return nil, err
	}
	raw, err := s.polled.SyscallConn()
	if err != nil {
		s.polled.Close()
		r.close()
		return nil, err
	}
	go func() {
		defer close(s.stopped)
		// Read returns after the deadline that close sets, because the function never returns true.
		_ = raw.Read(func(uintptr) bool {
			s.reap()
			return false
		})
	}()
	return s, nil
}

// polled returns a duplicate of a ring's descriptor that the poller watches.
func polled(ringFD int) (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(ringFD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	// NewFile registers a descriptor with the poller only if it is non-blocking. The flag has no
	// other effect, because a ring's descriptor is never read.
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(fd))
	}
	f := os.NewFile(uintptr(fd), "io_uring")
	if err := f.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("the poller does not watch rings: %w", err), f.Close())
	}
	return f, nil
}

// run performs the ops of b. It returns when each has its outcome and none is in flight.
func (s *sharedRing) run(b *batch) {
	for n := 0; n < len(b.ops); {
		// admit may wait although entries of this batch are in flight: the reaper takes their
		// completions, which releases their budget.
		b.ops[n].admit(s.env, true)
		n += s.submit(b, b.ops[n:], <-s.free)
	}
	<-b.last
}

// submit submits ops[0], which is admitted, in the slot first. It also submits as many of the
// following ops as there are free slots and free budget. It returns the number of submitted ops.
func (s *sharedRing) submit(b *batch, ops []op, first uint32) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.placeLocked(b, &ops[0], first)
	n := 1
	for ; n < len(ops) && ops[n].admit(s.env, false); n++ {
		i, ok := s.freeSlot()
		if !ok {
			break
		}
		s.placeLocked(b, &ops[n], i)
	}
	s.enterLocked()
	return n
}

// freeSlot returns a slot if there is one.
func (s *sharedRing) freeSlot() (uint32, bool) {
	select {
	case i := <-s.free:
		return i, true
	default:
		return 0, false
	}
}

// placeLocked puts o into slot i and queues its entry.
func (s *sharedRing) placeLocked(b *batch, o *op, i uint32) {
	sl := &s.slots[i]
	sl.op, sl.batch = o, b
	s.handLocked(i)
}

// handLocked queues the entry of slot i. If the ring is broken, it fails the op instead. The queue
// has as many entries as there are slots, so it is never full.
func (s *sharedRing) handLocked(i uint32) {
	sl := &s.slots[i]
	if s.broken != nil {
		sl.op.end(s.broken, s.env)
		s.release(i)
		return
	}
	if s.ring.unsubmitted() == 0 {
		s.queued = s.queued[:0]
	}
	e := s.ring.next()
	sl.op.prepare(e, s.env, s.registered)
	e.UserData = uint64(sl.turn.Add(1))<<32 | uint64(i)
	s.queued = append(s.queued, i)
}

// enterLocked enters the kernel until it has accepted all entries. A shortage of resources in the
// kernel is temporary. After any other error the ring is broken: the entries that the kernel has
// not accepted fail, and the kernel is not entered again. Requests in flight complete as usual.
func (s *sharedRing) enterLocked() {
	for s.broken == nil && s.ring.unsubmitted() > 0 {
		err := s.ring.enter(0)
		switch {
		case err == nil:
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EBUSY):
			s.mu.Unlock()
			pause(true)
			s.mu.Lock()
		default:
			s.broken = fmt.Errorf("the kernel refused the shared ring: %w", err)
			s.refused.Store(true)
			left := int(s.ring.unsubmitted())
			for _, i := range s.queued[len(s.queued)-left:] {
				s.slots[i].op.end(s.broken, s.env)
				s.release(i)
			}
			s.queued = s.queued[:0]
		}
	}
}

// release frees a slot whose op is finished, and wakes its batch after the last one.
func (s *sharedRing) release(i uint32) {
	sl := &s.slots[i]
	b := sl.batch
	sl.op, sl.batch = nil, nil
	s.free <- i
	if b.left.Add(-1) == 0 {
		b.last <- struct{}{}
	}
}

// reap takes the available completions, and submits unfinished ops again.
func (s *sharedRing) reap() {
	for s.ring.reap(s.completed) > 0 && len(s.again) > 0 {
		s.mu.Lock()
		for _, i := range s.again {
			s.handLocked(i)
		}
		s.enterLocked()
		s.mu.Unlock()
		s.again = s.again[:0]
	}
}

// completed processes one completion.
func (s *sharedRing) completed(userData uint64, res int32) {
	i := uint32(userData)
	sl := &s.slots[i]
	if turn := sl.turn.Load(); invariants.Enabled {
		invariants.Assert(turn == uint32(userData>>32), "completion %#x of slot %d in turn %d", userData, i, turn)
	}
	if !sl.op.complete(res, s.env) {
		s.again = append(s.again, i)
		return
	}
	s.release(i)
}

// close stops the reaper and closes the ring. Nothing may be in flight.
func (s *sharedRing) close() error {
	err := s.polled.SetReadDeadline(time.Unix(1, 0))
	<-s.stopped
	err = errors.Join(err, s.polled.Close())
	s.ring.close()
	return err
}
