package group

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// opKind is what an operation carries.
type opKind uint8

const (
	opWrite   opKind = 1
	opMessage opKind = 2
)

// noRun is no index into an op's runs.
const noRun = ^uint32(0)

// op is one operation that this side submitted. The Dst of its runs counts from the
// first byte of the Desc.
type op struct {
	sessions.Op

	kind opKind
	src  *region // nil for messages and empty writes
	// base and keys are of the Desc: where its bytes begin at the target, and
	// the key for each of the target's NICs.
	base uint64
	keys []remoteKey

	// seq numbers a message, slotIndex is its buffer in the outbox and size what
	// it holds, header included. empty: it is an empty write in truth.
	seq       uint64
	slotIndex int
	size      int
	empty     bool

	// dead is set once the operation was refused: what is not posted yet is not
	// posted any more. Read by pumps without session.Mu.
	dead atomic.Bool

	// Guarded by session.Mu, as are the fields below.
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
}

// Reset makes o ready for its next use.
func (o *op) Reset() {
	o.Op.Reset()
	o.src, o.tie, o.said = nil, nil, nil
	o.keys = o.keys[:0]
	o.dead.Store(false)
	o.asked, o.acked, o.empty, o.landed = false, false, false, false
	o.left, o.attempts, o.retries = 0, 0, 0
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
	if last := len(o.Runs) - 1; last >= 0 {
		if r := &o.Runs[last]; r.Src+r.N == src && r.Dst+r.N == dst {
			take := min(n, most-r.N)
			r.N += take
			src, dst, n = src+take, dst+take, n-take
		}
	}
	for n > 0 {
		take := min(n, most)
		o.Runs = append(o.Runs, sessions.Run{Src: src, Dst: dst, N: take})
		src, dst, n = src+take, dst+take, n-take
	}
}

// layPages lays out the pages of w.
func (o *op) layPages(w *rdma.PagedWrite, most uint64) error {
	size := uint64(0)
	if w.Src != nil {
		size = w.Src.Len()
	}
	return sessions.Pages(w, size, func(src, dst uint64) { o.add(src, dst, w.PageLen, most) })
}

// tailBytes is how much of the last run is kept back for the immediate, where it
// has to wait for the rest: little, so that the round trip that it adds carries
// little.
const tailBytes = 4 << 10

// keepBack takes the tail out of the last run, as the final one.
func (o *op) keepBack() {
	last := len(o.Runs) - 1
	if r := &o.Runs[last]; r.N > tailBytes {
		cut := r.N - tailBytes
		o.Runs = append(o.Runs, sessions.Run{Src: r.Src + cut, Dst: r.Dst + cut, N: tailBytes})
		o.Runs[last].N = cut
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
		for _, r := range j.op.Runs[j.lo:j.hi] {
			n += int64(r.N)
		}
	}
	return n
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
