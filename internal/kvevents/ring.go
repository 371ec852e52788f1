package kvevents

import "sync"

// message is a published message.
type message struct {
	seq     uint64
	topic   string
	payload []byte
}

// bytes returns the size of the message, in bytes, for ring.bytes.
func (m message) bytes() int64 { return int64(len(m.topic) + len(m.payload)) }

// ring keeps the newest messages, and wakes readers that wait for more messages. The number and the
// bytes of the messages are limited. Publishing never waits for a reader.
type ring struct {
	mu  sync.Mutex
	buf []message
	// The ring holds the messages with the sequence numbers [oldest, next), which have bytes bytes.
	// Invariant: next-oldest ≤ len(buf), and bytes ≤ bytesMax unless the newest message alone has
	// more.
	oldest, next    uint64
	bytes, bytesMax int64
	more            chan struct{}
	closed          bool
}

func newRing(messages int, bytesMax int64) *ring {
	return &ring{buf: make([]message, messages), bytesMax: bytesMax, more: make(chan struct{})}
}

// publish numbers and stores a message and wakes the readers. The ring owns payload after the call.
// After close it stores nothing.
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

// close makes publish store nothing, and wakes the readers for the last time.
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
	// lost is the number of requested messages that are not kept any more.
	lost uint64
	// more is closed when there are more messages or the ring is closed. closed is set if the ring
	// was closed at the time of the read.
	more   <-chan struct{}
	closed bool
}

// read returns up to limit messages from the sequence number from on. If that message is not kept
// any more, it begins with the oldest message.
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
