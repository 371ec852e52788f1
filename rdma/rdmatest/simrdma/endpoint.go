package simrdma

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// endpointAddr is the length of Endpoint.Local in bytes. Local holds the NIC's number and the
// endpoint's number on the NIC.
const endpointAddr = 8

// Endpoint is one end of a connection between two NICs.
type Endpoint struct {
	d      *Domain
	number uint32
	cookie uint64
	class  rdma.Class
	addr   [endpointAddr]byte
	draws  draws  // for the endpoint's own draws
	works  uint64 // seed of the random numbers of its Works

	posting atomic.Bool // true while a goroutine is in Post; only one may be

	// The fields below are guarded by the fabric's lock.
	peer *Endpoint
	// shut, broken and closed are set in this order. Some may remain unset.
	shut, broken, closed bool
	why                  error // reason for being broken, or for breaking soon
	breaking             bool  // stepBreak is scheduled
	// unpolled is the number of Works whose completion has not been polled. Invariant: unpolled
	// <= QueueDepth.
	unpolled int
	posted   uint64 // total number of Works
	// flying are the Works that have not landed, or whose completion has not been queued, in the
	// order posted.
	flying []*flight
	// lastAdmit is the time at which the latest Work is admitted, that is, arrives at the target's
	// NIC. If the NIC is Ordered, no later Work is admitted before it.
	lastAdmit time.Duration
	// lastLanded is the highest number of the peer's Works that have landed here, plus 1; 0 if none
	// has landed.
	lastLanded uint64
	// refusing: a Work was refused, which will break the endpoint, so no later Work is performed.
	refusing bool
}

var _ group.Endpoint = (*Endpoint)(nil)

var errGone = errors.New("simrdma: the peer's endpoint is gone")

// Local is the endpoint's address.
func (e *Endpoint) Local() []byte { return append([]byte(nil), e.addr[:]...) }

// Connect connects the endpoint to its peer.
func (e *Endpoint) Connect(remote []byte) error {
	if len(remote) != endpointAddr {
		return fmt.Errorf("simrdma: endpoint address of %d bytes, want %d: %w", len(remote), endpointAddr, rdma.ErrMalformed)
	}
	f := e.d.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := e.d.usableLocked("connect"); err != nil {
		return err
	}
	if e.closed || e.peer != nil {
		f.violationLocked("%v: Connect of an endpoint that is closed or connected", e)
		return fmt.Errorf("simrdma: connect %v again: %w", e, rdma.ErrExists)
	}
	if e.shut {
		return fmt.Errorf("simrdma: connect %v, which was shut: %w", e, rdma.ErrClosed)
	}
	id, number := binary.LittleEndian.Uint32(remote), binary.LittleEndian.Uint32(remote[4:])
	d := f.byID[id]
	if d == nil || d.endpoints[number] == nil {
		return fmt.Errorf("simrdma: no endpoint %d on NIC %d: %w", number, id, rdma.ErrMalformed)
	}
	if d.opts.Ordered != e.d.opts.Ordered || d.opts.RefusalBreaks != e.d.opts.RefusalBreaks {
		return fmt.Errorf("simrdma: %s and %s are of different kinds: %w", e.d.opts.Name, d.opts.Name, rdma.ErrUnsupported)
	}
	peer := d.endpoints[number]
	if peer == e || (peer.peer != nil && peer.peer != e) || peer.class != e.class {
		return fmt.Errorf("simrdma: endpoint %v does not exist for %v: %w", peer, e, rdma.ErrMalformed)
	}
	e.peer = peer
	return nil
}

// String returns the name of the endpoint for error texts.
func (e *Endpoint) String() string { return fmt.Sprintf("%s#%d", e.d.opts.Name, e.number) }

// closedToPeerLocked reports whether no Work of the peer can land here any more.
func (e *Endpoint) closedToPeerLocked() bool { return e.shut || e.broken || e.closed || e.d.dead }

// Post submits Works.
func (e *Endpoint) Post(works []group.Work) (int, error) {
	if !e.posting.CompareAndSwap(false, true) {
		e.d.f.violation("%v: Post beside another Post", e)
		return 0, fmt.Errorf("simrdma: %v is being posted to", e)
	}
	defer e.posting.Store(false)
	f := e.d.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := e.postableLocked(); err != nil {
		return 0, err
	}
	now := f.now()
	for i := range works {
		if e.unpolled >= e.d.opts.QueueDepth {
			return i, nil
		}
		if err := e.checkLocked(&works[i]); err != nil {
			f.violationLocked("%v: %v", e, err)
			return i, err
		}
		e.sendLocked(&works[i], now)
	}
	return len(works), nil
}

