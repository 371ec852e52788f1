package sim

import (
	"context"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"time"
)

// Phase orders the events of one instant.
type Phase uint8

// Phases.
const (
	Normal Phase = iota
	Settle
)

// Never is later than every event.
const Never = time.Duration(math.MaxInt64)

// Kernel is virtual time and what is to happen in it.
type Kernel struct {
	seed   uint64
	now    time.Duration
	queue  eventHeap
	number uint64
	free   []*event
	fired  uint64
	digest uint64
	// stopped ends Run after the event that is being called.
	stopped bool
}

// event is a function that is to be called.
type event struct {
	at     time.Duration
	number uint64
	phase  Phase
	// once: it belongs to the kernel and is used again.
	once bool
	// place in the heap, from 0; -1: not in it.
	place int
	call  func()
}

// New returns a kernel at time 0. The seed decides every random number.
func New(seed uint64) *Kernel { return &Kernel{seed: seed, digest: fnvOffset} }

// Now is the time of the event that is being called, since the beginning.
func (k *Kernel) Now() time.Duration { return k.now }

// Fired is how many events were called.
func (k *Kernel) Fired() uint64 { return k.fired }

// Pending is how many events wait.
func (k *Kernel) Pending() int { return len(k.queue) }

// Rand returns the stream of random numbers of that name, from its beginning.
func (k *Kernel) Rand(name string) *rand.Rand {
	h := fnv.New64a()
	h.Write([]byte(name)) // never fails
	return rand.New(rand.NewPCG(k.seed, h.Sum64()))
}

// At calls f at time t, in the Normal phase. A time that has passed is now.
func (k *Kernel) At(t time.Duration, f func()) { k.schedule(t, Normal, f) }

// After calls f when d has passed.
func (k *Kernel) After(d time.Duration, f func()) { k.schedule(k.now+max(d, 0), Normal, f) }

// Settled calls f when no Normal event of this instant is left.
func (k *Kernel) Settled(f func()) { k.schedule(k.now, Settle, f) }

// schedule queues an event of the kernel's own.
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

// push queues an event as the latest of its instant and phase.
func (k *Kernel) push(e *event, t time.Duration, p Phase) {
	k.number++
	e.at, e.phase, e.number = max(t, k.now), p, k.number
	k.queue.push(e)
}

// Timer is an event that can be moved and taken back. Setting it again is a new
// event in the order of an instant.
type Timer struct {
	k *Kernel
	e event
}

// NewTimer returns a timer that calls f whenever it is due, in the given phase. It
// is not set.
func (k *Kernel) NewTimer(p Phase, f func()) *Timer {
	return &Timer{k: k, e: event{place: -1, phase: p, call: f}}
}

// Set lets the timer be due at time t, once.
func (t *Timer) Set(at time.Duration) {
	t.Stop()
	t.k.push(&t.e, at, t.e.phase)
}

// SetAfter lets the timer be due when d has passed.
func (t *Timer) SetAfter(d time.Duration) { t.Set(t.k.now + max(d, 0)) }

// Stop takes the timer back.
func (t *Timer) Stop() {
	if t.e.place >= 0 {
		t.k.queue.remove(t.e.place)
	}
}

// Due returns when the timer is due, Never if it is not set.
func (t *Timer) Due() time.Duration {
	if t.e.place < 0 {
		return Never
	}
	return t.e.at
}

// Stop lets Run return after the event that is being called.
func (k *Kernel) Stop() { k.stopped = true }

// Run calls events until none is left, Stop is called or ctx ends.
func (k *Kernel) Run(ctx context.Context) error { return k.RunUntil(ctx, Never) }

// RunUntil calls the events up to time t, those at t included, and lets Now be t
// if that is finite and Stop was not called.
func (k *Kernel) RunUntil(ctx context.Context, t time.Duration) error {
	k.stopped = false
	for n := 0; len(k.queue) > 0 && k.queue[0].at <= t && !k.stopped; n++ {
		// A look at the context costs as much as an event.
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

// Note adds to the digest: what was decided, who got what.
func (k *Kernel) Note(values ...uint64) {
	d := k.digest
	for _, v := range values {
		d = (d ^ v) * fnvPrime
		d ^= d >> 29 // FNV alone leaves the low bits to the low bits
	}
	k.digest = d
}

// Digest is a hash over all that happened so far. It is for comparing two runs of
// one program, not for keeping.
func (k *Kernel) Digest() uint64 { return k.digest }

// eventHeap is a heap of four children a node: fewer levels, and the children of
// one lie beside each other.
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

// remove takes out the event at place i.
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

// up puts e at place i or above.
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

// down puts e at place i or below.
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
