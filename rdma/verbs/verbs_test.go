package verbs

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/qos"
)

// FuzzRing compares the ring with a slice. Each byte of script is one step: add, drop the last
// additions, or a completion of one of the Works in flight.
func FuzzRing(f *testing.F) {
	f.Add([]byte{0, 1, 2, 0x80, 0, 0xff, 3, 0x41})
	f.Add(bytes.Repeat([]byte{1, 0x83}, 200))
	f.Fuzz(func(t *testing.T, script []byte) {
		const depth = 16
		r := newRing(depth)
		// Begin where the low half of a sequence number is about to wrap.
		const first = 1<<32 - 8
		r.posted.Store(first)
		r.done.Store(first)
		var model []uint64 // cookies in flight
		next, seq := uint64(100), uint64(first)
		for _, b := range script {
			switch n := int(b & 0x3f); b >> 6 {
			case 0, 1: // add up to n Works, then remove the last of them if b is odd
				k := min(n%5, r.room())
				for range k {
					if got := r.add(next); got != seq {
						t.Fatalf("sequence number %d, want %d", got, seq)
					}
					model = append(model, next)
					next, seq = next+1, seq+1
				}
				if b>>6 == 1 && k > 0 {
					r.drop(1)
					model, seq = model[:len(model)-1], seq-1
				}
			default: // the completion of the Work n places behind the oldest
				low := uint32(r.done.Load()) + uint32(n)
				before, ok := r.before(low)
				if ok != (n < len(model)) || (ok && before != n) {
					t.Fatalf("%d Works before place %d of %d, %v", before, n, len(model), ok)
				}
				if !ok {
					continue
				}
				for range n + 1 {
					if got := r.end(); got != model[0] {
						t.Fatalf("cookie %d, want %d", got, model[0])
					}
					model = model[1:]
				}
			}
			if r.pending() != len(model) || r.room() != depth-len(model) {
				t.Fatalf("%d pending and room for %d, want %d of %d", r.pending(), r.room(), len(model), depth)
			}
		}
	})
}

// someAddr is an address that a port can have.
func someAddr() endpointAddr {
	return endpointAddr{
		writeQPN: 17, messageQPN: 0xfffffe, writePSN: 1, messagePSN: max24,
		gid: gid(netip.MustParseAddr("::ffff:10.88.0.1").As16()), lid: 3, mtu: 5, layer: layerEthernet,
	}
}

func TestAddr(t *testing.T) {
	want := someAddr()
	b := want.append(nil)
	if got, err := parseAddr(b); err != nil || got != want {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	if len(b) > group.MaxEndpointAddr {
		t.Errorf("%d bytes", len(b))
	}
	bad := func(change func(a *endpointAddr)) []byte {
		a := someAddr()
		change(&a)
		return a.append(nil)
	}
	for name, b := range map[string][]byte{
		"empty":          nil,
		"short":          b[:len(b)-1],
		"long":           append(bytes.Clone(b), 0),
		"version":        append([]byte{2}, b[1:]...),
		"wide QPN":       bad(func(a *endpointAddr) { a.writeQPN = 1 << 24 }),
		"wide PSN":       bad(func(a *endpointAddr) { a.messagePSN = 1 << 24 }),
		"no MTU":         bad(func(a *endpointAddr) { a.mtu = 0 }),
		"MTU of 8192":    bad(func(a *endpointAddr) { a.mtu = 6 }),
		"link layer":     bad(func(a *endpointAddr) { a.layer = 0 }),
		"link layer 200": bad(func(a *endpointAddr) { a.layer = 200 }),
	} {
		if a, err := parseAddr(b); !errors.Is(err, errAddr) {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}
}

// FuzzAddr: an address that parses encodes to the same bytes.
func FuzzAddr(f *testing.F) {
	f.Add(someAddr().append(nil))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := parseAddr(b)
		if err == nil && !bytes.Equal(a.append(nil), b) {
			t.Errorf("%x parses to %+v, which is %x", b, a, a.append(nil))
		}
	})
}