// postableLocked returns an error if the endpoint accepts no Works.
func (e *Endpoint) postableLocked() error {
	f := e.d.f
	switch {
	case e.closed || e.shut:
		f.violationLocked("%v: Post after Shut", e)
		return fmt.Errorf("simrdma: post to %v: %w", e, rdma.ErrClosed)
	case e.broken:
		return fmt.Errorf("simrdma: post to %v: broken: %w", e, e.why)
	case e.d.dead:
		return fmt.Errorf("simrdma: post to %v: %w", e, e.d.why)
	case e.peer == nil || (e.peer.peer != e && !e.peer.closedToPeerLocked()):
		f.violationLocked("%v: Post before Connect has returned on both sides", e)
		return fmt.Errorf("simrdma: post to %v: it is not connected on both sides", e)
	}
	return nil
}

// checkLocked returns an error if the engine may not post w.
func (e *Endpoint) checkLocked(w *group.Work) error {
	o := &e.d.opts
	switch w.Op {
	case group.OpWrite, group.OpWriteImm:
		if w.Len > o.MaxWrite {
			return fmt.Errorf("simrdma: write of %d bytes, at most %d", w.Len, o.MaxWrite)
		}
		if w.RemoteKey == 0 || (o.KeyBits > 0 && o.KeyBits < 64 && w.RemoteKey>>o.KeyBits != 0) {
			return fmt.Errorf("simrdma: key %#x is none of %d bits", w.RemoteKey, o.KeyBits)
		}
	case group.OpSend:
		if w.Len > uint64(o.MaxMessage) {
			return fmt.Errorf("simrdma: message of %d bytes, at most %d", w.Len, o.MaxMessage)
		}
	default:
		return fmt.Errorf("simrdma: op %d", w.Op)
	}
	if w.Len == 0 {
		return nil
	}
	src, ok := w.Src.(*Memory)
	if !ok || src.d != e.d {
		return fmt.Errorf("simrdma: the source is not memory of %s", o.Name)
	}
	if src.closed {
		return fmt.Errorf("simrdma: the source, memory %#x, is closed", src.key)
	}
	return rdma.Range("source", w.SrcOff, w.Len, uint64(len(src.buf)))
}

// breakLocked breaks the endpoint: its Works end, and one KindBroken is queued.
func (e *Endpoint) breakLocked(why error) {
	if e.broken || e.shut || e.closed || e.d.dead {
		return
	}
	e.broken, e.why = true, why
	e.d.f.counts.Breaks++
	tell := completion{ep: e, Completion: group.Completion{Kind: group.KindBroken, Status: group.StatusBroken, Cookie: e.cookie, Err: why}}
	first := e.draws.chance(0.5)
	if first && !e.d.silent {
		e.d.pushLocked(tell)
	}
	e.endFlightsLocked()
	if !first && !e.d.silent {
		e.d.pushLocked(tell)
	}
}

// breakSoonLocked breaks the endpoint after the delay of one packet.
func (e *Endpoint) breakSoonLocked(why error) {
	if e.breaking {
		return
	}
	e.breaking, e.why = true, why
	f := e.d.f
	f.scheduleLocked(event{at: f.now() + f.delay(&e.draws), step: stepBreak, ep: e})
}

// Shut disconnects the endpoint.
func (e *Endpoint) Shut() {
	e.d.f.mu.Lock()
	defer e.d.f.mu.Unlock()
	e.shutLocked()
}

func (e *Endpoint) shutLocked() {
	if e.shut {
		return
	}
	e.shut = true
	if e.why == nil {
		e.why = fmt.Errorf("simrdma: %v was shut", e)
	}
	e.endFlightsLocked()
}

// endFlightsLocked completes all Works in flight with StatusBroken. Some of these Works stay on the
// wire as ghosts and may still land.
func (e *Endpoint) endFlightsLocked() {
	f := e.d.f
	wire := true
	flying := append([]*flight(nil), e.flying...)
	for _, fl := range flying {
		if fl.ended {
			continue
		}
		if !fl.landed {
			ghost := wire && !e.refusing && e.draws.chance(f.opts.GhostChance)
			if e.d.opts.Ordered {
				wire = ghost
			}
			if ghost {
				fl.makeGhost()
			} else {
				f.landLocked(fl) // at no target
			}
		} else if fl.status == group.StatusOK {
			f.counts.DeliveredBroken++
		}
		f.completeLocked(fl, group.StatusBroken, e.why)
	}
}

// Close releases the endpoint.
func (e *Endpoint) Close() error {
	f := e.d.f
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case e.closed:
		f.violationLocked("%v: Close twice", e)
		return nil
	case !e.shut && !e.d.dead:
		f.violationLocked("%v: Close before Shut", e)
	case e.unpolled > 0 && !e.d.dead:
		f.violationLocked("%v: Close before the completions of %d Works have been polled", e, e.unpolled)
	}
	e.shutLocked()
	e.closed = true
	e.d.completions.remove(e)
	delete(e.d.endpoints, e.number)
	return nil
}
