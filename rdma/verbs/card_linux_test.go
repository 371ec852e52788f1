package verbs

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// cable connects cards without hardware. A post is performed immediately, under mu.
type cable struct {
	mu    sync.Mutex
	pairs map[uint32]*testPair // by number
	qpn   uint32
	// entered gets the name of each command that is in hold, which then waits until hold's
	// channel is closed.
	hold    map[string]chan struct{}
	entered chan string
}

func newCable() *cable {
	return &cable{pairs: make(map[uint32]*testPair), hold: make(map[string]chan struct{}), entered: make(chan string, 16)}
}

// command stands for the time that a command takes on the device.
func (c *cable) command(name string) {
	c.mu.Lock()
	hold := c.hold[name]
	c.mu.Unlock()
	if hold != nil {
		c.entered <- name
		<-hold
	}
}

// testCard is a card with the behaviour of mlx5: it refuses to register a dma-buf with the
// right to bind windows, and windows of more than 2 GiB, and it confines writes to windows.
type testCard struct {
	cable *cable
	// d is the domain, whose memories have the bytes at an address; nil until it is open.
	d *domain

	// The fields below are guarded by cable.mu.
	attr      deviceAttr
	port      portAttr
	partition []pkey
	table     []gidEntry
	row       uint16
	done      []completion
	events    []testEvent
	lent      []testBuffer
	keyed     map[uint32]*testKey
	lastKey   uint32
	queues    []rights // arguments of newQueue, in order
	announce  [2]int   // writing ends of the channels
	reading   [2]int
	armed     bool
	failed    error // error of poll
}

type testEvent struct {
	e   asyncEvent
	qpn uint32
}

type testBuffer struct {
	slot, size uint32
	addr       uint64
}

// testKey is a registration.
type testKey struct {
	card       *testCard
	key        uint32
	addr, size uint64
	rights     rights
	window     bool
	device     bool
}

// testPair is a queue pair.
type testPair struct {
	card     *testCard
	q        *queue
	messages bool
	rights   rights
	peer     uint32
	ready    bool
	failed   bool
	gone     bool
}

// newCard returns a card with one port on an InfiniBand subnet.
func newCard(c *cable) *testCard {
	return &testCard{
		cable: c,
		attr:  deviceAttr{maxQPWork: 1 << 15, maxCQE: 1 << 22, maxSRQWork: 1 << 15, ports: 1, windows: true, vendor: 0x02c9},
		port:  portAttr{active: true, mtu: 5, lid: 4, layer: layerInfiniBand, maxMessage: 1 << 30, pkeys: 4},
		// The port is a full member of the partition in row 2.
		partition: []pkey{0, 0x7fff, 0x8002, 0},
		table:     []gidEntry{{kind: gidInfiniBand, gid: gid{0xfe, 0x80, 15: 1}}},
		keyed:     make(map[uint32]*testKey), lastKey: 100,
	}
}

// openCard opens a domain on the card.
func openCard(t testing.TB, n *testCard, o NICOptions) *domain {
	t.Helper()
	o.Device = "test0"
	o.EnsureDefaults()
	d, err := newDomain(o, place{name: "test0", port: 1, gid: -1}, n)
	if err != nil {
		t.Fatal(err)
	}
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	n.d = d
	return d
}

func (n *testCard) device() (deviceAttr, error) {
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	return n.attr, nil
}

func (n *testCard) portState() (portAttr, error) {
	n.cable.command("query port")
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	return n.port, nil
}

func (n *testCard) pkeys(rows int) ([]pkey, error) {
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	return slices.Clone(n.partition[:rows]), nil
}

func (n *testCard) gids() ([]gidEntry, error) {
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	return slices.Clone(n.table), nil
}

func (n *testCard) start(partitionRow uint16, cqe, immEntries, msgEntries int) error {
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	n.row = partitionRow
	return nil
}

func (n *testCard) startBind(path) error { return nil }
func (n *testCard) restartBind() error   { return nil }

