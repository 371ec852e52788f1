package sim

import (
	"context"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"time"
)

// Phase orders the events that have the same time.
type Phase uint8

// Phases.
const (
	Normal Phase = iota
	Settle
)

// Never is later than every event.
const Never = time.Duration(math.MaxInt64)

// Kernel has the virtual time and the queue of events.
type Kernel struct {
	seed   uint64
	now    time.Duration
	queue  eventHeap
	number uint64
	free   []*event
	fired  uint64
	digest uint64
	// stopped ends Run after the current event.
	stopped bool
}

// event is a scheduled function call.
type event struct {
	at     time.Duration
	number uint64
	phase  Phase
	// once is set for an event of At, After or Settled. The kernel reuses its memory after the
	// call.
	once bool
	// place is the index in the heap; -1 if the event is not in the heap.
	place int
	call  func()
}

// New returns a kernel at virtual time 0. The seed determines every random number.
func New(seed uint64) *Kernel { return &Kernel{seed: seed, digest: fnvOffset} }

// Now returns the time of the current event, counted from the start of the simulation.
func (k *Kernel) Now() time.Duration { return k.now }

// Fired returns the number of events called.
func (k *Kernel) Fired() uint64 { return k.fired }

// Pending returns the number of scheduled events.
func (k *Kernel) Pending() int { return len(k.queue) }

// Rand returns the stream of random numbers with the given name, from the start of the stream.
func (k *Kernel) Rand(name string) *rand.Rand {
	h := fnv.New64a()
	h.Write([]byte(name)) // never fails
	return rand.New(rand.NewPCG(k.seed, h.Sum64()))
}

// At calls f at time t, in the Normal phase. A past time means now.
func (k *Kernel) At(t time.Duration, f func()) { k.schedule(t, Normal, f) }

// After calls f when d has passed.
func (k *Kernel) After(d time.Duration, f func()) { k.schedule(k.now+max(d, 0), Normal, f) }

// Settled calls f at the current time, when no Normal event of this time is left.
func (k *Kernel) Settled(f func()) { k.schedule(k.now, Settle, f) }

// schedule queues an event that belongs to the kernel.
func (k *Kernel) schedule(t time.Duration, p Phase, f func()) {
	var e *event
	if n := len(k.free); n > 0 {
		e = k.free[n-1]
		k.free = k.free[:n-1]
	} else {
		e = &event{once: true, place: -1}
	}
	e.call = f
	k.push(e, t, p)
}

// push queues an event behind all events of the same time and phase.
func (k *Kernel) push(e *event, t time.Duration, p Phase) {
	k.number++
	e.at, e.phase, e.number = max(t, k.now), p, k.number
	k.queue.push(e)
}

// Timer is an event that can be moved and cancelled. Each Set queues the event behind all events of
// the same time and phase.
type Timer struct {
	k *Kernel
	e event
}

// NewTimer returns a timer that is not set. Whenever the timer is due, f is called in the given
// phase.
func (k *Kernel) NewTimer(p Phase, f func()) *Timer {
	return &Timer{k: k, e: event{place: -1, phase: p, call: f}}
}

// Set schedules one call at time at. It replaces an earlier Set.
func (t *Timer) Set(at time.Duration) {
	t.Stop()
	t.k.push(&t.e, at, t.e.phase)
}

// SetAfter schedules the timer when d has passed.
func (t *Timer) SetAfter(d time.Duration) { t.Set(t.k.now + max(d, 0)) }

// Stop cancels the timer.
func (t *Timer) Stop() {
	if t.e.place >= 0 {
		t.k.queue.remove(t.e.place)
	}
}

// Due returns the virtual time at which the timer is due; Never if the timer is not set.
func (t *Timer) Due() time.Duration {
	if t.e.place < 0 {
		return Never
	}
	return t.e.at
}

// Stop makes Run return after the current event.
func (k *Kernel) Stop() { k.stopped = true }

// Run calls events until none is left, Stop is called or ctx ends.
func (k *Kernel) Run(ctx context.Context) error { return k.RunUntil(ctx, Never) }

// RunUntil calls the events up to and including time t. If t is finite and Stop was not called, Now
// returns t afterwards.
func (k *Kernel) RunUntil(ctx context.Context, t time.Duration) error {
	k.stopped = false
	for n := 0; len(k.queue) > 0 && k.queue[0].at <= t && !k.stopped; n++ {
		// A check of the context costs as much as an event, so only each 1024th event has one.
		if n%1024 == 0 {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("sim: stopped at %v: %w", k.now, err)
			}
		}
		k.step()
	}
	if t != Never && !k.stopped {
		k.now = max(k.now, t)
	}
	return nil
}

// step calls the first event.
func (k *Kernel) step() {
	e := k.queue[0]
	k.queue.remove(0)
	k.now = e.at
	k.fired++
	k.Note(uint64(e.at), e.number)
	f := e.call
	if e.once {
		e.call = nil
		k.free = append(k.free, e)
	}
	f()
}

const (
	fnvOffset = 14695981039346656037
	fnvPrime  = 1099511628211
)

// Note adds values to the digest, such as the decisions of a scheduler.
func (k *Kernel) Note(values ...uint64) {
	d := k.digest
	for _, v := range values {
		d = (d ^ v) * fnvPrime
		d ^= d >> 29 // in FNV alone, high bits never affect low bits
	}
	k.digest = d
}

// Digest returns a hash over all events so far. Equal digests show that two runs of the same program
// are equal. A different version of the program may have another digest.
func (k *Kernel) Digest() uint64 { return k.digest }

// eventHeap is a heap with four children per node. It has fewer levels than a binary heap, and the
// children of a node are adjacent in memory.
type eventHeap []*event

// before orders events by time, phase and number.
func before(a, b *event) bool {
	if a.at != b.at {
		return a.at < b.at
	}
	if a.phase != b.phase {
		return a.phase < b.phase
	}
	return a.number < b.number
}

// push adds an event.
func (h *eventHeap) push(e *event) {
	*h = append(*h, e)
	h.up(len(*h)-1, e)
}

// remove removes the event at index i.
func (h *eventHeap) remove(i int) {
	q := *h
	last := len(q) - 1
	q[i].place = -1
	e := q[last]
	q[last] = nil
	*h = q[:last]
	if i == last {
		return
	}
	if i > 0 && before(e, q[(i-1)/4]) {
		h.up(i, e)
		return
	}
	h.down(i, e)
}

// up moves e from index i towards the root until the heap is in order.
func (h *eventHeap) up(i int, e *event) {
	q := *h
	for i > 0 {
		parent := (i - 1) / 4
		if !before(e, q[parent]) {
			break
		}
		q[i] = q[parent]
		q[i].place = i
		i = parent
	}
	q[i] = e
	e.place = i
}

// down moves e from index i towards the leaves until the heap is in order.
func (h *eventHeap) down(i int, e *event) {
	q := *h
	for {
		child := 4*i + 1
		if child >= len(q) {
			break
		}
		least := child
		for c := child + 1; c < min(child+4, len(q)); c++ {
			if before(q[c], q[least]) {
				least = c
			}
		}
		if !before(q[least], e) {
			break
		}
		q[i] = q[least]
		q[i].place = i
		i = least
	}
	q[i] = e
	e.place = i
}
