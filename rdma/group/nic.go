package group

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// nic is one domain in use and its poller. A domain that replaces a dead domain is another nic
// with its own serial number, so the keys of the dead domain are not valid on the replacement.
type nic struct {
	e      *Engine
	index  int
	serial uint32
	dom    Domain
	lim    Limits
	name   string
	addr   rdma.NetAddr

	bytesOut, bytesIn atomic.Uint64
	dead              atomic.Bool
	stop              atomic.Bool
	// stopped is closed when the poller has ended.
	stopped chan struct{}
	// ends holds the endpoints. The index is the high half of an endpoint's cookies. The slice is
	// replaced as a whole, under mu.
	ends atomic.Pointer[[]*end]
	// draining is true while drains (the functions passed to the method drain) is not empty.
	draining atomic.Bool

	// Message buffers.
	buffers []byte
	memory  Memory
	freeMem func()

	mu     sync.Mutex
	why    error
	drains []func()
	// endCount is the number of endpoints. empty, if set, is closed when endCount is 0.
	endCount int
	empty    chan struct{}

	// Used by the poller only.
	polled  []Completion
	touched []*lane
	ended   []sessions.Ended
	due     []func()
}

// pollBatch is the largest number of completions of one Poll.
const pollBatch = 64

// newNIC prepares a domain for use. It does not start the poller.
func (e *Engine) newNIC(index int, d Domain) (*nic, error) {
	n := &nic{
		e: e, index: index, serial: e.serials.Add(1), dom: d, lim: d.Limits(), name: d.Name(),
		stopped: make(chan struct{}), polled: make([]Completion, pollBatch),
	}
	n.addr = addrOf(e.opts.Control.Addr, n.serial)
	n.ends.Store(new([]*end))
	if n.lim.QueueDepth < 1 || n.lim.MaxWrite < 1 || n.lim.MaxMessage < e.slotBytes() {
		return nil, fmt.Errorf("group: domain %s accepts %d works of %d bytes and messages of %d; at least 1, 1 and %d are needed (MaxMessage is %d)",
			n.name, n.lim.QueueDepth, n.lim.MaxWrite, n.lim.MaxMessage, e.slotBytes(), e.opts.MaxMessage)
	}
	return n, n.postBuffers()
}

// postBuffers lends receive buffers to the domain.
func (n *nic) postBuffers() (err error) {
	size := n.e.slotBytes()
	n.buffers, n.freeMem, err = n.e.opts.Alloc(n.e.opts.MessageBuffers * size)
	if err != nil {
		return fmt.Errorf("group: buffers of messages: %w", err)
	}
	n.memory, err = n.dom.Register(n.buffers, rdma.RegisterOptions{Local: true})
	if err != nil {
		n.freeMem()
		return fmt.Errorf("group: register buffers with %s: %w", n.name, err)
	}
	for i := range n.e.opts.MessageBuffers {
		if err := n.postBuffer(uint32(i)); err != nil {
			return errors.Join(err, n.freeBuffers())
		}
	}
	return nil
}

// buffer returns the buffer of a slot.
func (n *nic) buffer(slot uint32) []byte {
	size := n.e.slotBytes()
	off := int(slot) * size
	return n.buffers[off : off+size : off+size]
}

// postBuffer lends one buffer.
func (n *nic) postBuffer(slot uint32) error {
	if err := n.dom.PostRecv(slot, n.memory, n.buffer(slot)); err != nil {
		return fmt.Errorf("group: receive buffer %d of %s: %w", slot, n.name, err)
	}
	return nil
}

// freeBuffers closes the registration of the buffers and frees them.
func (n *nic) freeBuffers() error {
	err := n.memory.Close()
	n.freeMem()
	return err
}

// addrOf returns the address of a NIC in a Desc: the address on which the NIC's engine listens,
// and the NIC's serial number.
func addrOf(control string, serial uint32) rdma.NetAddr {
	return rdma.NetAddr(control + "#" + strconv.FormatUint(uint64(serial), 10))
}

// serialOf returns the serial number in an address that addrOf made.
func serialOf(a rdma.NetAddr) (uint32, bool) {
	i := strings.LastIndexByte(string(a), '#')
	if i < 0 {
		return 0, false
	}
	v, err := strconv.ParseUint(string(a[i+1:]), 10, 32)
	return uint32(v), err == nil && v > 0
}

