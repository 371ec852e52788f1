package testkit

import (
	"errors"
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"testing"
	"time"
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

// Listen returns the result of listen. It repeats listen while the address is in use: after the end
// of an earlier listener of the test, a process that another goroutine is starting may have that
// listener's descriptor until its exec.
func Listen[L any](t testing.TB, listen func() (L, error)) L {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		l, err := listen()
		if err == nil {
			return l
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			t.Fatal(err)
		}
		<-time.After(time.Millisecond)
	}
}
