package tcp

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// readWrite handles one frame of a write that the peer submitted.
func (c *conn) readWrite(h *header) error {
	c.r.spans = c.r.spans[:0]
	if h.runs > 0 {
		table, err := c.ahead(int(h.runs)*runSize, c.r.exact)
		if err != nil {
			return err
		}
		if c.r.spans, err = h.decodeTable(table, c.r.spans); err != nil {
			return err
		}
	} else {
		c.r.spans = append(c.r.spans, span{h.offset, h.length})
	}
	fresh, err := c.s.arrive(h)
	if err != nil {
		return err
	}
	if !fresh {
		return c.repeated(h)
	}
	w, reason := c.admit(h)
	if w == nil {
		return c.refuseWrite(h, reason, h.length)
	}
	left, err := c.land(w, h.length)
	if err == nil && left == 0 && c.mayBeSpliced() && c.r.resets.seen() {
		// The peer has returned the source to its owner, perhaps before all of the source was
		// copied.
		err = errResetBehind
	}
	if w.revoked.Load() {
		reason = rdma.ReasonRevoked
	}
	if err == nil && reason == rdma.ReasonNone {
		// conclude is called before exit, because no write to the window may be counted after
		// Revoke has returned, and Revoke waits for exit.
		c.conclude(h, reason)
	}
	if e := c.exit(w); err == nil {
		err = e
	}
	if err != nil || reason == rdma.ReasonNone {
		return err
	}
	return c.refuseWrite(h, reason, left)
}

// errResetBehind ends a connection whose last frame arrived completely but may contain other bytes
// than the sender wrote.
var errResetBehind = fmt.Errorf("the peer reset the connection while writing: %w", syscall.ECONNRESET)

// mayBeSpliced reports whether the peer may have sent a part of the last frame by splice(2): it
// does so for each contiguous span of at least spliceBytes, and the spans of the target are those of
// the sender.
func (c *conn) mayBeSpliced() bool {
	for _, s := range c.r.spans {
		if s.length >= spliceBytes {
			return true
		}
	}
	return false
}

// repeated drops the payload of a piece that has already arrived.
func (c *conn) repeated(h *header) error {
	c.s.e.framesRepeated.Add(1)
	return c.drain(h.length)
}

// admit finds the window with h's key and adds the connection to window.inside. If the write is
// refused, admit returns nil and the reason.
func (c *conn) admit(h *header) (*window, rdma.Reason) {
	w := c.s.e.lookup(h.key)
	if w == nil || !w.admits(c.s.Peer) {
		return nil, rdma.ReasonKey
	}
	size := uint64(len(w.mem))
	for _, s := range c.r.spans {
		if s.offset > size || s.length > size-s.offset || w.spans != nil && !rdma.HoldSpan(w.spans, s.offset, s.length) {
			return nil, rdma.ReasonBounds
		}
	}
	if !w.enter(c) {
		return nil, rdma.ReasonKey
	}
	return w, rdma.ReasonNone
}

// land reads the payload of a frame, n bytes, into the window. If the window was revoked in the
// meantime, left is the number of bytes that have not been read.
func (c *conn) land(w *window, n uint64) (left uint64, err error) {
	r := &c.r
	for _, s := range r.spans {
		if s.length > 0 {
			r.into = append(r.into, w.mem[s.offset:s.offset+s.length])
		}
	}
	r.into = append(r.into, nil)[:len(r.into)]
	into := r.into
	defer func() {
		clear(r.into)
		r.into = r.into[:0]
	}()
	rest := r.spans
	var restAt uint64 // the offset in rest[0]
	for left = n; left > 0; {
		if w.revoked.Load() {
			return left, nil
		}
		k, err := c.place(into, left, w.landed != nil)
		left -= k
		if w.landed != nil {
			rest, restAt = notifyLanded(w.landed, rest, restAt, k)
		}
		into = advance(into, k)
		if err != nil {
			if w.revoked.Load() && errors.Is(err, os.ErrDeadlineExceeded) {
				err = nil
			}
			return left, err
		}
	}
	c.s.e.core.WriteBytesIn.Add(n)
	c.nic.bytesIn.Add(n)
	return 0, nil
}

// notifyLanded calls landed for the n bytes that were just read into the runs in rest. The first at
// bytes of rest[0] were read before. It returns the runs that are not complete and the number of
// bytes read into the first of them.
func notifyLanded(landed func(off, n uint64), rest []span, at, n uint64) ([]span, uint64) {
	for n > 0 {
		k := min(n, rest[0].length-at)
		if k > 0 {
			landed(rest[0].offset+at, k)
		}
		if n, at = n-k, at+k; at == rest[0].length {
			rest, at = rest[1:], 0
		}
	}
	return rest, at
}

// exit leaves w (the connection is no longer inside it) and resets the read deadline that Revoke
// may have set.
func (c *conn) exit(w *window) error {
	w.leave(c)
	if !w.revoked.Load() {
		return nil
	}
	// c is inside no window, so no Revoke can set the deadline again.
	return c.nc.SetReadDeadline(time.Time{})
}

// refuseWrite drops the remaining payload of a frame and counts the frame as refused.
func (c *conn) refuseWrite(h *header, reason rdma.Reason, left uint64) error {
	if err := c.refuse(h, reason, left); err != nil {
		return err
	}
	c.conclude(h, reason)
	return nil
}

// conclude counts a frame. At the last frame of an operation it counts the operation and sends the
// ack.
func (c *conn) conclude(h *header, reason rdma.Reason) {
	complete, reason := c.s.landed(h, reason)
	if !complete {
		return
	}
	if reason == rdma.ReasonNone {
		c.s.e.core.WritesIn.Add(1)
		if h.flags&flagImm != 0 {
			c.s.e.core.Imms.Count(c.s.Peer, h.imm)
		}
	}
	c.s.acknowledge(c, h, reason)
}

// refuse counts and logs a refused frame and drops its remaining payload.
func (c *conn) refuse(h *header, reason rdma.Reason, left uint64) error {
	e := c.s.e
	e.core.RefusedIn[reason].Add(1)
	e.core.Log.Warn(sessions.LogRefused, "data-plane operation refused", "peer", c.s.Peer.String(), "remote", c.nc.RemoteAddr(), "reason", reason.String(), "offset", h.offset, "length", h.length)
	return c.drain(left)
}
