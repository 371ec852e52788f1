//go:build !linux

package simrdma

import (
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
)

// mapBuf fails: dma-bufs exist only on Linux.
func mapBuf(*rdma.DMABuf) (mapped, part []byte, err error) {
	return nil, nil, fmt.Errorf("simrdma: dma-buf: %w", rdma.ErrUnsupported)
}

func unmapBuf([]byte) {}
