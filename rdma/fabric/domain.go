//go:build fabric && cgo && linux

package fabric

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// maxWriteBytes is the longest write, unless the provider's limit is lower. It fits in the half of
// the remote CQ data that holds the length.
const maxWriteBytes = 1 << 30

// domain is one NIC.
type domain struct {
	native       *native
	name         string
	traits       traits
	quirks       quirks
	opts         DomainOptions
	limits       group.Limits
	hub          []byte // address of the endpoint that receives messages
	handshakeMem *memory

	// poll is held by Poll, and by every other function that reads completions or closes
	// endpoints.
	poll sync.Mutex
	dst  []group.Completion // of the Poll that is running
	n    int
	// backlog[head:] are completions that were read and that Poll has not returned yet.
	backlog []group.Completion
	head    int
	// lent are the receive buffers posted by PostRecv, in the order in which messages fill them.
	lent []loan
	// recvLate are the hub's receive buffers that the provider has not accepted yet.
	recvLate []uint32
	// sendFree are the indices of the hub's free send buffers. (The hub is the endpoint for
	// messages; doc.go.) The frames in outbox, and the receipts of the endpoints in receiptQueue,
	// wait for a free buffer or for the provider.
	sendFree     []uint32
	outbox       []pendingFrame
	receiptQueue []*endpoint
	// querying holds the endpoints that wait for the answer to a key query, by the query's number.
	// The answer lists which writes in flight the peer would refuse (doc.go, The hub).
	querying   map[uint64]*endpoint
	queryCount uint64
	delayed    []delayedClose
	nextSweep  time.Time
	fatal      error // error of the provider; turn handles the remaining events and then sets dead
	dead       error
	closed     bool

	wait waiter

	// noted guards failing and late. failing are endpoints that broke and are not closed yet. late
	// are endpoints with works that the provider has not accepted yet.
	noted   sync.Mutex
	failing []*endpoint
	late    []*endpoint
	// busy is true while sweep has work to do.
	busy atomic.Bool

	mu       sync.RWMutex
	byTag    map[uint32]*endpoint
	bySource map[uint64]*endpoint
	hubs     map[string]*peerHub
	memories map[uint64]*memory
}

// loan is a buffer lent by PostRecv.
type loan struct {
	slot uint32
	buf  []byte
}

// peerHub is a peer's hub and the number of endpoints and frames that refer to it. The hub's
// address is removed from the provider only when this number is 0, because no frame may be sent to
// a removed address.
type peerHub struct {
	name string
	addr uint64
	refs int // guarded by domain.mu
}

var _ group.Domain = (*domain)(nil)

// Open opens one domain, which is one NIC.
func Open(o DomainOptions) (group.Domain, error) {
	d, err := open(o)
	if err != nil {
		return nil, err // an interface that holds a nil *domain would not be nil
	}
	return d, nil
}

// open is Open with the concrete type of the result.
func open(o DomainOptions) (*domain, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	major, minor := libraryVersion()
	var errs []error
	for _, name := range candidates(o.Provider, major, minor) {
		n, t, err := openNative(name, o.NIC.Domain, o.NIC.Addr, o.QueueDepth)
		if err == nil {
			return newDomain(n, t, o)
		}
		errs = append(errs, fmt.Errorf("fabric: open %v of provider %q (libfabric %d.%d): %w", o.NIC, name, major, minor, err))
	}
	return nil, errors.Join(errs...)
}

