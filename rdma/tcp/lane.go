package tcp

import "github.com/penstock-kv/penstock/rdma"

// queue holds frames, oldest first.
type queue struct {
	frames []frame
	head   int   // frames[:head] have been taken
	bytes  int64 // of frames[head:]
}

// push queues a frame.
func (q *queue) push(f frame) {
	q.frames = append(q.frames, f)
	q.bytes += f.bytes
}

// empty reports whether nothing is queued.
func (q *queue) empty() bool { return q.head == len(q.frames) }

// pop takes the oldest frame of a lane that is not empty.
func (q *queue) pop() frame {
	f := q.frames[q.head]
	q.frames[q.head] = frame{}
	q.head++
	q.bytes -= f.bytes
	if q.head == len(q.frames) {
		q.frames, q.head = q.frames[:0], 0
	} else if q.head >= 1024 && q.head >= len(q.frames)/2 {
		// A queue that is never empty must not grow for ever.
		n := copy(q.frames, q.frames[q.head:])
		clear(q.frames[n:])
		q.frames, q.head = q.frames[:n], 0
	}
	return f
}

// lane is the queue of one traffic class, and the connections that take from
// it, over all rails that are up. Connections take when they can write: a NIC
// that is twice as fast comes twice as often, and nothing waits behind a slow
// one but what it has taken. The session's mu guards it.
type lane struct {
	queue
	class rdma.Class
	conns []*conn
	// next is where to look for a parked connection first, so that small
	// operations rotate; woken counts those that were signalled and have not
	// looked yet.
	next, woken int
}

// share is how many bytes one connection takes at a time: so few that the others
// find something to do, so many that a system call is worth it.
func (l *lane) share() int64 {
	return min(batchBytes, max(shareBytes, l.bytes/int64(max(1, len(l.conns)))))
}

// wake signals parked connections, as many as there are shares queued.
func (l *lane) wake() {
	if l.empty() {
		return
	}
	want := int(l.bytes/l.share()) + 1
	for range l.conns {
		if l.woken >= want {
			return
		}
		c := l.conns[l.next%len(l.conns)]
		l.next = (l.next + 1) % len(l.conns)
		if c.parked {
			c.parked, c.woken = false, true
			l.woken++
			c.signal()
		}
	}
}

// add makes c take from the lane.
func (l *lane) add(c *conn) { l.conns = append(l.conns, c) }

// remove is the end of what add began.
func (l *lane) remove(c *conn) {
	for i, x := range l.conns {
		if x == c {
			l.conns = append(l.conns[:i], l.conns[i+1:]...)
			break
		}
	}
	l.looked(c)
}

// looked notes that c looks at the queue, or never will again.
func (l *lane) looked(c *conn) {
	if c.woken {
		c.woken = false
		l.woken--
	}
	c.parked = false
}
