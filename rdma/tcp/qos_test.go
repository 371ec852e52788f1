//go:build linux

package tcp

import (
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/qos"
)

// withFD calls f with the socket of a connection.
func withFD(t testing.TB, c *conn, f func(fd int)) {
	t.Helper()
	rc, err := c.nc.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := rc.Control(func(fd uintptr) { f(int(fd)) }); err != nil {
		t.Fatal(err)
	}
}

// TestClasses: each class has its own connections. Each side marks its packets as its own
// options specify, and an operation uses the connections of its class.
func TestClasses(t *testing.T) {
	ours := qos.Map{rdma.ClassKV: {DSCP: 8, Priority: 1}, rdma.ClassCollective: {DSCP: 46, Priority: 6}}
	theirs := qos.Map{rdma.ClassKV: {DSCP: 10}, rdma.ClassCollective: {DSCP: 34, Priority: 5}}
	for _, listen := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(listen, func(t *testing.T) {
			testkit.VerifyNone(t)
			if l, err := net.Listen("tcp", listen); err != nil {
				if listen[0] != '[' {
					t.Fatal(err) // a host may have no IPv6; it has 127.0.0.1
				}
				t.Skipf("needs an address of this family: %v", err)
			} else {
				_ = l.Close()
			}
			ctx := testContext(t)
			server := closing(t, newEngine(t, Options{Listen: listen, Token: rdma.Token(testToken), QoS: &theirs}))
			dialer := closing(t, newEngine(t, Options{Conns: 2, QoS: &ours}))
			if _, err := dialer.Connect(ctx, server.Addr(), rdma.Token(testToken)); err != nil {
				t.Fatal(err)
			}
			const n = 4 << 20
			dst, err := server.Register(make([]byte, n), rdma.RegisterOptions{})
			if err != nil {
				t.Fatal(err)
			}
			src, err := dialer.Register(make([]byte, n), rdma.RegisterOptions{Local: true})
			if err != nil {
				t.Fatal(err)
			}
			conns := func(e *Engine, class rdma.Class) (out []*conn) {
				s := e.core.Sessions()[0]
				s.Mu.Lock()
				defer s.Mu.Unlock()
				return append(out, s.lane(class).conns...)
			}
			sent := func(class rdma.Class) (bytes uint64) {
				for _, c := range conns(dialer, class) {
					withFD(t, c, func(fd int) {
						info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
						if err != nil {
							t.Fatal(err)
						}
						bytes += info.Bytes_sent
					})
				}
				return bytes
			}
			for class := range rdma.Class(rdma.Classes) {
				for _, side := range []struct {
					e *Engine
					m qos.Lane
				}{{dialer, ours[class]}, {server, theirs[class]}} {
					cs := conns(side.e, class)
					want := 3
					if class == rdma.Classes-1 {
						want = 2 // the third is the control connection
					}
					if len(cs) != want {
						t.Errorf("class %v: %d connections, want %d", class, len(cs), want)
					}
					for _, c := range cs {
						withFD(t, c, func(fd int) {
							level, opt := unix.IPPROTO_IP, unix.IP_TOS
							if listen[0] == '[' {
								level, opt = unix.IPPROTO_IPV6, unix.IPV6_TCLASS
							}
							tos, err := unix.GetsockoptInt(fd, level, opt)
							prio, err2 := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PRIORITY)
							if err != nil || err2 != nil || tos&^3 != side.m.TOS() || prio != int(side.m.Priority) {
								t.Errorf("class %v: traffic class %#x (%v), priority %d (%v); want %+v", class, tos, err, prio, err2, side.m)
							}
						})
					}
				}
				other := rdma.Classes - 1 - class
				before, beforeOther := sent(class), sent(other)
				f := rdma.NewFlag()
				if err := dialer.Write(ctx, rdma.Write{Src: src, Dst: dst.Desc(), Len: n, Class: class, Done: f.Set}); err != nil {
					t.Fatal(err)
				}
				if err := f.Wait(ctx); err != nil {
					t.Fatal(err)
				}
				if own, others := sent(class)-before, sent(other)-beforeOther; own < n || others >= n {
					t.Errorf("a write of class %v: %d bytes over its connections, %d over the others", class, own, others)
				}
			}
			// Classes without connections of their own share the one lane.
			plain := closing(t, newEngine(t, Options{}))
			if _, err := plain.Connect(ctx, server.Addr(), rdma.Token(testToken)); err != nil {
				t.Fatal(err)
			}
			f := rdma.NewFlag()
			if err := plain.Write(ctx, rdma.Write{Dst: dst.Desc(), Class: rdma.ClassCollective, Done: f.Set}); err != nil {
				t.Fatal(err)
			}
			if err := f.Wait(ctx); err != nil {
				t.Fatal(err)
			}
		})
	}
}
