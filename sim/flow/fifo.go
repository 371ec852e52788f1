package flow

import (
	"fmt"
	"math"
	"time"

	"github.com/penstock-kv/penstock/sim"
)

// FIFO is a link that serves one transfer at a time, in order, at its full rate: a
// storage NIC with its reading queue.
type FIFO struct {
	k    *sim.Kernel
	name string
	rate float64
	// queue[head:] are the transfers that have not completed. The first of them is in service since
	// began.
	queue []job
	head  int
	began time.Duration
	due   *sim.Timer
	// queued is the sum of the sizes in queue[head:], carried the sum of the completed sizes.
	queued, carried int64
	busy            time.Duration
	served          func(from, to time.Duration, size int64)
}

// job is a transfer of a FIFO.
type job struct {
	size int64
	done func()
}

// NewFIFO returns an idle link of rate units per second; sizes have the same unit, bytes or tokens.
func NewFIFO(k *sim.Kernel, name string, rate float64) (*FIFO, error) {
	if !(rate > 0) || math.IsInf(rate, 0) {
		return nil, fmt.Errorf("flow: link %s of %v/s; a link's rate is positive and finite: %w", name, rate, ErrSpec)
	}
	q := &FIFO{k: k, name: name, rate: rate}
	q.due = k.NewTimer(sim.Normal, q.landed)
	return q, nil
}

// Observe registers f, which is called at the end of each transfer: the transfer used the link
// between the times from and to.
func (q *FIFO) Observe(f func(from, to time.Duration, size int64)) { q.served = f }

// Put queues a transfer; done is called when the transfer has completed. A transfer of size 0 waits
// in the queue too.
func (q *FIFO) Put(size int64, done func()) {
	q.queue = append(q.queue, job{size, done})
	q.queued += size
	if len(q.queue)-q.head == 1 {
		q.begin()
	}
}

// begin starts to serve the head of the queue.
func (q *FIFO) begin() {
	q.began = q.k.Now()
	q.due.SetAfter(time.Duration(math.Ceil(float64(q.queue[q.head].size) / q.rate * 1e9)))
}

// landed completes the head of the queue.
func (q *FIFO) landed() {
	j := q.queue[q.head]
	q.queue[q.head] = job{}
	q.head++
	if q.head == len(q.queue) {
		q.queue, q.head = q.queue[:0], 0
	} else if q.head >= 64 && 2*q.head >= len(q.queue) {
		n := copy(q.queue, q.queue[q.head:])
		clear(q.queue[n:])
		q.queue, q.head = q.queue[:n], 0
	}
	q.queued -= j.size
	q.carried += j.size
	q.busy += q.k.Now() - q.began
	if q.served != nil {
		q.served(q.began, q.k.Now(), j.size)
	}
	if q.head < len(q.queue) {
		q.begin()
	}
	if j.done != nil {
		j.done()
	}
}

// Queued returns the sum of the sizes that have not completed; the transfer being served counts
// with its full size.
func (q *FIFO) Queued() int64 { return q.queued }

// Waiting returns the number of transfers that have not completed.
func (q *FIFO) Waiting() int { return len(q.queue) - q.head }

// Carried returns the sum of the completed sizes.
func (q *FIFO) Carried() int64 { return q.carried }

// Busy returns the total time for which completed transfers used the link.
func (q *FIFO) Busy() time.Duration { return q.busy }

// Name returns the link's name.
func (q *FIFO) Name() string { return q.name }
