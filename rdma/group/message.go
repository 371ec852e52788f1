package group

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// A message on a NIC, little-endian:
//
//	kind 1 | zero 3 | imm 4 | seq 8 | low 8 | payload
//
// kind 1 is a message of Send, 2 an immediate without payload, 3 an empty write. The payload of
// kinds 2 and 3 is serial 4 | zero 4 | key 8 | address 8. low is the lowest seq for which the
// sender has no answer yet. The receiver keeps its answers to the messages from low on. So a
// message that is sent again gets the kept answer and is not delivered twice.
const (
	messageHeader = 24
	emptySize     = 24
	// slotSlack is the number of bytes by which a buffer is larger than MaxMessage.
	slotSlack = 32

	kindMessage = 1
	kindImm     = 2
	kindEmpty   = 3
)

// messageWindow is the largest number of messages of a session in flight. The seq of two messages
// in flight differ by less than sequenceWindow.
const (
	messageWindow  = 16
	sequenceWindow = 64
)

// slotBytes is the size of a buffer of one message.
func (e *Engine) slotBytes() int { return e.opts.MaxMessage + slotSlack }

// outbox holds the engine's send buffers for messages, registered with every NIC. A message stays
// in its buffer until the peer answers, so sending the message again needs no copy.
type outbox struct {
	region  *region
	freeMem func()
	size    int
	free    chan int
}

// newOutbox makes the outbox. The NICs must be open.
func (e *Engine) newOutbox() (*outbox, error) {
	n, size := e.opts.MessageBuffers, e.slotBytes()
	mem, free, err := e.opts.Alloc(n * size)
	if err != nil {
		return nil, fmt.Errorf("group: buffers of messages: %w", err)
	}
	r, err := e.Register(mem, rdma.RegisterOptions{Local: true})
	if err != nil {
		free()
		return nil, err
	}
	b := &outbox{region: r.(*region), freeMem: free, size: size, free: make(chan int, n)}
	for i := range n {
		b.free <- i
	}
	return b, nil
}

// take returns the index of a free buffer. If no buffer is free, take returns ErrBusy if noWait is
// set; otherwise it waits for a buffer until ctx or the session ends.
func (b *outbox) take(ctx context.Context, s *session, noWait bool) (int, error) {
	select {
	case i := <-b.free:
		return i, nil
	default:
	}
	if noWait {
		return 0, fmt.Errorf("rdma: all %d buffers of messages are in flight: %w", cap(b.free), rdma.ErrBusy)
	}
	select {
	case i := <-b.free:
		return i, nil
	case <-ctx.Done():
		return 0, fmt.Errorf("rdma: waiting for a buffer to %v: %w", s.Peer, ctx.Err())
	case <-s.Dying:
		s.Mu.Lock()
		defer s.Mu.Unlock()
		return 0, s.GoneLocked()
	}
}

// give frees a buffer.
func (b *outbox) give(i int) { b.free <- i }

// buffer returns the bytes of a buffer.
func (b *outbox) buffer(i int) []byte { return b.region.mem[i*b.size : (i+1)*b.size] }

// place returns the offset of a message in the region and its length.
func (b *outbox) place(o *op) (off, n uint64) {
	return uint64(o.slotIndex * b.size), uint64(o.size)
}

// encode writes the message into its buffer.
func (b *outbox) encode(o *op, kind byte, low uint64, payload []byte) {
	buf := b.buffer(o.slotIndex)
	imm, _ := o.Imm.Get()
	buf[0], buf[1], buf[2], buf[3] = kind, 0, 0, 0
	le.PutUint32(buf[4:], imm)
	le.PutUint64(buf[8:], o.seq)
	le.PutUint64(buf[16:], low)
	o.size = messageHeader + copy(buf[messageHeader:], payload)
}

// message is a decoded message. payload is a part of the buffer.
type message struct {
	kind     byte
	imm      uint32
	seq, low uint64
	payload  []byte
	// for kinds 2 and 3
	key  remoteKey
	addr uint64
}

