package evict

// fifo evicts in order of insertion and ignores hits. It is the baseline for the other policies.
type fifo struct {
	links
}

var _ Policy = (*fifo)(nil)

// Kind implements Policy.
func (p *fifo) Kind() Kind { return FIFO }

// Insert implements Policy.
func (p *fifo) Insert(n Node, _ uint64) { p.enter(n, mainQueue) }

// InsertCold implements Policy.
func (p *fifo) InsertCold(n Node) { p.enter(n, coldQueue) }

// Demote implements Policy.
func (p *fifo) Demote(n Node) { p.demote(n) }

// Touch implements Policy.
func (p *fifo) Touch(Node) {}

// Remove implements Policy.
func (p *fifo) Remove(n Node) { p.leave(n) }

// Victim implements Policy.
func (p *fifo) Victim(steps *int, evictable func(Node) bool) (Node, bool) {
	for _, q := range []queueID{spareQueue, coldQueue} {
		if n, ok := p.victimOf(q, steps, evictable); ok {
			return n, true
		}
	}
	return p.victimOf(mainQueue, steps, evictable)
}

// Evicted implements Policy.
func (p *fifo) Evicted(n Node, _ uint64) { p.leave(n) }

// Heat implements Policy.
func (p *fifo) Heat(Node) int { return 0 }

// Cool implements Policy.
func (p *fifo) Cool(Node) bool { return false }

// Bytes implements Policy.
func (p *fifo) Bytes() int64 { return p.links.bytes() }
