package tcp

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// Sizes of a connection's buffers and batches.
const (
	// readAhead is how much a reader takes at once when frames are small. What is
	// left of a frame is read into place while that is directBytes or more, and
	// copied from the read-ahead below: there a system call costs more than the
	// copy.
	readAhead   = 32 << 10
	directBytes = 16 << 10
	// scatterRuns is into how many places of a frame one system call reads.
	scatterRuns = 256
	// landingBytes is how much one system call reads into a window whose owner is
	// told what lands: with what it was copied from it stays in a core's second
	// cache until it has been looked at.
	landingBytes = 128 << 10
	// spliceBytes is the smallest run that is spliced, with three system calls where a
	// copy has a share of one: pages of this size gain by it (docs/benchmarks.md).
	spliceBytes = 64 << 10
	// A batch, one writev, ends at batchFrames frames or with the frame that
	// brings it to batchBytes. The kernel takes at most 1024 vectors at once;
	// net.Buffers goes on after that.
	// A connection takes less, down to shareBytes, while others could use it.
	batchFrames = 64
	batchBytes  = 1 << 20
	shareBytes  = 64 << 10
)

// down says that nothing is left of a generation of a rail on our side.
type down struct{ rail, generation uint32 }

// conn is one connection of a rail, in one of its lanes.
type conn struct {
	s         *session
	nc        net.Conn
	nic       *nic // ours
	laneIndex int
	// rail, generation and lane are set by rail.attach.
	rail       *rail
	generation uint32
	lane       *lane
	// control: it takes nothing from its lane (rail.controlConn).
	control bool
	// rx and tx count progress, for the watch: reads and writes that moved
	// something.
	rx, tx atomic.Uint64
	// wake has an element while the writer has something to look at; gone is
	// closed when the rail is taken down.
	wake chan struct{}
	gone chan struct{}
	watchState

	// Guarded by the session's mu: parked is set while the writer waits and the
	// lane may wake it, woken while it has been woken by the lane and has not
	// looked. The rest waits to be written on this connection.
	parked, woken bool
	acks          []ack
	downs         []down
	beat          bool
	// latest is the timer that ends the waiting of acks; late says that it runs.
	latest *time.Timer
	late   bool

	w writerState
	r readerState
}

// writerState belongs to the writer goroutine.
type writerState struct {
	batch []frame
	acks  []ack
	downs []down
	beat  bool
	meta  []byte      // headers, tables and acks of the batch
	vec   net.Buffers // the batch; out is vec while WriteTo consumes it
	out   net.Buffers
	// large marks the runs among vec that may be spliced; runs counts them. splicer
	// is nil if none may.
	large   []bool
	runs    int
	splicer *splicer
	ended   []ended
}

// readerState belongs to the reader goroutine.
type readerState struct {
	buf        []byte
	start, end int // buf[start:end] is read ahead
	// exact keeps the next header's read from running into its payload: set
	// after a large frame, as another is likely.
	exact bool
	spans []span
	// into is where the payload of the frame goes that is landing; scatter, unless
	// nil, reads into several places at once.
	into    [][]byte
	few     [][]byte // the beginning of into, for one read
	scatter *scatter
	// resets is asked behind payload that the peer may have spliced.
	resets *resetProbe
	ended  []ended
}

// newConn returns a connection of s from one of our NICs, for the given lane.
func newConn(s *session, nc net.Conn, n *nic, lane int) *conn {
	c := &conn{
		s: s, nc: nc, nic: n, laneIndex: lane, wake: make(chan struct{}, 1), gone: make(chan struct{}),
		w: writerState{splicer: newSplicer(nc, s.e.pipes)},
		r: readerState{buf: make([]byte, readAhead), scatter: newScatter(nc), resets: newResetProbe(nc)},
	}
	c.latest = time.AfterFunc(ackWait, c.flushLate)
	c.latest.Stop()
	return c
}

// signal wakes the writer.
func (c *conn) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// interrupt makes a read that waits for bytes return; the caller holds the lock
// of a window that c is inside of.
func (c *conn) interrupt() { _ = c.nc.SetReadDeadline(time.Unix(1, 0)) }

// hangUp closes the connection. With unacked operations of ours, what its socket has not
// sent is dropped where it may refer to a source: the owner gets that back when they end.
func (c *conn) hangUp(unacked bool) {
	if unacked && c.w.splicer != nil {
		c.w.splicer.discard()
	}
	c.latest.Stop()
	_ = c.nc.Close()
}

