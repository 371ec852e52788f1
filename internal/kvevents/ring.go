package kvevents

import "sync"

// message is a published message.
type message struct {
	seq     uint64
	topic   string
	payload []byte
}

// bytes returns the size of the message in the ring's accounting.
func (m message) bytes() int64 { return int64(len(m.topic) + len(m.payload)) }

// ring keeps the newest messages and wakes readers that wait for more. Their number and
// their bytes are bounded. Publishing never waits for a reader.
type ring struct {
	mu  sync.Mutex
	buf []message
	// The ring holds the messages [oldest, next).
	// Invariant: next-oldest ≤ len(buf); bytes ≤ bytesMax, unless the newest message
	// alone has more.
	oldest, next    uint64
	bytes, bytesMax int64
	more            chan struct{}
	closed          bool
}

func newRing(messages int, bytesMax int64) *ring {
	return &ring{buf: make([]message, messages), bytesMax: bytesMax, more: make(chan struct{})}
}

// publish numbers and stores a message and wakes the readers. The ring owns payload from
// then on. After close it stores nothing.
func (r *ring) publish(topic string, payload []byte) {
	m := message{topic: topic, payload: payload}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	n := uint64(len(r.buf))
	for r.oldest < r.next && (r.next-r.oldest == n || r.bytes+m.bytes() > r.bytesMax) {
		old := &r.buf[r.oldest%n]
		r.bytes -= old.bytes()
		*old = message{}
		r.oldest++
	}
	m.seq = r.next
	r.buf[r.next%n] = m
	r.bytes += m.bytes()
	r.next++
	close(r.more)
	r.more = make(chan struct{})
}

// close wakes the readers for the last time.
func (r *ring) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.closed = true
		close(r.more)
	}
}

// place returns the sequence number of the next message.
func (r *ring) place() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.next
}

// page is the result of one read of a ring.
type page struct {
	messages []message
	// lost is the number of requested messages that are no longer kept.
	lost uint64
	// more is closed when there are more messages or the ring is closed. closed is set if
	// the ring is closed.
	more   <-chan struct{}
	closed bool
}

// read returns up to limit messages from a position on. If the message at the position is
// no longer kept, it begins with the oldest.
func (r *ring) read(from uint64, limit int) page {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := page{more: r.more, closed: r.closed}
	if from < r.oldest {
		p.lost, from = r.oldest-from, r.oldest
	}
	for ; from < r.next && len(p.messages) < limit; from++ {
		p.messages = append(p.messages, r.buf[from%uint64(len(r.buf))])
	}
	return p
}
