//go:build !linux

package simrdma

import (
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
)

// mapBuf maps nothing: a dma-buf is Linux's.
func mapBuf(*rdma.DMABuf) (mapped, part []byte, err error) {
	return nil, nil, fmt.Errorf("simrdma: dma-buf: %w", rdma.ErrUnsupported)
}

func unmapBuf([]byte) {}
