package shm

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma/group"
)

const (
	// chunkBytes is the size of the chunks in which payload is placed. After each chunk, other
	// endpoints have their turn, and Shut or a memory's Close can run.
	chunkBytes = 256 << 10
	// turnEntries is the largest number of small entries that are performed in one turn of an
	// endpoint.
	turnEntries = 32
	// pollBytes is the number of bytes after which Poll returns even if nothing has completed.
	pollBytes = 2 << 20
)

// Poll implements group.Domain.
func (d *Domain) Poll(dst []group.Completion) (int, error) {
	if why := d.dead.Load(); why != nil {
		for _, e := range *d.live.Load() {
			e.Shut()
		}
		return 0, *why
	}
	d.pollMu.Lock()
	defer d.pollMu.Unlock()
	live := *d.live.Load()
	n, placed := 0, uint64(0)
	for progress := true; progress && n < len(dst) && placed < pollBytes; {
		progress = false
		d.turn++
		for i := range live {
			e := live[(d.turn+i)%len(live)]
			n += e.reap(dst[n:])
			if n == len(dst) {
				return n, nil
			}
			k, bytes, moved := e.perform(dst[n:])
			n += k
			placed += bytes
			progress = progress || moved
			if n == len(dst) {
				return n, nil
			}
		}
		if n > 0 {
			break
		}
	}
	return n, nil
}

// reap moves the completions of our own entries (operations that this end put into its ring) to
// dst.
func (e *endpoint) reap(dst []group.Completion) (n int) {
	if e.ending.Load() {
		return e.reapLast(dst)
	}
	reaped, done := e.reaped.Load(), e.own.done.Load()
	if done == reaped {
		return 0
	}
	if done-reaped > e.posted.Load()-reaped {
		e.broke(fmt.Errorf("shm: the peer reports %d performed entries of %d", done, e.posted.Load()))
		return e.reapLast(dst)
	}
	acquired()
	for n < len(dst) && reaped != done {
		dst[n] = e.outcome(reaped)
		reaped++
		n++
	}
	e.reaped.Store(reaped)
	return n
}

// reapLast moves to dst the last completions of an endpoint that is ending. These are first the
// completions of performed entries, then those of entries whose result is unknown, and at last the
// report that the endpoint is broken.
func (e *endpoint) reapLast(dst []group.Completion) (n int) {
	reaped, posted := e.reaped.Load(), e.posted.Load()
	if !e.final {
		// ending is set, so posted does not change after this: Post and broke hold sendMu.
		e.sendMu.Lock()
		posted = e.posted.Load()
		e.sendMu.Unlock()
		e.final, e.ended = true, e.own.done.Load()
		if e.ended-reaped > posted-reaped {
			e.ended = reaped // the peer's counter is invalid
		}
	}
	for ; n < len(dst) && reaped != posted; n++ {
		if reaped != e.ended {
			dst[n] = e.outcome(reaped)
			reaped++
			continue
		}
		dst[n] = group.Completion{Kind: group.KindDone, Status: group.StatusBroken, Cookie: e.cookies[reaped%depth], Err: e.why()}
		reaped++
		e.ended = reaped
	}
	e.reaped.Store(reaped)
	if n < len(dst) && !e.brokenReturned && !e.shut.Load() {
		e.brokenReturned = true
		dst[n] = group.Completion{Kind: group.KindBroken, Cookie: e.cookie, Err: e.why()}
		n++
	}
	return n
}

// outcome returns the completion of the entry i of our ring, which the peer has performed.
func (e *endpoint) outcome(i uint64) group.Completion {
	c := group.Completion{Kind: group.KindDone, Cookie: e.cookies[i%depth]}
	switch s := e.own.statuses[i%depth].Load(); s {
	case statusOK:
	case statusRefused:
		c.Status, c.Err = group.StatusRefused, errRefused
	case statusNoBuffer:
		c.Status, c.Err = group.StatusNoBuffer, errNoBuffer
	case statusUnreadable:
		c.Status, c.Err = group.StatusRefused, unreadable()
		if !e.warned {
			e.warned = true
			e.d.log.Warn("write refused", "nic", e.d.name, "err", c.Err)
		}
	default:
		c.Status, c.Err = group.StatusBroken, fmt.Errorf("shm: the peer answered with status %d", s)
	}
	return c
}

var (
	errRefused  = errors.New("shm: refused: the key is invalid at the peer, or does not cover the range")
	errNoBuffer = errors.New("shm: the peer had no free buffer that was large enough")
)

