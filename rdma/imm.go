package rdma

import (
	"fmt"
	"sync"
)

// Expect describes an expectation: Done is called when Imm has been counted Count times.
type Expect struct {
	Imm   uint32
	Count uint32
	// From are the peers whose death ends the expectation with ErrPeerDied. From is not a filter:
	// immediates of all peers count. If From is empty, only Cancel and the engine's Close end the
	// expectation early.
	From []EngineID
	// Done is called exactly once: with nil when the count is reached, otherwise with ErrPeerDied,
	// ErrCanceled or ErrClosed. It must not block.
	Done func(error)
}

// Expectation is an Expect that is pending or has ended.
type Expectation struct {
	counters *ImmCounters
	expect   Expect
	// left is the number of immediates that are still expected, guarded by counters.mu. The
	// expectation is in counters.waiting until it has ended.
	left uint32
}

// Cancel ends the expectation and discards the immediates counted for it. Done is called with
// ErrCanceled, unless the expectation has already ended. Cancel reports whether this call ended
// the expectation. Before the caller reuses the number of a cancelled immediate, it must revoke
// the windows, so that no late write counts the immediate.
func (e *Expectation) Cancel() bool { return e.counters.finish(e, ErrCanceled) }

// DefaultEarlyImmediates is the number of unexpected immediates that are kept for each peer by
// default.
const DefaultEarlyImmediates = 4096

// ImmCounters counts immediates and calls the Done of expectations. It is the part of ExpectImm
// that does not depend on the provider. All methods may be called concurrently.
type ImmCounters struct {
	// earlyMax is the largest number of entries of early that one peer may cause.
	earlyMax int

	mu      sync.Mutex
	closed  bool
	waiting map[uint32]*Expectation
	// early holds the counts of immediates for which there was no expectation. Invariant: no
	// immediate is in both waiting and early.
	early map[uint32]earlyImm
	// earlyBy is the number of entries of early that each peer has caused.
	earlyBy map[EngineID]int

	counted, dropped uint64
}

// earlyImm is the count of an unexpected immediate, and the peer that sent the first one.
type earlyImm struct {
	count uint32
	from  EngineID
}

// NewImmCounters returns counters that keep up to earlyMax unexpected immediates for each peer; if
// earlyMax is 0, DefaultEarlyImmediates.
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

// Count counts imm once, for a write of the peer from whose payload has been placed.
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

// keepLocked keeps an unexpected immediate, unless the peer has reached earlyMax.
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

// forgetLocked discards the early count of imm.
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

// Expect begins an expectation. alive reports whether a peer has a session; nil means that every
// peer has one. If a peer in From has no session, the expectation ends at once, unless early
// immediates satisfy it.
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
	// The expectation is already registered, so the death of a peer after this check ends it.
	for _, id := range x.From {
		if alive != nil && !alive(id) {
			c.finish(e, fmt.Errorf("rdma: %v: %w", id, ErrPeerDied))
			break
		}
	}
	return e, nil
}

// takeLocked subtracts n from the number of arrivals of imm that no expectation has counted yet.
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

// finish ends e with err, unless e has already ended. It reports whether this call ended e.
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

// PeerDied ends every expectation that has the peer in From. The error wraps ErrPeerDied and
// contains why. PeerDied also discards the unexpected immediates that the peer caused.
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

// Close ends every expectation with ErrClosed. Later immediates are not counted.
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

// Stats returns the number of immediates that were counted. It also returns the number that were
// dropped because they were unexpected and the limit of kept immediates was reached.
func (c *ImmCounters) Stats() (counted, dropped uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counted, c.dropped
}

// end calls Done. The caller has removed e from waiting, so end runs only once.
func (e *Expectation) end(err error) {
	if e.expect.Done != nil {
		e.expect.Done(err)
	}
}
