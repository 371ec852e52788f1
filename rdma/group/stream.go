package group

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// queuedMax is the largest number of bytes that may wait to be written on a control connection. If
// a peer reads too slowly, its session ends.
const queuedMax = 8 << 20

// stream is the control connection of a session. One goroutine writes queued frames, another
// reads frames.
type stream struct {
	nc net.Conn
	in *bufio.Reader
	// wake has an element while the writer has work.
	wake chan struct{}
	// rx and tx are the numbers of received and sent frames, for the watch goroutine.
	rx, tx atomic.Uint64

	mu           sync.Mutex
	queued       []byte
	acks         []ack
	heartbeatDue bool
	overflowed   bool // more than queuedMax was queued
	closed       bool
}

// newStream returns the control connection over nc.
func newStream(nc net.Conn) *stream {
	return &stream{nc: nc, in: bufio.NewReaderSize(nc, 16<<10), wake: make(chan struct{}, 1)}
}

// remoteAddr is the peer's address as the connection reports it.
func (c *stream) remoteAddr() string {
	if a := c.nc.RemoteAddr(); a != nil {
		return a.String()
	}
	return "unknown"
}

// close ends the connection.
func (c *stream) close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	_ = c.nc.Close()
}

// signal wakes up the writer.
func (c *stream) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// send queues the frame that add appends. It does not block and takes only the stream's lock.
func (c *stream) send(add func([]byte) []byte) {
	c.mu.Lock()
	if !c.closed && len(c.queued) < queuedMax {
		c.queued = add(c.queued)
	} else {
		c.overflowed = true
	}
	c.mu.Unlock()
	c.signal()
}

// ack queues the answer to a message.
func (c *stream) ack(a ack) {
	c.mu.Lock()
	if len(c.acks) < queuedMax/ackSize {
		c.acks = append(c.acks, a)
	} else {
		c.overflowed = true
	}
	c.mu.Unlock()
	c.signal()
}

// heartbeat queues a heartbeat.
func (c *stream) heartbeat() {
	c.mu.Lock()
	c.heartbeatDue = true
	c.mu.Unlock()
	c.signal()
}

// collect appends the queued frames, the queued acks and a heartbeat, if one is due, to b. It
// empties the queues.
func (c *stream) collect(b []byte) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.overflowed && !c.closed {
		return b, fmt.Errorf("more than %d bytes wait to be read by the peer: %w", queuedMax, rdma.ErrPeerDied)
	}
	b = append(b, c.queued...)
	c.queued = c.queued[:0]
	for acks := c.acks; len(acks) > 0; {
		n := min(len(acks), maxAcks)
		b = appendAcks(b, acks[:n])
		acks = acks[n:]
	}
	c.acks = c.acks[:0]
	if c.heartbeatDue {
		b = appendHeader(b, frameHeartbeat, 0)
		c.heartbeatDue = false
	}
	return b, nil
}

// write is the writer goroutine of a session.
func (s *session) write() {
	var b []byte
	for {
		var err error
		if b, err = s.ctl.collect(b[:0]); err == nil && len(b) > 0 {
			_, err = s.ctl.nc.Write(b)
			s.ctl.tx.Add(1)
		}
		if err != nil {
			s.Fail(fmt.Errorf("rdma: control connection to %v: %w: %w", s.Peer, rdma.ErrPeerDied, err))
			return
		}
		if len(b) > 0 {
			continue
		}
		select {
		case <-s.ctl.wake:
		case <-s.Dying:
			return
		}
	}
}

// readFrame reads a frame into buf. It may replace buf by a larger buffer, which it returns.
func (c *stream) readFrame(buf []byte) (kind frameKind, payload, _ []byte, _ error) {
	var h [frameHeader]byte
	if _, err := io.ReadFull(c.in, h[:]); err != nil {
		return 0, nil, buf, err
	}
	kind, n, err := decodeHeader(h[:])
	if err != nil {
		return 0, nil, buf, err
	}
	if cap(buf) < n {
		buf = make([]byte, n)
	}
	payload = buf[:n]
	if _, err := io.ReadFull(c.in, payload); err != nil {
		return 0, nil, buf, fmt.Errorf("in the middle of a frame: %w", err)
	}
	c.rx.Add(1)
	return kind, payload, buf, nil
}

