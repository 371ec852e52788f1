//go:build !linux

package tcp

import (
	"fmt"
	"log/slog"
	"net"
	"syscall"

	"github.com/penstock-kv/penstock/rdma"
)

// usableCongestion: only Linux lets a socket choose.
func usableCongestion(string, *slog.Logger) string { return "system" }

// control has nothing to prepare, and cannot bind to an interface.
func (e *Engine) control(n *nic) func(_, _ string, _ syscall.RawConn) error {
	return func(_, _ string, _ syscall.RawConn) error {
		if n.device != "" {
			return fmt.Errorf("tcp: bind to interface %q: %w", n.device, rdma.ErrUnsupported)
		}
		return nil
	}
}

// mark is for Linux.
func (e *Engine) mark(net.Conn, rdma.Class) error {
	if e.opts.QoS != nil {
		return fmt.Errorf("tcp: mark packets by class: %w", rdma.ErrUnsupported)
	}
	return nil
}
