package verbs

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// endpoint is two queue pairs to one peer.
type endpoint struct {
	d      *domain
	cookie uint64
	class  rdma.Class
	local  []byte
	// lanes are the queue pairs for writes and for messages.
	lanes [2]*lane

	// broken is set, under d.mu, when the endpoint accepts no more Works.
	broken atomic.Bool

	// mu is held while Works are posted, so that Shut waits for them.
	mu       sync.Mutex
	joined   bool
	shut     bool
	closed   bool
	reported bool // KindBroken was delivered, or Shut made it unnecessary; guarded by d.mu
}

var _ group.Endpoint = (*endpoint)(nil)

// Indices of endpoint.lanes.
const (
	writes   = 0
	messages = 1
)

// lane is one queue pair and the Works posted on it.
type lane struct {
	e     *endpoint
	q     *queue
	ring  *ring
	index uint32 // index in domain.byIndex
	kind  int    // writes or messages
}

// Errors of endpoints.
var (
	errShut      = errors.New("the endpoint was shut before the operation ended")
	errNotJoined = errors.New("the endpoint is not connected")
	errBroken    = errors.New("the endpoint is broken")
)

// NewEndpoint implements group.Domain.
func (d *domain) NewEndpoint(cookie uint64, class rdma.Class) (group.Endpoint, error) {
	if class >= rdma.Classes {
		return nil, fmt.Errorf("verbs: %s: endpoint for %v: %w", d.name, class, rdma.ErrUnsupported)
	}
	e := &endpoint{d: d, cookie: cookie, class: class}
	if err := d.reserve(2 * d.opts.QueueDepth); err != nil {
		return nil, fmt.Errorf("verbs: %s: endpoint: %w", d.name, err)
	}
	// Creating queue pairs takes the device some time. Other endpoints are polled in the meantime.
	d.qpMu.Lock()
	defer d.qpMu.Unlock()
	for i := range e.lanes {
		q, err := d.nic.newQueue(d.opts.QueueDepth, i == messages, queueRights(i))
		if err != nil {
			if i > 0 {
				err = errors.Join(err, e.lanes[0].q.close())
			}
			d.release(2 * d.opts.QueueDepth)
			return nil, fmt.Errorf("verbs: %s: endpoint: %w", d.name, hintMemlock(err))
		}
		e.lanes[i] = &lane{e: e, q: q, ring: newRing(d.opts.QueueDepth), kind: i}
	}
	e.local = endpointAddr{
		writeQPN: e.lanes[writes].q.qpn, messageQPN: e.lanes[messages].q.qpn,
		writePSN: e.lanes[writes].q.psn, messagePSN: e.lanes[messages].q.psn,
		gid: d.gid.gid, lid: d.port.lid, mtu: d.port.mtu, layer: d.port.layer,
	}.append(nil)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, l := range e.lanes {
		l.index = d.placeLocked(l)
		d.byQPN[l.q.qpn] = e
	}
	if d.doomed {
		e.breakLocked(group.ErrDead) // the domain failed before this endpoint was added to byQPN
	}
	return e, nil
}

// placeLocked returns an unused index of byIndex, at which it stores l.
func (d *domain) placeLocked(l *lane) uint32 {
	if k := len(d.free); k > 0 {
		i := d.free[k-1]
		d.free = d.free[:k-1]
		d.byIndex[i] = l
		return i
	}
	d.byIndex = append(d.byIndex, l)
	return uint32(len(d.byIndex) - 1)
}

// Local implements group.Endpoint.
func (e *endpoint) Local() []byte { return e.local }

// path returns the part of a path to the peer that both queue pairs share. Connect adds the queue
// pair numbers and the packet sequence numbers.
func (d *domain) path(to endpointAddr, class rdma.Class) path {
	return path{
		port: d.number, mtu: min(d.port.mtu, to.mtu), gidIndex: d.gid.index, remoteGID: to.gid, remoteLID: to.lid,
		marking: d.marking(class), timeoutCode: uint8(d.opts.TimeoutCode), retries: uint8(d.opts.Retries),
		rnrTimer: rnrTimerImm, rnrTries: rnrTriesImm,
	}
}

// marking returns the marking of the packets of a class.
func (d *domain) marking(class rdma.Class) marking {
	if d.opts.QoS == nil {
		return marking{}
	}
	l := d.opts.QoS.Lane(class)
	return marking{serviceLevel: l.SL, trafficClass: l.TrafficClass()}
}