// newDomain makes a domain of an open native. If newDomain fails it closes the native.
func newDomain(n *native, t traits, o DomainOptions) (*domain, error) {
	q := quirksOf(t.provider)
	if !t.source {
		q.noSourceAddress = true
	}
	d := &domain{
		native: n, name: t.domain, traits: t, quirks: q, opts: o,
		querying: make(map[uint64]*endpoint), byTag: make(map[uint32]*endpoint), bySource: make(map[uint64]*endpoint),
		hubs: make(map[string]*peerHub), memories: make(map[uint64]*memory),
	}
	d.limits = d.limitsOf()
	err := d.usable()
	if err == nil {
		d.hub, err = n.openHub()
	}
	if err == nil {
		err = n.openBuffers(max(headLen+o.MaxMessage, maxControl), d.localKey())
	}
	if err == nil {
		d.wait, err = newWaiter(n, t.fd)
	}
	if err == nil && q.connects {
		err = d.openHandshake()
	}
	if err != nil {
		err = fmt.Errorf("fabric: open %s of provider %s: %w", t.domain, t.provider, err)
		if d.wait != nil {
			err = errors.Join(err, d.wait.close())
		}
		return nil, errors.Join(err, n.close())
	}
	for i := range uint32(hubSends) {
		d.sendFree = append(d.sendFree, hubRecvs+i)
	}
	return d, nil
}

// openHandshake registers the byte that peers write to in a handshake.
func (d *domain) openHandshake() error {
	m, err := d.Register(make([]byte, handshakeSize), rdma.RegisterOptions{})
	if err == nil {
		d.handshakeMem = m.(*memory)
	}
	return err
}

// usable returns an error if the provider lacks a feature that a domain needs.
func (d *domain) usable() error {
	switch {
	case d.quirks.unmarked && d.opts.TrafficClass != [rdma.Classes]uint32{}:
		return fmt.Errorf("option TrafficClass is %#x, but this provider does not mark packets: set it to 0 (data_plane.qos: off), or use rdma/tcp: %w",
			d.opts.TrafficClass, rdma.ErrUnsupported)
	case d.traits.dataBytes < 4:
		return fmt.Errorf("%d bytes of remote CQ data; 4 are needed: %w", d.traits.dataBytes, rdma.ErrUnsupported)
	case d.quirks.connects && (d.quirks.noSourceAddress || d.traits.dataBytes < 8):
		return fmt.Errorf("this provider makes connections, and their handshake needs source addresses and 8 bytes of remote CQ data: %w", rdma.ErrUnsupported)
	case d.quirks.noSourceAddress && d.traits.dataBytes < 8:
		return fmt.Errorf("neither source addresses nor 8 bytes of remote CQ data: immediates have no sender: %w", rdma.ErrUnsupported)
	}
	return nil
}

// limitsOf returns the Limits for a provider's properties.
func (d *domain) limitsOf() group.Limits {
	t := d.traits
	maxWrite := min(t.maxWrite, maxWriteBytes)
	return group.Limits{
		MaxWrite: maxWrite, MaxMessage: int(min(t.maxWrite-headLen, uint64(d.opts.MaxMessage))), QueueDepth: min(d.opts.QueueDepth, max(t.depth, 1)),
		Ordered:       t.ordersWrites && t.maxOrder >= maxWrite,
		RefusalBreaks: true,
		// Software providers check the key when the header arrives and then copy the whole
		// payload. No other provider documents a stronger guarantee.
		CloseIsFinal: false,
		Windows:      !d.quirks.costlyWindows,
		KeyBits:      8 * min(t.keyBytes, 8),
	}
}

// Name is libfabric's name of the domain, with a number if an engine opens the domain more
// than once.
func (d *domain) Name() string { return d.name }

// Limits are constant.
func (d *domain) Limits() group.Limits { return d.limits }

// newKey returns a random key that is not 0 and has the width of the provider's keys.
func (d *domain) newKey() uint64 {
	for {
		if k := random64() >> (64 - 8*min(max(d.traits.keyBytes, 1), 8)); k != 0 {
			return k
		}
	}
}

// random64 returns an unguessable number, for keys and tags.
func random64() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:])
}

// localKey returns a key for memory that only this process uses, or 0 if the provider requires no
// key.
func (d *domain) localKey() uint64 {
	if !d.traits.localKeys {
		return 0
	}
	return d.newKey()
}

