package tcp

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// frame is a part of an operation, queued on a connection: runs[lo:hi], or the
// message.
type frame struct {
	op     *op
	lo, hi uint32
	bytes  int64
}

// Sizes of a connection's buffers and batches.
const (
	// readAhead is how much a reader takes at once when frames are small. A run
	// of directBytes or more is read into place, a smaller one is copied from
	// the read-ahead: below that a system call costs more than the copy.
	readAhead   = 32 << 10
	directBytes = 16 << 10
	// A batch, one writev, ends at batchFrames frames or with the frame that
	// brings it to batchBytes. The kernel takes at most 1024 vectors at once;
	// net.Buffers goes on after that.
	batchFrames = 64
	batchBytes  = 1 << 20
)

// conn is one connection of a session.
type conn struct {
	s     *session
	nc    net.Conn
	index int
	// queued is payload handed to push and not yet written, in bytes.
	queued atomic.Int64
	// rx and tx count progress, for the watch: reads and writes that moved
	// something.
	rx, tx atomic.Uint64
	// wake has an element while the writer has something to look at.
	wake chan struct{}
	watchState

	mu     sync.Mutex
	frames []frame
	head   int // frames[:head] have been taken
	acks   []ack
	beat   bool

	w writerState
	r readerState
}

// writerState belongs to the writer goroutine.
type writerState struct {
	batch []frame
	acks  []ack
	beat  bool
	meta  []byte      // headers, tables and acks of the batch
	vec   net.Buffers // the batch; out is vec while WriteTo consumes it
	out   net.Buffers
	ended []ended
}

// readerState belongs to the reader goroutine.
type readerState struct {
	buf        []byte
	start, end int // buf[start:end] is read ahead
	// exact keeps the next header's read from running into its payload: set
	// after a large frame, as another is likely.
	exact bool
	spans []span
	ended []ended
}

// newConn returns connection index of s.
func newConn(s *session, nc net.Conn, index int) *conn {
	return &conn{s: s, nc: nc, index: index, wake: make(chan struct{}, 1), r: readerState{buf: make([]byte, readAhead)}}
}

// signal wakes the writer.
func (c *conn) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// push queues a frame.
func (c *conn) push(f frame) {
	c.queued.Add(f.bytes)
	c.mu.Lock()
	c.frames = append(c.frames, f)
	c.mu.Unlock()
	c.signal()
}

// pushAck queues an ack.
func (c *conn) pushAck(a ack) {
	c.mu.Lock()
	c.acks = append(c.acks, a)
	c.mu.Unlock()
	c.signal()
}

// pushBeat queues a heartbeat.
func (c *conn) pushBeat() {
	c.mu.Lock()
	c.beat = true
	c.mu.Unlock()
	c.signal()
}

// interrupt makes a read that waits for bytes return; the caller holds the lock
// of a window that c is inside of.
func (c *conn) interrupt() { _ = c.nc.SetReadDeadline(time.Unix(1, 0)) }

// write is the writer goroutine: it turns what is queued into one writev after
// the other.
func (c *conn) write() {
	for {
		if !c.collect() {
			select {
			case <-c.wake:
				continue
			case <-c.s.dying:
				return
			}
		}
		c.encode()
		if err := c.flush(); err != nil {
			c.s.fail(fmt.Errorf("rdma: write to %v: %w: %w", c.s.peer, rdma.ErrPeerDied, err))
			return
		}
		c.settle()
	}
}

// flush writes the vectors of the batch.
func (c *conn) flush() error {
	if raceEnabled {
		for _, b := range c.w.vec {
			if _, err := c.nc.Write(b); err != nil {
				return err
			}
		}
		return nil
	}
	c.w.out = c.w.vec
	_, err := c.w.out.WriteTo(c.nc)
	return err
}

