//go:build verbs && cgo && linux

package verbs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/qos"
	"golang.org/x/sys/unix"
)

// netdev returns the network interface of a port, which a test may take down. It runs in the
// lab only.
func netdev(t testing.TB, device string) string {
	t.Helper()
	if os.Getenv(envLab) == "" {
		t.Skip("not in the lab (" + envLab + " is not set), and this test takes a network interface down or listens on it: run make test-rdma")
	}
	name, _, _ := strings.Cut(device, "/")
	text, err := os.ReadFile("/sys/class/infiniband/" + name + "/ports/1/gid_attrs/ndevs/0")
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// setLink brings a network interface up or down.
func setLink(t testing.TB, dev, state string) {
	t.Helper()
	if out, err := exec.Command("ip", "link", "set", dev, state).CombinedOutput(); err != nil {
		t.Fatalf("ip link set %s %s: %v: %s", dev, state, err, out)
	}
}

// TestLinkDown: one of two NICs loses its link during many writes. Nothing is lost, each
// immediate is counted once, and the NIC is used again when its link is up.
func TestLinkDown(t *testing.T) {
	names := ports(t, 4)
	testkit.VerifyNone(t)
	ctx := testContext(t)
	a, b := []string{names[0], names[2]}, []string{names[1], names[3]}
	cut := netdev(t, names[3])
	target := closing(t, startEngine(t, b, true, group.Options{Token: rdma.Token(testToken)}))
	sender := closing(t, startEngine(t, a, false, group.Options{InFlightOps: 8}))
	if _, err := sender.Connect(ctx, target.Addr(), rdma.Token(testToken)); err != nil {
		t.Fatal(err)
	}
	const size, count, imm = 256 << 10, 60, 3
	mem, got := make([]byte, size*count), make([]byte, size*count)
	for i := range mem {
		mem[i] = byte(i * 7 >> 3)
	}
	src, err := sender.Register(mem, rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	dst, err := target.Register(got, rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	all := rdma.NewFlag()
	if _, err := target.ExpectImm(rdma.Expect{Imm: imm, Count: count, Done: all.Set}); err != nil {
		t.Fatal(err)
	}
	defer setLink(t, cut, "up")
	var wg sync.WaitGroup
	for i := range uint64(count) {
		if i == count/3 {
			setLink(t, cut, "down")
		}
		wg.Add(1)
		w := rdma.Write{Src: src, SrcOffset: i * size, Dst: dst.Desc(), DstOffset: i * size, Len: size, Imm: rdma.ImmOf(imm)}
		w.Done = func(err error) {
			defer wg.Done()
			if err != nil {
				t.Errorf("write %d: %v", i, err)
			}
		}
		if err := sender.Write(ctx, w); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
	if err := all.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, mem) {
		t.Error("other bytes")
	}
	if n := target.Stats().ImmediatesIn; n != count {
		t.Errorf("%d immediates were counted for %d writes", n, count)
	}
	for _, e := range []*killable{sender, target} {
		if nics := e.NICs(); nics[1].Up || nics[1].Reason == "" || !nics[0].Up {
			t.Errorf("the NICs are %+v; want the second down, with a reason", nics)
		}
	}
	setLink(t, cut, "up")
	// The NIC is opened again automatically, and later writes use both.
	before := target.NICs()[1].BytesIn
	for target.NICs()[1].BytesIn == before {
		done := rdma.NewFlag()
		if err := sender.Write(ctx, rdma.Write{Src: src, Dst: dst.Desc(), Len: size, Done: done.Set}); err != nil {
			t.Fatal(err)
		}
		if err := done.Wait(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPortDown: a port that is down is not opened, and the error and the list have the reason.
func TestPortDown(t *testing.T) {
	names := ports(t, 4)
	dev := netdev(t, names[2])
	setLink(t, dev, "down")
	defer setLink(t, dev, "up")
	if d, err := Open(NICOptions{Device: names[2]}); !errors.Is(err, errPortDown) {
		if err == nil {
			err = d.Close()
		}
		t.Errorf("open: %v", err)
	}
	list, err := List()
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, d := range list {
		if d.Name == names[2] {
			found = true
			if d.Up || d.Reason == "" {
				t.Errorf("listed as %+v", d)
			}
		}
	}
	if !found {
		t.Errorf("%s is not in %+v", names[2], list)
	}
}

// TestAddressRemoved: a port whose address is removed is dead, with the reason.
func TestAddressRemoved(t *testing.T) {
	name := ports(t, 4)[2]
	dev := netdev(t, name)
	testkit.VerifyNone(t)
	const addr = "10.88.9.1"
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	ip("addr", "add", addr+"/24", "dev", dev)
	d := opened(t, NICOptions{Device: fmt.Sprintf("%s@%d", name, gidIndex(t, name, addr))})
	ip("addr", "del", addr+"/24", "dev", dev)
	dst := make([]group.Completion, 4)
	for {
		if _, err := d.Poll(dst); err != nil {
			if !errors.Is(err, group.ErrDead) || !errors.Is(err, errGIDGone) {
				t.Errorf("poll: %v", err)
			}
			break
		}
		d.Wait()
	}
	if _, err := d.NewEndpoint(1, rdma.ClassKV); !errors.Is(err, group.ErrDead) {
		t.Errorf("an endpoint of a dead domain: %v", err)
	}
}

// gidIndex waits until the port has a RoCE v2 row for the address, which the kernel adds
// asynchronously.
func gidIndex(t *testing.T, device, addr string) uint32 {
	t.Helper()
	ctx := testContext(t)
	n, err := openNIC(device, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer n.close()
	for ctx.Err() == nil {
		table, err := n.gids()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range table {
			if e.kind == gidRoCEv2 && e.addr().String() == addr {
				return e.index
			}
		}
		runtime.Gosched()
	}
	t.Fatalf("%s has no GID for %s", device, addr)
	return 0
}

// TestMarking: the packets of a traffic class carry its marking, as captured on the cable.
func TestMarking(t *testing.T) {
	names := ports(t, 2)
	dev := netdev(t, names[1])
	testkit.VerifyNone(t)
	lanes := qos.Default()
	a, err := open(NICOptions{Device: names[0], QoS: &lanes})
	if err != nil {
		t.Fatal(err)
	}
	defer closeDomain(t, a)
	b, err := open(NICOptions{Device: names[1], QoS: &lanes})
	if err != nil {
		t.Fatal(err)
	}
	defer closeDomain(t, b)
	src, err := a.Register(make([]byte, 64), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dst, err := b.Register(make([]byte, 64), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer dst.Close()
	for class := range rdma.Class(rdma.Classes) {
		seen := sniff(t, dev)
		la, lb := joined(t, a, b, class)
		if n, err := la.Post([]group.Work{{Cookie: 1, Op: group.OpWrite, Src: src, Len: 64, RemoteAddr: dst.Base(), RemoteKey: dst.Key()}}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if tos, err := seen(); err != nil || tos != lanes[class].TrafficClass() || tos == 0 {
			t.Errorf("class %v: packets carry traffic class %#x, %v; want %#x", class, tos, err, lanes[class].TrafficClass())
		}
		for _, e := range []group.Endpoint{la, lb} {
			e.Shut()
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

func closeDomain(t *testing.T, d *domain) {
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// joined returns two connected endpoints.
func joined(t testing.TB, a, b *domain, class rdma.Class) (x, y group.Endpoint) {
	t.Helper()
	x, err := a.NewEndpoint(1, class)
	if err != nil {
		t.Fatal(err)
	}
	if y, err = b.NewEndpoint(2, class); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(x.Connect(y.Local()), y.Connect(x.Local())); err != nil {
		t.Fatal(err)
	}
	return x, y
}

// sniff captures packets of a network interface. seen returns the type of service of the first
// RoCE v2 packet that arrived since.
func sniff(t *testing.T, dev string) (seen func() (uint8, error)) {
	t.Helper()
	const roce = 4791 // UDP port of RoCE v2
	protocol := uint16(unix.ETH_P_IP>>8 | unix.ETH_P_IP&0xff<<8)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(protocol))
	if err != nil {
		t.Fatal(err)
	}
	index, err := os.ReadFile("/sys/class/net/" + dev + "/ifindex")
	if err != nil {
		t.Fatal(err)
	}
	var i int
	if _, err := fmt.Sscan(string(index), &i); err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: i}); err != nil {
		t.Fatal(err)
	}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 20}); err != nil {
		t.Fatal(err)
	}
	return func() (uint8, error) {
		defer unix.Close(fd)
		for b := make([]byte, 1<<13); ; {
			n, from, err := unix.Recvfrom(fd, b, 0)
			if err != nil {
				return 0, err
			}
			l, ok := from.(*unix.SockaddrLinklayer)
			// 17 is UDP, in a header of 20 bytes. Packets sent by this host are skipped.
			if ok && l.Pkttype != unix.PACKET_OUTGOING && n > 28 && b[0] == 0x45 && b[9] == 17 && int(b[22])<<8|int(b[23]) == roce {
				return b[1], nil
			}
		}
	}
}
