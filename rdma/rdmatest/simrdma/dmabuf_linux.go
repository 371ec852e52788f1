package simrdma

import (
	"fmt"
	"math"
	"os"
	"syscall"

	"github.com/penstock-kv/penstock/rdma"
)

// mapBuf maps a dma-buf. mapped are the whole pages, part is the part of them that b describes.
func mapBuf(b *rdma.DMABuf) (mapped, part []byte, err error) {
	page := uint64(os.Getpagesize())
	skip := b.Offset % page
	if b.Len == 0 || b.Len > math.MaxInt-skip || b.Offset > math.MaxInt64 {
		return nil, nil, fmt.Errorf("simrdma: dma-buf of %d bytes from %d: %w", b.Len, b.Offset, rdma.ErrRange)
	}
	mapped, err = syscall.Mmap(b.FD, int64(b.Offset-skip), int(b.Len+skip), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("simrdma: map dma-buf: %w", err)
	}
	return mapped, mapped[skip:], nil
}

// unmapBuf unmaps the pages that mapBuf mapped.
func unmapBuf(mapped []byte) { _ = syscall.Munmap(mapped) }