// collect moves the next batch from the queues to the writer's state; false if
// there is nothing.
func (c *conn) collect() bool {
	w := &c.w
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(len(c.acks), maxAcks)
	w.acks = append(w.acks[:0], c.acks[:n]...)
	c.acks = c.acks[:copy(c.acks, c.acks[n:])]
	w.beat, c.beat = c.beat, false
	w.batch = w.batch[:0]
	bytes := int64(0)
	for c.head < len(c.frames) && len(w.batch) < batchFrames && bytes < batchBytes {
		f := c.frames[c.head]
		c.frames[c.head] = frame{}
		c.head++
		w.batch = append(w.batch, f)
		bytes += f.bytes
	}
	if c.head == len(c.frames) {
		c.frames, c.head = c.frames[:0], 0
	} else if c.head >= 1024 {
		// A queue that is never empty must not grow for ever.
		c.frames, c.head = c.frames[:copy(c.frames, c.frames[c.head:])], 0
	}
	return len(w.batch) > 0 || n > 0 || w.beat
}

// encode lays the batch out as vectors: headers and tables in meta, payload
// where it is registered.
func (c *conn) encode() {
	w := &c.w
	size := headerSize + len(w.acks)*ackSize + headerSize
	for _, f := range w.batch {
		size += headerSize + int(f.hi-f.lo)*runSize
	}
	// All of meta at once: the vectors point into it.
	if cap(w.meta) < size {
		w.meta = make([]byte, size)
	}
	meta := w.meta[:size]
	w.vec = w.vec[:0]
	if len(w.acks) > 0 {
		meta = c.encodeAcks(meta)
	}
	if w.beat {
		h := header{kind: frameHeartbeat}
		h.encode(meta)
		meta = c.vector(meta, headerSize)
	}
	for _, f := range w.batch {
		meta = c.encodeFrame(meta, f)
	}
}

// vector makes the first n bytes of meta the next vector and returns the rest.
func (c *conn) vector(meta []byte, n int) []byte {
	c.w.vec = append(c.w.vec, meta[:n:n])
	return meta[n:]
}

// encodeAcks adds the ack frame.
func (c *conn) encodeAcks(meta []byte) []byte {
	n := len(c.w.acks) * ackSize
	h := header{kind: frameAck, length: uint64(n)}
	h.encode(meta)
	for i, a := range c.w.acks {
		a.put(meta[headerSize+i*ackSize:])
	}
	return c.vector(meta, headerSize+n)
}

// encodeFrame adds one frame.
func (c *conn) encodeFrame(meta []byte, f frame) []byte {
	o := f.op
	h := header{kind: o.kind, op: o.id(), length: uint64(f.bytes)}
	if o.kind == frameMessage {
		h.encode(meta)
		meta = c.vector(meta, headerSize)
		if len(o.msg) > 0 {
			c.w.vec = append(c.w.vec, o.msg)
		}
		return meta
	}
	h.key, h.frames = o.key, uint32(len(o.cuts))
	if v, ok := o.imm.Get(); ok {
		h.imm, h.flags = v, flagImm
	}
	runs := o.runs[f.lo:f.hi]
	n := headerSize
	if len(runs) == 1 {
		h.offset = runs[0].dst
	} else if len(runs) > 1 {
		h.runs = uint16(len(runs))
		for _, r := range runs {
			putSpan(meta[n:], span{r.dst, r.n})
			n += runSize
		}
		h.tableSum = crc32.Checksum(meta[headerSize:n], castagnoli)
	}
	h.encode(meta)
	meta = c.vector(meta, n)
	for _, r := range runs {
		c.w.vec = append(c.w.vec, o.mem[r.src:r.src+r.n])
	}
	return meta
}

// settle gives up the batch that was written.
func (c *conn) settle() {
	w := &c.w
	c.tx.Add(1)
	for _, f := range w.batch {
		c.queued.Add(-f.bytes)
	}
	clear(w.vec)
	w.ended = c.s.wrote(w.batch, len(w.acks), w.ended[:0])
	clear(w.batch)
	callAll(w.ended)
}

// callAll runs the callbacks and forgets them.
func callAll(out []ended) {
	for i := range out {
		out[i].call()
		out[i] = ended{}
	}
}

