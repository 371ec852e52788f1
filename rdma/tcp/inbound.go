package tcp

import (
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// inbound is what a target remembers of the latest operation that its peer
// submitted in one slot. It stays when the operation is complete, until the slot
// is used again: only then it is certain that the peer has seen the ack, and
// that no piece of the operation is sent once more over another rail.
type inbound struct {
	generation uint32
	// frames is how many pieces there are, left how many have not arrived.
	frames, left uint32
	reason       rdma.Reason
	// via is the rail that carries the ack, once left is 0.
	via uint8
	// had has a bit for each piece that arrived: the first 64, and the rest.
	had  uint64
	more []uint64
}

// complete reports whether every piece has arrived.
func (in *inbound) complete() bool { return in.left == 0 }

// bit returns the word and mask of piece i.
func (in *inbound) bit(i uint32) (*uint64, uint64) {
	mask := uint64(1) << (i & 63)
	if i < 64 {
		return &in.had, mask
	}
	return &in.more[i/64-1], mask
}

// Bounds of what a peer can make us remember, for one session: MaxOps slots; the
// pieces of operations that are not complete; and acks that it does not read.
// (The peer may see an ack before our writer has noted that it was written.)
const (
	openFramesMax = 1 << 24
	acksOwedMax   = 4 * MaxOps
	// An ack that may wait does so for ackWait, or until it is one of patientAcks.
	ackWait     = time.Millisecond
	patientAcks = 32
	// keptWords is what a slot keeps of more for its next operation: 32 Ki pieces.
	keptWords = 512
)

// begin makes in remember a new operation of the slot.
func (in *inbound) begin(generation, frames uint32) {
	words := (int(frames) - 1) / 64
	more := in.more
	if words > cap(more) || cap(more) > keptWords {
		more = make([]uint64, words)
	}
	more = more[:words]
	clear(more)
	*in = inbound{generation: generation, frames: frames, left: frames, via: unsentRail, more: more}
}

// arrive looks at the header of a frame before its payload is placed. fresh is
// false for a piece that came before, over a rail that has died since, and for
// one of an operation that has ended: its payload is dropped.
func (s *session) arrive(h *header) (fresh bool, _ error) {
	slot, generation := uint32(h.op), uint32(h.op>>32)
	if slot >= MaxOps || generation == 0 {
		return false, fmt.Errorf("operation %#x: a session has %d slots: %w", h.op, MaxOps, errFrame)
	}
	frames := max(h.frames, 1)
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for int(slot) >= len(s.inbound) {
		s.inbound = append(s.inbound, inbound{})
	}
	in := &s.inbound[slot]
	if len(s.rails) > 1 && in.generation != 0 && int32(generation-in.generation) < 0 {
		// It was sent once more, over another rail, before its ack was seen, and is
		// late: the peer has used the slot again, so the operation had ended. With
		// one rail nothing is sent twice.
		return false, nil
	}
	if generation != in.generation {
		if !in.complete() || int32(generation-in.generation) < 0 {
			return false, fmt.Errorf("operation %#x in the slot of %#x, of which %d pieces are missing: %w",
				h.op, uint64(in.generation)<<32|uint64(slot), in.left, errFrame)
		}
		if s.openFrames += int(frames); s.openFrames > openFramesMax || s.acksOwed >= acksOwedMax {
			return false, fmt.Errorf("%d pieces and %d acks outstanding, more than %d or %d: %w", s.openFrames, s.acksOwed, openFramesMax, acksOwedMax, errFrame)
		}
		s.openOps++
		in.begin(generation, frames)
		return true, nil
	}
	if in.frames != frames {
		return false, fmt.Errorf("operation %#x has %d pieces, then %d: %w", h.op, in.frames, frames, errFrame)
	}
	word, mask := in.bit(h.piece)
	return *word&mask == 0, nil
}

// landed notes that a frame that arrive called fresh has been placed, or refused
// with a reason. It reports whether the operation is complete now, and how it
// ended; the caller then sends the ack.
func (s *session) landed(h *header, reason rdma.Reason) (complete bool, _ rdma.Reason) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	in := &s.inbound[uint32(h.op)]
	if in.generation != uint32(h.op>>32) {
		return false, 0
	}
	word, mask := in.bit(h.piece)
	if *word&mask != 0 {
		return false, 0 // the same piece on two connections at once: the peer's error, and counted once
	}
	*word |= mask
	in.left--
	if in.reason == rdma.ReasonNone {
		in.reason = reason
	}
	if in.left > 0 {
		return false, 0
	}
	s.openFrames -= int(in.frames)
	s.openOps--
	s.acksOwed++
	return true, in.reason
}

// acknowledge queues the ack of an operation that landed called complete. The ack of a
// patient one that has gone well waits for what else is written, if that is not long.
func (s *session) acknowledge(c *conn, h *header, reason rdma.Reason) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	var to *conn
	if c.rail.state == railUp && c.rail.generation == c.generation {
		to = c.rail.controlConn()
	} else if to = s.controlLocked(); to == nil {
		return // this connection's rail died while the payload landed, and with it the session
	}
	s.inbound[uint32(h.op)].via = uint8(to.rail.index)
	to.acks = append(to.acks, ack{h.op, reason})
	if h.flags&flagPatient == 0 || reason != rdma.ReasonNone || len(to.acks) >= patientAcks {
		to.signal()
	} else if !to.late {
		to.late = true
		to.latest.Reset(ackWait)
	}
}

// flushLate has the acks written that have waited long enough.
func (c *conn) flushLate() {
	c.s.Mu.Lock()
	defer c.s.Mu.Unlock()
	c.late = false
	if len(c.acks) > 0 {
		c.signal()
	}
}

// reackLocked sends the acks once more that a dead rail may have taken with it.
func (s *session) reackLocked(dead *rail, to *conn) {
	for slot := range s.inbound {
		in := &s.inbound[slot]
		if in.generation == 0 || !in.complete() || int(in.via) != dead.index {
			continue
		}
		in.via = uint8(to.rail.index)
		s.acksOwed++
		to.acks = append(to.acks, ack{uint64(in.generation)<<32 | uint64(slot), in.reason})
	}
}
