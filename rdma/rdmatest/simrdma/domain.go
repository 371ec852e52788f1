package simrdma

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// NICOptions describe a NIC. With the zero value the NIC is unordered, like EFA's SRD, and a
// refusal affects only the refused Work.
type NICOptions struct {
	// Host is the NIC's machine, for KillHost. Name is unique in the fabric.
	Host, Name string
	// Ordered, RefusalBreaks, CloseIsFinal, Windows, Spans, EmptyUnchecked and KeyBits are as in
	// group.Limits. Endpoints of two NICs can connect only if both NICs have the same Ordered and
	// RefusalBreaks. Spans requires Windows.
	Ordered, RefusalBreaks, CloseIsFinal, Windows, Spans, EmptyUnchecked bool
	KeyBits                                                              int
	// WindowMax is the longest window in bytes; 0: no limit. NoDeviceWindows: memory of a DMABuf
	// has no windows. Memory.Window returns rdma.ErrUnsupported for a window outside these limits.
	WindowMax       uint64
	NoDeviceWindows bool
	// VirtualAddresses makes Base the address of the memory; otherwise Base is 0.
	VirtualAddresses bool
	// MaxWrite is the longest payload of one Work in bytes, default 1 GiB. MaxMessage is the
	// longest message in bytes, default 256 KiB.
	MaxWrite   uint64
	MaxMessage int
	// QueueDepth is the largest number of an endpoint's Works whose completions have not been
	// polled; default 128.
	QueueDepth int
	// CompletionDepth is the largest number of completions that wait to be polled. At this number,
	// further arrivals are delayed. Default 65536.
	CompletionDepth int
}

// ensureDefaults sets each zero field to its default.
func (o *NICOptions) ensureDefaults() {
	if o.MaxWrite == 0 {
		o.MaxWrite = 1 << 30
	}
	if o.MaxMessage == 0 {
		o.MaxMessage = 256 << 10
	}
	if o.QueueDepth == 0 {
		o.QueueDepth = 128
	}
	if o.CompletionDepth == 0 {
		o.CompletionDepth = 64 << 10
	}
}

// LikeRC returns o with the limits of a card under rdma/verbs: reliable connections (RC), and
// memory windows of up to 2 GiB of host memory.
func (o NICOptions) LikeRC() NICOptions {
	o.Ordered, o.RefusalBreaks, o.CloseIsFinal, o.Windows, o.Spans = true, true, true, true, false
	o.EmptyUnchecked, o.KeyBits, o.VirtualAddresses = true, 32, true
	o.WindowMax, o.NoDeviceWindows = 2<<30, true
	return o
}

// LikeRXE returns o with the limits of rdma_rxe under rdma/verbs. They differ from LikeRC in two
// ways. There are no windows, because rxe does not confine writes to a memory window. CloseIsFinal
// is false, because rxe may still process a packet after the packet's key was closed.
func (o NICOptions) LikeRXE() NICOptions {
	o = o.LikeRC()
	o.CloseIsFinal, o.Windows, o.WindowMax, o.NoDeviceWindows = false, false, 0, false
	return o
}

// LikeSRD returns o with the limits of Amazon's EFA under rdma/fabric.
func (o NICOptions) LikeSRD() NICOptions {
	o.Ordered, o.RefusalBreaks, o.CloseIsFinal, o.Windows, o.Spans = false, true, false, false, false
	o.EmptyUnchecked, o.KeyBits, o.VirtualAddresses = false, 64, true
	return o
}

// LikeShm returns o with the limits of the software NIC of rdma/shm.
func (o NICOptions) LikeShm() NICOptions {
	o.Ordered, o.RefusalBreaks, o.CloseIsFinal, o.Windows, o.Spans = true, false, true, true, true
	o.EmptyUnchecked, o.KeyBits, o.VirtualAddresses = false, 64, false
	return o
}

// RandomNIC returns random options: either the options of a real kind of NIC, or a random mixture
// of options. All NICs of one fabric should be drawn from one seed.
func RandomNIC(seed uint64) NICOptions {
	d := drawsOf(seed, hash("nic options"))
	var o NICOptions
	switch d.below(7) {
	case 0:
		o = o.LikeRC()
	case 1:
		o = o.LikeSRD()
	case 2:
		o = o.LikeShm()
	case 3:
		o = o.LikeRXE()
	default:
		coin := func() bool { return d.below(2) == 0 }
		o.Ordered, o.RefusalBreaks, o.CloseIsFinal, o.Windows = coin(), coin(), coin(), coin()
		o.Spans = o.Windows && coin()
		o.EmptyUnchecked, o.KeyBits, o.VirtualAddresses = coin(), []int{0, 32, 64}[d.below(3)], coin()
		o.WindowMax, o.NoDeviceWindows = []uint64{0, 0, 5000}[d.below(3)], coin()
	}
	o.QueueDepth = []int{1, 2, 16, 128}[d.below(4)]
	o.MaxWrite = []uint64{4 << 10, 64 << 10, 1 << 20, 1 << 30}[d.below(4)]
	return o
}