// controlOf returns the address on which the engine of a NIC listens; "" if the engine does not
// listen.
func controlOf(a rdma.NetAddr) (string, bool) {
	i := strings.LastIndexByte(string(a), '#')
	if i < 0 {
		return "", false
	}
	return string(a[:i]), true
}

// tooWide reports whether key has more bits than keys of this NIC have.
func (n *nic) tooWide(key uint64) bool {
	return n.lim.KeyBits > 0 && n.lim.KeyBits < 64 && key>>n.lim.KeyBits != 0
}

// reason returns why the NIC is dead.
func (n *nic) reason() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.why == nil {
		return ErrDead
	}
	return n.why
}

// addEnd adds en to the NIC's endpoints and sets its index.
func (n *nic) addEnd(en *end) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.why != nil {
		return n.why
	}
	old := *n.ends.Load()
	ends := append(make([]*end, 0, len(old)+1), old...)
	i := 0
	for i < len(ends) && ends[i] != nil {
		i++
	}
	if i == len(ends) {
		ends = append(ends, nil)
	}
	ends[i] = en
	en.index = uint32(i)
	n.ends.Store(&ends)
	n.endCount++
	return nil
}

// removeEnd removes a closed endpoint.
func (n *nic) removeEnd(en *end) {
	n.mu.Lock()
	defer n.mu.Unlock()
	ends := append([]*end(nil), *n.ends.Load()...)
	ends[en.index] = nil
	n.ends.Store(&ends)
	if n.endCount--; n.endCount == 0 && n.empty != nil {
		close(n.empty)
		n.empty = nil
	}
}

// awaitEmpty returns when no endpoint is left.
func (n *nic) awaitEmpty() {
	n.mu.Lock()
	if n.endCount == 0 {
		n.mu.Unlock()
		return
	}
	if n.empty == nil {
		n.empty = make(chan struct{})
	}
	empty := n.empty
	n.mu.Unlock()
	<-empty
}

// find returns the endpoint with the given index, or nil. The index is the high half of the
// endpoint's cookies.
func (n *nic) find(index uint64) *end {
	if ends := *n.ends.Load(); index < uint64(len(ends)) {
		return ends[index]
	}
	return nil
}

// drain calls f on the poller after all completions that had arrived before the call of drain
// have been polled. f must be short.
func (n *nic) drain(f func()) {
	n.mu.Lock()
	if n.why != nil {
		n.mu.Unlock()
		f()
		return
	}
	n.drains = append(n.drains, f)
	n.draining.Store(true)
	n.mu.Unlock()
	n.dom.Wake()
}

// takeDrains moves the functions passed to drain to due, the poller's list.
func (n *nic) takeDrains() {
	n.mu.Lock()
	n.due = append(n.due, n.drains...)
	n.drains = n.drains[:0]
	n.draining.Store(false)
	n.mu.Unlock()
}

// runDrains runs the poller's list.
func (n *nic) runDrains() {
	for i, f := range n.due {
		n.due[i] = nil
		f()
	}
	n.due = n.due[:0]
}

// poll is the poller goroutine. It processes completions and posts Works for which there is room
// again.
func (n *nic) poll() {
	defer close(n.stopped)
	idle := 0
	for !n.stop.Load() {
		if n.draining.Load() {
			n.takeDrains()
		}
		k, err := n.dom.Poll(n.polled)
		for i := range n.polled[:k] {
			n.complete(&n.polled[i])
		}
		n.flush()
		if err != nil {
			n.fail(err)
			return
		}
		if k < len(n.polled) && len(n.due) > 0 {
			n.runDrains()
		}
		if k > 0 {
			idle = 0
			continue
		}
		if idle++; idle <= n.e.opts.SpinPolls {
			runtime.Gosched()
			continue
		}
		n.dom.Wait()
		idle = 0
	}
}

// flush posts on the lanes that have room again, and calls the Done callbacks of ended operations.
func (n *nic) flush() {
	for i, l := range n.touched {
		n.touched[i] = nil
		l.touched = false
		l.pump()
		if l.s.withdrawn.pending.Load() > 0 {
			l.s.confirm()
		}
	}
	n.touched = n.touched[:0]
	// A callback may submit operations but does not add to n.ended: completions come from Poll
	// only.
	sessions.CallAll(n.ended)
	n.ended = n.ended[:0]
}

