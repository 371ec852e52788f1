package rdma

import (
	"fmt"
	"sync"
)

// Expect asks to be told when an immediate has been counted often enough.
type Expect struct {
	Imm   uint32
	Count uint32
	// From are the peers whose end ends the expectation, with ErrPeerDied. It
	// is no filter: an immediate counts whoever sent it. Empty: only Cancel and
	// the engine's Close end it early.
	From []EngineID
	// Done is called exactly once: nil when the count is reached, otherwise
	// ErrPeerDied, ErrCanceled or ErrClosed. It must not block.
	Done func(error)
}

// Expectation is an Expect that is waiting, or was.
type Expectation struct {
	counters *ImmCounters
	expect   Expect
	// left is guarded by counters.mu; the expectation is in counters.waiting
	// exactly while it has not ended.
	left uint32
}

// Cancel ends the expectation: its Done is called with ErrCanceled, unless it
// has ended already, and whatever was counted for it is dropped. It reports
// whether it was this call that ended it. To reuse an immediate's number after
// a Cancel, revoke the windows first: then no late write can count it.
func (e *Expectation) Cancel() bool { return e.counters.finish(e, ErrCanceled) }

// DefaultEarlyImmediates is how many immediates that nobody expects yet are
// kept for each peer.
const DefaultEarlyImmediates = 4096

// ImmCounters counts immediates and calls back: the part of ExpectImm that does
// not depend on the provider. All methods may be called concurrently.
type ImmCounters struct {
	// earlyMax bounds early, for each peer that caused entries in it.
	earlyMax int

	mu      sync.Mutex
	closed  bool
	waiting map[uint32]*Expectation
	// early holds what was counted before it was expected, or beyond what was.
	// Invariant: no immediate is in both waiting and early.
	early map[uint32]earlyImm
	// earlyBy is how many entries of early each peer caused.
	earlyBy map[EngineID]int

	counted, dropped uint64
}

// earlyImm is a count without an expectation, and the peer that began it.
type earlyImm struct {
	count uint32
	from  EngineID
}

// NewImmCounters returns counters that keep up to earlyMax unexpected immediates
// for each peer; 0 is DefaultEarlyImmediates.
func NewImmCounters(earlyMax int) *ImmCounters {
	if earlyMax <= 0 {
		earlyMax = DefaultEarlyImmediates
	}
	return &ImmCounters{
		earlyMax: earlyMax,
		waiting:  make(map[uint32]*Expectation),
		early:    make(map[uint32]earlyImm),
		earlyBy:  make(map[EngineID]int),
	}
}

// Count counts imm once, for a write of peer from whose payload is in place.
func (c *ImmCounters) Count(from EngineID, imm uint32) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	e := c.waiting[imm]
	if e == nil {
		c.keepLocked(from, imm)
		c.mu.Unlock()
		return
	}
	c.counted++
	e.left--
	if e.left > 0 {
		c.mu.Unlock()
		return
	}
	delete(c.waiting, imm)
	c.mu.Unlock()
	e.end(nil)
}

// keepLocked remembers an immediate that nobody expects, if there is room.
func (c *ImmCounters) keepLocked(from EngineID, imm uint32) {
	k, ok := c.early[imm]
	if !ok {
		if c.earlyBy[from] >= c.earlyMax {
			c.dropped++
			return
		}
		k.from = from
		c.earlyBy[from]++
	}
	if k.count == ^uint32(0) {
		c.dropped++
		return
	}
	k.count++
	c.early[imm] = k
	c.counted++
}

// forgetLocked drops what was counted early for imm.
func (c *ImmCounters) forgetLocked(imm uint32) {
	k, ok := c.early[imm]
	if !ok {
		return
	}
	delete(c.early, imm)
	if c.earlyBy[k.from]--; c.earlyBy[k.from] == 0 {
		delete(c.earlyBy, k.from)
	}
}

// Expect begins an expectation. alive tells whether a peer's session is up; an
// expectation From a peer that is gone ends at once, unless it is satisfied by
// what came earlier. nil means all are alive.
func (c *ImmCounters) Expect(x Expect, alive func(EngineID) bool) (*Expectation, error) {
	e := &Expectation{counters: c, expect: x, left: x.Count}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, fmt.Errorf("rdma: expect immediate %d: %w", x.Imm, ErrClosed)
	}
	if c.waiting[x.Imm] != nil {
		c.mu.Unlock()
		return nil, fmt.Errorf("rdma: immediate %d: %w", x.Imm, ErrExists)
	}
	k := c.early[x.Imm]
	if k.count >= x.Count {
		c.takeLocked(x.Imm, k, x.Count)
		c.mu.Unlock()
		e.end(nil)
		return e, nil
	}
	e.left -= k.count
	c.forgetLocked(x.Imm)
	c.waiting[x.Imm] = e
	c.mu.Unlock()
	// The expectation is in place, so a peer that ends after this look finds it.
	for _, id := range x.From {
		if alive != nil && !alive(id) {
			c.finish(e, fmt.Errorf("rdma: %v: %w", id, ErrPeerDied))
			break
		}
	}
	return e, nil
}

// takeLocked uses n of the early count of imm.
func (c *ImmCounters) takeLocked(imm uint32, k earlyImm, n uint32) {
	if n == 0 {
		return
	}
	if k.count == n {
		c.forgetLocked(imm)
		return
	}
	k.count -= n
	c.early[imm] = k
}

// finish ends e with err if it is still waiting, and reports whether it was.
func (c *ImmCounters) finish(e *Expectation, err error) bool {
	c.mu.Lock()
	if c.waiting[e.expect.Imm] != e {
		c.mu.Unlock()
		return false
	}
	delete(c.waiting, e.expect.Imm)
	c.mu.Unlock()
	e.end(err)
	return true
}

// PeerDied ends every expectation From the peer with an error that wraps
// ErrPeerDied and says why, and forgets the unexpected immediates it caused.
func (c *ImmCounters) PeerDied(peer EngineID, why error) {
	c.mu.Lock()
	var ended []*Expectation
	for imm, e := range c.waiting {
		for _, id := range e.expect.From {
			if id == peer {
				ended = append(ended, e)
				delete(c.waiting, imm)
				break
			}
		}
	}
	if c.earlyBy[peer] > 0 {
		for imm, k := range c.early {
			if k.from == peer {
				c.forgetLocked(imm)
			}
		}
	}
	c.mu.Unlock()
	for _, e := range ended {
		e.end(why)
	}
}

// Close ends every expectation with ErrClosed and counts nothing from now on.
func (c *ImmCounters) Close() {
	c.mu.Lock()
	c.closed = true
	waiting := c.waiting
	c.waiting, c.early, c.earlyBy = nil, nil, nil
	c.mu.Unlock()
	for _, e := range waiting {
		e.end(ErrClosed)
	}
}

// Stats returns how many immediates were counted and how many were dropped
// because nobody expected them and there was no room to keep them.
func (c *ImmCounters) Stats() (counted, dropped uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counted, c.dropped
}

// end calls Done. The caller removed e from waiting, so this happens once.
func (e *Expectation) end(err error) {
	if e.expect.Done != nil {
		e.expect.Done(err)
	}
}
