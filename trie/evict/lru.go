package evict

import "sync/atomic"

// lru evicts the node whose last touch is the oldest. Touch runs without exclusive access, so it
// only records the touch in a ring. The next method with exclusive access applies the recorded
// touches. If the ring overflows before that, the oldest touches are lost; they matter least for
// the order.
type lru struct {
	links
	touched touches
	ring    *[ringLen]atomic.Uint32
	noted   atomic.Uint64 // touches ever recorded
	applied uint64        // touches applied or lost
}

// ringLen exceeds the number of pieces in a match of maximum length.
const ringLen = 1 << 17

var _ Policy = (*lru)(nil)

func newLRU() *lru { return &lru{ring: new([ringLen]atomic.Uint32)} }

// Kind implements Policy.
func (p *lru) Kind() Kind { return LRU }

// Insert implements Policy.
func (p *lru) Insert(n Node, _ uint64) {
	p.apply()
	p.touched.grow(n)
	p.touched.clear(n)
	p.enter(n, mainQueue)
}

// InsertCold implements Policy.
func (p *lru) InsertCold(n Node) {
	p.apply()
	p.touched.grow(n)
	p.touched.clear(n)
	p.enter(n, coldQueue)
}

// Demote implements Policy.
func (p *lru) Demote(n Node) {
	if p.apply(); p.queueOf(n) == noQueue {
		return
	}
	p.touched.clear(n)
	p.demote(n)
}

// Touch implements Policy.
func (p *lru) Touch(n Node) {
	p.touched.add(n)
	p.ring[(p.noted.Add(1)-1)%ringLen].Store(n)
}

// apply moves every touched node to the head of the main queue, in the order of the touches. Every
// change of the queue calls apply first, so the ring never contains a removed node.
func (p *lru) apply() {
	noted := p.noted.Load()
	p.applied = max(p.applied, noted-min(noted, ringLen))
	for ; p.applied < noted; p.applied++ {
		n := p.ring[p.applied%ringLen].Load()
		if q := p.queueOf(n); q == mainQueue || q == spareQueue {
			p.move(n, mainQueue)
		}
	}
}

// Remove implements Policy.
func (p *lru) Remove(n Node) {
	p.apply()
	p.leave(n)
}

// Victim implements Policy.
func (p *lru) Victim(steps *int, evictable func(Node) bool) (Node, bool) {
	p.apply()
	for _, q := range []queueID{spareQueue, coldQueue} {
		if n, ok := p.victimOf(q, steps, evictable); ok {
			return n, true
		}
	}
	return p.victimOf(mainQueue, steps, evictable)
}

// Evicted implements Policy.
func (p *lru) Evicted(n Node, _ uint64) { p.Remove(n) }

// Heat implements Policy.
func (p *lru) Heat(n Node) int { return p.touched.get(n) }

// Cool implements Policy.
func (p *lru) Cool(n Node) bool { return p.touched.take(n) }

// Bytes implements Policy.
func (p *lru) Bytes() int64 { return p.links.bytes() + p.touched.bytes() + ringLen*4 }
