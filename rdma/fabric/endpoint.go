//go:build fabric && cgo && linux

package fabric

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// endpoint is one libfabric endpoint, for one peer.
type endpoint struct {
	d       *domain
	cookie  uint64
	tag     uint32 // the peer sends this tag with its frames and immediates
	local   []byte
	address []byte // this endpoint's address, in the provider's format

	// The fields below are guarded by d.poll.

	// closedToPeer: messages and immediates of the peer are not delivered any more. handshakeDone:
	// the endpoint may be closed, because the handshake is done or this endpoint makes the
	// handshake. closeDelayed: the endpoint was shut before the handshake and is closed later
	// (handshake.go).
	handshakeDone, closeDelayed bool
	// peerGone: the peer's endpoint is gone, so no key query and no closed frame is sent to it.
	closedToPeer, broken, closed, joined, peerGone bool
	source                                         uint64 // the peer's address
	hub                                            *peerHub
	query                                          keyQuery
	receipts                                       []receipt // to be sent to the peer
	receiptsQueued                                 bool      // the endpoint is in d.receiptQueue

	mu        sync.Mutex
	native    *nativeEndpoint // used by Post and by close
	open      bool            // Post takes works
	held      bool            // works wait in the ring until the handshake
	cutOff    bool
	why       error // reason why open is false
	peerTag   uint32
	slots     []slot
	free      []uint32
	posted    uint64 // sequence number of the last work
	isLate    bool
	lateSince time.Time // since when the provider has accepted no work
}

// slot is a work in flight.
type slot struct {
	cookie, seq uint64
	target      target
	used        bool
	// A message is sent in a frame to the peer's hub (framed). Its work ends when the provider has
	// sent the frame (sent) and the peer has returned a receipt (receipted).
	framed, sent, receipted bool
	status                  group.Status
	// handshake: the work is the endpoint's own handshake write, which has no completion for the
	// user.
	handshake bool
}

// ref returns the value by which receipts refer to the work in slot i: its sequence number and
// slot.
func ref(seq uint64, i uint32) uint64 { return seq<<8 | uint64(i) }

var _ group.Endpoint = (*endpoint)(nil)

// errNotConnected: Post before Connect.
var errNotConnected = errors.New("fabric: the endpoint is not connected")

// NewEndpoint makes a libfabric endpoint for one peer. One libfabric endpoint for all peers would
// be cheaper: the peers' addresses could distinguish them. But then a peer that does not cooperate
// could not be cut off.
func (d *domain) NewEndpoint(cookie uint64, class rdma.Class) (group.Endpoint, error) {
	if int(class) >= rdma.Classes {
		return nil, fmt.Errorf("fabric: %v: %w", class, rdma.ErrRange)
	}
	depth := d.limits.QueueDepth
	e := &endpoint{d: d, cookie: cookie, why: errNotConnected, held: d.quirks.connects, slots: make([]slot, depth), free: make([]uint32, 0, depth)}
	for i := range uint32(depth) {
		e.free = append(e.free, uint32(depth)-1-i)
	}
	d.mu.Lock()
	for e.tag == 0 || d.byTag[e.tag] != nil {
		e.tag = uint32(random64())
	}
	d.byTag[e.tag] = e
	d.mu.Unlock()

	d.poll.Lock()
	defer d.poll.Unlock()
	var name []byte
	err := d.dead
	if err == nil {
		e.native, name, err = d.native.openEndpoint(e.tag, depth, d.opts.TrafficClass[class], d.localKey())
	}
	l := local{format: d.traits.format, tag: e.tag, provider: d.traits.provider, endpoint: name, hub: d.hub}
	if d.handshakeMem != nil {
		l.handshake = target{key: d.handshakeMem.Key(), addr: d.handshakeMem.Base()}
	}
	if err == nil && (len(name) > maxName || len(d.hub) > maxName) {
		err = fmt.Errorf("address of %d bytes; at most %d are possible", max(len(name), len(d.hub)), maxName)
	}
	if err != nil {
		d.mu.Lock()
		delete(d.byTag, e.tag)
		d.mu.Unlock()
		return nil, fmt.Errorf("fabric: endpoint on %s: %w", d.Name(), err)
	}
	e.local, e.address = l.append(nil), name
	return e, nil
}

// Local returns the encoded addresses that the peer's Connect takes.
func (e *endpoint) Local() []byte { return e.local }

