package tcp

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/qos"
)

// systemCongestion keeps the system's congestion control.
const systemCongestion = "system"

// usableCongestion returns want if the kernel supports it. Otherwise it logs that and returns
// "system".
func usableCongestion(want string, log *slog.Logger) string {
	if want == systemCongestion {
		return want
	}
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return systemCongestion
	}
	defer func() { _ = syscall.Close(fd) }()
	if err := setCongestion(fd, want); err != nil {
		log.Warn("data plane: congestion control not available, the system's is used", "wanted", want, "available", availableCongestion(), "err", err)
		return systemCongestion
	}
	return want
}

// availableCongestion lists the kernel's congestion controls that this user may use.
func availableCongestion() string {
	b, err := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(b))
}

// setCongestion sets TCP_CONGESTION.
func setCongestion(fd int, name string) error {
	return os.NewSyscallError("setsockopt TCP_CONGESTION", syscall.SetsockoptString(fd, syscall.IPPROTO_TCP, syscall.TCP_CONGESTION, name))
}

// setDevice sets SO_BINDTODEVICE.
func setDevice(fd int, device string) error {
	if err := syscall.BindToDevice(fd, device); err != nil {
		return fmt.Errorf("bind to interface %q: %w", device, os.NewSyscallError("setsockopt SO_BINDTODEVICE", err))
	}
	return nil
}

// unsentBytesMax is the largest number of unsent bytes in a socket, if a session may have several
// rails. Data in one socket cannot move to another, so a slow NIC must not take much data.
const unsentBytesMax = 256 << 10

// control returns a function that sets the options of a socket of n before the socket connects or
// listens. Accepted connections inherit the listener's options.
func (e *Engine) control(n *nic) func(_, _ string, rc syscall.RawConn) error {
	return func(_, _ string, rc syscall.RawConn) error {
		var err error
		cerr := rc.Control(func(fd uintptr) {
			if e.congestion != systemCongestion {
				err = setCongestion(int(fd), e.congestion)
			}
			if err == nil && n.device != "" {
				err = setDevice(int(fd), n.device)
			}
			if err == nil && len(e.opts.NICs) > 1 {
				err = os.NewSyscallError("setsockopt TCP_NOTSENT_LOWAT", unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsentBytesMax))
			}
		})
		return errors.Join(cerr, err)
	}
}

// mark sets the QoS marks for the packets that this engine sends on a connection of a class.
func (e *Engine) mark(nc net.Conn, class rdma.Class) error {
	if e.opts.QoS == nil {
		return nil
	}
	lane := e.opts.QoS.Lane(class)
	for {
		t, ok := nc.(interface{ NetConn() net.Conn }) // TLS, Options.Wrap
		if !ok {
			break
		}
		nc = t.NetConn()
	}
	c, ok := nc.(syscall.Conn)
	if !ok {
		return fmt.Errorf("tcp: mark a connection of type %T: %w", nc, rdma.ErrUnsupported)
	}
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var merr error
	cerr := rc.Control(func(fd uintptr) { merr = setMarking(int(fd), lane) })
	return errors.Join(cerr, merr)
}

// setMarking sets the traffic class of both IP versions, because an IPv6 socket may carry IPv4. It
// sets the socket priority last, because setting the traffic class changes the priority.
func setMarking(fd int, l qos.Lane) error {
	tos := l.TOS()
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return os.NewSyscallError("getsockopt SO_DOMAIN", err)
	}
	if domain == unix.AF_INET6 {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, tos); err != nil {
			return os.NewSyscallError("setsockopt IPV6_TCLASS", err)
		}
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, tos); err != nil {
		return os.NewSyscallError("setsockopt IP_TOS", err)
	}
	return os.NewSyscallError("setsockopt SO_PRIORITY", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PRIORITY, int(l.Priority)))
}
