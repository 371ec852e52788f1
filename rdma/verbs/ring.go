package verbs

import "sync/atomic"

// ring remembers the cookies of the Works of one queue pair in the order in
// which they were posted, until their completion is known. One goroutine at a
// time calls add and drop, one at a time end; the two may run at once.
//
//	     done                       posted
//	      ▼                           ▼
//	┌─────┬───┬───┬───┬───┬───┬───┬───┬─────┐
//	│free │ k │k+1│ … │   │   │   │   │free │   slot = count mod len(cookies)
//	└─────┴───┴───┴───┴───┴───┴───┴───┴─────┘
//
// Invariant: done <= posted <= done + len(cookies).
type ring struct {
	cookies []uint64
	posted  atomic.Uint64
	done    atomic.Uint64
}

// newRing returns a ring for depth Works; depth is a power of two.
func newRing(depth int) *ring { return &ring{cookies: make([]uint64, depth)} }

// room is how many Works may be added.
func (r *ring) room() int {
	return len(r.cookies) - int(r.posted.Load()-r.done.Load())
}

// add enters a Work and returns its sequence number, whose low 32 bits name it
// in a completion. There must be room.
func (r *ring) add(cookie uint64) uint64 {
	seq := r.posted.Load()
	r.cookies[seq&uint64(len(r.cookies)-1)] = cookie
	r.posted.Store(seq + 1)
	return seq
}

// drop takes the last n Works back: they were not posted after all.
func (r *ring) drop(n int) { r.posted.Store(r.posted.Load() - uint64(n)) }

// pending is how many Works have not ended.
func (r *ring) pending() int { return int(r.posted.Load() - r.done.Load()) }

// before is how many Works that have not ended were posted before the one whose
// sequence number has these low 32 bits. ok is false if there is no such Work.
func (r *ring) before(low uint32) (n int, ok bool) {
	done := r.done.Load()
	n = int(low - uint32(done))
	return n, n < int(r.posted.Load()-done)
}

// end returns the cookie of the oldest Work and forgets it. There must be one.
func (r *ring) end() uint64 {
	done := r.done.Load()
	cookie := r.cookies[done&uint64(len(r.cookies)-1)]
	r.done.Store(done + 1)
	return cookie
}