// perform performs entries (operations) that the peer put into its ring: one chunk of a large
// entry, or several small entries. It returns the number of completions that it put into dst, the
// number of bytes that it placed, and whether it made any progress. dst must have space for at
// least one completion.
func (e *endpoint) perform(dst []group.Completion) (n int, placed uint64, moved bool) {
	if e.ending.Load() {
		return 0, 0, false
	}
	tail := e.peer.tail.Load()
	if tail == e.next || e.stalled.Load() {
		return 0, 0, false
	}
	if tail-e.next > depth {
		e.broke(fmt.Errorf("shm: the peer posted %d entries into %d", tail-e.next, depth))
		return 0, 0, true
	}
	acquired()
	e.recvMu.Lock()
	first := e.next
	for i := 0; i < turnEntries && e.next != tail && n < len(dst) && placed < chunkBytes && !e.stopped; i++ {
		if !e.now.loaded {
			e.now = e.peer.get(e.next)
		}
		status, c, bytes, done := e.step()
		placed += bytes
		moved = moved || done || bytes > 0
		if !done {
			break
		}
		if c.Kind != 0 {
			dst[n] = c
			n++
		}
		e.peer.statuses[e.next%depth].Store(status)
		e.next++
		released()
		e.peer.done.Store(e.next)
		e.now.loaded = false
	}
	wake := first != e.next && e.peer.posterSleeps.Load() != 0 && e.peer.posterSleeps.Swap(0) != 0
	e.recvMu.Unlock()
	if wake {
		ringBell(e.bell)
	}
	return n, placed, moved
}

// step performs the next part of the entry in e.now. bytes is the number of bytes placed. If done
// is set, the entry is complete, status is its status, and c the completion for this engine, if
// there is one. recvMu is held.
func (e *endpoint) step() (status uint32, c group.Completion, bytes uint64, done bool) {
	switch group.Op(e.now.op) {
	case group.OpWrite, group.OpWriteImm:
		return e.stepWrite()
	case group.OpSend:
		return e.stepSend()
	}
	e.stopped = true
	e.broke(fmt.Errorf("shm: the peer posted an entry of kind %d", e.now.op))
	return 0, c, 0, false
}

// stepWrite places a chunk.
func (e *endpoint) stepWrite() (status uint32, c group.Completion, bytes uint64, done bool) {
	w := &e.now
	m := e.d.find(w.key)
	if m == nil {
		return statusRefused, c, 0, true
	}
	m.mu.Lock()
	to, ok := m.sliceLocked(w.addr, w.len)
	if !ok {
		m.mu.Unlock()
		return statusRefused, c, 0, true
	}
	bytes = min(w.len-w.placed, chunkBytes)
	got := e.fetch(to[w.placed:w.placed+bytes], w.offset+w.placed)
	m.mu.Unlock()
	switch got {
	case fetchLater:
		return 0, c, 0, false
	case fetchRefused:
		return statusUnreadable, c, 0, true
	}
	if w.placed += bytes; w.placed < w.len {
		return 0, c, bytes, false
	}
	if !e.sourceValid() {
		return 0, c, bytes, false
	}
	if group.Op(w.op) == group.OpWriteImm {
		c = group.Completion{Kind: group.KindImmediate, Cookie: e.cookie, Imm: w.imm, Len: w.len}
	}
	return statusOK, c, bytes, true
}

// stepSend copies a whole message into the first posted buffer.
func (e *endpoint) stepSend() (status uint32, c group.Completion, bytes uint64, done bool) {
	w := &e.now
	if w.len > maxMessage {
		return statusNoBuffer, c, 0, true
	}
	b, ok := e.d.buffers.first(w.len)
	if !ok {
		return statusNoBuffer, c, 0, true
	}
	switch e.fetch(b.buf[:w.len], w.offset) {
	case fetchLater:
		return 0, c, 0, false
	case fetchRefused:
		return statusUnreadable, c, 0, true
	}
	if !e.sourceValid() {
		return 0, c, 0, false
	}
	e.d.buffers.pop()
	return statusOK, group.Completion{Kind: group.KindMessage, Cookie: e.cookie, Slot: b.slot, Len: w.len}, w.len, true
}

