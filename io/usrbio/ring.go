//go:build cgo && linux

package usrbio

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
)

// ring is a ring for one direction. A slot is a place in the ring with its piece of shared memory,
// so a request that has a slot also has room in the ring.
type ring struct {
	native *nativeRing
	buffer *sharedBuffer
	slots  []slot
	// free has the indices of the unused slots. Invariant: each slot is unused, belongs to one
	// call, or is lost.
	free chan uint32
	// inFlight is the number of requests that the library has accepted and whose completions have
	// not been taken. A completion can be taken before its request is counted.
	inFlight atomic.Int64
	// wake holds an element if inFlight may have become positive.
	wake chan struct{}
	// stop ends the waiting goroutine.
	stop chan struct{}
	// broken is closed when the ring has failed. lost is set if requests were in flight then, so
	// that the daemon may still use the shared memory.
	broken chan struct{}
	lost   atomic.Bool

	// mu guards preparation, for which the library allows one thread at a time, and err.
	mu  sync.Mutex
	err error
}

// slot is one place of a ring, and the state of the part of a request that has the place.
type slot struct {
	index uint32
	// at is the offset of mem in the shared memory.
	at  uint64
	mem []byte
	// turn is odd while the request is in flight. It is the upper half of the id. The submitter
	// increments turn after it has written the other fields and before it submits. The goroutine
	// that increments turn again delivers the outcome: this gives the happens-before edge between
	// submitter and waiter, which the daemon does not provide for the Go memory model.
	turn atomic.Uint32

	part part
	call *call
	// result and err are the outcome of the last submission. lost is set if the daemon may still
	// use the slot.
	result int64
	err    error
	lost   bool
}

// newRing returns a ring whose library has room for the given number of entries.
func newRing(native *nativeRing, entries, slots int) *ring {
	n := max(1, min(entries, slots))
	return &ring{
		native: native, slots: make([]slot, n), free: make(chan uint32, n),
		wake: make(chan struct{}, 1), stop: make(chan struct{}), broken: make(chan struct{}),
	}
}

// start gives each slot its memory, from the offset at of the buffer on. It returns the offset
// after the last slot.
func (r *ring) start(b *sharedBuffer, at, slotBytes int) int {
	r.buffer = b
	for i := range r.slots {
		s := &r.slots[i]
		s.index, s.at, s.mem = uint32(i), uint64(at), b.mem[at:at+slotBytes:at+slotBytes]
		at += slotBytes
		r.free <- s.index
	}
	return at
}

// take returns an unused slot. If there is none, take waits for one if wait is set, and otherwise
// returns nil. It also returns nil if the ring is broken.
func (r *ring) take(wait bool) *slot {
	select {
	case <-r.broken:
		return nil
	case i := <-r.free:
		return &r.slots[i]
	default:
	}
	if !wait {
		return nil
	}
	select {
	case <-r.broken:
		return nil
	case i := <-r.free:
		return &r.slots[i]
	}
}

// submit submits the slots. It returns the slots for which the library had no room. Every other slot is
// delivered to its call, at the completion or after an error.
func (r *ring) submit(slots []*slot, requests []request) (full []*slot) {
	r.mu.Lock()
	err := r.err
	if err == nil {
		full, err = r.submitLocked(slots, requests)
		r.mu.Unlock()
		if err != nil {
			r.fail(fmt.Errorf("%w: start requests: %w", errRing, err))
		}
		return full
	}
	r.mu.Unlock()
	for _, s := range slots {
		s.deliver(0, err)
	}
	return nil
}

func (r *ring) submitLocked(slots []*slot, requests []request) (full []*slot, err error) {
	requests = requests[:0]
	for _, s := range slots {
		p := &s.part
		requests = append(requests, request{
			at: s.at + uint64(p.moved), offset: uint64(p.offset() + p.moved), len: uint64(p.len - p.moved),
			id: uint64(s.turn.Add(1))<<32 | uint64(s.index), fd: int32(p.op.fd),
		})
	}
	err = r.native.submit(r.buffer, requests)
	accepted := int64(0)
	for i, s := range slots {
		errno := syscall.Errno(-requests[i].prepared)
		switch {
		case requests[i].prepared >= 0:
			accepted++
			continue
		case errno == syscall.EAGAIN:
			s.turn.Add(1)
			full = append(full, s)
		default:
			s.turn.Add(1)
			s.deliver(0, errno)
		}
	}
	if r.inFlight.Add(accepted) > 0 {
		select {
		case r.wake <- struct{}{}:
		default:
		}
	}
	return full, err
}

// deliver gives the outcome to the call of s. The channel has room for all slots of the call.
func (s *slot) deliver(result int64, err error) {
	s.result, s.err = result, err
	s.call.done <- s
}

// waitMilliseconds is the longest wait in the library. It bounds the time after which the waiting
// goroutine of a broken ring ends.
const waitMilliseconds = 1000

// wait takes completions while requests are in flight, until stop is closed or the ring fails.
func (r *ring) wait() {
	done := new([waitMax]completion)
	for {
		for r.inFlight.Load() <= 0 {
			select {
			case <-r.wake:
			case <-r.stop:
				return
			}
		}
		select {
		case <-r.broken:
			return
		default:
		}
		completions, err := r.native.wait(done, waitMilliseconds)
		if err != nil && !passing(err) && !errors.Is(err, syscall.ETIMEDOUT) {
			r.fail(fmt.Errorf("%w: wait: %w", errRing, err))
			return
		}
		for _, c := range completions {
			if !r.completed(c) {
				r.fail(fmt.Errorf("%w: it completed a request (%#x, %d) that is not in flight", errRing, c.id, c.result))
				return
			}
		}
	}
}

// completed delivers a completion. It returns false if no such request is in flight.
func (r *ring) completed(c completion) bool {
	i, turn := uint32(c.id), uint32(c.id>>32)
	if int(i) >= len(r.slots) || turn%2 == 0 || !r.slots[i].turn.CompareAndSwap(turn, turn+1) {
		return false
	}
	r.inFlight.Add(-1)
	s := &r.slots[i]
	if left := s.part.len - s.part.moved; c.result > left {
		s.deliver(0, fmt.Errorf("3FS moved %d bytes of %d", c.result, left))
	} else if c.result < 0 {
		s.deliver(0, syscall.Errno(-c.result))
	} else {
		s.deliver(c.result, nil)
	}
	return true
}

// fail ends the requests in flight and all later ones with err. The slots of the former are not
// used again, because the daemon may still use their memory.
func (r *ring) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return
	}
	r.err = err
	close(r.broken)
	for i := range r.slots {
		s := &r.slots[i]
		if turn := s.turn.Load(); turn%2 == 1 && s.turn.CompareAndSwap(turn, turn+1) {
			r.lost.Store(true)
			s.lost = true
			s.deliver(0, err)
		}
	}
}

// failure returns the error of a broken ring.
func (r *ring) failure() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// passing reports whether err is temporary, so that the request may succeed when it is submitted
// again.
func passing(err error) bool {
	return errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EINTR)
}
