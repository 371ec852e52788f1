//go:build cgo && linux

package usrbio

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/posixio"
)

// triesMax is the maximum number of submissions of one part without progress.
const triesMax = 16

// op is the progress of one request.
type op struct {
	req *blockio.Request
	fd  int
	// left is the number of bytes whose outcome is not known, and moved the number of bytes that
	// were transferred.
	left, moved int64
	// err is the first error of a part.
	err error
}

// part is a part of a request that has a slot, at most SlotBytes.
type part struct {
	op *op
	// at is the start of the part in the request.
	at, len int64
	// moved is the number of bytes of the part that were transferred.
	moved int64
	// tries counts submissions since the last progress.
	tries int
}

// offset returns the start of the part in the file.
func (p *part) offset() int64 { return p.op.req.Offset + p.at }

// call is one Do. Only its goroutine uses it, except done.
type call struct {
	e   *engine
	ops []op
	// next and at are the request and the offset in it of the next part that has no slot. admitted
	// is set while the budget holds the bytes of this part.
	next     int
	at       int64
	admitted bool
	// held is the number of slots that the call has, and inFlight the number of these slots that were
	// submitted and not taken from done.
	held, inFlight int
	// ready has the slots to be submitted, for each ring, and readyBytes their bytes.
	ready      [2][]*slot
	readyBytes int64
	requests   []request
	// done receives the slots whose outcome is known. It has room for every slot of both rings.
	done chan *slot
}

func newCall(e *engine, batch []blockio.Request) *call {
	c := &call{e: e, ops: make([]op, len(batch)), done: make(chan *slot, len(e.read.slots)+len(e.write.slots))}
	for i := range batch {
		r := &batch[i]
		c.ops[i] = op{req: r, fd: r.File.(*posixio.File).FD(), left: r.Len()}
	}
	return c
}

// nextBytes returns the length of the next part.
func (c *call) nextBytes() int64 {
	return min(c.ops[c.next].req.Len()-c.at, int64(c.e.opts.SlotBytes))
}

// run performs the requests. It returns when each has its outcome and no slot is held.
//
// A call that holds slots does not wait for the budget or for another slot, because two such calls
// could wait for each other. It waits for its own completions only, which free its slots.
func (c *call) run() {
	for {
		for c.next < len(c.ops) && c.start(c.held == 0) {
			if c.readyBytes >= int64(c.e.opts.SlotBytes) {
				c.submit()
			}
		}
		c.submit()
		switch {
		case c.inFlight > 0:
			c.finish(<-c.done)
			c.finishDone()
		case c.held > 0:
			// The library had no room for the slots, although each slot has an entry.
			time.Sleep(100 * time.Microsecond)
		case c.next == len(c.ops):
			return
		}
	}
}

// finishDone takes the outcomes that are known.
func (c *call) finishDone() {
	for {
		select {
		case s := <-c.done:
			c.finish(s)
		default:
			return
		}
	}
}

// ring returns the ring of a request and its index in ready.
func (c *call) ring(r *blockio.Request) (*ring, int) {
	if r.Op == blockio.Write {
		return c.e.write, 1
	}
	return c.e.read, 0
}

// start gives the next part its bytes of the budget and a slot. It returns false if there is none
// and wait is not set.
func (c *call) start(wait bool) bool {
	o := &c.ops[c.next]
	n := c.nextBytes()
	if !c.admitted {
		if !c.e.budget.TryAcquire(n) {
			if !wait {
				return false
			}
			// This cannot fail, because the context never ends.
			_ = c.e.budget.Acquire(context.Background(), n)
		}
		c.admitted = true
	}
	r, way := c.ring(o.req)
	s := r.take(wait)
	if s == nil {
		err := r.failure()
		if err != nil {
			c.advance(n)
			c.end(part{op: o, len: n}, err)
		}
		return err != nil
	}
	s.call, s.part = c, part{op: o, at: c.at, len: n}
	if way == 1 {
		gather(s.mem[:n], o.req.Bufs, c.at)
	}
	c.advance(n)
	c.held++
	c.queue(s, way)
	return true
}

// advance makes the part after the next n bytes the next one.
func (c *call) advance(n int64) {
	c.admitted = false
	if c.at += n; c.at == c.ops[c.next].req.Len() {
		c.next, c.at = c.next+1, 0
	}
}

func (c *call) queue(s *slot, way int) {
	c.ready[way] = append(c.ready[way], s)
	c.readyBytes += s.part.len
}

