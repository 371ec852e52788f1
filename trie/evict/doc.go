// Package evict orders nodes for eviction. It has the policies S3-FIFO, LRU and FIFO over node
// numbers, behind one interface.
//
// It is pure: no clock, no I/O, no goroutine, no lock. A node is only a number: the owner of the
// nodes decides which nodes are evictable.
//
// A cache of prefixes is evicted leaf first, so most nodes at the end of a queue are not evictable:
// they have children or a lease. Stepping over such nodes repeatedly would cost a scan per victim.
// Therefore Victim parks such a node: it unlinks the node from its queue. When the last child or
// lease of the node is gone, the owner calls Unpark. Unpark makes the node the next victim of its
// queue, because the node had reached the end of the queue before:
//
//	insert ─► [ small ]──touched──►[ main ]◄─┐ touched: once more round
//	             │  │                 │ │ └──┘
//	   untouched │  └─ has children ─┐│ │ untouched
//	             ▼                   ▼▼ ▼
//	          victim ─► ghost      parked     victim
//	             ▲                   │
//	             └──── Unpark ───────┘      (S3-FIFO; LRU and FIFO have one queue)
//
// Each step of Victim parks a node, removes one of its touches, or returns it, so the amortised
// cost of a victim is constant.
//
// Memory: 9 B per node for links and queue, ¼ B for the touch counter, and for S3-FIFO up to 8 B
// per node for fingerprints of evicted content (ghosts) once eviction has begun.
package evict
