//go:build !linux

package tcp

import (
	"net"

	"github.com/penstock-kv/penstock/rdma"
)

// scatter works on Linux only (scatter_unsafe.go). On other systems runs are read one by one.
type scatter struct{}

func newScatter(net.Conn) *scatter { return nil }

func (*scatter) read([][]byte) (int, error) { return 0, rdma.ErrUnsupported }
