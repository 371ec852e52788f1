package tcp

import (
	"log/slog"
	"os"
	"strings"
	"syscall"
)

// systemCongestion leaves the system's congestion control alone.
const systemCongestion = "system"

// usableCongestion returns want if the kernel knows it, otherwise "system", and
// says so.
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

// availableCongestion names what the kernel offers to this user.
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

// control prepares a socket before it connects or listens; connections that are
// accepted inherit from the listener.
func (e *Engine) control(_, _ string, rc syscall.RawConn) error {
	if e.congestion == systemCongestion {
		return nil
	}
	var err error
	if cerr := rc.Control(func(fd uintptr) { err = setCongestion(int(fd), e.congestion) }); cerr != nil {
		return cerr
	}
	return err
}