// write is the writer goroutine: it turns what is queued into one writev after
// the other.
func (c *conn) write() {
	for {
		if !c.next() {
			select {
			case <-c.wake:
				continue
			case <-c.gone:
				return
			case <-c.s.dying:
				return
			}
		}
		c.encode()
		if post := c.s.e.opts.OnPost; post != nil && len(c.w.batch) > 0 {
			post()
		}
		if err := c.flush(); err != nil {
			c.settle()
			c.s.drop(c.rail, c.generation, c.writeError(err))
			return
		}
		c.tx.Add(1)
	}
}

// writeError says what it means that the peer takes nothing more.
func (c *conn) writeError(err error) error {
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		if err := c.hungUp(); err != nil {
			return c.readError(err)
		}
	}
	return fmt.Errorf("rdma: write to %v: %w: %w", c.s.peer, rdma.ErrPeerDied, err)
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
	w := &c.w
	if w.splicer != nil && w.runs > 0 {
		if ok, err := w.splicer.write(w.vec, w.large); ok {
			return err
		}
	}
	w.out = w.vec
	_, err := w.out.WriteTo(c.nc)
	return err
}

// next settles the batch that was written and takes the next; false if there is
// none, and the connection is parked then.
func (c *conn) next() bool {
	s, w := c.s, &c.w
	s.mu.Lock()
	w.ended = c.settleLocked(w.ended[:0])
	var some bool
	some, w.ended = c.takeLocked(w.ended)
	s.mu.Unlock()
	callAll(w.ended)
	return some
}

// settle gives up the batch of a connection that has failed.
func (c *conn) settle() {
	c.s.mu.Lock()
	c.w.ended = c.settleLocked(c.w.ended[:0])
	c.s.mu.Unlock()
	callAll(c.w.ended)
}

// settleLocked gives up the batch: the writer does not read from it any more.
func (c *conn) settleLocked(out []ended) []ended {
	s, w := c.s, &c.w
	s.acksOwed -= len(w.acks)
	w.acks = w.acks[:0]
	if s.acksOwed == 0 && s.parted != nil {
		close(s.parted)
		s.parted = nil
	}
	bytes := int64(0)
	for i, f := range w.batch {
		bytes += f.bytes
		f.op.unsent--
		out = s.settleOpLocked(f.op, out)
		w.batch[i] = frame{}
	}
	w.batch = w.batch[:0]
	clear(w.vec)
	c.nic.bytesOut.Add(uint64(bytes))
	return out
}

// takeLocked moves what is to be written next to the writer's state.
func (c *conn) takeLocked(out []ended) (some bool, _ []ended) {
	s, w, l := c.s, &c.w, c.lane
	l.looked(c)
	if c.rail.state != railUp || c.rail.generation != c.generation || s.why != nil {
		return false, out
	}
	n := min(len(c.acks), maxAcks)
	w.acks = append(w.acks[:0], c.acks[:n]...)
	c.acks = c.acks[:copy(c.acks, c.acks[n:])]
	// What is said of rails comes after the acks that may have been lost with
	// them, or the peer would send more than it has to.
	if w.downs = w.downs[:0]; len(c.acks) == 0 {
		w.downs = append(w.downs, c.downs...)
		c.downs = c.downs[:0]
	}
	w.beat, c.beat = c.beat, false
	bytes := int64(0)
	for c == s.messenger && !s.messages.empty() && len(w.batch) < batchFrames && bytes < batchBytes {
		bytes, out = c.takeFrameLocked(s.messages.pop(), bytes, out)
	}
	for share := l.share(); !c.control && !l.empty() && len(w.batch) < batchFrames && bytes < share; {
		bytes, out = c.takeFrameLocked(l.pop(), bytes, out)
	}
	l.wake()
	some = len(w.batch) > 0 || n > 0 || len(w.downs) > 0 || w.beat
	c.parked = !some
	return some, out
}

// takeFrameLocked adds a frame to the batch. One whose operation has been acked
// already, over another rail, is dropped.
func (c *conn) takeFrameLocked(f frame, bytes int64, out []ended) (int64, []ended) {
	if f.op.acked {
		f.op.unsent--
		return bytes, c.s.settleOpLocked(f.op, out)
	}
	f.op.via[f.piece] = uint8(c.rail.index)
	c.w.batch = append(c.w.batch, f)
	return bytes + f.bytes, out
}