// sourceValid reports whether the bytes that were just copied are the bytes that the poster posted.
// They are, if after the copy the poster had not withdrawn its entries and, for a source read by
// process_vm_readv, was still alive. Otherwise sourceValid sets stopped and breaks the endpoint.
// recvMu is held.
func (e *endpoint) sourceValid() bool {
	// The source must be read before the flag withdrawn. An atomic load of the flag would not keep
	// the earlier reads before it, but an atomic read-modify-write does.
	if atomic.AddUint32(&e.d.fence, 1); e.peer.withdrawn.Load() == 0 && (e.now.segment != 0 || e.now.len == 0 || !e.process.gone()) {
		return true
	}
	e.stopped = true
	e.broke(errors.New("shm: the peer has withdrawn its entries"))
	return false
}

// fetched is the result of reading a part of a source.
type fetched uint8

const (
	fetchOK      fetched = iota
	fetchLater           // the source's segment has not been received yet
	fetchRefused         // no memory is at the source's address, or the memory may not be read
)

// fetch copies len(to) bytes of the source of the entry in e.now into to. at is their offset in the
// source's segment, or, if the segment is 0, their address in the poster's process. recvMu is held.
func (e *endpoint) fetch(to []byte, at uint64) fetched {
	n := uint64(len(to))
	if n == 0 {
		return fetchOK
	}
	if e.now.segment == 0 {
		if e.process.fd < 0 || e.process.read(to, at) != nil {
			return fetchRefused
		}
		return fetchOK
	}
	v := e.views[e.now.segment]
	if v == nil {
		// The message with the segment has not arrived yet. The reader goroutine clears stalled
		// when the message arrives.
		e.stalled.Store(true)
		return fetchLater
	}
	from := v.Bytes()
	if size := uint64(len(from)); at > size || n > size-at {
		return fetchRefused
	}
	copy(to, from[at:])
	return fetchOK
}

// busy reports whether Poll would find work on the endpoint. pollMu is held.
func (e *endpoint) busy() bool {
	if e.ending.Load() {
		return e.reaped.Load() != e.posted.Load() || !e.brokenReturned && !e.shut.Load()
	}
	return e.own.done.Load() != e.reaped.Load() || e.peer.tail.Load() != e.next && !e.stalled.Load()
}

// arm sets or clears the flags that make the peer ring our bell. pollMu is held.
func (e *endpoint) arm(sleeps uint32) {
	e.own.posterSleeps.Store(sleeps)
	e.peer.performerSleeps.Store(sleeps)
}

// ready reports whether Wait must return.
func (d *Domain) ready() bool {
	if d.woken.Load() && d.woken.Swap(false) || d.dead.Load() != nil {
		return true
	}
	d.pollMu.Lock()
	defer d.pollMu.Unlock()
	for _, e := range *d.live.Load() {
		if e.busy() {
			return true
		}
	}
	return false
}

// armAll arms every endpoint.
func (d *Domain) armAll(sleeps uint32) {
	d.pollMu.Lock()
	defer d.pollMu.Unlock()
	for _, e := range *d.live.Load() {
		e.arm(sleeps)
	}
}

// Wait implements group.Domain. It polls for a while, then sleeps until the bell rings. The flags
// in the rings are set before the last poll. So a process that adds work after the last poll finds
// its flag set and rings the bell.
func (d *Domain) Wait() {
	if d.spin.look(d.ready) {
		return
	}
	d.sleeping.Store(true)
	d.armAll(1)
	if !d.ready() {
		if err := d.bell.wait(); err != nil {
			d.fail(fmt.Errorf("bell: %w", err))
		}
		d.woken.Store(false)
	}
	d.sleeping.Store(false)
	d.armAll(0)
}

// Wake implements group.Domain.
func (d *Domain) Wake() {
	d.woken.Store(true)
	if d.sleeping.Load() {
		ringBell(d.bell.fd)
	}
}

// spinner polls before its owner sleeps, if polling has recently found work. Polling is worthwhile
// because a wake-up through the bell takes longer than most answers take to arrive.
type spinner struct{ patience time.Duration }

const (
	patienceMin = 2 * time.Microsecond
	patienceMax = 50 * time.Microsecond
)

// look calls ready until ready returns true, or until patience has elapsed.
func (s *spinner) look(ready func() bool) bool {
	s.patience = min(max(s.patience, patienceMin), patienceMax)
	for start := time.Now(); ; runtime.Gosched() {
		if ready() {
			s.patience *= 2
			return true
		}
		if time.Since(start) >= s.patience {
			s.patience /= 2
			return false
		}
	}
}
