// Package evict orders nodes for eviction: S3-FIFO, LRU and FIFO over node
// numbers, behind one interface.
//
// It is pure: no clock, no I/O, no goroutine, no lock. It knows neither what a
// node is nor what it weighs; the owner of the nodes says which may go now.
//
// A cache of prefixes is evicted leaf first, so most of what a queue offers may
// not go yet: it has children or a lease. Stepping over such nodes again and
// again would cost a scan per victim. They are parked instead: taken off their
// queue until the owner calls Unpark because the last child or lease is gone.
// Then they stand first in line, since their turn had already come:
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