// encode lays the batch out as vectors: headers and tables in meta, payload
// where it is registered.
func (c *conn) encode() {
	w := &c.w
	size := headerSize + len(w.acks)*ackSize + len(w.downs)*headerSize + headerSize
	for _, f := range w.batch {
		size += headerSize + len(f.op.piece(f.piece))*runSize
	}
	// All of meta at once: the vectors point into it.
	if cap(w.meta) < size {
		w.meta = make([]byte, size)
	}
	meta := w.meta[:size]
	w.vec, w.large, w.runs = w.vec[:0], w.large[:0], 0
	if len(w.acks) > 0 {
		meta = c.encodeAcks(meta)
	}
	for _, d := range w.downs {
		h := header{kind: frameDown, frames: d.rail, piece: d.generation}
		h.encode(meta)
		meta = c.vector(meta, headerSize)
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
	c.add(meta[:n:n], false)
	return meta[n:]
}

// add makes b the next vector; stays says that it is registered memory.
func (c *conn) add(b []byte, stays bool) {
	large := stays && len(b) >= spliceBytes
	if large {
		c.w.runs++
	}
	c.w.vec, c.w.large = append(c.w.vec, b), append(c.w.large, large)
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
		if o.patient {
			h.flags = flagPatient
		}
		h.encode(meta)
		meta = c.vector(meta, headerSize)
		if len(o.msg) > 0 {
			c.add(o.msg, false)
		}
		return meta
	}
	h.key, h.frames, h.piece = o.key, uint32(len(o.cuts)), f.piece
	if v, ok := o.imm.Get(); ok {
		h.imm, h.flags = v, flagImm
	}
	runs := o.piece(f.piece)
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
		c.add(o.mem[r.src:r.src+r.n], true)
	}
	return meta
}

// read is the reader goroutine.
func (c *conn) read() {
	for {
		if err := c.readFrame(); err != nil {
			if why := c.readError(err); errors.Is(err, errFrame) {
				c.s.fail(why) // nothing that this peer says can be trusted
			} else {
				c.s.drop(c.rail, c.generation, why)
			}
			return
		}
	}
}

// errHungUp is how a session ends whose peer is through with it.
var errHungUp = errors.New("hung up, and nothing was in flight")

// errDisconnected is how a session ends that this engine's caller ended.
var errDisconnected = errors.New("disconnected")