// decodeMessage reads a message.
func decodeMessage(b []byte) (m message, _ error) {
	if len(b) < messageHeader || b[0] < kindMessage || b[0] > kindEmpty || b[1]|b[2]|b[3] != 0 {
		return m, fmt.Errorf("message of %d bytes, beginning with % x: %w", len(b), b[:min(len(b), 4)], errFrame)
	}
	m = message{kind: b[0], imm: le.Uint32(b[4:]), seq: le.Uint64(b[8:]), low: le.Uint64(b[16:]), payload: b[messageHeader:]}
	if m.low == 0 || m.seq < m.low || m.seq-m.low >= sequenceWindow || m.kind != kindImm && m.imm != 0 {
		return m, fmt.Errorf("message %d of kind %d, lowest %d, immediate %d: %w", m.seq, m.kind, m.low, m.imm, errFrame)
	}
	if m.kind == kindMessage {
		return m, nil
	}
	p := m.payload
	if len(p) != emptySize || le.Uint32(p[4:]) != 0 {
		return m, fmt.Errorf("empty write of %d bytes: %w", len(p), errFrame)
	}
	m.key, m.addr = remoteKey{le.Uint32(p), le.Uint64(p[8:])}, le.Uint64(p[16:])
	return m, nil
}

// send submits a message. fill encodes the message in the buffer of o.
func (s *session) send(ctx context.Context, o *op, noWait bool, fill func(o *op, low uint64)) error {
	i, err := s.e.outbox.take(ctx, s, noWait)
	if err != nil {
		s.Unreserve(o)
		return err
	}
	o.slotIndex = i
	var touched laneSet
	var out []sessions.Ended
	s.Mu.Lock()
	if err := s.BeginLocked(o, s.e.core.Ticks.Load()); err != nil {
		s.Mu.Unlock()
		s.e.outbox.give(i)
		o.slotIndex = -1
		s.Unreserve(o)
		return err
	}
	fill(o, s.low)
	o.left = 1
	out = s.placeLocked(job{op: o, hi: 1}, &touched, out)
	s.Mu.Unlock()
	touched.pump(s)
	sessions.CallAll(out)
	return nil
}

// takeAcks handles the peer's answers to messages.
func (s *session) takeAcks(b []byte) error {
	acks, err := decodeAcks(b, nil)
	if err != nil {
		return err
	}
	var touched laneSet
	var out []sessions.Ended
	s.Mu.Lock()
	for _, a := range acks {
		// A message that was sent twice may be answered twice.
		for _, o := range s.messages {
			if o.seq == a.seq && o.Submitted && !o.acked {
				o.acked, o.reason = true, a.reason
				out = s.advanceLocked(o, &touched, out)
				break
			}
		}
	}
	s.Mu.Unlock()
	touched.pump(s)
	sessions.CallAll(out)
	return nil
}

// finished handles a completed or refused Work.
func (s *session) finished(r record, c *Completion, serial uint32, out []sessions.Ended) []sessions.Ended {
	var touched laneSet
	o, status := r.op, c.Status
	s.Mu.Lock()
	switch {
	case o.kind == opMessage && status != StatusOK && !o.acked:
		// The peer had no free buffer, so the message is sent again after a pause.
		o.retries++
		s.resendLater(o, o.retries)
		s.Mu.Unlock()
		return out
	case o.kind == opMessage:
		o.left--
	default:
		o.left--
		// A delivered immediate means that all payload is in place, even if Works posted earlier
		// complete later or never.
		o.landed = o.landed || r.imm && status == StatusOK
		if status != StatusOK {
			x := o.Runs[r.run]
			key, _ := o.key(serial)
			s.refuseLocked(o, reasonQuery{op: o.ID(), serial: serial, key: key, addr: o.base + x.Dst, n: x.N}, c.Err)
			o.final = noRun
		}
	}
	out = s.advanceLocked(o, &touched, out)
	s.Mu.Unlock()
	touched.pump(s)
	return out
}

// resendPause is the first pause before a message is sent again because the receiver had no free
// buffer.
const resendPause = 200 * time.Microsecond