// read is the reader goroutine.
func (c *conn) read() {
	for {
		if err := c.readFrame(); err != nil {
			c.s.fail(c.readError(err))
			return
		}
	}
}

// errHungUp is how a session ends whose peer is through with it.
var errHungUp = errors.New("hung up, and nothing was in flight")

// readError says what the end of the stream means.
func (c *conn) readError(err error) error {
	if errors.Is(err, errFrame) {
		c.s.e.stats.malformedFrames.Add(1)
		c.s.e.log.warn(logMalformed, "data-plane peer sent a malformed frame; session closed", "peer", c.s.peer.String(), "remote", c.nc.RemoteAddr(), "err", err)
	}
	if err == errHungUp {
		return fmt.Errorf("rdma: %v %w: %w", c.s.peer, err, rdma.ErrPeerDied)
	}
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("rdma: %v closed the connection: %w", c.s.peer, rdma.ErrPeerDied)
	}
	return fmt.Errorf("rdma: read from %v: %w: %w", c.s.peer, rdma.ErrPeerDied, err)
}

// readFrame reads and performs one frame.
func (c *conn) readFrame() error {
	b, err := c.ahead(headerSize, c.r.exact)
	if err == io.EOF && c.r.start == c.r.end && c.s.idle() {
		return errHungUp
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
	}
	return nil // a heartbeat: that it came is all it says
}

// fill reads more into buf, which must have room; limit bounds how far.
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

// ahead returns the next n bytes of the stream, at most readAhead; they are
// valid until the next read. With exact nothing beyond them is read.
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

// place reads exactly len(dst) bytes into dst, in place if they are many. It
// stops early, with the number of bytes read, when w is revoked.
func (c *conn) place(w *window, dst []byte) (n int, revoked bool, err error) {
	r := &c.r
	for n < len(dst) {
		if w.revoked.Load() {
			return n, true, nil
		}
		if r.start < r.end {
			k := copy(dst[n:], r.buf[r.start:r.end])
			r.start += k
			n += k
			continue
		}
		if len(dst)-n < directBytes {
			r.start, r.end = 0, 0
			err = c.fill(len(r.buf))
		} else {
			var k int
			k, err = c.nc.Read(dst[n:])
			if k > 0 {
				n += k
				c.rx.Add(1)
				err = nil
			}
		}
		if err != nil {
			if w.revoked.Load() && errors.Is(err, os.ErrDeadlineExceeded) {
				return n, true, nil
			}
			return n, false, err
		}
	}
	return n, false, nil
}

