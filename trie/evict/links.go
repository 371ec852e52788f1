package evict

import "reflect"

// A chunked array consists of chunks of chunkLen elements instead of one growing slice. So growing
// copies nothing, no insert stalls, and less than one chunk is unused.
const (
	chunkBits = 13
	chunkLen  = 1 << chunkBits
	chunkMask = chunkLen - 1
)

// chunked is an array that grows at its end without moving.
type chunked[T any] struct {
	chunks []*[chunkLen]T
}

func (c *chunked[T]) at(i uint32) *T { return &c.chunks[i>>chunkBits][i&chunkMask] }

// has reports whether at(i) may be called.
func (c *chunked[T]) has(i uint32) bool { return int(i>>chunkBits) < len(c.chunks) }

func (c *chunked[T]) grow(i uint32) {
	for !c.has(i) {
		c.chunks = append(c.chunks, new([chunkLen]T))
	}
}

func (c *chunked[T]) bytes() int64 {
	return int64(len(c.chunks)) * (chunkLen*int64(reflect.TypeFor[T]().Size()) + 8)
}

// queueID is the queue of a node. If the parked bit is set, the node is not linked in that queue
// and waits for Unpark.
type queueID uint8

const (
	noQueue    queueID = iota
	spareQueue         // of demoted nodes
	coldQueue
	mainQueue
	smallQueue
	queueCount

	parkedBit queueID = 0x80
)

type link struct{ prev, next Node }

// queue is a doubly linked list. Nodes enter at the head and are evicted from
// the tail.
type queue struct {
	head, tail Node
	// held counts the nodes of this queue, parked nodes included.
	held int
}

// links holds the queues of one policy in shared arrays.
type links struct {
	link   chunked[link]
	in     chunked[queueID]
	queues [queueCount]queue
	total  int
}

func (l *links) grow(n Node) {
	l.link.grow(n)
	l.in.grow(n)
}

// queueOf returns the queue that n is in or, if n is parked, the queue that n came from.
func (l *links) queueOf(n Node) queueID {
	if !l.in.has(n) {
		return noQueue
	}
	return *l.in.at(n) &^ parkedBit
}

// Parked implements Policy.
func (l *links) Parked(n Node) bool { return l.in.has(n) && *l.in.at(n)&parkedBit != 0 }

// demote moves n to the queue of demoted nodes. A parked node stays parked.
func (l *links) demote(n Node) {
	if q := l.queueOf(n); q == noQueue || q == spareQueue {
		return
	}
	parked := l.Parked(n)
	l.move(n, spareQueue)
	if parked {
		l.park(n)
	}
}

// Len implements Policy.
func (l *links) Len() int { return l.total }

func (l *links) bytes() int64 { return l.link.bytes() + l.in.bytes() }

// enter adds a node that is in no queue at the head of q.
func (l *links) enter(n Node, q queueID) {
	l.grow(n)
	*l.in.at(n) = q
	l.queues[q].held++
	l.total++
	l.pushHead(n, q)
}

// leave removes n from its queue and ends its parking.
func (l *links) leave(n Node) {
	q := l.queueOf(n)
	if q == noQueue {
		return
	}
	if !l.Parked(n) {
		l.unlink(n, q)
	}
	*l.in.at(n) = noQueue
	l.queues[q].held--
	l.total--
}

// move moves n to the head of q, also if n is parked.
func (l *links) move(n Node, q queueID) {
	l.leave(n)
	l.enter(n, q)
}

func (l *links) park(n Node) {
	l.unlink(n, l.queueOf(n))
	*l.in.at(n) |= parkedBit
}

// Unpark implements Policy.
func (l *links) Unpark(n Node) {
	if !l.Parked(n) {
		return
	}
	q := l.queueOf(n)
	*l.in.at(n) = q
	l.pushTail(n, q)
}

func (l *links) pushHead(n Node, q queueID) {
	qu := &l.queues[q]
	*l.link.at(n) = link{next: qu.head}
	if qu.head != 0 {
		l.link.at(qu.head).prev = n
	} else {
		qu.tail = n
	}
	qu.head = n
}

func (l *links) pushTail(n Node, q queueID) {
	qu := &l.queues[q]
	*l.link.at(n) = link{prev: qu.tail}
	if qu.tail != 0 {
		l.link.at(qu.tail).next = n
	} else {
		qu.head = n
	}
	qu.tail = n
}

func (l *links) unlink(n Node, q queueID) {
	qu, at := &l.queues[q], *l.link.at(n)
	if at.prev != 0 {
		l.link.at(at.prev).next = at.next
	} else {
		qu.head = at.next
	}
	if at.next != 0 {
		l.link.at(at.next).prev = at.prev
	} else {
		qu.tail = at.prev
	}
}

// tailOf returns the node at the tail of q, and decrements *steps. It returns 0 if q has no linked node, or if
// *steps is 0 already.
func (l *links) tailOf(q queueID, steps *int) Node {
	if *steps <= 0 || l.queues[q].tail == 0 {
		return 0
	}
	*steps--
	return l.queues[q].tail
}

// victimOf returns the evictable node closest to the tail of q, and parks the nodes behind it.
func (l *links) victimOf(q queueID, steps *int, evictable func(Node) bool) (Node, bool) {
	for n := l.tailOf(q, steps); n != 0; n = l.tailOf(q, steps) {
		if evictable(n) {
			return n, true
		}
		l.park(n)
	}
	return 0, false
}
