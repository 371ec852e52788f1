package verbs

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// domain is one port of one device.
type domain struct {
	name string
	opts NICOptions
	nic  card
	dev  deviceAttr
	// number is the number of the port on the device, from 1.
	number uint8
	port   portAttr
	gid    gidEntry
	// partition is the partition key of the queue pairs, and partitionRow its row in the port's
	// table.
	partition    pkey
	partitionRow uint16
	limits       group.Limits
	// windows: the device confines writes to a memory window, so memory windows are used.
	windows bool
	// lendMax is the largest number of message buffers in the receive queue for messages.
	lendMax int

	// completions and async are the event channels, registered with the netpoller.
	completions, async eventFile
	// woken: Wake has been called since the last Wait, which clears it.
	woken atomic.Bool
	// spin is used by Wait.
	spin    spinner
	workers sync.WaitGroup

	// memMu guards memories, which holds all memory whose address the card has. So the memory
	// stays reachable even if a caller drops its reference.
	memMu    sync.Mutex
	memories map[*memory]struct{}

	// bindMu serializes the binding of memory windows.
	bindMu sync.Mutex

	// qpMu is held while queue pairs are created and destroyed, each by a command to the device. A
	// new queue pair may get the number of a queue pair that was just destroyed. So the new queue
	// pair must not be entered in byQPN before the old one has been removed.
	qpMu sync.Mutex

	// roomMu guards cqEntries and cqUsed. It is held while the device changes the length of the
	// completion queue.
	roomMu sync.Mutex
	// cqEntries is the length of the completion queue, in entries. cqUsed is the largest number of
	// completions that all queues together may have at the same time. Invariant: cqUsed <=
	// cqEntries.
	cqEntries, cqUsed int

	mu sync.Mutex
	// out[head:] are completions that were read from the card and not yet returned by Poll.
	out  []group.Completion
	head int
	// byQPN finds the endpoint of a completion by the number of the queue pair, byIndex the queue
	// pair by its index in the completion's id.
	byQPN   map[uint32]*endpoint
	byIndex []*lane
	free    []uint32 // unused indices of byIndex
	// buffers are the message buffers of PostRecv, by slot. lent is the number of buffers that are
	// posted to the card.
	buffers map[uint32]buffer
	lent    int
	// doomed: the port or the device has failed, and the endpoints are being cut off. dead is set
	// when all of them have been cut off; it wraps group.ErrDead.
	doomed bool
	dead   error
}

var _ group.Domain = (*domain)(nil)

// buffer is a message buffer posted by PostRecv.
type buffer struct {
	addr       uint64
	size, lkey uint32
	// taken: the buffer was delivered with a message since it was posted.
	taken bool
}

// cqStart is the initial length of the completion queue, in entries. With the default options it
// is enough for 16 endpoints. While a queue grows, mlx5's part of libibverbs holds the lock that
// its poll takes, so every peer of the port waits for that command. The length doubles each time,
// so the queue grows only six times up to 1,024 endpoints.
const cqStart = 16 << 10

// newDomain starts a domain on an open port. If newDomain fails it closes the port.
func newDomain(o NICOptions, at place, nic card) (*domain, error) {
	d := &domain{
		name: at.name, number: at.port, nic: nic, opts: o, spin: spinner{max: max(0, o.Spin)},
		byQPN: make(map[uint32]*endpoint), buffers: make(map[uint32]buffer), memories: make(map[*memory]struct{}),
	}
	if at.port != 1 {
		d.name = fmt.Sprintf("%s/%d", at.name, at.port)
	}
	if err := d.start(at); err != nil {
		return nil, errors.Join(fmt.Errorf("verbs: %s: %w", o.Device, err), nic.close())
	}
	if err := d.openChannels(); err != nil {
		return nil, errors.Join(fmt.Errorf("verbs: %s: %w", o.Device, err), nic.close())
	}
	d.workers.Go(d.watchEvents)
	return d, nil
}

// errPortDown: the port cannot be used in its current state.
var errPortDown = errors.New("port is down: plug the cable in, or bring its network interface up (ip link set … up)")