// read is the reader goroutine of a session.
func (s *session) read() {
	var buf []byte
	for {
		kind, payload, next, err := s.ctl.readFrame(buf)
		buf = next
		if err == nil {
			err = s.take(kind, payload)
		}
		if err != nil {
			s.readFailed(err)
			return
		}
	}
}

// readFailed ends the session after an error of the reader.
func (s *session) readFailed(err error) {
	switch {
	case errors.Is(err, errFrame):
		s.malformed(err)
	case err == io.EOF && s.idle():
		s.Fail(fmt.Errorf("rdma: %v %w: %w", s.Peer, sessions.ErrPeerClosed, rdma.ErrPeerDied))
	case err == io.EOF:
		s.Fail(fmt.Errorf("rdma: %v closed the connection: %w", s.Peer, rdma.ErrPeerDied))
	default:
		s.Fail(fmt.Errorf("rdma: control connection to %v: %w: %w", s.Peer, rdma.ErrPeerDied, err))
	}
}

// malformed ends the session after an invalid frame.
func (s *session) malformed(err error) {
	s.e.core.MalformedFrames.Add(1)
	s.e.core.Log.Warn(sessions.LogMalformed, "data-plane peer sent a malformed frame; session closed", "peer", s.Peer.String(), "remote", s.Remote, "err", err)
	s.Fail(fmt.Errorf("rdma: %v: %w: %w", s.Peer, rdma.ErrPeerDied, err))
}

// laneOf returns a lane by its number.
func (s *session) laneOf(i uint16) (*lane, error) {
	if int(i) >= len(s.lanes) {
		return nil, fmt.Errorf("lane %d of %d: %w", i, len(s.lanes), errFrame)
	}
	return s.lanes[i], nil
}

// take handles one frame. It waits only for memory and locks.
func (s *session) take(kind frameKind, b []byte) error {
	switch kind {
	case frameHeartbeat:
		return wantSize("heartbeat", b, 0)
	case frameLaneAddr, frameLaneReady, frameLaneUp, frameLaneDown, frameCheckpoint, frameChecked:
		return s.takeLane(kind, b)
	case frameQuery:
		w, err := decodeQuery(b)
		if err == nil {
			s.explain(w)
		}
		return err
	case frameReason:
		a, err := decodeReason(b)
		if err == nil {
			s.takeReason(a)
		}
		return err
	case frameAck:
		return s.takeAcks(b)
	case frameWithdraw:
		w, err := decodeWithdraw(b)
		if err == nil {
			err = s.withdrawn.add(w)
		}
		if err == nil {
			s.confirm()
		}
		return err
	case frameWithdrawn, frameForget:
		id, err := decodeID(b)
		if err != nil {
			return err
		}
		if kind == frameWithdrawn {
			s.confirmed(id)
		} else {
			s.withdrawn.forget(id)
		}
		return nil
	}
	return fmt.Errorf("frame of type %d in a session: %w", kind, errFrame)
}

// takeLane handles a frame about a lane.
func (s *session) takeLane(kind frameKind, b []byte) error {
	if len(b) < 2 {
		return fmt.Errorf("frame of type %d with %d bytes: %w", kind, len(b), errFrame)
	}
	l, err := s.laneOf(le.Uint16(b))
	if err != nil {
		return err
	}
	switch kind {
	case frameLaneAddr:
		a, err := decodeLaneAddr(b)
		if err != nil {
			return err
		}
		return l.address(a)
	case frameLaneReady, frameLaneUp:
		r, err := decodeLaneReady(b)
		switch {
		case err != nil:
		case kind == frameLaneReady:
			l.ready(r)
		default:
			l.peerUp(r)
		}
		return err
	case frameLaneDown:
		d, err := decodeLaneDown(b)
		if err != nil {
			return err
		}
		return l.ended(d)
	}
	c, err := decodeCheckpoint(b)
	if err != nil {
		return err
	}
	if kind == frameCheckpoint {
		l.checkpoint(c)
	} else {
		l.checked(c)
	}
	return nil
}