// submit submits the ready slots. Those for which there is no room stay ready, a limited number of
// times.
func (c *call) submit() {
	c.readyBytes = 0
	for way, r := range [...]*ring{c.e.read, c.e.write} {
		slots := c.ready[way]
		if len(slots) == 0 {
			continue
		}
		if cap(c.requests) < len(slots) {
			c.requests = make([]request, 0, cap(slots))
		}
		c.inFlight += len(slots)
		for _, s := range slots {
			s.part.tries++
		}
		full := r.submit(slots, c.requests)
		c.ready[way] = slots[:0]
		for _, s := range full {
			c.inFlight--
			if s.part.tries >= triesMax {
				c.endSlot(s, unix.EAGAIN)
			} else {
				c.queue(s, way)
			}
		}
	}
}

// finish processes the outcome of one submission.
func (c *call) finish(s *slot) {
	c.inFlight--
	p := &s.part
	if s.err != nil {
		if p.tries < triesMax && passing(s.err) {
			c.again(s)
		} else {
			c.endSlot(s, s.err)
		}
		return
	}
	// A file that is open with O_DIRECT can be continued at a multiple of Align only, so the bytes
	// after that are moved again.
	moved := s.result &^ (blockio.Align - 1)
	var err error
	if moved == 0 && p.op.req.Op == blockio.Read {
		moved, err = readMount(s)
	}
	if moved > 0 {
		p.tries = 0
	}
	p.moved += moved
	switch {
	case err != nil:
		c.endSlot(s, err)
	case p.moved >= p.len:
		c.endSlot(s, nil)
	case p.tries >= triesMax:
		c.endSlot(s, io.ErrNoProgress)
	default:
		c.e.count.Resumed()
		c.again(s)
	}
}

// again submits a slot another time.
func (c *call) again(s *slot) {
	_, way := c.ring(s.part.op.req)
	c.queue(s, way)
}

// readMount reads the rest of a part through the mount. A ring ends a read at the end of the file
// and at a hole alike, and a hole is read as zeroes. The mount distinguishes the two.
func readMount(s *slot) (int64, error) {
	p := &s.part
	for {
		n, err := unix.Pread(p.op.fd, s.mem[p.moved:p.len], p.offset()+p.moved)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, err
		case n < blockio.Align:
			return 0, io.ErrUnexpectedEOF // another process truncated the file
		default:
			return int64(n) &^ (blockio.Align - 1), nil
		}
	}
}

// endSlot ends the part of a slot and returns the slot to its ring.
func (c *call) endSlot(s *slot, err error) {
	p := s.part
	r, _ := c.ring(p.op.req)
	if p.op.req.Op == blockio.Read {
		if err == nil {
			scatter(p.op.req.Bufs, p.at, s.mem[:p.len])
		} else if invariants.Enabled {
			mangle(p.op.req.Bufs, p.at, p.len) // a failed read leaves the buffer undefined
		}
	}
	c.held--
	if !s.lost {
		s.call, s.part, s.err = nil, part{}, nil
		r.free <- s.index
	}
	c.end(p, err)
}

// end adds the outcome of a part to its request, and sets the request's outcome after the last
// part. It returns the bytes of the part to the budget.
func (c *call) end(p part, err error) {
	o := p.op
	o.left -= p.len
	o.moved += p.moved
	if o.err == nil {
		o.err = err
	}
	c.e.budget.Release(p.len)
	if o.left > 0 {
		return
	}
	r := o.req
	r.Err = nil
	if err := o.err; err != nil {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			err = fmt.Errorf("%w (%w)", blockio.ErrNoSpace, err)
		}
		r.Err = fmt.Errorf("usrbio: %v of %d bytes at %d of %s, after %d: %w", r.Op, r.Len(), r.Offset, r.File.Name(), o.moved, err)
	}
}

// gather copies into to the bytes of bufs from the offset at on.
func gather(to []byte, bufs [][]byte, at int64) {
	each(bufs, at, int64(len(to)), func(b []byte) { to = to[copy(to, b):] })
}

// scatter copies from into bufs, from the offset at on.
func scatter(bufs [][]byte, at int64, from []byte) {
	each(bufs, at, int64(len(from)), func(b []byte) { from = from[copy(b, from):] })
}

func mangle(bufs [][]byte, at, n int64) { each(bufs, at, n, invariants.Mangle) }

// each calls f for the pieces of the n bytes of bufs from the offset at on.
func each(bufs [][]byte, at, n int64, f func([]byte)) {
	for _, b := range bufs {
		if at >= int64(len(b)) {
			at -= int64(len(b))
			continue
		}
		b = b[at:]
		at = 0
		if int64(len(b)) >= n {
			f(b[:n])
			return
		}
		n -= int64(len(b))
		f(b)
	}
}
