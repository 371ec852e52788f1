//go:build fabric && cgo && linux

package fabric

import (
	"fmt"
	"math/bits"
	"time"

	"github.com/penstock-kv/penstock/rdma/group"
)

// pendingFrame is a frame that waits to be sent. It holds a reference to the destination's hub.
type pendingFrame struct {
	to       *peerHub
	frame    frame
	deadline time.Time
}

// keyQuery is an unanswered query to the target: which of an endpoint's writes in flight would the
// target refuse?
type keyQuery struct {
	id uint64 // 0: none
	// seqs are the sequence numbers of the writes in the query, in the query's order.
	seqs     []uint64
	deadline time.Time
}

const (
	// sweepInterval is the time between two runs of sweep.
	sweepInterval = 20 * time.Millisecond
	// keyReplyTimeout is the longest time for which the works of a broken endpoint wait for the
	// target's answer. Without an answer they end as broken.
	keyReplyTimeout = time.Second
	// maxOutbox bounds the waiting frames.
	maxOutbox = 256
)

// takeFrame handles a frame that arrived at the hub. A frame that does not decode or names no
// endpoint is dropped, and its sender gets no receipt.
func (d *domain) takeFrame(b []byte) {
	f, err := parseFrame(b)
	if err != nil {
		return
	}
	e := d.endpointOf(f.tag)
	if e == nil || !e.joined {
		return
	}
	switch f.kind {
	case frameMessage:
		d.takeMessage(e, &f)
	case frameKeyQuery:
		d.replyKeyQuery(e, &f)
	case frameKeyReply:
		d.takeKeyReply(e, &f)
	case frameReceipts:
		for _, r := range f.receipts {
			e.takeReceipt(r)
		}
	case frameClosed:
		e.peerGone = true
		e.mu.Lock()
		e.failLocked(errPeerClosed)
		e.mu.Unlock()
	}
}

// errPeerClosed: the peer has shut its endpoint.
var errPeerClosed = fmt.Errorf("fabric: the peer's endpoint is gone")

// takeMessage copies a message into the buffer that was lent earliest.
func (d *domain) takeMessage(e *endpoint, f *frame) {
	if e.closedToPeer {
		return
	}
	if len(d.lent) == 0 || len(f.payload) > len(d.lent[0].buf) {
		d.queueReceipt(e, receipt{ref: f.ref, status: group.StatusNoBuffer})
		return
	}
	l := d.lent[0]
	d.lent = d.lent[1:]
	n := copy(l.buf, f.payload)
	d.emit(group.Completion{Kind: group.KindMessage, Cookie: e.cookie, Slot: l.slot, Len: uint64(n)})
	d.queueReceipt(e, receipt{ref: f.ref})
}

// queueReceipt queues a receipt (the result of a message of the peer) to be sent. A peer may have
// at most maxQueueDepth works in flight. A peer that sends more is cut off.
func (d *domain) queueReceipt(e *endpoint, r receipt) {
	if len(e.receipts) >= maxReceipts {
		e.mu.Lock()
		e.failLocked(fmt.Errorf("the peer has more than %d messages in flight", maxQueueDepth))
		e.mu.Unlock()
		return
	}
	e.receipts = append(e.receipts, r)
	if !e.receiptsQueued {
		e.receiptsQueued = true
		d.receiptQueue = append(d.receiptQueue, e)
	}
}

// sendReceipts sends the queued receipts (results of the peers' messages) until no send buffer is
// free or the provider is full.
func (d *domain) sendReceipts() {
	for len(d.receiptQueue) > 0 {
		e := d.receiptQueue[0]
		if !e.closed && !e.peerGone {
			f := frame{kind: frameReceipts, tag: e.peerTag, receipts: e.receipts}
			if !d.send(e.hub, &f) {
				d.busy.Store(true)
				return
			}
		}
		e.receipts, e.receiptsQueued = e.receipts[:0], false
		d.receiptQueue = d.receiptQueue[1:]
	}
}

// send sends a frame from the hub. It returns false if no buffer is free or the provider is full.
func (d *domain) send(to *peerHub, f *frame) bool {
	last := len(d.sendFree) - 1
	if last < 0 {
		return false
	}
	i := d.sendFree[last]
	text := f.append(d.native.buffer(i)[:0])
	if d.native.send(i, len(text), to.addr) != nil {
		return false
	}
	d.sendFree = d.sendFree[:last]
	return true
}

// post sends a frame as soon as the provider accepts it. If too many frames wait, post drops the
// frame and returns false.
func (d *domain) post(l pendingFrame) bool {
	if len(d.outbox) == 0 && d.send(l.to, &l.frame) {
		return true
	}
	if len(d.outbox) >= maxOutbox {
		return false
	}
	d.mu.Lock()
	l.to.refs++
	d.mu.Unlock()
	d.outbox = append(d.outbox, l)
	d.busy.Store(true)
	return true
}