// start queries the device and creates the objects that all endpoints share.
func (d *domain) start(at place) error {
	var err error
	if d.dev, err = d.nic.device(); err != nil {
		return err
	}
	if d.number > d.dev.ports {
		return fmt.Errorf("port %d: the device has %d ports", d.number, d.dev.ports)
	}
	if d.port, err = d.nic.portState(); err != nil {
		return err
	}
	if !d.port.active {
		return errPortDown
	}
	table, err := d.nic.gids()
	if err != nil {
		return err
	}
	if d.gid, _, err = chooseGID(table, at.gid); err != nil {
		return err
	}
	keys, err := d.nic.pkeys(d.port.pkeys)
	if err != nil {
		return err
	}
	if d.partitionRow, d.partition, err = choosePKey(keys); err != nil {
		return err
	}
	if depth := d.opts.QueueDepth; depth > d.dev.maxQPWork {
		return fmt.Errorf("option QueueDepth is %d; the device supports at most %d", depth, d.dev.maxQPWork)
	}
	entries := min(d.opts.ReceiveEntries, d.dev.maxSRQWork)
	// The completion queue must hold the entries of the two receive queues and of one endpoint.
	d.cqUsed = 2 * entries
	d.cqEntries = min(max(cqStart, d.cqUsed+2*d.opts.QueueDepth), d.dev.maxCQE)
	if d.cqUsed+2*d.opts.QueueDepth > d.cqEntries {
		return fmt.Errorf("completion queues of the device have %d entries, too few for ReceiveEntries %d", d.cqEntries, entries)
	}
	d.lendMax = entries
	if err := d.nic.start(d.partitionRow, d.cqEntries, entries, entries); err != nil {
		return hintMemlock(err)
	}
	if d.dev.windows {
		if err := d.nic.startBind(d.path(endpointAddr{gid: d.gid.gid, lid: d.port.lid, mtu: d.port.mtu}, rdma.ClassKV)); err != nil {
			return fmt.Errorf("memory windows: %w", err)
		}
		if d.windows, err = d.probeWindows(); err != nil {
			return fmt.Errorf("memory windows: %w", err)
		}
	}
	d.limits = limitsOf(d.port.maxWrite(), d.opts.QueueDepth, d.windows, d.dev.vendor)
	return nil
}

// Name implements group.Domain.
func (d *domain) Name() string { return d.name }

// Limits implements group.Domain.
func (d *domain) Limits() group.Limits { return d.limits }

// PostRecv implements group.Domain.
func (d *domain) PostRecv(slot uint32, mem group.Memory, buf []byte) error {
	m, ok := mem.(*memory)
	if !ok || m.d != d {
		return fmt.Errorf("verbs: %s: receive buffer: %w", d.name, rdma.ErrForeign)
	}
	off, ok := m.offsetOf(buf)
	if !ok {
		return fmt.Errorf("verbs: %s: receive buffer is outside of its memory: %w", d.name, rdma.ErrRange)
	}
	b := buffer{addr: m.base + off, size: uint32(len(buf)), lkey: m.lkey}
	d.mu.Lock()
	defer d.mu.Unlock()
	if had, twice := d.buffers[slot]; twice && !had.taken {
		return fmt.Errorf("verbs: %s: receive buffer %d: %w", d.name, slot, rdma.ErrExists)
	}
	if d.lent >= d.lendMax {
		return fmt.Errorf("verbs: %s: the device takes at most %d receive buffers (option ReceiveEntries): %w", d.name, d.lendMax, rdma.ErrRange)
	}
	if err := d.nic.lend(slot, b.addr, b.size, b.lkey); err != nil {
		return fmt.Errorf("verbs: %s: %w", d.name, err)
	}
	d.buffers[slot] = b
	d.lent++
	return nil
}

// Poll implements group.Domain.
func (d *domain) Poll(dst []group.Completion) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for n < len(dst) {
		if d.head == len(d.out) && !d.reapLocked() {
			break
		}
		k := copy(dst[n:], d.out[d.head:])
		n, d.head = n+k, d.head+k
	}
	if n == 0 && len(dst) > 0 {
		return 0, d.dead
	}
	return n, nil
}

// reapLocked reads the card's completions into out and reports whether out has any.
func (d *domain) reapLocked() bool {
	if d.head == len(d.out) {
		d.out, d.head = d.out[:0], 0
	}
	for {
		done, err := d.nic.poll()
		if err != nil {
			d.doomLocked(err)
		}
		for i := range done {
			d.takeLocked(&done[i])
		}
		// A batch may add nothing to out, for example if all entries belong to queue pairs that
		// were reset.
		if len(done) == 0 || d.head < len(d.out) {
			break
		}
	}
	return d.head < len(d.out)
}

// takeLocked converts one completion of the card into completions for the engine.
func (d *domain) takeLocked(c *completion) {
	switch id := c.id; {
	case id&idImm != 0:
		d.takeImmediateLocked(c)
	case id&idMessage != 0:
		d.takeMessageLocked(c, uint32(id))
	default:
		if l := d.byIndex[id>>32]; l != nil {
			l.takeLocked(uint32(id), wcStatus(c.status), c.vendor)
		}
	}
}

