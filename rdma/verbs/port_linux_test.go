package verbs

import (
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/group/domaintest"
	"github.com/penstock-kv/penstock/rdma/rdmatest/simrdma"
	"golang.org/x/sys/unix"
)

// TestDomainWithoutCard: the domain keeps the promises of group.Domain over cards without
// hardware.
func TestDomainWithoutCard(t *testing.T) {
	domaintest.Run(t, func(t testing.TB) domaintest.Pair {
		c := newCable()
		a, b := openCard(t, newCard(c), NICOptions{Spin: maxSpin}), openCard(t, newCard(c), NICOptions{Spin: -1})
		return domaintest.Pair{A: a, B: b, KillB: func() {
			b.mu.Lock()
			b.doomLocked(errors.New("killed by the test"))
			b.mu.Unlock()
			b.Wake()
		}}
	})
}

// linked returns two connected endpoints.
func linked(t testing.TB, a, b *domain) (x, y *endpoint) {
	t.Helper()
	var ends [2]*endpoint
	for i, d := range []*domain{a, b} {
		e, err := d.NewEndpoint(uint64(i+1), rdma.ClassKV)
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = e.(*endpoint)
	}
	if err := errors.Join(ends[0].Connect(ends[1].Local()), ends[1].Connect(ends[0].Local())); err != nil {
		t.Fatal(err)
	}
	return ends[0], ends[1]
}

// errLate: the expected event did not occur in time.
var errLate = errors.New("no event for a minute")

// pollFor polls until ok accepts a completion, or the domain is dead, or errLate.
func pollFor(d *domain, ok func(group.Completion) bool) error {
	var late atomic.Bool
	limit := time.AfterFunc(time.Minute, func() {
		late.Store(true)
		d.Wake()
	})
	defer limit.Stop()
	dst := make([]group.Completion, 8)
	for {
		n, err := d.Poll(dst)
		switch {
		case err != nil || slices.ContainsFunc(dst[:n], ok):
			return err
		case late.Load():
			return errLate
		}
		if n == 0 {
			d.Wait()
		}
	}
}

