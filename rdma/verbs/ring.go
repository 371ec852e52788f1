package verbs

import "sync/atomic"

// ring holds the cookies of one queue pair's Works, in the order in which the Works were posted,
// until their completion is known. At most one goroutine at a time may call add and drop, and one
// may call end; these two goroutines may run concurrently.
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

// room returns the number of Works that may be added.
func (r *ring) room() int {
	return len(r.cookies) - int(r.posted.Load()-r.done.Load())
}

// add adds a Work and returns its sequence number. The low 32 bits of this number identify the
// Work in a completion. The ring must not be full.
func (r *ring) add(cookie uint64) uint64 {
	seq := r.posted.Load()
	r.cookies[seq&uint64(len(r.cookies)-1)] = cookie
	r.posted.Store(seq + 1)
	return seq
}

// drop removes the last n Works, because they were not posted.
func (r *ring) drop(n int) { r.posted.Store(r.posted.Load() - uint64(n)) }

// pending returns the number of Works that have not ended.
func (r *ring) pending() int { return int(r.posted.Load() - r.done.Load()) }

// before finds the Work in flight whose sequence number, modulo 2^32, is low. It returns the number
// of earlier Works that have not ended. ok is false if no Work in flight has this number.
func (r *ring) before(low uint32) (n int, ok bool) {
	done := r.done.Load()
	n = int(low - uint32(done))
	return n, n < int(r.posted.Load()-done)
}

// end removes the oldest Work and returns its cookie. The ring must not be empty.
func (r *ring) end() uint64 {
	done := r.done.Load()
	cookie := r.cookies[done&uint64(len(r.cookies)-1)]
	r.done.Store(done + 1)
	return cookie
}