func TestChooseGID(t *testing.T) {
	row := func(index uint32, kind gidType, addr string) gidEntry {
		return gidEntry{index: index, kind: kind, gid: gid(netip.MustParseAddr(addr).As16())}
	}
	v1, v2 := gidRoCEv1, gidRoCEv2
	// The addresses of a ConnectX port with an IPv4 and an IPv6 address.
	card := []gidEntry{
		row(0, v1, "fe80::1"), row(1, v2, "fe80::1"), row(2, v1, "::ffff:10.0.0.1"), row(3, v2, "::ffff:10.0.0.1"),
		row(4, v1, "2001:db8::1"), row(5, v2, "2001:db8::1"), row(7, v2, "::ffff:10.0.0.2"),
	}
	for _, c := range []struct {
		name  string
		table []gidEntry
		asked int
		index uint32
		why   string
	}{
		{"IPv4 first", card, -1, 3, "IPv4"},
		{"IPv6", card[4:6], -1, 5, "global IPv6"},
		{"link-local", card[:2], -1, 1, "link-local"},
		{"v1 alone", card[:1], -1, 0, "no RoCE v2"},
		{"IPv4 link-local is no better", []gidEntry{row(0, v2, "::ffff:169.254.1.1"), row(1, v2, "2001:db8::1")}, -1, 1, "global IPv6"},
		{"InfiniBand", []gidEntry{row(0, gidInfiniBand, "fe80::2")}, -1, 0, "InfiniBand"},
		{"asked for", card, 5, 5, "asked"},
	} {
		got, why, err := chooseGID(c.table, c.asked)
		if err != nil || got.index != c.index || !strings.Contains(why, c.why) {
			t.Errorf("%s: row %d because %q, %v; want row %d because of %q", c.name, got.index, why, err, c.index, c.why)
		}
	}
	if _, _, err := chooseGID(nil, -1); err == nil {
		t.Error("a row of an empty table")
	}
	if _, _, err := chooseGID(card, 6); err == nil || !strings.Contains(err.Error(), "6") {
		t.Errorf("a row that does not exist: %v", err)
	}
}

func TestParseDevice(t *testing.T) {
	for _, c := range []struct {
		in   string
		want place
	}{
		{"rxe0", place{"rxe0", 1, -1}},
		{"mlx5_0/2", place{"mlx5_0", 2, -1}},
		{"mlx5_0@3", place{"mlx5_0", 1, 3}},
		{"mlx5_0/1@0", place{"mlx5_0", 1, 0}},
	} {
		if got, err := parseDevice(c.in); err != nil || got != c.want {
			t.Errorf("%q: %+v, %v", c.in, got, err)
		}
	}
	for _, bad := range []string{"", "/1", "@1", "x/0", "x/256", "x/", "x@", "x@-1", "x@256", "x@1/2"} {
		if got, err := parseDevice(bad); err == nil {
			t.Errorf("%q: %+v", bad, got)
		}
	}
}

// TestPartition: the first row that is in a partition, full membership first.
func TestPartition(t *testing.T) {
	for _, c := range []struct {
		table []pkey
		row   uint16
		key   pkey
	}{{[]pkey{0xffff}, 0, 0xffff}, {[]pkey{0, 0x7fff, 0x0002, 0x8002, 0xffff}, 3, 0x8002}, {[]pkey{0, 0x7fff}, 1, 0x7fff}} {
		if row, key, err := choosePKey(c.table); err != nil || row != c.row || key != c.key {
			t.Errorf("of %#x: row %d, key %#x, %v", c.table, row, key, err)
		}
	}
	if _, _, err := choosePKey([]pkey{0, 0x8000}); err == nil {
		t.Error("a port in no partition")
	}
}