// Connect implements group.Endpoint. On Ethernet the kernel resolves the peer's address by ARP,
// for which Connect waits.
func (e *endpoint) Connect(remote []byte) error {
	to, err := parseAddr(remote)
	if err == nil && to.layer != e.d.port.layer {
		err = fmt.Errorf("%w: the peer's port uses %v and this port %v", errAddr, to.layer, e.d.port.layer)
	}
	if err != nil {
		return fmt.Errorf("verbs: %s: connect: %w", e.d.name, err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.shut || e.joined {
		return fmt.Errorf("verbs: %s: connect: the endpoint is already connected or shut", e.d.name)
	}
	p := e.d.path(to, e.class)
	for i, l := range e.lanes {
		p.remoteQPN, p.remotePSN, p.localPSN = to.writeQPN, to.writePSN, l.q.psn
		if i == messages {
			p.remoteQPN, p.remotePSN = to.messageQPN, to.messagePSN
			p.rnrTimer, p.rnrTries = rnrTimerMessage, rnrTriesMessage
		}
		if err := l.q.join(p); err != nil {
			return fmt.Errorf("verbs: %s: connect to GID %v: %w", e.d.name, gidEntry{gid: to.gid}.addr(), err)
		}
	}
	e.joined = true
	return nil
}

// Limits of selective signalling.
const (
	// signalEvery is the largest number of requests that share a completion: the length of the
	// chains in fabric-lib (section 3.5).
	signalEvery = 4
	// signalBytes is the length in bytes from which a write has its own completion. If such a
	// write shared a completion, its completion would be noticeably late, because it would wait
	// for later writes.
	signalBytes = 64 << 10
)

// Post implements group.Endpoint. Consecutive Works for the same queue pair are posted in one
// chain. While posting succeeds, Post allocates no memory: it reuses the queue pair's slice of
// requests.
func (e *endpoint) Post(works []group.Work) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.joined || e.shut || e.broken.Load() {
		return 0, e.unusable()
	}
	for n := 0; n < len(works); {
		l := e.laneOf(&works[n])
		chain := l.fill(works[n:])
		if chain == 0 {
			return n, nil
		}
		k, err := l.q.post(chain)
		n += k
		if err != nil {
			l.ring.drop(chain - k)
			return n, e.fail(err)
		}
	}
	return len(works), nil
}

// laneOf returns the queue pair that carries w.
func (e *endpoint) laneOf(w *group.Work) *lane {
	if w.Op == group.OpSend {
		return e.lanes[messages]
	}
	return e.lanes[writes]
}

// fill converts the first works for l, as many as can be posted together, into l's requests and
// adds them to l's ring. It returns their number, which is 0 if the ring is full.
func (l *lane) fill(works []group.Work) int {
	n := min(len(works), postMax, l.ring.room())
	requests := l.q.requests
	unsignaled := 0
	for i := range n {
		w := &works[i]
		if l.e.laneOf(w) != l {
			n = i
			break
		}
		r := &requests[i]
		r.op = opWrite
		switch w.Op {
		case group.OpWriteImm:
			r.op = opWriteImm
		case group.OpSend:
			r.op = opSend
		}
		r.len, r.imm, r.signaled = 0, w.Imm, 0
		if w.Len > 0 {
			m := w.Src.(*memory)
			r.local, r.len, r.lkey = m.base+w.SrcOff, uint32(w.Len), m.lkey
		}
		r.remote, r.rkey = w.RemoteAddr, uint32(w.RemoteKey)
		if unsignaled++; unsignaled == signalEvery || w.Len >= signalBytes {
			r.signaled, unsignaled = 1, 0
		}
		r.id = uint64(l.index)<<32 | uint64(uint32(l.ring.add(w.Cookie)))
	}
	if n > 0 {
		requests[n-1].signaled = 1
	}
	return n
}

// unusable returns why Post accepts no Works. The errors are made in advance, so that a caller
// that retries often causes no allocation.
func (e *endpoint) unusable() error {
	switch {
	case !e.joined:
		return errNotJoined
	case e.shut:
		return errShut
	}
	return errBroken
}

// fail breaks the endpoint after a post has failed.
func (e *endpoint) fail(err error) error {
	e.d.mu.Lock()
	e.breakLocked(err)
	e.d.mu.Unlock()
	e.d.Wake()
	return fmt.Errorf("verbs: %s: %w", e.d.name, err)
}

// breakLocked ends the use of the endpoint and delivers KindBroken, once. Both queue pairs are
// moved to the error state: the card then returns their Works, and the peer's packets are not
// accepted any more. This command to the device runs later, without d.mu, because all other peers
// would wait for it.
func (e *endpoint) breakLocked(why error) {
	e.broken.Store(true)
	if e.reported {
		return
	}
	e.reported = true
	e.d.workers.Go(func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if !e.shut {
			e.modifyAll()
		}
	})
	e.d.out = append(e.d.out, group.Completion{Kind: group.KindBroken, Cookie: e.cookie, Err: why})
}

