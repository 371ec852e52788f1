package sessions

import (
	"fmt"
	"math/bits"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sources"
)

// Run is contiguous both in the source and at the target. The engine defines from
// where Dst counts.
type Run struct{ Src, Dst, N uint64 }

// Op is the part of an operation of this side that its session accounts for. The
// op of an engine embeds it. Ops are recycled: a session has as many as were ever in
// flight at once.
type Op struct {
	// Slot and Generation make the number of the operation, so that an answer to an
	// operation that has ended is recognised. Generations begin at 1.
	Slot, Generation uint32

	Class rdma.Class
	Imm   rdma.Imm
	Done  func(error)
	Runs  []Run
	// source is the region that the operation reads from; nil for messages and empty
	// writes. bytes is the operation's charge to the budget.
	source *sources.Readers
	bytes  int64

	// Guarded by the session's Mu. reserved: a submitter is filling it in. Submitted:
	// it ends by itself or with the session. Tick is of the engine's clock, at
	// submission.
	reserved, Submitted bool
	Tick                uint64
}

// Operation is an engine's op.
type Operation interface {
	comparable
	base() *Op
	// Reset makes the op ready for its next use, with Op.Reset.
	Reset()
}

func (o *Op) base() *Op { return o }

// ID returns the operation's number on the wire.
func (o *Op) ID() uint64 { return uint64(o.Generation)<<32 | uint64(o.Slot) }

// Hold makes the operation a reader of its source, until it ends.
func (o *Op) Hold(source *sources.Readers) error {
	if err := source.Acquire(); err != nil {
		return err
	}
	o.source = source
	return nil
}

// KeptRuns is how many runs an idle op keeps for its next use, at most: 48 KiB.
const KeptRuns = 2 << 10

// Reset makes o ready for its next use.
func (o *Op) Reset() {
	runs := o.Runs[:0]
	if cap(runs) > KeptRuns {
		runs = nil
	}
	*o = Op{Slot: o.Slot, Generation: o.Generation + 1, Class: o.Class, Runs: runs, Tick: o.Tick}
}

// RunBytes returns how many bytes the runs of o have.
func (o *Op) RunBytes() uint64 {
	n := uint64(0)
	for _, r := range o.Runs {
		n += r.N
	}
	return n
}

// PagedBytes returns how many bytes w has.
func PagedBytes(provider string, w *rdma.PagedWrite) (uint64, error) {
	hi, n := bits.Mul64(w.PageLen, uint64(len(w.SrcPages.Indices)))
	if hi != 0 {
		return 0, fmt.Errorf("%s: %d pages of %d bytes: %w", provider, len(w.SrcPages.Indices), w.PageLen, rdma.ErrRange)
	}
	return n, nil
}

// Pages calls add with the place of each page of w, in a source of size bytes and in
// the Desc.
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

// Ended is an operation whose Done is to be called, outside of all locks.
type Ended struct {
	done   func(error)
	err    error
	source *sources.Readers
}

// call runs the callback, if there is one, and then gives up the source: after
// Region.Close no callback is outstanding.
func (x Ended) call() {
	if x.done != nil {
		x.done(x.err)
	}
	if x.source != nil {
		x.source.Release()
	}
}

// CallAll runs the callbacks and forgets them.
func CallAll(out []Ended) {
	for i := range out {
		out[i].call()
		out[i] = Ended{}
	}
}
