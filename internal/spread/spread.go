// Package spread divides work on memory, such as copies and checksums, over idle processors.
//
//	Do(16 layers, 1 MiB) ─► caller: 0 1 2 … ◄─ the next range of layers ─► helper: …
//	                        returns when all ranges are done; a helper that has not begun is not waited for
//
// The package does not know what the work is. It starts goroutines for a call, and keeps none
// between calls.
//
// There is no lock.
package spread

import (
	"runtime"
	"sync/atomic"
)

const (
	// shareBytes is the least number of bytes for each goroutine that takes part, about 80 µs of work.
	// For half of that, the wake-up of a helper and the wait for it take longer than they spare.
	shareBytes = 1 << 20
	// rangeBytes is the size of the ranges that a goroutine takes, in bytes.
	rangeBytes = 128 << 10
)

// Pool limits the number of helpers of all its calls. Its methods may be called concurrently.
type Pool struct{ busy chan struct{} }

// New returns a pool with a helper for each processor except one. So one calling goroutine and all
// helpers fill the processors.
func New() *Pool { return NewOf(runtime.GOMAXPROCS(0) - 1) }

// NewOf returns a pool with the given number of helpers, 0 or more.
func NewOf(helpers int) *Pool { return &Pool{busy: make(chan struct{}, helpers)} }

// Do divides n items with the given total size in bytes into ranges and calls part for each range,
// [from, to), in the caller's goroutine and in as many helpers as are idle and pay. It returns when
// all calls of part have returned.
func (p *Pool) Do(n int, bytes int64, part func(from, to int)) {
	helpers := p.take(min(n, int(bytes/shareBytes)) - 1)
	if helpers == 0 {
		part(0, n)
		return
	}
	step := max(1, int(int64(n)*rangeBytes/bytes))
	w := &work{n: n, step: step, part: part, done: make(chan struct{})}
	w.left.Store(int64((n + step - 1) / step))
	for range helpers {
		go func() {
			w.run()
			<-p.busy
		}()
	}
	w.run()
	<-w.done
}

// take reserves up to n helpers, as many as are idle.
func (p *Pool) take(n int) (got int) {
	for got < n {
		select {
		case p.busy <- struct{}{}:
			got++
		default:
			return got
		}
	}
	return got
}

// work is one call of Do with helpers.
type work struct {
	n, step int
	part    func(from, to int)
	// next is the first item that no goroutine has taken. left is the number of ranges that are not done.
	next, left atomic.Int64
	// done is closed when left is 0.
	done chan struct{}
}

// run takes ranges until none is left.
func (w *work) run() {
	for {
		from := int(w.next.Add(int64(w.step))) - w.step
		if from >= w.n {
			return
		}
		w.part(from, min(from+w.step, w.n))
		if w.left.Add(-1) == 0 {
			close(w.done)
		}
	}
}
