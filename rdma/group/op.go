package group

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
)

// run is contiguous both in the source and at the target; dst counts from the
// first byte of the Desc.
type run struct{ src, dst, n uint64 }

// opKind is what an operation carries.
type opKind uint8

const (
	opWrite   opKind = 1
	opMessage opKind = 2
)

// noRun is no index into an op's runs.
const noRun = ^uint32(0)

// op is one operation that this side submitted. Ops are recycled: a session has
// as many as were ever in flight at once.
type op struct {
	// slot and generation make the number on the control connection, so that an
	// answer to an operation that has ended is recognised.
	slot, generation uint32

	kind  opKind
	class rdma.Class
	imm   rdma.Imm
	done  func(error)
	src   *region // nil for messages and empty writes
	bytes int64   // what the budget was charged
	// base and keys are of the Desc: where its bytes begin at the target, and
	// the key for each of the target's NICs.
	base uint64
	keys []remoteKey
	runs []run

	// seq numbers a message, slotIndex is its buffer in the outbox and size what
	// it holds, header included. empty: it is an empty write in truth.
	seq       uint64
	slotIndex int
	size      int
	empty     bool

	// dead is set once the operation was refused: what is not posted yet is not
	// posted any more. Read by pumps without session.mu.
	dead atomic.Bool

	// Guarded by session.mu, as are the fields below. reserved: a submitter is
	// filling it in; submitted: it ends by its completions or with the session.
	reserved, submitted bool
	// left counts runs that are not done, without the one of final.
	// Invariant: it is the number of runs in queues, parked, posted and broken.
	left int
	// final is the run that is kept back until left is 0 and then carries the
	// immediate; noRun if the immediate travels with the others, or is done.
	final uint32
	// landed: the immediate has been delivered, and so everything is in place;
	// nothing of it may be written again.
	landed bool
	// refusal is what the target is asked about, said what our NIC told of it;
	// asked says that the target was asked.
	refusal why
	said    error
	asked   bool
	// attempts counts how often it was begun again after a refusal that the
	// target does not know the reason of.
	attempts int
	// tie holds operations together whose immediates can't be told apart.
	tie *tie
	// acked and reason: the target's answer to a message; reason alone is its
	// answer to what was asked about before it was to be sent again.
	acked   bool
	reason  rdma.Reason
	retries int
	tick    uint64 // of the engine's clock, at submission
}

// id returns the operation's number on the control connection.
func (o *op) id() uint64 { return uint64(o.generation)<<32 | uint64(o.slot) }

// keptRuns is what an idle op keeps for its next use, at most: 48 KiB.
const keptRuns = 2 << 10

// reset makes o ready for its next use.
func (o *op) reset() {
	o.generation++
	o.done, o.src, o.tie, o.said = nil, nil, nil, nil
	o.imm = rdma.Imm{}
	o.keys, o.runs = o.keys[:0], o.runs[:0]
	if cap(o.runs) > keptRuns {
		o.runs = nil
	}
	o.dead.Store(false)
	o.reserved, o.submitted, o.asked, o.acked, o.empty = false, false, false, false, false
	o.bytes, o.left, o.attempts, o.retries = 0, 0, 0, 0
	o.landed = false
	o.final, o.reason = noRun, rdma.ReasonNone
}

// key returns the key for the target's NIC serial.
func (o *op) key(serial uint32) (uint64, bool) {
	for _, k := range o.keys {
		if k.serial == serial {
			return k.key, true
		}
	}
	return 0, false
}

// aim sets where o goes: the ways and the base of d. If d is for other engines than self,
// each key is 0, which is never posted and which the target refuses: the target's Revoke
// asks only the engines that d names, and no other may have a Work in flight then.
func (o *op) aim(d *rdma.Desc, self rdma.EngineID) error {
	o.base = d.Base
	ours := len(d.Peers) == 0 || slices.Contains(d.Peers, self)
	for _, n := range d.NICs {
		serial, ok := serialOf(n.Addr)
		if !ok {
			return fmt.Errorf("group: Desc with NIC address %q, which no engine of this kind gives out: %w", n.Addr, rdma.ErrMalformed)
		}
		k := remoteKey{serial: serial}
		if ours {
			k.key = n.Key
		}
		o.keys = append(o.keys, k)
	}
	if len(o.keys) == 0 {
		return fmt.Errorf("group: write to a Desc without a key: %w", rdma.ErrMalformed)
	}
	return nil
}