// Connect connects the endpoint to the peer's endpoint. If the provider uses connections, the
// endpoint with the greater address opens the connection before Connect returns.
func (e *endpoint) Connect(remote []byte) error {
	l, err := parseLocal(remote)
	if err != nil {
		return err
	}
	if err := e.d.checkPeer(&l); err != nil {
		return err
	}
	if err := e.join(&l); err != nil {
		return fmt.Errorf("fabric: connect: %w", err)
	}
	if e.d.quirks.connects && bytes.Compare(e.address, l.endpoint) > 0 {
		if err := e.handshake(l.handshake); err != nil {
			return fmt.Errorf("fabric: connect: %w", err)
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.why != errNotConnected {
		return e.why // broken, or shut
	}
	e.open, e.why = true, nil
	return nil
}

// join adds the peer's addresses to the provider.
func (e *endpoint) join(l *local) error {
	d := e.d
	d.poll.Lock()
	defer d.poll.Unlock()
	if d.dead != nil {
		return d.dead
	}
	if e.joined || e.closedToPeer || e.broken {
		return errors.New("the endpoint is connected or shut already")
	}
	source, err := d.native.insert(l.endpoint)
	if err != nil {
		return err
	}
	hub, err := d.insertHub(l.hub)
	if err != nil {
		return errors.Join(err, d.native.remove(source))
	}
	e.joined, e.source, e.hub = true, source, hub
	d.mu.Lock()
	d.bySource[source] = e
	d.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.native.join(source, hub.addr)
	e.peerTag = l.tag
	return nil
}

// handshake writes one byte to the peer, which makes the connection, and waits until the write has
// completed. It polls the completion queue itself, because its caller may be the poller.
func (e *endpoint) handshake(at target) error {
	e.d.poll.Lock()
	e.handshakeDone = true // no peer connects to this endpoint
	e.d.poll.Unlock()
	e.mu.Lock()
	if e.cutOff {
		defer e.mu.Unlock()
		return e.why
	}
	e.held = false
	if err := e.native.stopListening(); err != nil {
		defer e.mu.Unlock()
		return err
	}
	last := len(e.free) - 1
	i := e.free[last]
	e.free = e.free[:last]
	e.posted++
	e.slots[i] = slot{seq: e.posted, used: true, handshake: true, target: at}
	src := e.d.handshakeMem
	e.native.put(i, src.addr, src.reg.desc, handshakeSize, at.addr, at.key, handshakeMark<<32|uint64(e.peerTag), true)
	_, err := e.native.flush(1)
	e.mu.Unlock()
	for deadline := time.Now().Add(lateTimeout); err == nil; {
		var done bool
		if done, err = e.handshakeDoneIn(i); done {
			return nil
		}
		if time.Now().After(deadline) {
			err = fmt.Errorf("the peer's endpoint did not answer in %v", lateTimeout)
		}
		<-time.After(handshakePause)
	}
	return err
}

// handshakeDoneIn polls the queue and reports whether the handshake in slot i has completed.
func (e *endpoint) handshakeDoneIn(i uint32) (bool, error) {
	d := e.d
	d.poll.Lock()
	defer d.poll.Unlock()
	if d.dead == nil {
		d.turn(maxEvents)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.why != errNotConnected:
		return false, e.why
	case e.slots[i].handshake:
		_, err := e.native.flush(0)
		return false, err
	}
	return true, nil
}

// checkPeer returns an error if l cannot describe an endpoint of this domain's provider.
func (d *domain) checkPeer(l *local) error {
	if l.provider != d.traits.provider || l.format != d.traits.format {
		return fmt.Errorf("fabric: connect: the peer's provider is %q (format %d), this side's %q (format %d)",
			l.provider, l.format, d.traits.provider, d.traits.format)
	}
	for _, a := range [][]byte{l.endpoint, l.hub} {
		if err := checkAddress(d.traits.format, a, len(d.hub)); err != nil {
			return fmt.Errorf("fabric: connect: %w", err)
		}
	}
	return nil
}

// checkAddress rejects an address that is too short, because the provider would read beyond its
// end. It also rejects an address that the provider would treat as an address of another kind. ours
// is the length of the local address in bytes.
func checkAddress(format uint32, a []byte, ours int) error {
	switch format {
	case formatIPv4, formatIPv6:
		family := map[uint32]uint16{formatIPv4: 2, formatIPv6: 10}[format]
		if len(a) != ours || binary.NativeEndian.Uint16(a) != family || binary.BigEndian.Uint16(a[2:]) == 0 {
			return fmt.Errorf("%w: no socket address of family %d with a port", errLocal, family)
		}
		return nil
	}
	if len(a) != ours {
		return fmt.Errorf("%w: address of %d bytes, this side's has %d", errLocal, len(a), ours)
	}
	return nil
}

// insertHub returns a peer's hub and adds a reference to it. It inserts the hub's address into the
// provider if the hub is new.
func (d *domain) insertHub(name []byte) (*peerHub, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.hubs[string(name)]
	if h == nil {
		a, err := d.native.insert(name)
		if err != nil {
			return nil, err
		}
		h = &peerHub{name: string(name), addr: a}
		d.hubs[h.name] = h
	}
	h.refs++
	return h, nil
}

// Post submits works in order.
func (e *endpoint) Post(works []group.Work) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.open {
		return 0, e.why
	}
	n := 0
	for n < len(works) && len(e.free) > 0 {
		e.putLocked(&works[n])
		n++
	}
	if n > 0 {
		e.flushLocked(n)
	}
	return n, nil
}

// putLocked appends one work to the ring.
func (e *endpoint) putLocked(w *group.Work) {
	last := len(e.free) - 1
	i := e.free[last]
	e.free = e.free[:last]
	e.posted++
	s := &e.slots[i]
	*s = slot{cookie: w.Cookie, seq: e.posted, used: true, target: target{key: w.RemoteKey, addr: w.RemoteAddr, size: w.Len}}
	var buf uintptr
	var desc cpointer
	if w.Len > 0 {
		m := w.Src.(*memory)
		buf, desc = m.addr+uintptr(w.SrcOff), m.reg.desc
	}
	if w.Op == group.OpSend {
		s.framed = true
		f := frame{kind: frameMessage, tag: e.peerTag, ref: ref(s.seq, i)}
		f.appendHead(e.native.head(i)[:0], 0)
		e.native.putFrame(i, buf, desc, w.Len)
		return
	}
	key := w.RemoteKey
	if w.RemoteAddr+w.Len < w.RemoteAddr {
		// A provider that compares only the end of the range would accept a write that wraps
		// around. The write is posted with key 0, which is invalid, so the peer refuses the write.
		key = 0
	}
	e.native.put(i, buf, desc, w.Len, w.RemoteAddr, key, e.data(w), w.Op == group.OpWriteImm)
}

// data returns the remote CQ data of a write. Its low half is the immediate. If the data has 8
// bytes, the high half is the peer's tag, for a provider without source addresses. For other
// providers it is the length of the payload, because some of them do not report the length.
func (e *endpoint) data(w *group.Work) uint64 {
	switch {
	case e.d.quirks.noSourceAddress:
		return uint64(w.Imm) | uint64(e.peerTag)<<32
	case e.d.traits.dataBytes >= 8:
		return uint64(w.Imm) | w.Len<<32
	}
	return uint64(w.Imm)
}

// flushLocked gives the works in the ring to the provider; added of them are new. Works that the
// provider does not accept stay in the ring, and Poll offers them again. left is the number of
// these works. An error breaks the endpoint.
func (e *endpoint) flushLocked(added int) (left int) {
	var err error
	if e.held {
		left = e.native.hold(added)
	} else if left, err = e.native.flush(added); err != nil {
		e.failLocked(err)
		return 0
	}
	if left > 0 && !e.isLate {
		e.isLate = true
		e.d.noted.Lock()
		e.d.late = append(e.d.late, e)
		e.d.noted.Unlock()
		if !e.held || added > 0 { // held works wait for the handshake, which wakes the poller
			e.d.Wake()
		}
	}
	return left
}

// flushLate offers the waiting works to the provider again; Poll calls it. It breaks the endpoint
// if the provider has accepted none of these works for lateTimeout.
func (e *endpoint) flushLate() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.isLate = false
	if !e.open {
		return
	}
	left := e.flushLocked(0)
	switch {
	case left == 0 || left < len(e.slots)-len(e.free): // the provider has accepted some works
		e.lateSince = time.Time{}
	case e.lateSince.IsZero():
		e.lateSince = time.Now()
	case time.Since(e.lateSince) > lateTimeout:
		e.failLocked(fmt.Errorf("the peer's endpoint accepted no work for %v", lateTimeout))
	}
}

