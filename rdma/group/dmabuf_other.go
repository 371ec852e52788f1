//go:build !linux

package group

import (
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
)

// ownBuf fails: dma-bufs exist only on Linux.
func ownBuf(*rdma.DMABuf) (*rdma.DMABuf, error) {
	return nil, fmt.Errorf("dma-bufs exist only on Linux: %w", rdma.ErrUnsupported)
}

func closeBuf(*rdma.DMABuf) {}