// add appends n bytes from src in the source to dst at the target, merging it
// with the run before where both are neighbours, and cutting at most bytes.
func (o *op) add(src, dst, n, most uint64) {
	if last := len(o.runs) - 1; last >= 0 {
		if r := &o.runs[last]; r.src+r.n == src && r.dst+r.n == dst {
			take := min(n, most-r.n)
			r.n += take
			src, dst, n = src+take, dst+take, n-take
		}
	}
	for n > 0 {
		take := min(n, most)
		o.runs = append(o.runs, run{src, dst, take})
		src, dst, n = src+take, dst+take, n-take
	}
}

// runBytes returns how many bytes the runs of o have.
func (o *op) runBytes() uint64 {
	n := uint64(0)
	for _, r := range o.runs {
		n += r.n
	}
	return n
}

// layPages lays out the pages of w.
func (o *op) layPages(w *rdma.PagedWrite, most uint64) error {
	size := uint64(0)
	if w.Src != nil {
		size = w.Src.Len()
	}
	for i := range w.SrcPages.Indices {
		src, err := w.SrcPages.At(i, w.PageLen, size)
		if err != nil {
			return fmt.Errorf("source %w", err)
		}
		dst, err := w.DstPages.At(i, w.PageLen, w.Dst.Len)
		if err != nil {
			return fmt.Errorf("destination %w", err)
		}
		o.add(src, dst, w.PageLen, most)
	}
	return nil
}

// tailBytes is how much of the last run is kept back for the immediate, where it
// has to wait for the rest: little, so that the round trip that it adds carries
// little.
const tailBytes = 4 << 10

// keepBack takes the tail out of the last run, as the final one.
func (o *op) keepBack() {
	last := len(o.runs) - 1
	if r := &o.runs[last]; r.n > tailBytes {
		cut := r.n - tailBytes
		o.runs = append(o.runs, run{r.src + cut, r.dst + cut, tailBytes})
		o.runs[last].n = cut
		last++
	}
	o.final = uint32(last)
}

// job is a part of an operation that goes over one lane: runs[lo:hi], posted in
// that order. With imm the last of them carries the immediate.
type job struct {
	op     *op
	lo, hi uint32
	imm    bool
	// tail: it is the final run, and all others of op are in place.
	tail bool
}

// postCost is what a Work weighs beyond its bytes when lanes are compared.
const postCost = 512

// Ranks of the jobs that wait in a lane's queue. A message stands before all writes,
// because calls and their answers wait for it. The tail of a write, with its immediate,
// stands before all other writes: the rest of its write is in place, and its end waits for
// the tail alone.
const (
	rankMessage = 0
	rankTail    = 1
	rankBulk    = 2
)

// rank returns the rank of j.
func (j job) rank() int {
	switch {
	case j.op.kind == opMessage && !j.op.empty:
		return rankMessage
	case j.tail:
		return rankTail
	}
	return rankBulk
}

// load is the weight of the runs of j.
func (j job) load() int64 {
	n := int64(j.hi-j.lo) * postCost
	if j.op.kind == opWrite {
		for _, r := range j.op.runs[j.lo:j.hi] {
			n += int64(r.n)
		}
	}
	return n
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

// tie holds operations with the same immediate of which the target counted some, and it is
// unknown which. The sender sends all their payload again, and then as many immediates as
// were lost.
type tie struct {
	// left counts members whose payload is neither in place again nor refused.
	left int
	// lost is how many immediates did not arrive.
	lost            int
	placed, refused []*op
}