// Domain is one NIC.
type Domain struct {
	f    *Fabric
	id   uint32
	opts NICOptions
	// drawSeed is the seed of the NIC's random numbers: a hash of its name, plus the number of
	// times that a NIC of this name was opened before.
	drawSeed uint64
	keys     draws
	// arrived wakes Wait. Its lock is the fabric's lock.
	arrived sync.Cond
	polling atomic.Bool // true while a goroutine is in Poll or Wait; only one may be

	// The fields below are guarded by the fabric's lock.
	woken, dead, closed bool
	why                 error // reason of its death
	silent              bool  // died without completions
	endpoints           map[uint32]*Endpoint
	made                uint32 // number of endpoints made so far
	memories            map[uint64]*Memory
	mapped              [][]byte // mapped dma-bufs, kept until Close because late payload may still land in them
	completions         ring
	receives            []receive
}

// receive is a buffer lent by PostRecv.
type receive struct {
	slot uint32
	mem  *Memory
	buf  []byte
}

var _ group.Domain = (*Domain)(nil)

// Open adds a NIC to the fabric.
func (f *Fabric) Open(o NICOptions) (*Domain, error) {
	o.ensureDefaults()
	if o.Name == "" {
		return nil, errors.New("simrdma: a NIC needs a name")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.deadHosts[o.Host] || f.deadNICs[o.Name] {
		return nil, fmt.Errorf("simrdma: open %s: %w", o.Name, group.ErrDead)
	}
	if d := f.nics[o.Name]; d != nil && !d.dead {
		return nil, fmt.Errorf("simrdma: %s is open already", o.Name)
	}
	f.ids++
	drawSeed := hash(o.Name) + f.opened[o.Name]
	f.opened[o.Name]++
	d := &Domain{
		f: f, id: f.ids, opts: o, drawSeed: drawSeed, keys: drawsOf(f.seed, hash("keys"), drawSeed), arrived: sync.Cond{L: &f.mu},
		endpoints: make(map[uint32]*Endpoint), memories: make(map[uint64]*Memory),
	}
	f.nics[o.Name], f.byID[d.id] = d, d
	return d, nil
}

// Name returns the NIC's name.
func (d *Domain) Name() string { return d.opts.Name }

// Limits returns the limits of the NICOptions.
func (d *Domain) Limits() group.Limits {
	o := d.opts
	return group.Limits{
		MaxWrite: o.MaxWrite, MaxMessage: o.MaxMessage, QueueDepth: o.QueueDepth, Ordered: o.Ordered, RefusalBreaks: o.RefusalBreaks,
		CloseIsFinal: o.CloseIsFinal, Windows: o.Windows, Spans: o.Spans, EmptyUnchecked: o.EmptyUnchecked, KeyBits: o.KeyBits,
	}
}

// usableLocked returns an error if the domain is dead or closed.
func (d *Domain) usableLocked(what string) error {
	if d.closed {
		d.f.violationLocked("%s: %s after Close", d.opts.Name, what)
		return fmt.Errorf("simrdma: %s of %s: %w", what, d.opts.Name, rdma.ErrClosed)
	}
	if d.dead {
		return fmt.Errorf("simrdma: %s: %w", what, d.why)
	}
	return nil
}

// NewEndpoint makes an endpoint that is not connected.
func (d *Domain) NewEndpoint(cookie uint64, class rdma.Class) (group.Endpoint, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if err := d.usableLocked("new endpoint"); err != nil {
		return nil, err
	}
	d.made++
	draws := drawsOf(d.f.seed, d.drawSeed, uint64(d.made))
	e := &Endpoint{d: d, number: d.made, cookie: cookie, class: class, works: draws.next(), draws: draws}
	binary.LittleEndian.PutUint32(e.addr[:], d.id)
	binary.LittleEndian.PutUint32(e.addr[4:], e.number)
	d.endpoints[e.number] = e
	return e, nil
}

// PostRecv lends a buffer for a message.
func (d *Domain) PostRecv(slot uint32, mem group.Memory, buf []byte) error {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if err := d.usableLocked("post a receive buffer"); err != nil {
		return err
	}
	m, ok := mem.(*Memory)
	if !ok || m.d != d {
		return fmt.Errorf("simrdma: receive buffer in memory not registered with %s: %w", d.opts.Name, rdma.ErrForeign)
	}
	if m.closed || !m.holds(buf) {
		d.f.violationLocked("%s: receive buffer %d is not part of open memory", d.opts.Name, slot)
		return fmt.Errorf("simrdma: receive buffer %d is not part of its memory: %w", slot, rdma.ErrRange)
	}
	d.receives = append(d.receives, receive{slot: slot, mem: m, buf: buf})
	return nil
}

// Poll returns completions.
func (d *Domain) Poll(dst []group.Completion) (int, error) {
	if !d.polling.CompareAndSwap(false, true) {
		d.f.violation("%s: Poll beside another Poll or Wait", d.opts.Name)
		return 0, nil
	}
	defer d.polling.Store(false)
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if d.closed {
		d.f.violationLocked("%s: Poll after Close", d.opts.Name)
		return 0, fmt.Errorf("simrdma: poll %s: %w: %w", d.opts.Name, rdma.ErrClosed, group.ErrDead)
	}
	n := 0
	for n < len(dst) && d.completions.len() > 0 {
		c := d.completions.pop()
		if c.Kind == group.KindDone {
			c.ep.unpolled--
		}
		dst[n] = c.Completion
		n++
	}
	if n == 0 && d.dead {
		return 0, d.why
	}
	return n, nil
}

// Wait blocks until there is a completion to poll.
func (d *Domain) Wait() {
	if !d.polling.CompareAndSwap(false, true) {
		d.f.violation("%s: Wait beside another Poll or Wait", d.opts.Name)
		return
	}
	defer d.polling.Store(false)
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	for d.completions.len() == 0 && !d.woken && !d.dead && !d.closed {
		d.arrived.Wait()
	}
	d.woken = false
}

// Wake ends the current or the next Wait.
func (d *Domain) Wake() {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	d.woken = true
	d.arrived.Signal()
}

// Close removes the NIC from the fabric.
func (d *Domain) Close() error {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if d.closed {
		d.f.violationLocked("%s: Close twice", d.opts.Name)
		return nil
	}
	if d.polling.Load() {
		d.f.violationLocked("%s: Close while Poll or Wait is running", d.opts.Name)
	}
	for _, e := range d.endpoints {
		d.f.violationLocked("%s: Close with endpoint %d open", d.opts.Name, e.number)
		e.shutLocked()
	}
	for _, m := range d.memories {
		d.f.violationLocked("%s: Close with memory %#x open", d.opts.Name, m.key)
		m.closed = true
	}
	d.closed, d.dead = true, true
	for _, b := range d.mapped {
		unmapBuf(b)
	}
	d.mapped = nil
	if d.why == nil {
		d.why = fmt.Errorf("simrdma: %s: %w", d.opts.Name, group.ErrDead)
	}
	delete(d.f.byID, d.id)
	if d.f.nics[d.opts.Name] == d {
		delete(d.f.nics, d.opts.Name)
	}
	d.arrived.Signal()
	return nil
}

// dieLocked ends the NIC.
func (d *Domain) dieLocked(why error) {
	if d.dead {
		return
	}
	draws := drawsOf(d.f.seed, hash("death"), d.drawSeed)
	d.silent = draws.chance(0.5)
	d.why = why
	for n := uint32(1); n <= d.made; n++ {
		if e := d.endpoints[n]; e != nil {
			e.breakLocked(why)
		}
	}
	d.dead = true
	d.arrived.Signal()
}

// pushLocked queues a completion.
func (d *Domain) pushLocked(c completion) {
	d.completions.push(c)
	d.arrived.Signal()
}

// completion is a completion that waits to be polled, and its endpoint.
type completion struct {
	group.Completion
	ep *Endpoint
}

// ring is a queue of completions that keeps its memory.
type ring struct {
	items []completion
	head  int
}

func (r *ring) len() int { return len(r.items) - r.head }

func (r *ring) push(c completion) {
	if r.head > 0 && len(r.items) == cap(r.items) {
		n := copy(r.items, r.items[r.head:])
		clear(r.items[n:])
		r.items, r.head = r.items[:n], 0
	}
	r.items = append(r.items, c)
}

func (r *ring) pop() completion {
	c := r.items[r.head]
	r.items[r.head] = completion{}
	r.head++
	if r.head == len(r.items) {
		r.items, r.head = r.items[:0], 0
	}
	return c
}

// remove removes the completions of an endpoint.
func (r *ring) remove(e *Endpoint) {
	kept := r.items[:0]
	for _, c := range r.items[r.head:] {
		if c.ep != e {
			kept = append(kept, c)
		}
	}
	clear(r.items[len(kept):])
	r.items, r.head = kept, 0
}
