package group

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// opKind is the kind of an operation.
type opKind uint8

const (
	opWrite   opKind = 1
	opMessage opKind = 2
)

// noRun is the value of op.final if no run (contiguous range of the payload) is held back to carry
// the immediate.
const noRun = ^uint32(0)

// op is one operation that this engine submitted. Its runs are the contiguous ranges of its
// payload; their Dst is relative to the first byte of the target's Desc.
type op struct {
	sessions.Op

	kind opKind
	src  *region // nil for messages and empty writes
	// base and keys come from the Desc. base is the address of its first byte at the target. keys
	// holds the key for each of the target's NICs.
	base uint64
	keys []remoteKey

	// seq is the number of a message, slotIndex the index of its buffer in the outbox, and size
	// its length in bytes with the header. empty: the message stands for an empty write.
	seq       uint64
	slotIndex int
	size      int
	empty     bool

	// dead: the operation has been refused, so runs that are not posted yet are skipped. lane.pump
	// reads dead without session.Mu.
	dead atomic.Bool

	// The fields below are guarded by session.Mu.
	//
	// left is the number of runs that are not done, not counting the final run. These runs are
	// queued, wait for a lane, are posted, or were lost with an endpoint.
	left int
	// final is the index of the run that is held back until left is 0 and then carries the
	// immediate. It is noRun if another run carries the immediate, or if the final run has been
	// sent.
	final uint32
	// landed: the immediate has been delivered, so all payload is in place and must not be
	// written again.
	landed bool
	// refusal is the refused range, for the query to the target. queried: this query has been
	// sent. nicErr is the local NIC's error.
	refusal reasonQuery
	nicErr  error
	queried bool
	// attempts is the number of times that the operation was started again because the target
	// found no reason for a refusal.
	attempts int
	// lostGroup, if set, is the group of operations whose immediates cannot be distinguished from
	// this operation's.
	lostGroup *lostGroup
	// acked: the target has answered a message. reason is the answer to a message; for a write, it
	// is the target's answer to the query before the write is sent again.
	acked   bool
	reason  rdma.Reason
	retries int
}

// Reset makes o ready for its next use.
func (o *op) Reset() {
	o.Op.Reset()
	o.src, o.lostGroup, o.nicErr = nil, nil, nil
	o.keys = o.keys[:0]
	o.dead.Store(false)
	o.queried, o.acked, o.empty, o.landed = false, false, false, false
	o.left, o.attempts, o.retries = 0, 0, 0
	o.final, o.reason = noRun, rdma.ReasonNone
}

// key returns the key for the target's NIC with that serial number.
func (o *op) key(serial uint32) (uint64, bool) {
	for _, k := range o.keys {
		if k.serial == serial {
			return k.key, true
		}
	}
	return 0, false
}

// aim sets the destination of o from d. If d names peers and self is not among them, each key is
// set to 0, which is never posted and which the target refuses. This is required by Revoke: the
// target asks only the engines that d names to stop, so no other engine may have a Work in flight
// with these keys.
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

// add appends n bytes from src in the source to dst at the target. It merges them with the
// previous run if both ranges are adjacent. It starts a new run after each maxBytes bytes.
func (o *op) add(src, dst, n, maxBytes uint64) {
	if last := len(o.Runs) - 1; last >= 0 {
		if r := &o.Runs[last]; r.Src+r.N == src && r.Dst+r.N == dst {
			take := min(n, maxBytes-r.N)
			r.N += take
			src, dst, n = src+take, dst+take, n-take
		}
	}
	for n > 0 {
		take := min(n, maxBytes)
		o.Runs = append(o.Runs, sessions.Run{Src: src, Dst: dst, N: take})
		src, dst, n = src+take, dst+take, n-take
	}
}

// layPages adds the pages of w to the runs of o.
func (o *op) layPages(w *rdma.PagedWrite, maxBytes uint64) error {
	size := uint64(0)
	if w.Src != nil {
		size = w.Src.Len()
	}
	return sessions.Pages(w, size, func(src, dst uint64) { o.add(src, dst, w.PageLen, maxBytes) })
}

// tailBytes is the size of the tail of the last run that is held back to carry the immediate. It
// is small because the transfer of the tail adds a round trip.
const tailBytes = 4 << 10

// keepBack splits the tail off the last run and makes the tail the final run.
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

// job is a part of an operation that is sent over one lane: runs[lo:hi], posted in that order. If
// imm is set, the last of these runs carries the immediate.
type job struct {
	op     *op
	lo, hi uint32
	imm    bool
	// tail: the job's only run is the final run of op, and all other runs of op are in place.
	tail bool
}

// postCost is the weight of a Work without payload, in bytes, for the comparison of lanes by load.
const postCost = 512

// Ranks of the jobs in a lane's queue. A message precedes all writes, because requests and their
// answers are messages and should not wait. The tail of a write precedes all other writes: all
// other bytes of that write are in place, so only the tail delays its completion.
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

// load is the weight of the runs of j, in bytes: their payload and postCost for each.
func (j job) load() int64 {
	n := int64(j.hi-j.lo) * postCost
	if j.op.kind == opWrite {
		for _, r := range j.op.Runs[j.lo:j.hi] {
			n += int64(r.N)
		}
	}
	return n
}

// lostGroup groups operations with the same immediate, after the target counted only some of these
// immediates. The sender cannot determine which operations were counted. So it sends the payload
// of all again, and then the number of immediates that were lost.
type lostGroup struct {
	// left is the number of operations in the group whose payload has been neither placed again
	// nor refused.
	left int
	// lost is the number of the group's immediates that did not arrive.
	lost            int
	placed, refused []*op
}
