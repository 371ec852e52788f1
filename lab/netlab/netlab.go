package netlab

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Lab is a set of namespaces and the links between them.
type Lab struct {
	namespaces      []*Namespace
	links, switches int
}

// Namespace is a network namespace with a loopback interface and one interface for each Link.
type Namespace struct {
	name string
	file *os.File
	nl   *netlink.Handle
	devs int
}

// End is one end of a link.
type End struct {
	Namespace *Namespace
	// Device is the interface's name in its namespace.
	Device string
	// Net is the end's address with its network; invalid at a switch.
	Net netip.Prefix
}

// IP is the end's address.
func (e End) IP() netip.Addr { return e.Net.Addr() }

// Link connects two namespaces, or a namespace (A) and a switch (B).
type Link struct {
	A, B    End
	classes []Class
}

// LinkOptions are the options of a link. The zero value has no rate limit.
type LinkOptions struct {
	// RateBits limits each direction, in bits per second; 0 means no limit.
	RateBits uint64
	// Classes divide a limited rate; packets of no class belong to the last class. Without classes,
	// packets are sent in order of arrival.
	Classes []Class
}

// Class is a share of a link's rate (tc-htb(8)). The unused rate of a class is lent to the other
// classes, in the order of the list.
type Class struct {
	// DSCP is the code point of the class's packets, 0 to 63.
	DSCP uint8
	// Share is the guaranteed part of the rate, in (0, 1).
	Share float64
}

// Sizes of a link with a rate: the burst after a pause, and the queue. Packets that do not fit into
// the queue are dropped. The burst holds the largest packet that a socket sends (64 KiB and
// headers). With a smaller burst the kernel would cut each packet into segments, which takes
// several times the CPU.
const (
	burstBytes = 128 << 10
	queueBytes = 1 << 20
)

// Sizes of a link with classes. Packets of all classes wait until the packet on the wire has been
// sent. After a pause a class may send its burst at once, which delays the other classes. So
// packets are small, like those of a network card, and the burst of a class is two packets.
const (
	sharedPacketBytes = 16 << 10
	sharedBurstBytes  = 2 * sharedPacketBytes
)

// addresses is the range of the links' addresses. It is divided into one network of four addresses
// per link.
var addresses = netip.MustParsePrefix("10.77.0.0/16")

// linksMax is the number of networks in addresses.
const linksMax = 1 << 14

// Open returns an empty lab. It fails if this process may not create namespaces.
func Open() (*Lab, error) {
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("netlab: network namespaces need root, this is user %d", os.Geteuid())
	}
	return &Lab{}, nil
}

// Close closes the lab. A namespace with running processes exists until the last of them ends.
func (l *Lab) Close() error {
	var errs []error
	for _, n := range l.namespaces {
		n.nl.Close()
		errs = append(errs, n.file.Close())
	}
	l.namespaces = nil
	return errors.Join(errs...)
}

// Namespace creates a namespace; name is used in errors.
func (l *Lab) Namespace(name string) (*Namespace, error) {
	n := &Namespace{name: name}
	err := onThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		n.file, err = os.Open(threadNet)
		return err
	})
	if err == nil {
		n.nl, err = netlink.NewHandleAt(netns.NsHandle(n.file.Fd()))
	}
	if err == nil {
		err = n.up("lo")
	}
	if err != nil {
		return nil, fmt.Errorf("netlab: namespace %s: %w", name, err)
	}
	l.namespaces = append(l.namespaces, n)
	return n, nil
}

// threadNet is the network namespace of the calling thread.
const threadNet = "/proc/thread-self/ns/net"

// onThread runs f on a separate thread. f may move the thread to another namespace; after f,
// onThread moves the thread back.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open(threadNet)
		if err != nil {
			done <- err
			return // the thread ends with the goroutine
		}
		defer func() { _ = home.Close() }()
		err = f()
		if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
			done <- errors.Join(err, os.NewSyscallError("setns", back))
			return
		}
		runtime.UnlockOSThread()
		done <- err
	}()
	return <-done
}

// Do runs f on a thread inside the namespace. Sockets that f makes belong to the namespace, but not
// sockets that another goroutine makes for f.
func (n *Namespace) Do(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("setns", err)
		}
		return f()
	})
}

// Start starts cmd inside the namespace. The process is killed if this process ends.
func (n *Namespace) Start(cmd *exec.Cmd) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	if err := n.Do(cmd.Start); err != nil {
		return fmt.Errorf("netlab: start %s in %s: %w", cmd.Path, n.name, err)
	}
	return nil
}