// drain reads n bytes and drops them.
func (c *conn) drain(n uint64) error {
	c.s.e.stats.drainedBytesIn.Add(n)
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

// readWrite performs one frame of a write of the peer.
func (c *conn) readWrite(h *header) error {
	c.r.spans = c.r.spans[:0]
	if h.runs > 0 {
		table, err := c.ahead(int(h.runs)*runSize, false)
		if err != nil {
			return err
		}
		if c.r.spans, err = h.decodeTable(table, c.r.spans); err != nil {
			return err
		}
	} else {
		c.r.spans = append(c.r.spans, span{h.offset, h.length})
	}
	w, reason := c.admit(h)
	if w == nil {
		return c.refuseWrite(h, reason, h.length)
	}
	left, err := c.land(w, h.length)
	if w.revoked.Load() {
		reason = rdma.ReasonRevoked
	}
	if err == nil && reason == rdma.ReasonNone {
		// Inside the window still: after Revoke has returned, no write of the
		// window may be counted either.
		err = c.conclude(h, reason)
	}
	if e := c.exit(w); err == nil {
		err = e
	}
	if err != nil || reason == rdma.ReasonNone {
		return err
	}
	return c.refuseWrite(h, reason, left)
}

// admit enters the window that h names, or says why not.
func (c *conn) admit(h *header) (*window, rdma.Reason) {
	w := c.s.e.lookup(h.key)
	if w == nil {
		return nil, rdma.ReasonKey
	}
	size := uint64(len(w.mem))
	for _, s := range c.r.spans {
		if s.offset > size || s.length > size-s.offset {
			return nil, rdma.ReasonBounds
		}
	}
	if !w.enter(c) {
		return nil, rdma.ReasonKey
	}
	return w, rdma.ReasonNone
}

// land reads the payload of a frame, n bytes, into the window, and returns how
// many are left: more than none if the window was revoked meanwhile.
func (c *conn) land(w *window, n uint64) (left uint64, err error) {
	left = n
	for _, s := range c.r.spans {
		placed, revoked, err := c.place(w, w.mem[s.offset:s.offset+s.length])
		left -= uint64(placed)
		if revoked || err != nil {
			return left, err
		}
	}
	c.s.e.stats.writeBytesIn.Add(n)
	return 0, nil
}

// exit leaves w and undoes what its Revoke may have done to this connection's
// reads.
func (c *conn) exit(w *window) error {
	w.leave(c)
	if !w.revoked.Load() {
		return nil
	}
	// c is inside no window now, so that nobody else interrupts it.
	return c.nc.SetReadDeadline(time.Time{})
}

// refuseWrite drops the rest of a frame's payload and accounts for the frame.
func (c *conn) refuseWrite(h *header, reason rdma.Reason, left uint64) error {
	if err := c.refuse(h, reason, left); err != nil {
		return err
	}
	return c.conclude(h, reason)
}

// conclude accounts for a frame; the last one of an operation is counted and
// acked.
func (c *conn) conclude(h *header, reason rdma.Reason) error {
	complete, reason, err := c.s.landed(h, reason)
	if err != nil || !complete {
		return err
	}
	if reason == rdma.ReasonNone {
		c.s.e.stats.writesIn.Add(1)
		if h.flags&flagImm != 0 {
			c.s.e.imms.Count(c.s.peer, h.imm)
		}
	}
	c.pushAck(ack{h.op, reason})
	return nil
}

// refuse counts and logs a refused frame and drops what is left of its payload.
func (c *conn) refuse(h *header, reason rdma.Reason, left uint64) error {
	e := c.s.e
	e.stats.refusedIn[reason].Add(1)
	e.log.warn(logRefused, "data-plane operation refused", "peer", c.s.peer.String(), "remote", c.nc.RemoteAddr(), "reason", reason.String(), "offset", h.offset, "length", h.length)
	return c.drain(left)
}

// readAcks ends the operations that the peer says have landed or were refused.
func (c *conn) readAcks(h *header) error {
	b, err := c.ahead(int(h.length), false)
	if err != nil {
		return err
	}
	c.r.ended, err = c.s.acked(b, c.r.ended[:0])
	callAll(c.r.ended)
	return err
}

// readMessage takes a message into a receive buffer, or refuses it.
func (c *conn) readMessage(h *header) error {
	reason, err := c.receive(h)
	if err != nil {
		return err
	}
	if err := c.s.owe(); err != nil {
		return err
	}
	c.pushAck(ack{h.op, reason})
	return nil
}

// receive reads a message into a receive buffer and hands it on.
func (c *conn) receive(h *header) (rdma.Reason, error) {
	pool := c.s.e.inbox.Load()
	if pool == nil {
		return rdma.ReasonNoBuffer, c.refuse(h, rdma.ReasonNoBuffer, h.length)
	}
	if h.length > uint64(pool.size) {
		return rdma.ReasonTooLarge, c.refuse(h, rdma.ReasonTooLarge, h.length)
	}
	buf := pool.take()
	if buf == nil {
		return rdma.ReasonNoBuffer, c.refuse(h, rdma.ReasonNoBuffer, h.length)
	}
	msg := buf[:h.length]
	for n := 0; n < len(msg); {
		b, err := c.ahead(min(len(msg)-n, directBytes), false)
		if err != nil {
			pool.give(buf)
			return 0, err
		}
		n += copy(msg[n:], b)
	}
	c.s.e.stats.sendsIn.Add(1)
	pool.deliver(c.s.peer, msg)
	return rdma.ReasonNone, nil
}
