package netlab

import (
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// listenIn listens on an address of a namespace.
func listenIn(t *testing.T, e End) net.Listener {
	t.Helper()
	var l net.Listener
	err := e.Namespace.Do(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(e.IP(), 0).String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// dialFrom dials from a namespace with a DSCP and returns both ends.
func dialFrom(t *testing.T, n *Namespace, l net.Listener, dscp int) (out, in net.Conn) {
	t.Helper()
	d := net.Dialer{Control: func(_, _ string, rc syscall.RawConn) error {
		var failed error
		err := rc.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TOS, dscp<<2) })
		if err == nil {
			err = failed
		}
		return err
	}}
	err := n.Do(func() (err error) {
		out, err = d.Dial("tcp", l.Addr().String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if in, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close(); in.Close() })
	return out, in
}

// TestSwitch: three namespaces reach each other over one switch, and the counters count the bytes.
func TestSwitch(t *testing.T) {
	l := ForTest(t)
	s, err := l.Switch("switch")
	if err != nil {
		t.Fatal(err)
	}
	var ports []*Link
	for _, name := range []string{"a", "b", "c"} {
		n, err := l.Namespace(name)
		if err != nil {
			t.Fatal(err)
		}
		k, err := s.Attach(n, LinkOptions{RateBits: 1e9})
		if err != nil {
			t.Fatal(err)
		}
		ports = append(ports, k)
	}
	const n = 1 << 20
	to := listenIn(t, ports[2].A)
	for i, from := range ports[:2] {
		out, in := dialFrom(t, from.A.Namespace, to, 0)
		go func() { _, _ = out.Write(make([]byte, n)) }()
		if _, err := io.CopyN(io.Discard, in, n); err != nil {
			t.Fatal(err)
		}
		sent, err := from.Counters()
		if err != nil {
			t.Fatal(err)
		}
		received, err := ports[2].Counters()
		if err != nil {
			t.Fatal(err)
		}
		if sent.SentBytes < n || received.ReceivedBytes < uint64(i+1)*n {
			t.Errorf("%d bytes went; the sender counts %d, the receiver %d after %d such", n, sent.SentBytes, received.ReceivedBytes, i+1)
		}
	}
	if err := ports[0].SetRate(10e6); err != nil {
		t.Error(err)
	}
}

// TestClasses: of two flows that could each fill the link, each class gets its share.
func TestClasses(t *testing.T) {
	l, a, b := pair(t)
	const marked = 26
	k, err := l.Link(a, b, LinkOptions{RateBits: 100e6, Classes: []Class{{DSCP: marked, Share: 0.9}, {DSCP: 1, Share: 0.05}}})
	if err != nil {
		t.Fatal(err)
	}
	to := listenIn(t, k.B)
	first, firstIn := dialFrom(t, a, to, marked)
	rest, restIn := dialFrom(t, a, to, 0)
	flood := func(c net.Conn) {
		for block := make([]byte, 64<<10); ; {
			if _, err := c.Write(block); err != nil {
				return
			}
		}
	}
	// Little of the rest may wait for the link, but much of the class: if this process is not
	// scheduled for a while, the link is not left to the rest.
	if err := rest.(*net.TCPConn).SetWriteBuffer(128 << 10); err != nil {
		t.Fatal(err)
	}
	go flood(rest)
	// At first the other flow has the link to itself.
	const n = 4 << 20
	if _, err := io.CopyN(io.Discard, restIn, 1<<20); err != nil {
		t.Fatal(err)
	}
	var others counter
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(&others, restIn)
	}()
	go flood(first)
	if _, err := io.CopyN(io.Discard, firstIn, n/4); err != nil { // the class has its share by now
		t.Fatal(err)
	}
	before := others.Load()
	if _, err := io.CopyN(io.Discard, firstIn, n); err != nil {
		t.Fatal(err)
	}
	if other := others.Load() - before; other > n/2 {
		t.Errorf("the class with nine tenths carried %d bytes while the rest carried %d", n, other)
	}
	first.Close()
	rest.Close()
	<-ended
}

// counter counts the bytes that are written to it.
type counter struct{ atomic.Int64 }

func (c *counter) Write(b []byte) (int, error) {
	c.Add(int64(len(b)))
	return len(b), nil
}