// String returns the name of the namespace and the command to enter it.
func (n *Namespace) String() string {
	return fmt.Sprintf("%s (nsenter --net=/proc/%d/fd/%d)", n.name, os.Getpid(), n.file.Fd())
}

// up sets an interface of the namespace up.
func (n *Namespace) up(device string) error {
	dev, err := n.nl.LinkByName(device)
	if err != nil {
		return err
	}
	return n.nl.LinkSetUp(dev)
}

// Link connects two namespaces by a link with new addresses.
func (l *Lab) Link(a, b *Namespace, o LinkOptions) (*Link, error) {
	if l.links == linksMax {
		return nil, fmt.Errorf("netlab: a lab has at most %d links, the networks in %v", linksMax, addresses)
	}
	base := addresses.Addr().As4()
	base[2], base[3] = byte(l.links>>6), byte(l.links<<2)
	l.links++
	ip := func(last byte) netip.Addr {
		x := base
		x[3] += last
		return netip.AddrFrom4(x)
	}
	k := &Link{A: End{a, a.nextDevice(), netip.PrefixFrom(ip(1), 30)}, B: End{b, b.nextDevice(), netip.PrefixFrom(ip(2), 30)}}
	return k, k.lay(o)
}

// lay creates the two interfaces of a link and waits for their carrier.
func (k *Link) lay(o LinkOptions) error {
	k.classes = o.Classes
	err := k.A.Namespace.nl.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: k.A.Device},
		PeerName:  k.B.Device, PeerNamespace: netlink.NsFd(int(k.B.Namespace.file.Fd())),
	})
	if err == nil {
		err = errors.Join(k.A.configure(), k.B.configure())
	}
	if err == nil && o.RateBits > 0 {
		err = k.SetRate(o.RateBits)
	}
	if err == nil {
		err = k.await()
	}
	if err != nil {
		return fmt.Errorf("netlab: link %s to %s: %w", k.A.Namespace.name, k.B.Namespace.name, err)
	}
	return nil
}

// nextDevice returns the name of the namespace's next interface.
func (n *Namespace) nextDevice() string {
	n.devs++
	return fmt.Sprint("lab", n.devs-1)
}

// configure assigns the end's address, if it has one, to the end's interface, and then sets the
// interface up.
func (e End) configure() error {
	dev, err := e.device()
	if err != nil {
		return err
	}
	if e.Net.IsValid() {
		addr, err := netlink.ParseAddr(e.Net.String())
		if err != nil {
			return err
		}
		if err := e.Namespace.nl.AddrAdd(dev, addr); err != nil {
			return err
		}
	}
	return e.Namespace.nl.LinkSetUp(dev)
}

// device returns the interface.
func (e End) device() (netlink.Link, error) { return e.Namespace.nl.LinkByName(e.Device) }

// SetRate changes the limit of each direction of the link, in bits per second.
func (k *Link) SetRate(bits uint64) error {
	for _, e := range []End{k.A, k.B} {
		dev, err := e.device()
		if err == nil && len(k.classes) > 0 {
			err = e.share(dev, bits/8, k.classes)
		} else if err == nil {
			err = e.limit(dev, bits/8)
		}
		if err != nil {
			return fmt.Errorf("netlab: %s of %s to %d bit/s (kernel modules sch_tbf, sch_htb, cls_u32): %w", e.Device, e.Namespace.name, bits, err)
		}
	}
	return nil
}

// root is the handle of an interface's root queue.
var root = netlink.MakeHandle(1, 0)

// limit limits an interface to rate bytes per second with a token bucket (tc-tbf(8)).
func (e End) limit(dev netlink.Link, rate uint64) error {
	return e.Namespace.nl.QdiscReplace(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: dev.Attrs().Index, Parent: netlink.HANDLE_ROOT, Handle: root},
		Rate:       rate, Limit: queueBytes, Buffer: netlink.Xmittime(rate, burstBytes),
	})
}