// handshakePause is the time between two polls of handshake.
const handshakePause = 100 * time.Microsecond

// lateTimeout is the longest time for which a provider may accept no work, for example because it
// is still connecting.
const lateTimeout = 5 * time.Second

// failLocked makes the endpoint refuse works. The next Poll ends the works that were posted.
func (e *endpoint) failLocked(err error) {
	if e.open || e.why == errNotConnected {
		e.open, e.why = false, fmt.Errorf("fabric: the endpoint is broken: %w", err)
		e.d.noteFailing(e)
	}
}

// complete ends the work in slot i. If the work failed with an error, complete notes that the
// endpoint broke.
func (e *endpoint) complete(i uint32, fault, provFault int32) {
	e.mu.Lock()
	s := &e.slots[i]
	if !s.used {
		e.mu.Unlock()
		return
	}
	if fault != 0 {
		// The work keeps its slot: whether it was refused is not known yet.
		e.failLocked(fmt.Errorf("%s (provider's %d)", faultText(fault), provFault))
		e.mu.Unlock()
		return
	}
	s.sent = true
	e.endLocked(i)
}

// takeReceipt records how a message ended, according to the receipt that the peer has sent for it.
func (e *endpoint) takeReceipt(r receipt) {
	i := uint32(r.ref & 0xff)
	e.mu.Lock()
	if int(i) >= len(e.slots) || !e.slots[i].used || !e.slots[i].framed || ref(e.slots[i].seq, i) != r.ref {
		e.mu.Unlock()
		return
	}
	e.slots[i].receipted, e.slots[i].status = true, r.status
	e.endLocked(i)
}

