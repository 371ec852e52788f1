package tcp

import (
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// op is one operation that this engine submitted. The Dst of its runs counts from the start of the
// window. An operation occupies a slot. The target records one operation for each slot: this
// engine uses a slot again only after it has received the ack of the previous operation.
type op struct {
	sessions.Op

	kind uint8
	key  uint64
	mem  []byte // the memory to which the runs' Src refers
	// The runs are cut into frames: frame i is Runs[cuts[i-1]:cuts[i]].
	cuts []uint32
	// via holds the index of the rail to which each frame was given, or unsentRail.
	via []uint8
	msg []byte // copy of the message, kept for reuse when small

	// The fields below and via are guarded by session.Mu. ackMayWait: the peer may delay the ack.
	ackMayWait bool
	// unsent is the number of frames that a writer is reading from or will read from. An op ends
	// when it is acked and unsent is 0. An ack alone must not free the source: the ack may arrive
	// while the local writer still reads, because the writer is slow or because the peer sent the
	// ack in error.
	unsent int
	acked  bool
	status rdma.Reason
}

// unsentRail is the value in op.via for a frame that was given to no rail.
const unsentRail = 0xff

// keptMessageBytes is the largest message buffer that an idle op keeps for its next use.
const keptMessageBytes = 4 << 10

// Reset makes o ready for its next use.
func (o *op) Reset() {
	o.cuts, o.via = o.cuts[:0], o.via[:0]
	if cap(o.Runs) > sessions.KeptRuns {
		o.cuts, o.via = nil, nil
	}
	o.Op.Reset()
	o.mem = nil
	if cap(o.msg) > keptMessageBytes {
		o.msg = nil
	}
	o.msg = o.msg[:0]
	o.ackMayWait, o.acked, o.unsent, o.status = false, false, 0, rdma.ReasonNone
}

// add appends n bytes from src in the source to dst at the target. It merges adjacent runs. It
// starts a new frame when the last frame has piece bytes. frame is the number of bytes in the last
// frame; add returns its new value.
func (o *op) add(src, dst, n, piece, frame uint64) uint64 {
	for n > 0 {
		first := uint32(0)
		if len(o.cuts) > 0 {
			first = o.cuts[len(o.cuts)-1]
		}
		if frame == piece || uint32(len(o.Runs))-first == maxRuns {
			o.cuts = append(o.cuts, uint32(len(o.Runs)))
			first, frame = uint32(len(o.Runs)), 0
		}
		take := min(n, piece-frame)
		if last := len(o.Runs) - 1; last >= int(first) && o.Runs[last].Src+o.Runs[last].N == src && o.Runs[last].Dst+o.Runs[last].N == dst {
			o.Runs[last].N += take
		} else {
			o.Runs = append(o.Runs, sessions.Run{Src: src, Dst: dst, N: take})
		}
		src, dst, n, frame = src+take, dst+take, n-take, frame+take
	}
	return frame
}

// seal ends the last frame; an operation without bytes has one empty frame.
func (o *op) seal() {
	o.cuts = append(o.cuts, uint32(len(o.Runs)))
	for range o.cuts {
		o.via = append(o.via, unsentRail)
	}
}

// frame is one piece of an operation, queued for a writer. piece is the number of the piece, and
// bytes its payload.
type frame struct {
	op    *op
	piece uint32
	bytes int64
}

// frame returns the frame for piece i of the operation.
func (o *op) frame(i uint32) frame {
	n := int64(len(o.msg))
	for _, r := range o.piece(i) {
		n += int64(r.N)
	}
	return frame{o, i, n}
}

// piece returns the runs of piece i.
func (o *op) piece(i uint32) []sessions.Run {
	lo := uint32(0)
	if i > 0 {
		lo = o.cuts[i-1]
	}
	return o.Runs[lo:o.cuts[i]]
}