// share divides rate bytes per second among classes (tc-htb(8)).
func (e End) share(dev netlink.Link, rate uint64, classes []Class) error {
	nl, index := e.Namespace.nl, dev.Attrs().Index
	if err := nl.LinkSetGSOMaxSize(dev, sharedPacketBytes); err != nil {
		return fmt.Errorf("packets of at most %d bytes: %w", sharedPacketBytes, err)
	}
	q := netlink.NewHtb(netlink.QdiscAttrs{LinkIndex: index, Parent: netlink.HANDLE_ROOT, Handle: root})
	q.Defcls = uint32(1 + len(classes))
	if err := nl.QdiscReplace(q); err != nil {
		return err
	}
	class := func(parent uint32, minor int, rate, most uint64, prio int) error {
		return nl.ClassReplace(netlink.NewHtbClass(
			netlink.ClassAttrs{LinkIndex: index, Parent: parent, Handle: netlink.MakeHandle(1, uint16(minor))},
			netlink.HtbClassAttrs{Rate: rate * 8, Ceil: most * 8, Prio: uint32(prio), Quantum: sharedPacketBytes, Buffer: sharedBurstBytes, Cbuffer: sharedBurstBytes},
		))
	}
	whole := netlink.MakeHandle(1, 1)
	if err := class(root, 1, rate, rate, 0); err != nil {
		return err
	}
	for i, c := range classes {
		minor := 2 + i
		if err := class(whole, minor, max(uint64(float64(rate)*c.Share), 1), rate, i); err != nil {
			return err
		}
		err := nl.FilterReplace(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: root, Priority: uint16(minor), Protocol: unix.ETH_P_IP},
			ClassId:     netlink.MakeHandle(1, uint16(minor)),
			// The second byte of an IPv4 header is DSCP and two bits of ECN.
			Sel: &netlink.TcU32Sel{Flags: netlink.TC_U32_TERMINAL, Nkeys: 1, Keys: []netlink.TcU32Key{{Mask: 0x00fc0000, Val: uint32(c.DSCP) << 18}}},
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Counters are the numbers of bytes, with headers, that an interface has received and sent since
// its creation.
type Counters struct{ ReceivedBytes, SentBytes uint64 }

// Counters returns the counters of A.
func (k *Link) Counters() (Counters, error) {
	dev, err := k.A.device()
	if err != nil {
		return Counters{}, fmt.Errorf("netlab: %s of %s: %w", k.A.Device, k.A.Namespace.name, err)
	}
	s := dev.Attrs().Statistics
	if s == nil {
		return Counters{}, fmt.Errorf("netlab: %s of %s: the kernel returned no counters", k.A.Device, k.A.Namespace.name)
	}
	return Counters{s.RxBytes, s.TxBytes}, nil
}

// SetUp takes the link up or down. Down has the effect of pulling the cable at A: both ends lose
// their carrier, and packets in flight are lost.
func (k *Link) SetUp(up bool) error {
	dev, err := k.A.device()
	if err == nil && up {
		if err = k.A.Namespace.nl.LinkSetUp(dev); err == nil {
			err = k.await()
		}
	} else if err == nil {
		err = k.A.Namespace.nl.LinkSetDown(dev)
	}
	if err != nil {
		return fmt.Errorf("netlab: link %s of %s: %w", k.A.Device, k.A.Namespace.name, err)
	}
	return nil
}

// carrierMax bounds the wait for a link's carrier.
const carrierMax = 10 * time.Second

// await returns when both ends have their carrier. The kernel detects the carrier asynchronously,
// and drops packets that are sent before that.
func (k *Link) await() error {
	deadline := time.Now().Add(carrierMax)
	for _, e := range []End{k.A, k.B} {
		for {
			dev, err := e.device()
			if err != nil {
				return err
			}
			if dev.Attrs().OperState == netlink.OperUp {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("%s has no carrier after %v", e.Device, carrierMax)
			}
			<-time.After(time.Millisecond)
		}
	}
	return nil
}

// TB has the methods of testing.TB that ForTest uses.
type TB interface {
	Helper()
	Skipf(format string, args ...any)
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
	Cleanup(f func())
}

// ForTest opens a lab for a test, and closes it at the test's end. Without root, or if the kernel
// refuses to make namespaces, the test is skipped with the reason. As root in CI (CI=true) the test
// fails instead.
func ForTest(t TB) *Lab {
	t.Helper()
	l, err := Open()
	if err == nil {
		// The first namespace shows whether the kernel allows namespaces.
		var n *Namespace
		if n, err = l.Namespace("probe"); err == nil {
			err = probeRate(l, n)
		}
	}
	if err != nil {
		if os.Geteuid() == 0 && os.Getenv("CI") == "true" {
			t.Fatalf("CI as root, but: %v", err)
		}
		t.Skipf("needs network namespaces with limited links: %v", err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Errorf("netlab: %v", err)
		}
	})
	return l
}

// probeRate tests whether a link can have a rate.
func probeRate(l *Lab, n *Namespace) error {
	_, err := l.Link(n, n, LinkOptions{RateBits: 1e9})
	return err
}