// PostRecv lends buf to the domain for one message. The message arrives in one of the hub's own
// buffers and is copied into buf. The hub can therefore report to the sender that no buffer is
// posted.
func (d *domain) PostRecv(slot uint32, mem group.Memory, buf []byte) error {
	if m, ok := mem.(*memory); !ok || m.d != d {
		return fmt.Errorf("fabric: receive buffer of another domain: %w", rdma.ErrForeign)
	}
	d.poll.Lock()
	defer d.poll.Unlock()
	if d.dead != nil {
		return d.dead
	}
	d.lent = append(d.lent, loan{slot: slot, buf: buf})
	return nil
}

// Poll drives the provider's progress and moves up to len(dst) completions to dst.
func (d *domain) Poll(dst []group.Completion) (int, error) {
	d.poll.Lock()
	defer d.poll.Unlock()
	d.dst, d.n = dst, 0
	defer func() { d.dst = nil }()
	for d.head < len(d.backlog) && d.n < len(dst) {
		dst[d.n] = d.backlog[d.head]
		d.n++
		d.head++
	}
	if d.head == len(d.backlog) {
		d.backlog, d.head = d.backlog[:0], 0
	}
	if d.n == len(dst) {
		return d.n, nil
	}
	if d.dead == nil {
		d.retryPosts()
		d.turn(len(dst) - d.n)
	}
	if d.dead != nil && d.n == 0 {
		return 0, d.dead
	}
	return d.n, nil
}

// turn reads the provider's completions once, up to room of them, and handles them. Then it does
// the periodic work.
func (d *domain) turn(room int) {
	events, err := d.native.poll(room)
	if err != nil {
		d.fatal = err
	}
	for i := range events {
		d.handle(&events[i])
	}
	d.breakFailing()
	d.sendReceipts()
	if d.busy.Load() {
		d.sweep()
	}
	if d.fatal != nil {
		d.die(d.fatal)
	}
}

// emit returns a completion to the engine from the running Poll, or from a later Poll if dst is
// full.
func (d *domain) emit(c group.Completion) {
	if d.n < len(d.dst) {
		d.dst[d.n] = c
		d.n++
		return
	}
	d.backlog = append(d.backlog, c)
}

// retryPosts posts the works and buffers that the provider did not accept before.
func (d *domain) retryPosts() {
	if len(d.recvLate) > 0 {
		late := d.recvLate
		d.recvLate = nil
		for _, i := range late {
			d.recv(i)
		}
	}
	d.noted.Lock()
	late := d.late
	d.late = nil
	d.noted.Unlock()
	for _, e := range late {
		e.flushLate()
	}
}

// recv posts the hub's receive buffer i. If the provider is full, a later Poll posts it.
func (d *domain) recv(i uint32) {
	err := d.native.recv(i)
	switch {
	case errors.Is(err, errAgain):
		d.recvLate = append(d.recvLate, i)
	case err != nil:
		d.fatal = err
	}
}

// handle acts on one completion of the provider.
func (d *domain) handle(ev *event) {
	switch ev.kind {
	case evRemote:
		d.handleRemote(ev)
	case evWork:
		if e := d.endpointOf(uint32(ev.owner)); e != nil {
			e.complete(uint32(ev.slot), int32(ev.err), int32(ev.prov_err))
		}
	case evHubRecv:
		i := uint32(ev.slot)
		if b := d.native.buffer(i); ev.err == 0 && uint64(ev.len) <= uint64(len(b)) {
			d.takeFrame(b[:ev.len])
		}
		d.recv(i)
	case evHubSend:
		d.sendFree = append(d.sendFree, uint32(ev.slot))
	}
}

// endpointOf returns the endpoint with that tag, or nil.
func (d *domain) endpointOf(tag uint32) *endpoint {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.byTag[tag]
}

