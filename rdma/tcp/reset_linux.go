//go:build linux

package tcp

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// resetProbe reports whether the peer has reset a connection. When both ends are on one host,
// spliced payload in our receive queue may still be the pages of the peer's source. The peer
// resets the connection before it returns such a source to its owner, so the payload that the
// reader copied out of the queue before a reset is the payload that the peer wrote. Only the
// connection's reader uses the probe.
type resetProbe struct {
	raw   syscall.RawConn
	fd    [1]unix.PollFd
	reset bool
	// step is the method value of look, bound once to avoid an allocation per call.
	step func(fd uintptr)
}

// newResetProbe returns nil if nc is not a plain TCP socket (TLS): such a connection is not
// spliced.
func newResetProbe(nc net.Conn) *resetProbe {
	t, ok := nc.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return nil // closed already: the first read returns the error
	}
	p := &resetProbe{raw: raw}
	p.step = p.look
	return p
}

// seen reports whether the connection was reset by the peer or closed locally.
func (p *resetProbe) seen() bool {
	if p == nil {
		return false
	}
	return p.raw.Control(p.step) != nil || p.reset
}

// look polls without waiting. A stream that was closed normally sets neither POLLERR nor
// POLLHUP while the local direction is open.
func (p *resetProbe) look(fd uintptr) {
	for {
		p.fd[0] = unix.PollFd{Fd: int32(fd)}
		n, err := unix.Poll(p.fd[:], 0)
		if err == unix.EINTR {
			continue
		}
		p.reset = err != nil || n > 0 && p.fd[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0
		return
	}
}