// takeImmediateLocked delivers an immediate. An entry that returns with an error belonged to a
// queue pair that broke; the receive queue has already been refilled.
func (d *domain) takeImmediateLocked(c *completion) {
	e := d.byQPN[c.qpn]
	if e == nil || wcStatus(c.status) != wcSuccess {
		return
	}
	if c.opcode != gotImmediate {
		e.breakLocked(errStray)
		return
	}
	d.out = append(d.out, group.Completion{Kind: group.KindImmediate, Cookie: e.cookie, Imm: c.imm, Len: uint64(c.len)})
}

// errStray: a queue pair for immediates received a message, or a queue pair for messages received
// an immediate. A peer that uses this package never sends that.
var errStray = errors.New("the peer sent a message instead of an immediate, or an immediate instead of a message")

// takeMessageLocked delivers a message. A buffer that returns without a message is posted
// again.
func (d *domain) takeMessageLocked(c *completion, slot uint32) {
	d.lent--
	e := d.byQPN[c.qpn]
	if e == nil || wcStatus(c.status) != wcSuccess {
		d.lendAgainLocked(slot)
		return
	}
	if c.opcode != gotMessage {
		e.breakLocked(errStray)
		d.lendAgainLocked(slot)
		return
	}
	b := d.buffers[slot]
	b.taken = true
	d.buffers[slot] = b
	d.out = append(d.out, group.Completion{Kind: group.KindMessage, Cookie: e.cookie, Slot: slot, Len: uint64(c.len)})
}

// lendAgainLocked posts a buffer again that the card returned without a message.
func (d *domain) lendAgainLocked(slot uint32) {
	b := d.buffers[slot]
	b.taken = false
	d.buffers[slot] = b
	if err := d.nic.lend(slot, b.addr, b.size, b.lkey); err != nil {
		d.doomLocked(err)
		return
	}
	d.lent++
}

// doomLocked starts to end the domain. The further steps run in a separate goroutine, because an
// endpoint may be busy (connecting, for example), and Poll must not wait for it.
func (d *domain) doomLocked(why error) {
	if d.doomed {
		return
	}
	d.doomed = true
	err := fmt.Errorf("verbs: %s: %w: %w", d.name, group.ErrDead, why)
	var all []*endpoint
	for _, l := range d.byIndex {
		if l != nil && l.kind == writes {
			all = append(all, l.e)
			l.e.breakLocked(err)
		}
	}
	d.workers.Go(func() {
		for _, e := range all {
			e.cutOff()
		}
		d.mu.Lock()
		d.dead = err
		d.mu.Unlock()
		d.Wake()
	})
}

// reapAllLocked reads all completions of the card.
func (d *domain) reapAllLocked() {
	for {
		done, err := d.nic.poll()
		for i := range done {
			d.takeLocked(&done[i])
		}
		if err != nil {
			d.doomLocked(err)
		}
		if len(done) == 0 {
			return
		}
	}
}

// reserve reserves n more entries of the completion queue. If necessary, it makes the queue
// longer.
func (d *domain) reserve(n int) error {
	d.mu.Lock()
	doomed := d.doomed
	d.mu.Unlock()
	if doomed {
		return group.ErrDead
	}
	d.roomMu.Lock()
	defer d.roomMu.Unlock()
	need := d.cqUsed + n
	if need > d.cqEntries {
		size := min(max(need, 2*d.cqEntries), d.dev.maxCQE)
		if size < need {
			return fmt.Errorf("the device's completion queue has at most %d entries: use fewer endpoints, or a QueueDepth below %d", d.dev.maxCQE, d.opts.QueueDepth)
		}
		if err := d.nic.resize(size); err != nil {
			return err
		}
		d.cqEntries = size
	}
	d.cqUsed = need
	return nil
}

// release releases entries that reserve reserved.
func (d *domain) release(n int) {
	d.roomMu.Lock()
	defer d.roomMu.Unlock()
	d.cqUsed -= n
}

// Close implements group.Domain.
func (d *domain) Close() error {
	// The channels are closed first, because that ends watchEvents.
	err := errors.Join(d.completions.close(), d.async.close())
	d.workers.Wait()
	if err = errors.Join(err, d.nic.close()); err != nil {
		return fmt.Errorf("verbs: %s: %w", d.name, err)
	}
	return nil
}

// hintMemlock adds the usual cause (the limit of locked memory) to an error of memory
// registration.
func hintMemlock(err error) error {
	if errors.Is(err, os.ErrPermission) || isNoMemory(err) {
		return fmt.Errorf("%w (registered memory is locked: is the limit of locked memory, ulimit -l, too low?)", err)
	}
	return err
}