// modifyAll moves both queue pairs to the error state. Errors are ignored: a queue pair may
// already be in that state, and a device that accepts no commands has no Works to return.
func (e *endpoint) modifyAll() {
	for _, l := range e.lanes {
		_ = l.q.modify(stateError)
	}
}

// takeLocked records the end of the Work with that sequence number, and of all earlier Works that
// requested no completion of their own. d.mu is held.
func (l *lane) takeLocked(seq uint32, status wcStatus, vendor uint32) {
	n, ok := l.ring.before(seq)
	if !ok {
		return // already ended by quiesce
	}
	for range n {
		l.e.d.out = append(l.e.d.out, group.Completion{Kind: group.KindDone, Cookie: l.ring.end()})
	}
	c := group.Completion{Kind: group.KindDone, Status: status.outcome(l.kind == messages)}
	c.Cookie = l.ring.end()
	if status == wcSuccess {
		l.e.d.out = append(l.e.d.out, c)
		return
	}
	c.Err = &wcError{nic: l.e.d.name, status: status, text: l.e.d.nic.statusText(status), vendor: vendor}
	l.e.d.out = append(l.e.d.out, c)
	l.e.breakLocked(c.Err)
}

// Shut implements group.Endpoint.
func (e *endpoint) Shut() {
	e.d.mu.Lock()
	e.reported = true // the caller of Shut does not need KindBroken
	e.d.mu.Unlock()
	e.cutOff()
}

// flushMax is the longest time for which cutOff waits for the card to return Works. Cards take
// microseconds. cutOff itself ends the Works that have not returned by then.
const flushMax = 200 * time.Millisecond

// cutOff does the work of Shut. Afterwards the card neither reads nor writes memory here for this
// endpoint. out then contains everything that had arrived, and the end of every Work. cutOff
// destroys the queue pairs, which waits for payload that is being placed. A reset of the queue
// pairs should be enough, but the reset of rdma_rxe in Linux 6.1 counts packets in flight twice.
func (e *endpoint) cutOff() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.shut {
		return
	}
	e.shut = true
	d := e.d
	e.broken.Store(true)
	// The error state keeps data that has arrived, while destroying a queue pair may drop it.
	e.modifyAll()
	d.mu.Lock()
	for end := time.Now().Add(flushMax); ; {
		d.reapAllLocked()
		if e.lanes[writes].ring.pending()+e.lanes[messages].ring.pending() == 0 || time.Now().After(end) {
			break
		}
		d.mu.Unlock() // let other goroutines poll
		runtime.Gosched()
		d.mu.Lock()
	}
	d.mu.Unlock()
	e.destroy()
	d.Wake()
}

// destroy destroys the queue pairs and ends their remaining Works. e.mu is held. While the device
// destroys the queue pairs, other goroutines may poll, but not create queue pairs.
func (e *endpoint) destroy() {
	d := e.d
	d.qpMu.Lock()
	defer d.qpMu.Unlock()
	for _, l := range e.lanes {
		_ = l.q.destroy() // fails only if the device is gone
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reapAllLocked()
	for _, l := range e.lanes {
		delete(d.byQPN, l.q.qpn) // the next queue pair may get this number
		for l.ring.pending() > 0 {
			d.out = append(d.out, group.Completion{Kind: group.KindDone, Status: group.StatusBroken, Cookie: l.ring.end(), Err: errShut})
		}
	}
}

// Close implements group.Endpoint.
func (e *endpoint) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	if !e.shut {
		return fmt.Errorf("verbs: %s: close an endpoint that was not shut", e.d.name)
	}
	e.closed = true
	d := e.d
	d.release(2 * d.opts.QueueDepth)
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for _, l := range e.lanes {
		d.byIndex[l.index] = nil
		d.free = append(d.free, l.index)
		errs = append(errs, l.q.close())
	}
	d.forgetLocked(e)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("verbs: %s: %w", d.name, err)
	}
	return nil
}

// forgetLocked drops the completions of a closed endpoint that have not been polled. These are
// only arrivals: the caller has polled the ends of all Works.
func (d *domain) forgetLocked(e *endpoint) {
	d.out = d.out[:copy(d.out, d.out[d.head:])]
	d.head = 0
	d.out = slices.DeleteFunc(d.out, func(c group.Completion) bool {
		if c.Kind == group.KindDone || c.Cookie != e.cookie {
			return false
		}
		if c.Kind == group.KindMessage {
			d.lendAgainLocked(c.Slot)
		}
		return true
	})
}