// deliver sends the frames in the outbox and drops those past their deadline.
func (d *domain) deliver(now time.Time) {
	kept := d.outbox[:0]
	for _, l := range d.outbox {
		if !d.send(l.to, &l.frame) && now.Before(l.deadline) {
			kept = append(kept, l)
		} else if err := d.dropHub(l.to); err != nil {
			d.fatal = err
		}
	}
	clear(d.outbox[len(kept):])
	d.outbox = kept
}

// sendClosed notifies the peer, if it can be reached, that e is closed. Without this frame the
// peer's libfabric would try to connect forever.
func (d *domain) sendClosed(e *endpoint) {
	if e.joined && !e.peerGone && d.dead == nil {
		e.peerGone = true
		d.post(pendingFrame{to: e.hub, frame: frame{kind: frameClosed, tag: e.peerTag}, deadline: time.Now().Add(keyReplyTimeout)})
	}
}

// breakAndQuery cuts off a broken endpoint. Before it ends the endpoint's works, it queries the
// target which of them the target would refuse.
func (d *domain) breakAndQuery(e *endpoint) {
	if e.closedToPeer || e.broken {
		return
	}
	e.broken = true
	d.cut(e)
	if !e.joined || e.peerGone || !d.sendKeyQuery(e) {
		d.finish(e, 0)
	}
}

// finish ends the works of a broken endpoint, and reports the endpoint as broken.
func (d *domain) finish(e *endpoint, refused uint64) {
	d.forget(e)
	e.settle(refused)
	e.mu.Lock()
	why := e.why
	e.mu.Unlock()
	d.emit(group.Completion{Kind: group.KindBroken, Status: group.StatusBroken, Cookie: e.cookie, Err: why})
	d.sendClosed(e)
}

// sendKeyQuery sends a key query about every write in flight on e. It reports whether to wait for
// an answer.
func (d *domain) sendKeyQuery(e *endpoint) bool {
	f := frame{kind: frameKeyQuery, tag: e.peerTag}
	q := keyQuery{deadline: time.Now().Add(keyReplyTimeout)}
	for _, i := range e.pending() {
		e.mu.Lock()
		if s := &e.slots[i]; !s.framed {
			f.targets = append(f.targets, s.target)
			q.seqs = append(q.seqs, s.seq)
		}
		e.mu.Unlock()
	}
	if len(f.targets) == 0 {
		return false
	}
	d.queryCount++
	q.id, f.ref = d.queryCount, d.queryCount
	if !d.post(pendingFrame{to: e.hub, frame: f, deadline: q.deadline}) {
		return false
	}
	e.query = q
	d.querying[q.id] = e
	d.busy.Store(true)
	return true
}

// forget drops the unanswered key query of e (keyQuery), if there is one.
func (d *domain) forget(e *endpoint) {
	if e.query.id != 0 {
		delete(d.querying, e.query.id)
		e.query = keyQuery{}
	}
}

// replyKeyQuery answers a key query of the peer: which of the listed writes this domain would
// refuse.
func (d *domain) replyKeyQuery(e *endpoint, f *frame) {
	a := frame{kind: frameKeyReply, tag: e.peerTag, ref: f.ref, refused: make([]bool, len(f.targets))}
	for i, t := range f.targets {
		a.refused[i] = !d.opens(t)
	}
	d.post(pendingFrame{to: e.hub, frame: a, deadline: time.Now().Add(keyReplyTimeout)})
}

// opens reports whether a registration of this domain permits a peer's write to t.
func (d *domain) opens(t target) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	m := d.memories[t.key]
	if m == nil || !m.remote || t.addr < m.base {
		return false
	}
	end, carry := bits.Add64(t.addr-m.base, t.size, 0)
	return carry == 0 && end <= m.size
}

// takeKeyReply ends the works of an endpoint according to the target's answer. The first work that
// the target would refuse broke the endpoint; later works were not performed.
func (d *domain) takeKeyReply(e *endpoint, f *frame) {
	if d.querying[f.ref] != e || len(f.refused) != len(e.query.seqs) {
		return
	}
	var refused uint64
	for i, r := range f.refused {
		if r {
			refused = e.query.seqs[i]
			break
		}
	}
	d.finish(e, refused)
}

// sweep does the periodic work. It sends the queued frames and receipts (acknowledgements of
// frames), completes delayed closes, and gives up key queries that the peer has not answered in
// time (querying).
func (d *domain) sweep() {
	now := time.Now()
	if now.Before(d.nextSweep) {
		return
	}
	d.nextSweep = now.Add(sweepInterval)
	d.deliver(now)
	d.sendReceipts()
	d.endDelayedCloses(now)
	for _, e := range d.querying {
		if now.After(e.query.deadline) {
			d.finish(e, 0)
		}
	}
	d.busy.Store(len(d.querying) > 0 || len(d.outbox) > 0 || len(d.receiptQueue) > 0 || len(d.delayed) > 0)
}