// handleRemote returns the immediate of a peer's write to the engine. An event with an error
// belongs to a write that was interrupted while it arrived. Such an event is ignored, because the
// sender's NIC reports the failure.
func (d *domain) handleRemote(ev *event) {
	if ev.err != 0 || ev.has_data == 0 {
		return
	}
	if d.quirks.connects && ev.data>>32 == handshakeMark {
		// The endpoint is found by the tag, because the peer's address may not be known yet.
		if e := d.endpointOf(uint32(ev.data)); e != nil {
			e.peerConnected()
		}
		return
	}
	var e *endpoint
	size := uint64(ev.len)
	if d.quirks.noSourceAddress {
		e = d.endpointOf(uint32(ev.data >> 32))
	} else {
		d.mu.RLock()
		e = d.bySource[uint64(ev.src)]
		d.mu.RUnlock()
		if d.traits.dataBytes >= 8 {
			size = uint64(ev.data >> 32)
		}
	}
	if e == nil || e.closedToPeer {
		return
	}
	d.emit(group.Completion{Kind: group.KindImmediate, Cookie: e.cookie, Imm: uint32(ev.data), Len: size})
}

// noteFailing makes the next Poll close e.
func (d *domain) noteFailing(e *endpoint) {
	d.noted.Lock()
	d.failing = append(d.failing, e)
	d.noted.Unlock()
	d.Wake()
}

// breakFailing closes the endpoints that broke.
func (d *domain) breakFailing() {
	d.noted.Lock()
	failing := d.failing
	d.failing = nil
	d.noted.Unlock()
	for _, e := range failing {
		d.breakAndQuery(e)
	}
}

// cut closes e and drains the completion queue. When cut returns, every completion of e is in the
// backlog, and no further completion of e arrives. Works that did not complete stay in e's slots.
func (d *domain) cut(e *endpoint) {
	// A half-open connection must complete first: net mishandles it when the endpoint is closed
	// (doc.go).
	d.drain()
	if e.close() {
		d.drain()
	}
}

// drain handles events until the completion queue is empty, but at most twice the number that the
// queue can hold. Events that arrive during drain belong to other endpoints.
func (d *domain) drain() {
	for range 2 * queueEvents / maxEvents {
		events, err := d.native.poll(maxEvents)
		if err != nil {
			d.fatal = err
		}
		if len(events) == 0 {
			return
		}
		for i := range events {
			d.handle(&events[i])
		}
	}
}

// die ends the domain after a fatal error. It closes every endpoint. The completions that have
// arrived are kept.
func (d *domain) die(err error) {
	if d.dead != nil {
		return
	}
	d.mu.RLock()
	var all []*endpoint
	for _, e := range d.byTag {
		all = append(all, e)
	}
	d.mu.RUnlock()
	for _, e := range all {
		e.close()
		d.sendClosed(e) // if the hub can still send
	}
	d.drain()
	d.dead = fmt.Errorf("fabric: %s of provider %s: %w: %w", d.traits.domain, d.traits.provider, err, group.ErrDead)
}

// Close releases the domain.
func (d *domain) Close() error {
	d.poll.Lock()
	defer d.poll.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	for range lingerPolls {
		d.drain()
		d.wait.wait(lingerPause)
	}
	for len(d.delayed) > 0 {
		d.endDelayed(d.delayed[0].e)
	}
	err := d.wait.close()
	if d.handshakeMem != nil {
		err = errors.Join(err, d.handshakeMem.Close())
	}
	return errors.Join(err, d.native.close())
}

// Wait blocks until Poll may have work.
func (d *domain) Wait() {
	d.wait.wait(d.pause())
}

// pause returns the longest time for which Wait may sleep without an event. 0 means no limit.
func (d *domain) pause() time.Duration {
	d.noted.Lock()
	late := len(d.late) > 0
	d.noted.Unlock()
	switch {
	case late:
		return latePause
	case d.busy.Load():
		return sweepInterval
	}
	return 0
}

// Wake makes the current or the next Wait return.
func (d *domain) Wake() { d.wait.wake() }

// Before it closes the domain, Close polls for some milliseconds, so that waiting frames are sent
// and half-open connections complete or fail.
const (
	lingerPolls = 5
	lingerPause = 2 * time.Millisecond
)

// latePause is the time after which works that the provider did not accept are offered again, if
// no event wakes the poller earlier.
const latePause = time.Millisecond
