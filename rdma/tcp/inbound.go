package tcp

import (
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// inbound is the target's record of the latest operation in one of the peer's slots. The record
// remains after the operation is complete, until the peer uses the slot again. Before that, the
// peer may not have received the ack and may send pieces of the operation again over another rail.
type inbound struct {
	generation uint32
	// frames is the number of pieces of the operation, left the number of pieces that have not
	// arrived.
	frames, left uint32
	reason       rdma.Reason
	// via is the index of the rail that carries the ack, once left is 0.
	via uint8
	// arrived and more have a bit for each piece that arrived: arrived for the first 64 pieces,
	// more for later pieces.
	arrived uint64
	more    []uint64
}

// complete reports whether every piece has arrived.
func (in *inbound) complete() bool { return in.left == 0 }

// bit returns the word that holds the bit of piece i, and the mask of this bit.
func (in *inbound) bit(i uint32) (*uint64, uint64) {
	mask := uint64(1) << (i & 63)
	if i < 64 {
		return &in.arrived, mask
	}
	return &in.more[i/64-1], mask
}

// Bounds of the state that a peer can create in one session: MaxOps slots, the pieces of incomplete
// operations, and acks that are not written yet because the peer does not read. (The peer may
// receive an ack before the local writer has recorded that it wrote the ack.)
const (
	openFramesMax = 1 << 24
	acksOwedMax   = 4 * MaxOps
	// A delayed ack is written after ackWait. The acks are written earlier if delayedAcksMax acks
	// wait.
	ackWait        = time.Millisecond
	delayedAcksMax = 32
	// keptWords is the largest length of inbound.more that a slot keeps for its next operation:
	// 512 words, for 32 Ki pieces.
	keptWords = 512
)

// begin resets the record for a new operation of the slot.
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

// arrive checks the header of a frame before its payload is placed. fresh is false if the payload
// must be dropped: the piece has already arrived, over a rail that has failed since, or its
// operation has ended.
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
		// This frame is late: it was sent again over another rail, and the ack has arrived there.
		// The peer has used the slot again, so the operation had ended. With one rail no frame is
		// sent twice.
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

// landed records that the payload of a fresh frame has been placed, or was refused for a reason.
// It reports whether the operation is complete, and the operation's result. For a complete
// operation the caller then sends the ack.
func (s *session) landed(h *header, reason rdma.Reason) (complete bool, _ rdma.Reason) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	in := &s.inbound[uint32(h.op)]
	if in.generation != uint32(h.op>>32) {
		return false, 0
	}
	word, mask := in.bit(h.piece)
	if *word&mask != 0 {
		return false, 0 // the peer sent the piece on two connections, in error; it is counted once
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

// acknowledge queues the ack of a complete operation. If the peer permits delay, the ack of a
// successful operation waits for other frames, at most ackWait.
func (s *session) acknowledge(c *conn, h *header, reason rdma.Reason) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	var to *conn
	if c.rail.state == railUp && c.rail.generation == c.generation {
		to = c.rail.controlConn()
	} else if to = s.controlLocked(); to == nil {
		return // this connection's rail, and the session with it, ended while the payload landed
	}
	s.inbound[uint32(h.op)].via = uint8(to.rail.index)
	to.acks = append(to.acks, ack{h.op, reason})
	if h.flags&flagAckMayWait == 0 || reason != rdma.ReasonNone || len(to.acks) >= delayedAcksMax {
		to.signal()
	} else if !to.ackTimerOn {
		to.ackTimerOn = true
		to.ackTimer.Reset(ackWait)
	}
}

// flushLate wakes the writer when acks have waited for ackWait.
func (c *conn) flushLate() {
	c.s.Mu.Lock()
	defer c.s.Mu.Unlock()
	c.ackTimerOn = false
	if len(c.acks) > 0 {
		c.signal()
	}
}

// reackLocked queues again, on the connection to, all acks that were sent over the failed rail
// (dead) and may have been lost with it.
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