// endAll shuts and closes endpoints, then domains.
func endAll(t testing.TB, domains []*domain, ends ...*endpoint) {
	t.Helper()
	for _, e := range ends {
		e.Shut()
	}
	dst := make([]group.Completion, 64)
	for _, d := range domains {
		for n, err := d.Poll(dst); n > 0 && err == nil; n, err = d.Poll(dst) {
		}
	}
	for _, e := range ends {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, d := range domains {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestCommandsBesidePeers: while the device performs a command for one peer, the Works of
// another peer are posted, end and are polled.
func TestCommandsBesidePeers(t *testing.T) {
	for _, command := range []string{"new queue pair", "resize", "connect", "error state", "destroy", "register", "window", "take back a key", "query port"} {
		t.Run(command, func(t *testing.T) {
			testkit.VerifyNone(t)
			c := newCable()
			card := newCard(c)
			a, b := openCard(t, card, NICOptions{}), openCard(t, newCard(c), NICOptions{})
			x, y := linked(t, a, b)
			slow, other := linked(t, a, b)
			fresh, err := a.NewEndpoint(7, rdma.ClassKV)
			if err != nil {
				t.Fatal(err)
			}
			mem := make([]byte, 4096)
			src, err := a.Register(mem, rdma.RegisterOptions{})
			if err != nil {
				t.Fatal(err)
			}
			dst, err := b.Register(make([]byte, 4096), rdma.RegisterOptions{})
			if err != nil {
				t.Fatal(err)
			}

			release := make(chan struct{})
			c.mu.Lock()
			c.hold[command] = release
			c.mu.Unlock()
			adds := 1
			if command == "resize" {
				adds += (a.cqEntries - a.cqUsed) / (2 * a.opts.QueueDepth)
			}
			var more []*endpoint
			ended := make(chan error, 1)
			go func() {
				switch command {
				case "new queue pair", "resize":
					for range adds {
						e, err := a.NewEndpoint(8, rdma.ClassKV)
						if err != nil {
							ended <- err
							return
						}
						more = append(more, e.(*endpoint))
					}
					ended <- nil
				case "connect":
					ended <- fresh.Connect(other.Local())
				case "error state":
					if err := slow.fail(errShut); !errors.Is(err, errShut) {
						t.Errorf("fail returned %v", err)
					}
					ended <- nil
				case "destroy":
					slow.Shut()
					ended <- nil
				case "query port":
					card.happens(eventLIDChange, 0)
					ended <- nil
				default: // command for memory
					m, err := a.Register(mem, rdma.RegisterOptions{})
					if err != nil {
						ended <- err
						return
					}
					w, err := m.Window(0, 64)
					if err != nil {
						ended <- err
						return
					}
					ended <- errors.Join(w.Close(), m.Close())
				}
			}()
			if got := <-c.entered; got != command {
				t.Errorf("the device performs %q", got)
			}

			polled := make(chan error, 1)
			go func() {
				if n, err := x.Post([]group.Work{{Cookie: 99, Op: group.OpWrite, Src: src, Len: 4096, RemoteAddr: dst.Base(), RemoteKey: dst.Key()}}); n != 1 {
					polled <- err
					return
				}
				polled <- pollFor(a, func(c group.Completion) bool { return c.Kind == group.KindDone && c.Cookie == 99 })
			}()
			select {
			case err := <-polled:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(time.Minute):
				t.Error("another peer's write waits for the command")
			}
			c.mu.Lock()
			delete(c.hold, command)
			c.mu.Unlock()
			close(release)
			if err := <-ended; err != nil {
				t.Error(err)
			}
			if err := errors.Join(src.Close(), dst.Close()); err != nil {
				t.Error(err)
			}
			endAll(t, []*domain{a, b}, append([]*endpoint{x, y, slow, other, fresh.(*endpoint)}, more...)...)
		})
	}
}

// TestRights: the peer of a queue pair for messages has no right to memory, only host
// memory allows windows, and local memory is not open as a whole.
func TestRights(t *testing.T) {
	testkit.VerifyNone(t)
	c := newCable()
	card := newCard(c)
	a, b := openCard(t, card, NICOptions{}), openCard(t, newCard(c), NICOptions{})
	x, y := linked(t, a, b)
	if want := []rights{rightRemoteWrite, 0}; !slices.Equal(card.queues, want) {
		t.Errorf("queue pairs were made with the rights %#x; want %#x, that of messages last", card.queues, want)
	}
	for _, r := range []struct {
		remote, windows bool
		want            rights
	}{
		{false, false, rightLocalWrite | rightRelaxed}, {true, false, rightLocalWrite | rightRelaxed | rightRemoteWrite},
		{false, true, rightLocalWrite | rightRelaxed | rightBind},
	} {
		if got := rightsOf(r.remote, r.windows); got != r.want {
			t.Errorf("remote %t, windows %t: rights %#x, want %#x", r.remote, r.windows, got, r.want)
		}
	}
	endAll(t, []*domain{a, b}, x, y)
}

// TestDMABufAndLongRegions: a dma-buf is registered without the right to bind windows, which
// mlx5 refuses. A part of it, and a part of more than 2 GiB, cannot be a window, so the caller
// registers that part separately.
func TestDMABufAndLongRegions(t *testing.T) {
	testkit.VerifyNone(t)
	card := newCard(newCable())
	d := openCard(t, card, NICOptions{})
	for _, local := range []bool{false, true} {
		m, err := d.Register(nil, rdma.RegisterOptions{Local: local, Device: "cuda:0", DMABuf: &rdma.DMABuf{FD: 0, Len: 4 << 30, Addr: 1 << 40}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.Window(0, 4096); !errors.Is(err, rdma.ErrUnsupported) {
			t.Errorf("a window of a dma-buf: %v; want ErrUnsupported", err)
		}
		part, err := d.Register(nil, rdma.RegisterOptions{Device: "cuda:0", DMABuf: &rdma.DMABuf{FD: 0, Offset: 4096, Len: 4096, Addr: 1<<40 + 4096}})
		if err != nil || part.Base() != 1<<40+4096 {
			t.Fatalf("a part of a dma-buf: %v", err)
		}
		if err := errors.Join(part.Close(), m.Close()); err != nil {
			t.Error(err)
		}
	}

	const long = 3 << 30
	mem, err := unix.Mmap(-1, 0, long, unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	m, err := d.Register(mem, rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	w, err := m.Window(4096, windowMax)
	if err != nil {
		t.Fatalf("a window of 2 GiB: %v", err)
	}
	if _, err := m.Window(0, windowMax+1); !errors.Is(err, rdma.ErrUnsupported) {
		t.Errorf("a window of more than 2 GiB: %v; want ErrUnsupported", err)
	}
	part, err := d.Register(mem[:windowMax+1], rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(part.Close(), w.Close(), m.Close()); err != nil {
		t.Error(err)
	}
	card.cable.mu.Lock()
	if len(card.keyed) != 0 {
		t.Errorf("%d keys are left", len(card.keyed))
	}
	card.cable.mu.Unlock()
	endAll(t, []*domain{d})
}

// TestStray: a completion of the wrong kind for its receive queue breaks the endpoint. The
// engine gets neither a message nor an immediate from it, and the message buffer is lent again.
func TestStray(t *testing.T) {
	const sendWithImmediate = 1 << 30 // PK_OP_SEND_IMM
	for name, stray := range map[string]completion{
		"a write with an immediate, to the queue of messages": {id: idMessage | 5, opcode: gotImmediate, imm: 7, len: 3},
		"a message with an immediate":                         {id: idMessage | 5, opcode: sendWithImmediate, imm: 7, len: 3},
		"a message, to the queue of immediates":               {id: idImm, opcode: gotMessage, len: 3},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.VerifyNone(t)
			c := newCable()
			card := newCard(c)
			a, b := openCard(t, card, NICOptions{}), openCard(t, newCard(c), NICOptions{})
			x, y := linked(t, a, b)
			mem, err := a.Register(make([]byte, 64), rdma.RegisterOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := a.PostRecv(5, mem, mem.(*memory).mem); err != nil {
				t.Fatal(err)
			}
			c.mu.Lock()
			if stray.id&idMessage != 0 {
				card.lent = nil // the stray completion has it
			}
			stray.qpn = x.lanes[writes].q.qpn
			if stray.id&idMessage != 0 {
				stray.qpn = x.lanes[messages].q.qpn
			}
			card.completesLocked(stray)
			c.mu.Unlock()
			var got []group.Completion
			err = pollFor(a, func(c group.Completion) bool {
				got = append(got, c)
				return c.Kind == group.KindBroken
			})
			if err != nil || len(got) != 1 || got[0].Cookie != 1 || !errors.Is(got[0].Err, errStray) {
				t.Errorf("%+v, %v; want the end of endpoint 1 alone", got, err)
			}
			if _, err := x.Post([]group.Work{{Op: group.OpWrite}}); !errors.Is(err, errBroken) {
				t.Errorf("a post behind it: %v", err)
			}
			c.mu.Lock()
			if len(card.lent) != 1 || card.lent[0].slot != 5 {
				t.Errorf("buffers lent: %+v; want the one of slot 5", card.lent)
			}
			c.mu.Unlock()
			if err := mem.Close(); err != nil {
				t.Error(err)
			}
			endAll(t, []*domain{a, b}, x, y)
		})
	}
}

// TestPortEvents: queue pairs use the row of the port's partition. A port that loses its
// LID, that row or its GID, or that goes down, is dead with the cause. Other changes leave
// it alive. A port that is opened again reads the device's values again.
func TestPortEvents(t *testing.T) {
	const unchanged = "event 8" // ends the cases in which the port stays alive
	for _, c := range []struct {
		name   string
		event  asyncEvent
		change func(*testCard)
		want   string
		row    uint16 // when opened again
		lid    uint16
	}{
		{"another LID", eventLIDChange, func(n *testCard) { n.port.lid = 9 }, "LID changed from 4 to 9", 2, 9},
		{"the same LID", eventLIDChange, func(*testCard) {}, unchanged, 2, 4},
		{"partition elsewhere", eventPKeyChange, func(n *testCard) { n.partition = []pkey{0, 0x7fff, 0x7fff, 0x8002} }, "partition key 0x8002 left row 2", 3, 4},
		{"another row changed", eventPKeyChange, func(n *testCard) { n.partition[3] = 0x8007 }, unchanged, 2, 4},
		{"shorter table", eventPKeyChange, func(n *testCard) { n.partition, n.port.pkeys = []pkey{0x8002}, 1 }, "left row 2", 0, 4},
		{"port down", eventPortDown, func(n *testCard) { n.port.active = false }, errPortDown.Error(), 2, 4},
		{"port up again", eventPortDown, func(*testCard) {}, unchanged, 2, 4},
		{"GID gone", eventGIDChange, func(n *testCard) { n.table = []gidEntry{{gid: gid{1}}} }, errGIDGone.Error(), 2, 4},
		{"completion queue", eventCQ, func(*testCard) {}, "event 0", 2, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			testkit.VerifyNone(t)
			wire := newCable()
			card := newCard(wire)
			a, b := openCard(t, card, NICOptions{}), openCard(t, newCard(wire), NICOptions{})
			if card.row != 2 {
				t.Errorf("queue pairs use row %d of the partitions; the port is in that of row 2", card.row)
			}
			x, y := linked(t, a, b)
			wire.mu.Lock()
			c.change(card)
			card.happensLocked(c.event, 0)
			if c.want == unchanged {
				card.happensLocked(eventDeviceFatal, 0)
			}
			wire.mu.Unlock()
			broken := false
			err := pollFor(a, func(c group.Completion) bool {
				broken = broken || c.Kind == group.KindBroken && c.Cookie == 1
				return false
			})
			if !errors.Is(err, group.ErrDead) || !strings.Contains(err.Error(), c.want) || !broken {
				t.Errorf("the domain ended with %v (endpoint broken: %t); want %q", err, broken, c.want)
			}
			endAll(t, []*domain{a, b}, x, y)

			again := newCard(wire)
			c.change(again)
			again.port.active = true
			d := openCard(t, again, NICOptions{})
			e, err := d.NewEndpoint(3, rdma.ClassKV)
			if err != nil {
				t.Fatal(err)
			}
			addr, err := parseAddr(e.Local())
			if err != nil || again.row != c.row || addr.lid != c.lid {
				t.Errorf("opened again: row %d, LID %d, %v; want row %d, LID %d", again.row, addr.lid, err, c.row, c.lid)
			}
			endAll(t, []*domain{d}, e.(*endpoint))
		})
	}
}

// TestQueueEvents: an event of a queue pair breaks its endpoint, and no other.
func TestQueueEvents(t *testing.T) {
	testkit.VerifyNone(t)
	c := newCable()
	card := newCard(c)
	a, b := openCard(t, card, NICOptions{}), openCard(t, newCard(c), NICOptions{})
	x, y := linked(t, a, b)
	u, v := linked(t, a, b)
	u.cookie = 5
	card.happens(eventQPAccess, x.lanes[messages].q.qpn)
	var got []group.Completion
	if err := pollFor(a, func(c group.Completion) bool { got = append(got, c); return true }); err != nil || len(got) != 1 || got[0].Kind != group.KindBroken || got[0].Cookie != 1 {
		t.Errorf("%+v, %v; want the end of endpoint 1", got, err)
	}
	if u.broken.Load() {
		t.Error("the other endpoint is broken too")
	}
	endAll(t, []*domain{a, b}, x, y, u, v)
}

// TestDeclared: the cards of package simrdma have the limits that this package reports for
// them.
func TestDeclared(t *testing.T) {
	f := simrdma.NewFabric(1, simrdma.FabricOptions{})
	for name, c := range map[string]struct {
		nic     simrdma.NICOptions
		windows bool
		vendor  uint32
	}{
		"a card":   {simrdma.NICOptions{}.LikeRC(), true, 0x02c9},
		"rdma_rxe": {simrdma.NICOptions{}.LikeRXE(), false, vendorRXE},
	} {
		c.nic.Name, c.nic.MaxWrite, c.nic.MaxMessage, c.nic.QueueDepth = name, 1<<30, 1<<30, 256
		d, err := f.Open(c.nic)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := d.Limits(), limitsOf(1<<30, 256, c.windows, c.vendor); got != want {
			t.Errorf("%s is simulated with the limits %+v; it has %+v", name, got, want)
		}
		if c.windows && (c.nic.WindowMax != windowMax || !c.nic.NoDeviceWindows) {
			t.Errorf("%s is simulated with windows of %d bytes, of devices: %t", name, c.nic.WindowMax, !c.nic.NoDeviceWindows)
		}
		if !c.nic.VirtualAddresses {
			t.Errorf("%s is simulated without virtual addresses", name)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}