func (n *testCard) channels() (completions, async int, err error) {
	for i := range n.reading {
		var ends [2]int
		if err := unix.Pipe2(ends[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
			return -1, -1, err
		}
		n.reading[i], n.announce[i] = ends[0], ends[1]
	}
	// The domain closes its own copy.
	if completions, err = unix.FcntlInt(uintptr(n.reading[0]), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return -1, -1, err
	}
	async, err = unix.FcntlInt(uintptr(n.reading[1]), unix.F_DUPFD_CLOEXEC, 0)
	return completions, async, err
}

func (n *testCard) resize(int) error {
	n.cable.command("resize")
	return nil
}

func (n *testCard) close() error {
	var errs []error
	for i := range n.reading {
		errs = append(errs, unix.Close(n.reading[i]), unix.Close(n.announce[i]))
	}
	return errors.Join(errs...)
}

func (n *testCard) poll() ([]completion, error) {
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	k := min(len(n.done), 8)
	taken := slices.Clone(n.done[:k])
	n.done = n.done[k:]
	return taken, n.failed
}

func (n *testCard) arm() error {
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	n.armed = true
	return nil
}

// drain reads all that a pipe holds.
func drain(fd int) (read int) {
	var b [64]byte
	for {
		k, err := unix.Read(fd, b[:])
		if k <= 0 || err != nil {
			return read
		}
		read += k
	}
}

func (n *testCard) takeEvents() int { return drain(n.reading[0]) }

func (n *testCard) asyncEvent() (e asyncEvent, qpn uint32, ok bool) {
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	if len(n.events) == 0 {
		drain(n.reading[1])
		return 0, 0, false
	}
	first := n.events[0]
	n.events = n.events[1:]
	return first.e, first.qpn, true
}

// happens delivers an event.
func (n *testCard) happens(e asyncEvent, qpn uint32) {
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	n.happensLocked(e, qpn)
}

func (n *testCard) happensLocked(e asyncEvent, qpn uint32) {
	n.events = append(n.events, testEvent{e, qpn})
	_, _ = unix.Write(n.announce[1], []byte{1})
}

// completesLocked adds a completion.
func (n *testCard) completesLocked(c completion) {
	n.done = append(n.done, c)
	if n.armed {
		n.armed = false
		_, _ = unix.Write(n.announce[0], []byte{1})
	}
}

func (n *testCard) lend(slot uint32, addr uint64, size, lkey uint32) error {
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	n.lent = append(n.lent, testBuffer{slot: slot, addr: addr, size: size})
	return nil
}

func (n *testCard) register(addr, size uint64, r rights) (registration, error) {
	n.cable.command("register")
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	return n.enterLocked(&testKey{addr: addr, size: size, rights: r}), nil
}

func (n *testCard) enterLocked(k *testKey) *testKey {
	n.lastKey++
	k.card, k.key = n, n.lastKey
	n.keyed[k.key] = k
	return k
}

func (n *testCard) registerDMABuf(fd int, off, size, addr uint64, r rights) (registration, error) {
	n.cable.command("register")
	if r&rightBind != 0 {
		return nil, syscall.EINVAL // as mlx5's reg_user_mr_dmabuf
	}
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	return n.enterLocked(&testKey{addr: addr, size: size, rights: r, device: true}), nil
}

func (n *testCard) window(of registration, addr, size uint64) (registration, error) {
	n.cable.command("window")
	k := of.(*testKey)
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	switch {
	case k.rights&rightBind == 0:
		return nil, syscall.EINVAL
	case size > 2<<30:
		return nil, syscall.ENOMEM // as mlx5's set_bind_wr
	}
	return n.enterLocked(&testKey{addr: addr, size: size, rights: rightRemoteWrite, window: true}), nil
}

func (n *testCard) write(_ registration, _ uint64, to registration, dst, size uint64) error {
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	if !to.(*testKey).opensLocked(dst, size) {
		return &wcError{nic: "test0", status: wcRemoteAccess, text: n.statusText(wcRemoteAccess)}
	}
	return nil
}

func (n *testCard) eventText(e asyncEvent) string { return fmt.Sprintf("event %d", e) }
func (n *testCard) statusText(s wcStatus) string  { return fmt.Sprintf("status %d", s) }

// opensLocked reports whether a peer may write there with the key.
func (k *testKey) opensLocked(addr, size uint64) bool {
	return k.rights&rightRemoteWrite != 0 && addr >= k.addr && addr-k.addr <= k.size && size <= k.size-(addr-k.addr)
}

func (k *testKey) keys() (local, remote uint32) { return k.key, k.key }

func (k *testKey) close() error {
	k.card.cable.command("take back a key")
	k.card.cable.mu.Lock()
	defer k.card.cable.mu.Unlock()
	delete(k.card.keyed, k.key)
	return nil
}

func (n *testCard) newQueue(depth int, messages bool, r rights) (*queue, error) {
	n.cable.command("new queue pair")
	n.cable.mu.Lock()
	defer n.cable.mu.Unlock()
	n.cable.qpn++
	n.queues = append(n.queues, r)
	p := &testPair{card: n, messages: messages, rights: r}
	p.q = &queue{pair: p, requests: make([]request, postMax), qpn: n.cable.qpn, psn: 1}
	n.cable.pairs[n.cable.qpn] = p
	return p.q, nil
}

func (p *testPair) join(to path) error {
	p.card.cable.command("connect")
	p.card.cable.mu.Lock()
	defer p.card.cable.mu.Unlock()
	p.peer, p.ready = to.remoteQPN, true
	return nil
}

func (p *testPair) modify(s qpState) error {
	p.card.cable.command("error state")
	p.card.cable.mu.Lock()
	defer p.card.cable.mu.Unlock()
	p.failed = p.failed || s == stateError
	return nil
}

func (p *testPair) destroy() error {
	p.card.cable.command("destroy")
	p.card.cable.mu.Lock()
	defer p.card.cable.mu.Unlock()
	p.gone = true
	delete(p.card.cable.pairs, p.q.qpn)
	return nil
}

func (p *testPair) close() error { return p.destroy() }

// post performs the requests in order. A request that fails breaks the queue pair at both ends,
// and later requests are flushed.
func (p *testPair) post(count int) (int, error) {
	p.card.cable.mu.Lock()
	defer p.card.cable.mu.Unlock()
	for i := range count {
		r := &p.q.requests[i]
		status := p.performLocked(r)
		if status != wcSuccess {
			p.failLocked()
		}
		if r.signaled != 0 || status != wcSuccess {
			p.card.completesLocked(completion{id: r.id, status: uint32(status), qpn: p.q.qpn})
		}
	}
	return count, nil
}

// failLocked moves the queue pair to the error state, and its peer's with it.
func (p *testPair) failLocked() {
	if p.failed {
		return
	}
	p.failed = true
	p.card.happensLocked(eventQPFatal, p.q.qpn)
	if peer := p.card.cable.pairs[p.peer]; peer != nil && peer.peer == p.q.qpn {
		peer.failLocked()
	}
}

func (p *testPair) performLocked(r *request) wcStatus {
	peer := p.card.cable.pairs[p.peer]
	switch {
	case p.failed || p.gone:
		return wcFlushed
	case peer == nil || !peer.ready || peer.failed || peer.peer != p.q.qpn:
		return wcRetries
	}
	to := peer.card
	if r.op == opSend {
		if len(to.lent) == 0 {
			return wcRNRRetries
		}
		b := to.lent[0]
		to.lent = to.lent[1:]
		c := completion{id: idMessage | uint64(b.slot), len: r.len, qpn: peer.q.qpn, opcode: gotMessage}
		if r.len > b.size {
			c.status = 1 // the buffer is too short
			to.completesLocked(c)
			return wcRemoteInvReq
		}
		copy(to.bytes(b.addr, uint64(r.len)), p.card.bytes(r.local, uint64(r.len)))
		to.completesLocked(c)
		return wcSuccess
	}
	if r.len > 0 {
		k := to.keyed[r.rkey]
		if k == nil || !k.opensLocked(r.remote, uint64(r.len)) || peer.rights&rightRemoteWrite == 0 {
			return wcRemoteAccess
		}
		copy(to.bytes(r.remote, uint64(r.len)), p.card.bytes(r.local, uint64(r.len)))
	}
	if r.op == opWriteImm {
		to.completesLocked(completion{id: idImm, imm: r.imm, len: r.len, qpn: peer.q.qpn, opcode: gotImmediate})
	}
	return wcSuccess
}

// bytes returns the memory at an address, or nil for device memory.
func (n *testCard) bytes(addr, size uint64) []byte {
	if size == 0 || n.d == nil {
		return nil
	}
	n.d.memMu.Lock()
	defer n.d.memMu.Unlock()
	for m := range n.d.memories {
		if m.mem != nil && addr >= m.base && addr-m.base <= m.size && size <= m.size-(addr-m.base) {
			return m.mem[addr-m.base:][:size]
		}
	}
	return nil
}
