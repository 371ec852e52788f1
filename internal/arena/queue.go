package arena

// waiter is one request that did not fit.
type waiter struct {
	pages uint32
	// buf is set before ready is closed.
	buf        Buffer
	ready      chan struct{}
	prev, next *waiter
}

// queue holds the waiters in order of arrival; the zero value is empty.
type queue struct {
	first, last *waiter
	n           int
}

func (q *queue) len() int      { return q.n }
func (q *queue) head() *waiter { return q.first }

// push appends a waiter for the given number of pages.
func (q *queue) push(pages uint32) *waiter {
	w := &waiter{pages: pages, ready: make(chan struct{}), prev: q.last}
	if q.last != nil {
		q.last.next = w
	} else {
		q.first = w
	}
	q.last = w
	q.n++
	return w
}

// remove removes w, which must be in the queue.
func (q *queue) remove(w *waiter) {
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		q.first = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		q.last = w.prev
	}
	w.prev, w.next = nil, nil
	q.n--
}