// TestPortChanged: the values with which queue pairs were created are compared with the port's
// current values.
func TestPortChanged(t *testing.T) {
	table := []pkey{0xffff, 0x8001}
	if err := stillThere(4, 4, 0x8001, table, 1); err != nil {
		t.Errorf("nothing changed: %v", err)
	}
	for what, err := range map[string]error{
		"LID changed from 4 to 5": stillThere(4, 5, 0x8001, table, 1),
		"key 0x8002":              stillThere(4, 4, 0x8002, table, 1),
		"row 2":                   stillThere(4, 4, 0x8001, table, 2),
	} {
		if err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestNoWindow: dma-bufs, and ranges that exceed the length of a memory window, have no
// windows.
func TestNoWindow(t *testing.T) {
	for _, c := range []struct {
		device bool
		n      uint64
		ok     bool
	}{{false, 1, true}, {false, windowMax, true}, {false, windowMax + 1, false}, {true, 1, false}} {
		err := noWindow(c.device, c.n)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, rdma.ErrUnsupported) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestOptions(t *testing.T) {
	good := NICOptions{Device: "rxe0"}
	good.EnsureDefaults()
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(*NICOptions){
		"has no name":    func(o *NICOptions) { o.Device = "" },
		"QueueDepth":     func(o *NICOptions) { o.QueueDepth = 8 },
		"power of two":   func(o *NICOptions) { o.QueueDepth = 100 },
		"ReceiveEntries": func(o *NICOptions) { o.ReceiveEntries = 1 },
		"TimeoutCode":    func(o *NICOptions) { o.TimeoutCode = 40 },
		"Retries":        func(o *NICOptions) { o.Retries = 7 },
		"Spin":           func(o *NICOptions) { o.Spin = 2 * maxSpin },
		"sl:16":          func(o *NICOptions) { o.QoS = &qos.Map{rdma.ClassCollective: {SL: 16}} },
	} {
		o := good
		change(&o)
		if err := o.Validate(); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v; want an error about %s", err, what)
		}
	}
}

func TestOutcome(t *testing.T) {
	for _, c := range []struct {
		status  wcStatus
		message bool
		want    group.Status
	}{
		{wcSuccess, false, group.StatusOK},
		{wcRemoteAccess, false, group.StatusRefused},
		{wcRemoteInvReq, false, group.StatusRefused},
		{wcRemoteInvReq, true, group.StatusNoBuffer},
		{wcRemoteOp, true, group.StatusNoBuffer},
		{wcRNRRetries, true, group.StatusNoBuffer},
		{wcRemoteOp, false, group.StatusBroken},
		{wcRNRRetries, false, group.StatusBroken},
		{wcRetries, true, group.StatusBroken},
		{wcFlushed, false, group.StatusBroken},
		{99, false, group.StatusBroken},
	} {
		if got := c.status.outcome(c.message); got != c.want {
			t.Errorf("status %d of a message %v: %d, want %d", c.status, c.message, got, c.want)
		}
	}
}

// TestNoDevice: the error of an engine that can't be started names the reason, and nothing
// stays open.
func TestNoDevice(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e, err := New(context.Background(), Options{Devices: []string{"no such card"}, Group: group.Options{Control: group.Control{Listener: l}, Token: rdma.Token(strings.Repeat("t", 32))}})
	if err == nil {
		t.Fatal("an engine without a card", e.Close())
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener is still open: %v", err)
	}
	want := "no such card"
	if !Built {
		want = "-tags verbs"
		if !errors.Is(err, rdma.ErrUnsupported) {
			t.Errorf("%v does not wrap ErrUnsupported", err)
		}
		if _, err := Open(NICOptions{}); !errors.Is(err, rdma.ErrUnsupported) {
			t.Errorf("Open: %v", err)
		}
		if _, err := List(); !errors.Is(err, rdma.ErrUnsupported) {
			t.Errorf("List: %v", err)
		}
	}
	if !strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %q in it", err, want)
	}
}

// TestCloseIsFinal: after a key was invalidated, a hardware NIC writes no more bytes with
// it, but a software device may still finish a packet.
func TestCloseIsFinal(t *testing.T) {
	const mellanox = 0x02c9
	for vendor, final := range map[uint32]bool{mellanox: true, vendorRXE: false, vendorSIW: false} {
		if got := limitsOf(1<<30, 64, true, vendor); got.CloseIsFinal != final || got.MaxWrite != 1<<30 || !got.Windows {
			t.Errorf("vendor %#x: %+v; want CloseIsFinal %t", vendor, got, final)
		}
	}
}
