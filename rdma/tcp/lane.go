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

// pop removes and returns the oldest frame. The queue must not be empty.
func (q *queue) pop() frame {
	f := q.frames[q.head]
	q.frames[q.head] = frame{}
	q.head++
	q.bytes -= f.bytes
	if q.head == len(q.frames) {
		q.frames, q.head = q.frames[:0], 0
	} else if q.head >= 1024 && q.head >= len(q.frames)/2 {
		// Without this copy, a queue that always holds a frame would grow without bound.
		n := copy(q.frames, q.frames[q.head:])
		clear(q.frames[n:])
		q.frames, q.head = q.frames[:n], 0
	}
	return f
}

// lane is the queue of one traffic class and the connections that take frames from it, over all
// rails that are up. A connection takes frames when it can write. So a NIC that is twice as fast
// takes twice as many frames, and a slow NIC delays only the frames that it has taken. Guarded by
// the session's mu.
type lane struct {
	queue
	class rdma.Class
	conns []*conn
	// next is the index at which the search for a parked connection starts, so that small
	// operations rotate over the connections. woken is the number of connections that were
	// signalled and have not looked at the queue yet.
	next, woken int
}

// share is the number of bytes that one connection takes at a time. It is small enough to leave
// frames for the other connections, and large enough to justify a system call.
func (l *lane) share() int64 {
	return min(batchBytes, max(shareBytes, l.bytes/int64(max(1, len(l.conns)))))
}

// wake signals parked connections, one for each l.share() bytes in the queue.
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

// add adds c to the connections that take frames from the lane.
func (l *lane) add(c *conn) { l.conns = append(l.conns, c) }

// remove undoes add.
func (l *lane) remove(c *conn) {
	for i, x := range l.conns {
		if x == c {
			l.conns = append(l.conns[:i], l.conns[i+1:]...)
			break
		}
	}
	l.looked(c)
}

// looked records that c has looked at the queue: c is neither parked nor counted as woken.
func (l *lane) looked(c *conn) {
	if c.woken {
		c.woken = false
		l.woken--
	}
	c.parked = false
}
