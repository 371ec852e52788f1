//go:build !linux

package tcp

import (
	"fmt"
	"log/slog"
	"net"
	"syscall"

	"github.com/penstock-kv/penstock/rdma"
)

// usableCongestion returns "system": only Linux lets a socket choose its congestion control.
func usableCongestion(string, *slog.Logger) string { return "system" }

// control sets no socket options. It returns an error if the NIC must be bound to an interface.
func (e *Engine) control(n *nic) func(_, _ string, _ syscall.RawConn) error {
	return func(_, _ string, _ syscall.RawConn) error {
		if n.device != "" {
			return fmt.Errorf("tcp: bind to interface %q: %w", n.device, rdma.ErrUnsupported)
		}
		return nil
	}
}

// mark works on Linux only.
func (e *Engine) mark(net.Conn, rdma.Class) error {
	if e.opts.QoS != nil {
		return fmt.Errorf("tcp: mark packets by class: %w", rdma.ErrUnsupported)
	}
	return nil
}
