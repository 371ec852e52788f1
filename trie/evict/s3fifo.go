package evict

// s3fifo inserts new nodes into a small queue, and moves a node to the main queue only if it was
// touched in the small queue. So a scan of blocks that are used once passes through the small queue
// and leaves the main queue as it is (Yang et al., FIFO queues are all you need for cache eviction,
// SOSP 2023).
type s3fifo struct {
	links
	touched touches
	ghost   ghost
	tuning  Tuning
}

var _ Policy = (*s3fifo)(nil)

// Kind implements Policy.
func (p *s3fifo) Kind() Kind { return S3FIFO }

// Insert implements Policy.
func (p *s3fifo) Insert(n Node, key uint64) {
	p.touched.grow(n)
	p.touched.clear(n)
	if p.ghost.take(key) {
		p.enter(n, mainQueue)
		return
	}
	p.enter(n, smallQueue)
}

// InsertCold implements Policy.
func (p *s3fifo) InsertCold(n Node) {
	p.touched.grow(n)
	p.touched.clear(n)
	p.enter(n, coldQueue)
}

// Demote implements Policy.
func (p *s3fifo) Demote(n Node) {
	if p.queueOf(n) == noQueue {
		return
	}
	p.touched.clear(n)
	p.demote(n)
}

// Touch implements Policy.
func (p *s3fifo) Touch(n Node) { p.touched.add(n) }

// Remove implements Policy.
func (p *s3fifo) Remove(n Node) { p.leave(n) }

// Victim implements Policy.
func (p *s3fifo) Victim(steps *int, evictable func(Node) bool) (Node, bool) {
	for n := p.tailOf(spareQueue, steps); n != 0; n = p.tailOf(spareQueue, steps) {
		switch {
		case p.touched.get(n) > 0: // it is in use again
			p.touched.clear(n)
			p.move(n, mainQueue)
		case evictable(n):
			return n, true
		default:
			p.park(n)
		}
	}
	if n, ok := p.victimOf(coldQueue, steps, evictable); ok {
		return n, true
	}
	for {
		q := p.next()
		n := p.tailOf(q, steps)
		switch {
		case n == 0:
			return 0, false
		case q == smallQueue && p.touched.get(n) >= p.tuning.PromoteTouches:
			p.touched.clear(n)
			p.move(n, mainQueue)
		case q == mainQueue && p.touched.take(n):
			p.move(n, mainQueue)
		case !evictable(n):
			p.park(n)
		default:
			return n, true
		}
	}
}

// next chooses the queue to evict from: the small queue while it holds more than its share of the
// nodes, otherwise the main queue. If all nodes of that queue are parked, next chooses the other
// queue.
func (p *s3fifo) next() queueID {
	small, main := &p.queues[smallQueue], &p.queues[mainQueue]
	overShare := small.held*100 > p.tuning.SmallPercent*p.total
	if main.tail == 0 || overShare && small.tail != 0 {
		return smallQueue
	}
	return mainQueue
}

// Evicted implements Policy. It remembers only content evicted from the small queue. A node of the
// main queue has been touched before, so its eviction does not show that the small queue is too
// short.
func (p *s3fifo) Evicted(n Node, key uint64) {
	if p.queueOf(n) == smallQueue {
		p.ghost.add(key, p.total*p.tuning.GhostPercent/100)
	}
	p.leave(n)
}

// Heat implements Policy. A node of the main queue has been touched in the small queue, or soon after
// its eviction from there.
func (p *s3fifo) Heat(n Node) int {
	if p.queueOf(n) == mainQueue {
		return p.touched.get(n) + 1
	}
	return p.touched.get(n)
}

// Cool implements Policy.
func (p *s3fifo) Cool(n Node) bool { return p.touched.take(n) }

// Bytes implements Policy.
func (p *s3fifo) Bytes() int64 { return p.links.bytes() + p.touched.bytes() + p.ghost.bytes() }
