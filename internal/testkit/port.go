package testkit

import (
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"testing"
)

// Port returns an address "127.0.0.1:PORT" on which the test may listen, stop, and listen again.
// The port is reserved until the test ends. Otherwise the kernel could assign the port to a
// connection of another test while the test does not listen.
//
// A socket that is bound but does not listen reserves the port. Because of SO_REUSEADDR, which Go's
// listeners set too, one listener can bind the same port.
func Port(t testing.TB) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatalf("testkit: socket: %v", err)
	}
	syscall.CloseOnExec(fd)
	t.Cleanup(func() { _ = syscall.Close(fd) })
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		t.Fatalf("testkit: SO_REUSEADDR: %v", err)
	}
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: loopback.As4()}); err != nil {
		t.Fatalf("testkit: bind: %v", err)
	}
	bound, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatalf("testkit: getsockname: %v", err)
	}
	return net.JoinHostPort(loopback.String(), strconv.Itoa(bound.(*syscall.SockaddrInet4).Port))
}
