package tcp

import (
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// read is the reader goroutine.
func (c *conn) read() {
	for {
		if err := c.readFrame(); err != nil {
			if why := c.readError(err); errors.Is(err, errFrame) {
				c.s.Fail(why) // the peer's stream cannot be trusted
			} else {
				c.s.drop(c.rail, c.generation, why)
			}
			return
		}
	}
}

// readError returns the reason why the stream ended.
func (c *conn) readError(err error) error {
	if errors.Is(err, errFrame) {
		c.s.e.core.MalformedFrames.Add(1)
		c.s.e.core.Log.Warn(sessions.LogMalformed, "data-plane peer sent a malformed frame; session closed", "peer", c.s.Peer.String(), "remote", c.nc.RemoteAddr(), "err", err)
	}
	if err == sessions.ErrPeerClosed {
		return fmt.Errorf("rdma: %v %w: %w", c.s.Peer, err, rdma.ErrPeerDied)
	}
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("rdma: %v closed the connection: %w", c.s.Peer, rdma.ErrPeerDied)
	}
	return fmt.Errorf("rdma: read from %v: %w: %w", c.s.Peer, rdma.ErrPeerDied, err)
}

// readFrame reads and handles one frame.
func (c *conn) readFrame() error {
	b, err := c.ahead(headerSize, c.r.exact)
	if c.r.start == c.r.end && (err == io.EOF || errors.Is(err, syscall.ECONNRESET)) {
		c.end()
		if e := c.awaitNormalEnd(); e != nil {
			err = e
		}
	}
	if err != nil {
		return err
	}
	var h header
	if err := h.decode(b); err != nil {
		return err
	}
	c.r.exact = h.length >= readAhead
	switch h.kind {
	case frameWrite:
		return c.readWrite(&h)
	case frameAck:
		return c.readAcks(&h)
	case frameMessage:
		return c.readMessage(&h)
	case frameDown:
		return c.s.peerTookDown(h.frames, h.piece)
	}
	return nil // a heartbeat has no content
}

// end records that the stream has ended between two frames.
func (c *conn) end() {
	s := c.s
	s.Mu.Lock()
	defer s.Mu.Unlock()
	c.rail.ends++
	for _, r := range s.rails {
		if r.state == railUp && r.ends < len(r.conns) {
			return
		}
	}
	select {
	case <-s.ended:
	default:
		close(s.ended)
	}
}

// Times for which awaitNormalEnd waits for the ends of the peer's other streams, after the first
// has ended. It waits normalEndWait on the last rail. If another rail continues, the frames of
// this rail are sent again over that rail, so the wait is only normalEndRailWait.
const (
	normalEndWait     = time.Second
	normalEndRailWait = 100 * time.Millisecond
)

// awaitNormalEnd returns sessions.ErrPeerClosed if the peer closed the session with no operation
// in flight, otherwise nil. The peer's last acks may still be in other connections, so
// awaitNormalEnd waits for the ends of these connections.
func (c *conn) awaitNormalEnd() error {
	s := c.s
	s.Mu.Lock()
	idle, wait := s.idleLocked(), normalEndWait
	if s.up > 1 {
		wait = normalEndRailWait
	}
	s.Mu.Unlock()
	if !idle {
		t := time.NewTimer(wait)
		defer t.Stop()
		select {
		case <-s.ended:
		case <-s.Dying:
		case <-c.gone:
		case <-t.C:
		}
	}
	if s.idle() {
		return sessions.ErrPeerClosed
	}
	return nil
}

