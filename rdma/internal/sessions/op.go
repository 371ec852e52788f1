package sessions

import (
	"fmt"
	"math/bits"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sources"
)

// Run is a range of N bytes that is contiguous both in the source and at the target. Src is the
// offset in the source. Dst is the offset at the target, counted from the first byte that the Desc
// describes.
type Run struct{ Src, Dst, N uint64 }

// Op is the part of a local operation that its session manages. The op type of an engine embeds Op.
// Ops are recycled: a session has as many ops as were ever in flight at the same time.
type Op struct {
	// Slot and Generation together are the number of the operation. Each use of a slot has a new
	// generation, so an answer to an operation that has ended is recognised. Generations begin at
	// 1.
	Slot, Generation uint32

	Class rdma.Class
	Imm   rdma.Imm
	Done  func(error)
	Runs  []Run
	// source is the region from which the operation reads; nil for messages and empty writes.
	// bytes is the number of bytes that the operation occupies in the budget. limited: it came through
	// the queue Limited.
	source  *sources.Readers
	bytes   int64
	limited bool

	// Guarded by the session's Mu. reserved: the op belongs to a submitter that fills it in.
	// Submitted: the operation is in flight. Tick is the engine's tick at submission.
	reserved, Submitted bool
	Tick                uint64
}

// Operation is an engine's op.
type Operation interface {
	comparable
	base() *Op
	// Reset makes the op ready for its next use. It calls Op.Reset.
	Reset()
}

func (o *Op) base() *Op { return o }

// ID returns the operation's number on the wire.
func (o *Op) ID() uint64 { return uint64(o.Generation)<<32 | uint64(o.Slot) }

// Hold registers the operation as a reader of its source until the operation ends.
func (o *Op) Hold(source *sources.Readers) error {
	if err := source.Acquire(); err != nil {
		return err
	}
	o.source = source
	return nil
}

// KeptRuns is the largest number of runs for which an idle op keeps memory (48 KiB).
const KeptRuns = 2 << 10

// Reset makes o ready for its next use.
func (o *Op) Reset() {
	runs := o.Runs[:0]
	if cap(runs) > KeptRuns {
		runs = nil
	}
	*o = Op{Slot: o.Slot, Generation: o.Generation + 1, Class: o.Class, Runs: runs, Tick: o.Tick}
}

// RunBytes returns the sum of the lengths of the runs of o.
func (o *Op) RunBytes() uint64 {
	n := uint64(0)
	for _, r := range o.Runs {
		n += r.N
	}
	return n
}

// PagedBytes returns the number of bytes of w.
func PagedBytes(provider string, w *rdma.PagedWrite) (uint64, error) {
	hi, n := bits.Mul64(w.PageLen, uint64(len(w.SrcPages.Indices)))
	if hi != 0 {
		return 0, fmt.Errorf("%s: %d pages of %d bytes: %w", provider, len(w.SrcPages.Indices), w.PageLen, rdma.ErrRange)
	}
	return n, nil
}

// Pages calls add with the offsets of each page of w, in a source of size bytes and in the
// Desc.
func Pages(w *rdma.PagedWrite, size uint64, add func(src, dst uint64)) error {
	for i := range w.SrcPages.Indices {
		src, err := w.SrcPages.At(i, w.PageLen, size)
		if err != nil {
			return fmt.Errorf("source %w", err)
		}
		dst, err := w.DstPages.At(i, w.PageLen, w.Dst.Len)
		if err != nil {
			return fmt.Errorf("destination %w", err)
		}
		add(src, dst)
	}
	return nil
}

// Ended is an operation that has ended. Its Done must be called when no lock is held.
type Ended struct {
	done   func(error)
	err    error
	source *sources.Readers
}

// call runs the callback, if there is one, and then releases the source. In this order, no
// callback is outstanding when Region.Close returns.
func (x Ended) call() {
	if x.done != nil {
		x.done(x.err)
	}
	if x.source != nil {
		x.source.Release()
	}
}

// CallAll calls the callbacks of out and clears out.
func CallAll(out []Ended) {
	for i := range out {
		out[i].call()
		out[i] = Ended{}
	}
}