// complete processes one completion.
func (n *nic) complete(c *Completion) {
	index := c.Cookie
	if c.Kind == KindDone {
		index >>= 32
	}
	en := n.find(index)
	if en == nil {
		invariants.Assert(!invariants.Enabled, "completion %+v of an unknown endpoint", *c)
		if c.Kind == KindMessage {
			n.repost(c.Slot)
		}
		return
	}
	l := en.lane
	switch c.Kind {
	case KindDone:
		n.ended = l.done(en, c, n.ended)
		if !l.touched {
			l.touched = true
			n.touched = append(n.touched, l)
		}
	case KindImmediate:
		if l.immediate(en, c.Imm) {
			n.bytesIn.Add(c.Len)
			l.s.counted(c.Imm, c.Len)
		}
	case KindMessage:
		n.message(en, c)
	case KindBroken:
		l.breakAfterPoll(en, orElse(c.Err, "the NIC reports it broken"))
	}
}

// message processes a message and posts its receive buffer again.
func (n *nic) message(en *end, c *Completion) {
	if int(c.Slot) >= n.e.opts.MessageBuffers || c.Len > uint64(n.e.slotBytes()) {
		n.e.core.Log.Warn(sessions.LogNIC, "NIC reports an invalid message", "nic", n.name, "slot", c.Slot, "bytes", c.Len)
		return
	}
	n.bytesIn.Add(c.Len)
	en.lane.s.received(n.buffer(c.Slot)[:c.Len])
	n.repost(c.Slot)
}

// repost posts a receive buffer again.
func (n *nic) repost(slot uint32) {
	invariants.Mangle(n.buffer(slot))
	if err := n.postBuffer(slot); err != nil && !n.dead.Load() {
		n.e.core.Log.Warn(sessions.LogNIC, "receive buffer lost", "nic", n.name, "err", err)
	}
}

// fail handles the death of a domain. It ends the domain's endpoints. In the background it then
// closes the domain and opens a replacement.
func (n *nic) fail(why error) {
	n.mu.Lock()
	n.why = fmt.Errorf("group: %s: %w", n.name, why)
	why = n.why
	n.due = append(n.due, n.drains...)
	n.drains = nil
	n.mu.Unlock()
	n.dead.Store(true)
	n.e.core.Log.Warn(sessions.LogNIC, "NIC is dead", "nic", n.name, "err", why)
	n.runDrains()
	for _, en := range *n.ends.Load() {
		if en != nil && en.lane.installed(en) {
			en.lane.breakEnd(en, why)
			en.lane.failWorks(en)
		}
	}
	n.flush()
	n.e.core.Running.Go(func() { n.e.replaceNIC(n) })
}

// installed reports whether en has been installed on the lane.
func (l *lane) installed(en *end) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cur == en || l.last == en
}

// closeDomain closes a domain that has neither a poller nor endpoints.
func (n *nic) closeDomain() error {
	n.e.unregister(n)
	return errors.Join(n.freeBuffers(), n.dom.Close())
}

// replaceNIC replaces a dead NIC. It closes the old domain and calls Reopen until a call succeeds.
func (e *Engine) replaceNIC(n *nic) {
	<-n.stopped
	n.awaitEmpty()
	if err := n.closeDomain(); err != nil {
		e.core.Log.Info(sessions.LogNIC, "closing a dead NIC", "nic", n.name, "err", err)
	}
	if e.opts.Reopen == nil {
		return
	}
	pause := e.opts.RetryInterval
	for e.core.Ctx.Err() == nil {
		err := e.reopen(e.core.Ctx, n.index)
		if err == nil {
			e.core.Log.Info(sessions.LogNIC, "NIC is back", "nic", n.name)
			return
		}
		e.core.Log.Info(sessions.LogNIC, "NIC cannot be opened again", "nic", n.name, "err", err)
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-e.core.Ctx.Done():
			t.Stop()
		}
		pause = min(2*pause, 64*e.opts.RetryInterval)
	}
}

// reopen opens NIC i again, registers all memory with the new domain, and opens the NIC's lanes.
func (e *Engine) reopen(ctx context.Context, i int) error {
	d, err := e.opts.Reopen(ctx, i)
	if err != nil {
		return err
	}
	n, err := e.newNIC(i, d)
	if err != nil {
		return errors.Join(err, d.Close())
	}
	if err := e.installNIC(n); err != nil {
		return errors.Join(err, n.freeBuffers(), d.Close())
	}
	for _, s := range e.core.Sessions() {
		for _, l := range s.lanes {
			if l.nicIndex == i {
				l.open()
			}
		}
	}
	return nil
}
