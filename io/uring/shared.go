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

// sharedRing is one ring that all goroutines submit to. Its descriptor is in the
// runtime's poller; one goroutine, the reaper, waits there and wakes the others.
//
//	goroutine ── slot ── entry ──► submission queue ──► kernel
//	    ▲ last completion of its batch                    │
//	    └──────── reaper ◄── poller ◄── completion queue ◄┘
type sharedRing struct {
	env        *env
	registered bool
	// slots is the table of requests; free holds the indices not in use.
	// Invariant: an index is in free, or its slot is in flight, or its goroutine
	// or the reaper is about to submit it.
	slots []slot
	free  chan uint32
	// polled is a second descriptor of the ring, in the poller; stopped is closed
	// when the reaper has returned.
	polled  *os.File
	stopped chan struct{}
	// again are the slots that the reaper, alone, will submit once more.
	again []uint32

	mu   sync.Mutex
	ring *ring
	// broken is why the kernel refused the ring for good, if it did; refused says
	// so to those who have not the lock.
	broken  error
	refused atomic.Bool
	// handed are the slots of entries that the kernel may not have taken yet.
	handed []uint32
}

// slot is one place in the table of requests.
type slot struct {
	op    *op
	batch *batch
	// turn numbers the uses of the slot, in the upper half of user_data. It is
	// stored after the rest is written, before the submission, and loaded before
	// the rest is read, after the completion: the happens-before edge between the
	// two, which the kernel does not make.
	turn atomic.Uint32
}

// batch is what one Do has in flight on the shared ring.
type batch struct {
	ops  []op
	left atomic.Int64
	// last gets one value when left reaches 0.
	last chan struct{}
}

// start makes room for n ops.
func (b *batch) start(n int) {
	b.ops = resize(b.ops, n)
	b.left.Store(int64(n))
}

// newShared sets up the ring and starts its reaper; register makes the regions
// known to it, if it can.
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
		// Read returns when the deadline that close sets has passed: the function
		// never says that it is done.
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
	// NewFile gives to the poller what is non-blocking; a ring is never read.
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(fd))
	}
	f := os.NewFile(uintptr(fd), "io_uring")
	if err := f.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("the poller does not watch rings: %w", err), f.Close())
	}
	return f, nil
}

// run performs the ops of b and returns when every one has its outcome and none
// is in flight any more.
func (s *sharedRing) run(b *batch) {
	for n := 0; n < len(b.ops); {
		// Entries of ours are in the kernel's hands while we wait for room.
		b.ops[n].admit(s.env, true)
		n += s.submit(b, b.ops[n:], <-s.free)
	}
	<-b.last
}

// submit hands the first of ops, which is admitted, to the kernel, with the given
// slot, and as many of the following as there are slots and the budget allows; it
// returns how many.
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

// placeLocked puts o into slot i and hands it to the ring.
func (s *sharedRing) placeLocked(b *batch, o *op, i uint32) {
	sl := &s.slots[i]
	sl.op, sl.batch = o, b
	s.handLocked(i)
}

// handLocked hands the entry of slot i to the ring; a broken ring fails it. There
// is always room: the queue has as many entries as there are slots.
func (s *sharedRing) handLocked(i uint32) {
	sl := &s.slots[i]
	if s.broken != nil {
		sl.op.end(s.broken, s.env)
		s.release(i)
		return
	}
	if s.ring.unsubmitted() == 0 {
		s.handed = s.handed[:0]
	}
	e := s.ring.next()
	sl.op.prepare(e, s.env, s.registered)
	e.UserData = uint64(sl.turn.Add(1))<<32 | uint64(i)
	s.handed = append(s.handed, i)
}

// enterLocked has the kernel take all entries. A shortage there passes; after any
// other error the ring is broken: the entries that the kernel has not taken fail,
// and it is not entered again. What is in flight completes as ever.
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
			for _, i := range s.handed[len(s.handed)-left:] {
				s.slots[i].op.end(s.broken, s.env)
				s.release(i)
			}
			s.handed = s.handed[:0]
		}
	}
}

// release frees a slot whose op is over, and wakes its batch after the last one.
func (s *sharedRing) release(i uint32) {
	sl := &s.slots[i]
	b := sl.batch
	sl.op, sl.batch = nil, nil
	s.free <- i
	if b.left.Add(-1) == 0 {
		b.last <- struct{}{}
	}
}

// reap takes the completions that are there, and submits again what is not over.
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

// completed takes one completion.
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