// endLocked completes the work in slot i, if both the send and the receipt are recorded, and
// unlocks e.
func (e *endpoint) endLocked(i uint32) {
	s := e.slots[i]
	if !s.sent || s.framed && !s.receipted {
		e.mu.Unlock()
		return
	}
	e.releaseLocked(i)
	if s.handshake {
		e.mu.Unlock()
		return
	}
	c := group.Completion{Kind: group.KindDone, Cookie: s.cookie, Status: s.status}
	if s.status != group.StatusOK {
		c.Err = errNoBuffer // receipts report no other fault
		e.failLocked(c.Err)
	}
	e.mu.Unlock()
	e.d.emit(c)
}

// The errors of works that the target did not accept.
var (
	errRefused  = errors.New("fabric: the target's domain refused the key or the bounds")
	errNoBuffer = errors.New("fabric: the target's domain had no buffer for the message")
)

func (e *endpoint) releaseLocked(i uint32) {
	e.slots[i] = slot{}
	e.free = append(e.free, i)
}

// close closes the provider's endpoint. After that, the provider accesses no memory of the
// endpoint. close reports whether this call, and not an earlier call, closed the endpoint.
func (e *endpoint) close() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cutOff {
		return false
	}
	e.cutOff, e.open = true, false
	if e.why == nil || e.why == errNotConnected {
		e.why = errShut
	}
	if e.d.quirks.connects && !e.handshakeDone {
		e.d.delayClose(e)
		return true
	}
	// fi_close of an endpoint fails only while another object refers to the endpoint. No object
	// does.
	_ = e.native.cut()
	return true
}

// errShut: Post after Shut.
var errShut = errors.New("fabric: the endpoint is shut")

// pending returns the slots in use, in the order posted.
func (e *endpoint) pending() []uint32 {
	e.mu.Lock()
	defer e.mu.Unlock()
	var used []uint32
	for i := range e.slots {
		if e.slots[i].used {
			used = append(used, uint32(i))
		}
	}
	slices.SortFunc(used, func(a, b uint32) int { return int(e.slots[a].seq - e.slots[b].seq) })
	return used
}

// settle completes every posted work of a broken endpoint. The work with the sequence number
// refused ends with StatusRefused, all others end with StatusBroken.
func (e *endpoint) settle(refused uint64) {
	for _, i := range e.pending() {
		e.mu.Lock()
		s := e.slots[i]
		e.releaseLocked(i)
		c := group.Completion{Kind: group.KindDone, Status: group.StatusBroken, Cookie: s.cookie, Err: e.why}
		e.mu.Unlock()
		if s.handshake {
			continue
		}
		if s.seq == refused {
			c.Status, c.Err = group.StatusRefused, errRefused
		}
		e.d.emit(c)
	}
}

// Shut cuts the endpoint off.
func (e *endpoint) Shut() {
	d := e.d
	d.poll.Lock()
	defer d.poll.Unlock()
	if e.closedToPeer {
		return
	}
	d.cut(e)
	d.forget(e)
	e.closedToPeer = true
	e.settle(0)
	d.sendClosed(e)
	d.Wake()
}

// Close releases the endpoint.
func (e *endpoint) Close() error {
	d := e.d
	d.poll.Lock()
	defer d.poll.Unlock()
	if e.closed {
		return nil
	}
	if !e.closedToPeer {
		return errors.New("fabric: close of an endpoint that is not shut")
	}
	e.closed = true
	if e.closeDelayed {
		return nil
	}
	return e.release()
}

// release frees the memory and the addresses of a closed endpoint.
func (e *endpoint) release() (err error) {
	d := e.d
	d.mu.Lock()
	delete(d.byTag, e.tag)
	if e.joined {
		delete(d.bySource, e.source)
	}
	d.mu.Unlock()
	if e.joined {
		err = errors.Join(d.native.remove(e.source), d.dropHub(e.hub))
	}
	e.native.free()
	return err
}

// dropHub drops a reference to a peer's hub. With the last reference it removes the hub's address
// from the provider.
func (d *domain) dropHub(h *peerHub) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if h.refs--; h.refs > 0 {
		return nil
	}
	delete(d.hubs, h.name)
	return d.native.remove(h.addr)
}
