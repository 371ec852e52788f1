// Package evict orders nodes for eviction: S3-FIFO, LRU and FIFO over node
// numbers, behind one interface.
//
// It is pure: no clock, no I/O, no goroutine, no lock. A node is only a number: the owner of the
// nodes decides which nodes are evictable.
//
// A cache of prefixes is evicted leaf first, so most nodes at the end of a queue are not evictable:
// they have children or a lease. Stepping over such nodes repeatedly would cost a scan per victim.
// They are parked instead: taken off their queue until the owner calls Unpark, after the last child
// or lease of the node is gone. Unpark puts the node first in line, because its turn had come
// before:
//
//	insert ─► [ small ]──touched──►[ main ]◄─┐ touched: once more round
//	             │  │                 │ │ └──┘
//	   untouched │  └─ has children ─┐│ │ untouched
//	             ▼                   ▼▼ ▼
//	          victim ─► ghost      parked     victim
//	             ▲                   │
//	             └──── Unpark ───────┘      (S3-FIFO; LRU and FIFO have one queue)
//
// Each step of Victim parks a node, spends one of its touches, or returns it,
// so the cost of a victim is constant when amortised.
//
// Cost: 9 B per node for links and queue, ¼ B for the touch counter, and for
// S3-FIFO up to 8 B per node of ghost fingerprints once eviction has begun.
package evict