// fill reads more into buf, up to limit. buf must have room.
func (c *conn) fill(limit int) error {
	n, err := c.nc.Read(c.r.buf[c.r.end:limit])
	if n > 0 {
		c.r.end += n
		c.rx.Add(1)
		return nil
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	return err
}

// ahead returns the next n bytes of the stream; n is at most readAhead. The bytes are valid until
// the next read. If exact is set, ahead does not read beyond these n bytes.
func (c *conn) ahead(n int, exact bool) ([]byte, error) {
	r := &c.r
	if r.start == r.end {
		r.start, r.end = 0, 0
	}
	if r.start+n > len(r.buf) {
		r.start, r.end = 0, copy(r.buf, r.buf[r.start:r.end])
	}
	limit := len(r.buf)
	if exact {
		limit = r.start + n
	}
	for r.end-r.start < n {
		if err := c.fill(limit); err != nil {
			return nil, err
		}
	}
	b := r.buf[r.start : r.start+n]
	r.start += n
	return b, nil
}

// place reads payload into the slices of into, none of which is empty. left is the number of
// payload bytes that are not in place yet. place returns the number of bytes that it has put in
// place; 0 without an error means that it has only filled the buffer. If few is set, one read
// system call into the slices reads at most landingBytes.
func (c *conn) place(into [][]byte, left uint64, few bool) (n uint64, err error) {
	r := &c.r
	if r.start < r.end {
		k := copy(into[0], r.buf[r.start:r.end])
		r.start += k
		return uint64(k), nil
	}
	r.start, r.end = 0, 0
	if left < directBytes || r.scatter == nil && len(into[0]) < directBytes {
		return 0, c.fill(len(r.buf))
	}
	k := 0
	if r.scatter == nil {
		k, err = c.nc.Read(into[0])
	} else if few && left > landingBytes {
		k, err = r.scatter.read(c.first(into))
		clear(r.few)
	} else {
		k, err = r.scatter.read(c.withNext(into))
	}
	if k <= 0 {
		return 0, err
	}
	c.rx.Add(1)
	n = min(uint64(k), left)
	r.end = int(uint64(k) - n)
	return n, nil
}

// withNext returns the destinations of one read system call. If into has more slices than one call
// takes, these are the first scatterRuns slices. Otherwise they are all slices of into and a buffer
// for the next frame's header and table; the next table is assumed to be as long as the current
// table.
func (c *conn) withNext(into [][]byte) [][]byte {
	r := &c.r
	if len(into) > scatterRuns {
		return into[:scatterRuns]
	}
	next := headerSize
	if len(r.spans) > 1 {
		next += len(r.spans) * runSize
	}
	// land has reserved capacity for one more element after into.
	return append(into, r.buf[:next])
}

// first returns the first landingBytes bytes of into, or fewer if one system call cannot take that
// many slices. into must have more than landingBytes bytes.
func (c *conn) first(into [][]byte) [][]byte {
	r := &c.r
	r.few = r.few[:0]
	for left := landingBytes; left > 0 && len(r.few) < scatterRuns; into = into[1:] {
		part := into[0][:min(len(into[0]), left)]
		r.few = append(r.few, part)
		left -= len(part)
	}
	return r.few
}

// advance returns the part of into after its first n bytes.
func advance(into [][]byte, n uint64) [][]byte {
	for len(into) > 0 && n >= uint64(len(into[0])) {
		n -= uint64(len(into[0]))
		into = into[1:]
	}
	if n > 0 {
		into[0] = into[0][n:]
	}
	return into
}

// drain reads n bytes and drops them.
func (c *conn) drain(n uint64) error {
	c.s.e.core.DrainedBytesIn.Add(n)
	r := &c.r
	for n > 0 {
		if r.start == r.end {
			r.start, r.end = 0, 0
			if err := c.fill(int(min(n, uint64(len(r.buf))))); err != nil {
				return err
			}
		}
		k := min(n, uint64(r.end-r.start))
		r.start += int(k)
		n -= k
	}
	return nil
}

// readAcks ends the operations that the peer has acked, successful or refused.
func (c *conn) readAcks(h *header) error {
	b, err := c.ahead(int(h.length), false)
	if err != nil {
		return err
	}
	c.r.ended, err = c.s.acked(b, c.r.ended[:0])
	sessions.CallAll(c.r.ended)
	return err
}

// readMessage reads a message into a receive buffer, or refuses it.
func (c *conn) readMessage(h *header) error {
	fresh, err := c.s.arrive(h)
	if err != nil {
		return err
	}
	if !fresh {
		return c.repeated(h)
	}
	msg, reason, err := c.receive(h)
	if err != nil {
		return err
	}
	// The ack is queued before delivery, because the receiver of the message may close the engine.
	complete, reason := c.s.landed(h, reason)
	if !complete {
		if msg != nil {
			c.s.e.core.Inbox.Load().Give(msg)
		}
		return nil
	}
	if msg != nil {
		c.s.e.core.SendsIn.Add(1)
		c.s.e.core.Inbox.Load().Deliver(c.s.Peer, msg)
	}
	c.s.acknowledge(c, h, reason)
	return nil
}

// receive reads a message into a receive buffer. It returns nil if the message was refused.
func (c *conn) receive(h *header) ([]byte, rdma.Reason, error) {
	pool := c.s.e.core.Inbox.Load()
	if pool == nil {
		return nil, rdma.ReasonNoBuffer, c.refuse(h, rdma.ReasonNoBuffer, h.length)
	}
	if h.length > uint64(pool.Size()) {
		return nil, rdma.ReasonTooLarge, c.refuse(h, rdma.ReasonTooLarge, h.length)
	}
	buf := pool.Take()
	if buf == nil {
		return nil, rdma.ReasonNoBuffer, c.refuse(h, rdma.ReasonNoBuffer, h.length)
	}
	msg := buf[:h.length]
	for n := 0; n < len(msg); {
		b, err := c.ahead(min(len(msg)-n, directBytes), false)
		if err != nil {
			pool.Give(buf)
			return nil, 0, err
		}
		n += copy(msg[n:], b)
	}
	return msg, rdma.ReasonNone, nil
}