// resendLater sends a message again after a pause that grows with tries.
func (s *session) resendLater(o *op, tries int) {
	id := o.ID()
	time.AfterFunc(resendPause<<min(tries-1, 8), func() {
		var touched laneSet
		var out []sessions.Ended
		s.Mu.Lock()
		if s.Why == nil && s.byIDLocked(id) == o && o.left == 1 {
			if o.acked {
				o.left = 0
				out = s.advanceLocked(o, &touched, out)
			} else {
				out = s.placeLocked(job{op: o, hi: 1}, &touched, out)
			}
		}
		s.Mu.Unlock()
		touched.pump(s)
		sessions.CallAll(out)
	})
}

// skip counts the skipped runs as done, although they are not posted, and records the refusal of
// their operation.
func (s *session) skip(k skipped) {
	var touched laneSet
	s.Mu.Lock()
	k.op.left -= k.runs
	k.op.final = noRun
	s.refuseLocked(k.op, k.refusal, nil)
	out := s.advanceLocked(k.op, &touched, nil)
	s.Mu.Unlock()
	touched.pump(s)
	sessions.CallAll(out)
}

// inbound holds the answers to the peer's recent messages.
type inbound struct {
	mu   sync.Mutex
	low  uint64
	seen map[uint64]rdma.Reason
}

// received handles a message of the peer. b must not be used after received has returned, because
// the buffer is then posted again. Pollers call received.
func (s *session) received(b []byte) {
	m, err := decodeMessage(b)
	if err != nil {
		s.malformed(err)
		return
	}
	reason, fresh, err := s.admit(&m)
	if err != nil {
		s.malformed(err)
		return
	}
	if !fresh {
		return
	}
	switch {
	case reason != rdma.ReasonNone:
		s.refused(reason, m.addr, uint64(len(m.payload)))
	case m.kind == kindImm:
		s.counted(m.imm, 0)
	case m.kind == kindEmpty:
		s.e.core.WritesIn.Add(1)
	}
	// The answer is sent last, so that the sender's Done comes after the count.
	s.ctl.ack(ack{m.seq, reason})
}

// admit delivers a message of Send, or checks the key of an empty write. It returns the reason to
// refuse the message, or ReasonNone. If the message was received before, fresh is false, and admit
// sends the first answer again.
func (s *session) admit(m *message) (reason rdma.Reason, fresh bool, _ error) {
	r := &s.rx
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.seen == nil {
		r.seen = make(map[uint64]rdma.Reason)
	}
	if m.low > r.low {
		r.low = m.low
		for seq := range r.seen {
			if seq < r.low {
				delete(r.seen, seq)
			}
		}
	}
	if m.seq < r.low {
		return 0, false, nil // the sender has received the answer to the first copy
	}
	if m.seq-r.low >= sequenceWindow {
		return 0, false, fmt.Errorf("message %d while message %d is not answered: %w", m.seq, r.low, errFrame)
	}
	if reason, again := r.seen[m.seq]; again {
		s.ctl.ack(ack{m.seq, reason})
		return reason, false, nil
	}
	if m.kind == kindMessage {
		reason = s.deliver(m.payload)
	} else {
		reason = s.e.check(s.Peer, m.key, m.addr, 0)
	}
	r.seen[m.seq] = reason
	return reason, true, nil
}

// counted counts an immediate of the peer whose n bytes of payload are in place.
func (s *session) counted(imm uint32, n uint64) {
	s.e.core.WritesIn.Add(1)
	s.e.core.WriteBytesIn.Add(n)
	s.e.core.Imms.Count(s.Peer, imm)
}

// deliver copies a message into a receive buffer, or returns the reason why it cannot.
func (s *session) deliver(payload []byte) rdma.Reason {
	pool := s.e.core.Inbox.Load()
	if pool == nil {
		return rdma.ReasonNoBuffer
	}
	if len(payload) > pool.Size() {
		return rdma.ReasonTooLarge
	}
	buf := pool.Take()
	if buf == nil {
		return rdma.ReasonNoBuffer
	}
	s.e.core.SendsIn.Add(1)
	pool.Deliver(s.Peer, buf[:copy(buf, payload)])
	return rdma.ReasonNone
}
