package tcp

import (
	"github.com/penstock-kv/penstock/rdma"
)

// run is contiguous both in the source and at the target.
type run struct{ src, dst, n uint64 }

// op is one operation that this side submitted. Ops are recycled: a session has
// as many as were ever in flight at once.
type op struct {
	// slot and generation make the number on the wire: whoever uses a slot again
	// has seen the end of its former operation, and the target need remember one
	// operation for each slot. Generations begin at 1.
	slot, generation uint32

	kind  uint8
	class rdma.Class
	key   uint64
	imm   rdma.Imm
	done  func(error)
	src   *region // nil for messages and empty writes
	mem   []byte  // what runs' src offsets count in
	// runs are cut into frames: frame i is runs[cuts[i-1]:cuts[i]].
	runs []run
	cuts []uint32
	// via is the rail that each frame was given to, or unsentRail.
	via   []uint8
	msg   []byte // copy of the message, kept for reuse when small
	bytes int64  // what the budget was charged

	// reserved: a submitter is filling it in. submitted: it ends by an ack or
	// with the session. Both guarded by session.mu, as are via and the fields
	// below.
	reserved, submitted bool
	// patient: the peer may keep the ack for a while.
	patient bool
	// unsent counts frames that a writer may still read from, or will. An op
	// ends when it is acked and unsent is 0: an ack that comes early, by a peer's
	// error or because our writer was slow to wake, must not free the source.
	unsent int
	acked  bool
	status rdma.Reason
	tick   uint64 // of the engine's clock, at submission
}

// unsentRail stands in op.via for no rail yet.
const unsentRail = 0xff

// id returns the operation's number on the wire.
func (o *op) id() uint64 { return uint64(o.generation)<<32 | uint64(o.slot) }

// What an idle op keeps for its next use, at most: a message buffer of 4 KiB,
// and runs of 48 KiB. Larger operations allocate.
const (
	keptMessageBytes = 4 << 10
	keptRuns         = 2 << 10
)

// reset makes o ready for its next use.
func (o *op) reset() {
	o.generation++
	o.done, o.src, o.mem = nil, nil, nil
	o.imm = rdma.Imm{}
	o.runs, o.cuts, o.via = o.runs[:0], o.cuts[:0], o.via[:0]
	if cap(o.msg) > keptMessageBytes {
		o.msg = nil
	}
	if cap(o.runs) > keptRuns {
		o.runs, o.cuts, o.via = nil, nil, nil
	}
	o.msg = o.msg[:0]
	o.reserved, o.submitted, o.patient, o.acked = false, false, false, false
	o.unsent, o.status, o.bytes = 0, rdma.ReasonNone, 0
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
		if frame == piece || uint32(len(o.runs))-first == maxRuns {
			o.cuts = append(o.cuts, uint32(len(o.runs)))
			first, frame = uint32(len(o.runs)), 0
		}
		take := min(n, piece-frame)
		if last := len(o.runs) - 1; last >= int(first) && o.runs[last].src+o.runs[last].n == src && o.runs[last].dst+o.runs[last].n == dst {
			o.runs[last].n += take
		} else {
			o.runs = append(o.runs, run{src, dst, take})
		}
		src, dst, n, frame = src+take, dst+take, n-take, frame+take
	}
	return frame
}

// runBytes returns how many bytes the runs of o have.
func (o *op) runBytes() uint64 {
	n := uint64(0)
	for _, r := range o.runs {
		n += r.n
	}
	return n
}

// seal ends the last frame; an operation without bytes has one empty frame.
func (o *op) seal() {
	o.cuts = append(o.cuts, uint32(len(o.runs)))
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
		n += int64(r.n)
	}
	return frame{o, i, n}
}

// piece returns the runs of piece i.
func (o *op) piece(i uint32) []run {
	lo := uint32(0)
	if i > 0 {
		lo = o.cuts[i-1]
	}
	return o.runs[lo:o.cuts[i]]
}

// ended is an operation whose Done is to be called, outside of all locks.
type ended struct {
	done func(error)
	err  error
	src  *region
}

// call runs the callback, if there is one, and then gives up the source: after
// Region.Close no callback is outstanding.
func (x ended) call() {
	if x.done != nil {
		x.done(x.err)
	}
	if x.src != nil {
		x.src.readers.Release()
	}
}

// callAll runs the callbacks and forgets them.
func callAll(out []ended) {
	for i := range out {
		out[i].call()
		out[i] = ended{}
	}
}