// readError says what the end of the stream means.
func (c *conn) readError(err error) error {
	if errors.Is(err, errFrame) {
		c.s.e.stats.MalformedFrames.Add(1)
		c.s.e.log.Warn(logMalformed, "data-plane peer sent a malformed frame; session closed", "peer", c.s.peer.String(), "remote", c.nc.RemoteAddr(), "err", err)
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
	if c.r.start == c.r.end && (err == io.EOF || errors.Is(err, syscall.ECONNRESET)) {
		c.end()
		if e := c.hungUp(); e != nil {
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
	return nil // a heartbeat: that it came is all it says
}

// end notes that the stream has ended between two frames.
func (c *conn) end() {
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
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

// How long the ends of the other streams of a peer whose first has ended are waited
// for: on the last rail, and where another goes on, over which what this one had is sent
// again.
const (
	hungUpWait     = time.Second
	hungUpRailWait = 100 * time.Millisecond
)

// hungUp returns errHungUp if the peer that is gone was through, or nil. Its last acks
// may lie in other connections still, so their ends are waited for.
func (c *conn) hungUp() error {
	s := c.s
	s.mu.Lock()
	idle, wait := s.idleLocked(), hungUpWait
	if s.up > 1 {
		wait = hungUpRailWait
	}
	s.mu.Unlock()
	if !idle {
		t := time.NewTimer(wait)
		defer t.Stop()
		select {
		case <-s.ended:
		case <-s.dying:
		case <-c.gone:
		case <-t.C:
		}
	}
	if s.idle() {
		return errHungUp
	}
	return nil
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

// place reads some of the left bytes of payload that go to into, whose parts are
// not empty, and returns how many are in place now: with few at most
// landingBytes.
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

// withNext returns what one system call may read into: as much of into as it
// takes, and, if that is all, a place for the next header and its table, which are
// likely to be as long as this one's.
func (c *conn) withNext(into [][]byte) [][]byte {
	r := &c.r
	if len(into) > scatterRuns {
		return into[:scatterRuns]
	}
	next := headerSize
	if len(r.spans) > 1 {
		next += len(r.spans) * runSize
	}
	// land left room for one more behind into.
	return append(into, r.buf[:next])
}

// first returns the first landingBytes of into, which has more, or of as many parts
// as one system call takes.
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

// advance returns what is left of into behind the first n bytes.
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
	c.s.e.stats.DrainedBytesIn.Add(n)
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
		// The peer has given the source up, perhaps before all of it was copied.
		err = errResetBehind
	}
	if w.revoked.Load() {
		reason = rdma.ReasonRevoked
	}
	if err == nil && reason == rdma.ReasonNone {
		// Inside the window still: after Revoke has returned, no write of the
		// window may be counted either.
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

// errResetBehind is the end of a connection whose last frame came whole, and may have
// other bytes than were written.
var errResetBehind = fmt.Errorf("the peer gave up what it was writing: %w", syscall.ECONNRESET)

// mayBeSpliced reports whether the peer may have spliced a run of the frame that has
// landed: its runs are as long here as they are there.
func (c *conn) mayBeSpliced() bool {
	for _, s := range c.r.spans {
		if s.length >= spliceBytes {
			return true
		}
	}
	return false
}

// repeated drops the payload of a piece that has come before.
func (c *conn) repeated(h *header) error {
	c.s.e.stats.framesRepeated.Add(1)
	return c.drain(h.length)
}

// admit enters the window that h names, or says why not.
func (c *conn) admit(h *header) (*window, rdma.Reason) {
	w := c.s.e.lookup(h.key)
	if w == nil || !w.admits(c.s.peer) {
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

// land reads the payload of a frame, n bytes, into the window, and returns how
// many are left: more than none if the window was revoked meanwhile.
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
	var restAt uint64 // into rest[0]
	for left = n; left > 0; {
		if w.revoked.Load() {
			return left, nil
		}
		k, err := c.place(into, left, w.landed != nil)
		left -= k
		if w.landed != nil {
			rest, restAt = tellLanded(w.landed, rest, restAt, k)
		}
		into = advance(into, k)
		if err != nil {
			if w.revoked.Load() && errors.Is(err, os.ErrDeadlineExceeded) {
				err = nil
			}
			return left, err
		}
	}
	c.s.e.stats.WriteBytesIn.Add(n)
	c.nic.bytesIn.Add(n)
	return 0, nil
}

// tellLanded tells landed of the first n bytes of rest, of which the first run has
// had at bytes before, and returns what is left.
func tellLanded(landed func(off, n uint64), rest []span, at, n uint64) ([]span, uint64) {
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
	c.conclude(h, reason)
	return nil
}

// conclude accounts for a frame; the last one of an operation is counted and
// acked.
func (c *conn) conclude(h *header, reason rdma.Reason) {
	complete, reason := c.s.landed(h, reason)
	if !complete {
		return
	}
	if reason == rdma.ReasonNone {
		c.s.e.stats.WritesIn.Add(1)
		if h.flags&flagImm != 0 {
			c.s.e.imms.Count(c.s.peer, h.imm)
		}
	}
	c.s.acknowledge(c, h, reason)
}

// refuse counts and logs a refused frame and drops what is left of its payload.
func (c *conn) refuse(h *header, reason rdma.Reason, left uint64) error {
	e := c.s.e
	e.stats.RefusedIn[reason].Add(1)
	e.log.Warn(logRefused, "data-plane operation refused", "peer", c.s.peer.String(), "remote", c.nc.RemoteAddr(), "reason", reason.String(), "offset", h.offset, "length", h.length)
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
	// The ack is owed before anybody sees the message: who has it may close the engine.
	complete, reason := c.s.landed(h, reason)
	if !complete {
		if msg != nil {
			c.s.e.inbox.Load().Give(msg)
		}
		return nil
	}
	if msg != nil {
		c.s.e.stats.SendsIn.Add(1)
		c.s.e.inbox.Load().Deliver(c.s.peer, msg)
	}
	c.s.acknowledge(c, h, reason)
	return nil
}

// receive reads a message into a receive buffer; it is nil if the message was refused.
func (c *conn) receive(h *header) ([]byte, rdma.Reason, error) {
	pool := c.s.e.inbox.Load()
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
