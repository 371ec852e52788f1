package tcp

import (
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// op is one operation that this side submitted. The Dst of its runs counts from the
// start of the window. The target need remember one operation for each slot: whoever
// uses a slot again has seen the end of its former operation.
type op struct {
	sessions.Op

	kind uint8
	key  uint64
	mem  []byte // what the runs' Src counts in
	// The runs are cut into frames: frame i is Runs[cuts[i-1]:cuts[i]].
	cuts []uint32
	// via is the rail that each frame was given to, or unsentRail.
	via []uint8
	msg []byte // copy of the message, kept for reuse when small

	// Guarded by session.Mu, as are via and the fields below. patient: the peer may
	// keep the ack for a while.
	patient bool
	// unsent counts frames that a writer may still read from, or will. An op
	// ends when it is acked and unsent is 0: an ack that comes early, by a peer's
	// error or because our writer was slow to wake, must not free the source.
	unsent int
	acked  bool
	status rdma.Reason
}

// unsentRail stands in op.via for no rail yet.
const unsentRail = 0xff

// keptMessageBytes is how long a message buffer an idle op keeps for its next use, at
// most.
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
	o.patient, o.acked, o.unsent, o.status = false, false, 0, rdma.ReasonNone
}

// add appends n bytes from src in the source to dst at the target, merging
// neighbours and cutting frames at piece bytes. frame is how many bytes the
// last frame has; add returns its new value.
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

// frame is piece number piece of an operation, on its way to a writer.
type frame struct {
	op    *op
	piece uint32
	bytes int64
}

// frame returns piece i of o.
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
