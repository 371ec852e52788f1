package tcp

import (
	"errors"
	"fmt"
	"hash/crc32"
	"syscall"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// write is the writer goroutine. It writes the queued frames in batches, each with one writev.
func (c *conn) write() {
	for {
		if !c.next() {
			select {
			case <-c.wake:
				continue
			case <-c.gone:
				return
			case <-c.s.Dying:
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

// writeError returns the reason for a failed write.
func (c *conn) writeError(err error) error {
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		if err := c.awaitNormalEnd(); err != nil {
			return c.readError(err)
		}
	}
	return fmt.Errorf("rdma: write to %v: %w: %w", c.s.Peer, rdma.ErrPeerDied, err)
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

// next releases the batch that was written and takes the next batch. If there is none, it parks
// the connection and returns false.
func (c *conn) next() bool {
	s, w := c.s, &c.w
	s.Mu.Lock()
	w.ended = c.settleLocked(w.ended[:0])
	var some bool
	some, w.ended = c.takeLocked(w.ended)
	s.Mu.Unlock()
	sessions.CallAll(w.ended)
	return some
}

// settle releases the batch of a connection that has failed.
func (c *conn) settle() {
	c.s.Mu.Lock()
	c.w.ended = c.settleLocked(c.w.ended[:0])
	c.s.Mu.Unlock()
	sessions.CallAll(c.w.ended)
}

// settleLocked releases the batch, from which the writer does not read any more.
func (c *conn) settleLocked(out []sessions.Ended) []sessions.Ended {
	s, w := c.s, &c.w
	s.acksOwed -= len(w.acks)
	if invariants.Enabled {
		invariants.Assert(s.acksOwed >= 0, "%d acks owed", s.acksOwed)
	}
	w.acks = w.acks[:0]
	if s.acksOwed == 0 && s.acksDrained != nil {
		close(s.acksDrained)
		s.acksDrained = nil
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

// takeLocked moves the next frames to the writer's state.
func (c *conn) takeLocked(out []sessions.Ended) (some bool, _ []sessions.Ended) {
	s, w, l := c.s, &c.w, c.lane
	l.looked(c)
	if c.rail.state != railUp || c.rail.generation != c.generation || s.Why != nil {
		return false, out
	}
	n := min(len(c.acks), maxAcks)
	w.acks = append(w.acks[:0], c.acks[:n]...)
	c.acks = c.acks[:copy(c.acks, c.acks[n:])]
	// Reports about rails are written after the acks that may have been lost with these rails, so
	// that the peer does not repeat acked operations.
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

// takeFrameLocked adds a frame to the batch. It drops the frame if its operation has already been
// acked over another rail.
func (c *conn) takeFrameLocked(f frame, bytes int64, out []sessions.Ended) (int64, []sessions.Ended) {
	if f.op.acked {
		f.op.unsent--
		return bytes, c.s.settleOpLocked(f.op, out)
	}
	f.op.via[f.piece] = uint8(c.rail.index)
	c.w.batch = append(c.w.batch, f)
	return bytes + f.bytes, out
}

// encode lays out the batch as vectors. Headers and tables are in meta, payload is in its
// registered memory.
func (c *conn) encode() {
	w := &c.w
	size := headerSize + len(w.acks)*ackSize + len(w.downs)*headerSize + headerSize
	for _, f := range w.batch {
		size += headerSize + len(f.op.piece(f.piece))*runSize
	}
	// Allocate all of meta first, because the vectors point into it.
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

// vector makes the first n bytes of meta the next vector and returns the remaining bytes.
func (c *conn) vector(meta []byte, n int) []byte {
	c.add(meta[:n:n], false)
	return meta[n:]
}

// add makes b the next vector. stays: b is registered memory.
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
	h := header{kind: o.kind, op: o.ID(), length: uint64(f.bytes)}
	if o.kind == frameMessage {
		if o.ackMayWait {
			h.flags = flagAckMayWait
		}
		h.encode(meta)
		meta = c.vector(meta, headerSize)
		if len(o.msg) > 0 {
			c.add(o.msg, false)
		}
		return meta
	}
	h.key, h.frames, h.piece = o.key, uint32(len(o.cuts)), f.piece
	if v, ok := o.Imm.Get(); ok {
		h.imm, h.flags = v, flagImm
	}
	runs := o.piece(f.piece)
	n := headerSize
	if len(runs) == 1 {
		h.offset = runs[0].Dst
	} else if len(runs) > 1 {
		h.runs = uint16(len(runs))
		for _, r := range runs {
			putSpan(meta[n:], span{r.Dst, r.N})
			n += runSize
		}
		h.tableSum = crc32.Checksum(meta[headerSize:n], castagnoli)
	}
	h.encode(meta)
	meta = c.vector(meta, n)
	for _, r := range runs {
		c.add(o.mem[r.Src:r.Src+r.N], true)
	}
	return meta
}
