//go:build !cuda || !cgo || !linux

package copier

import (
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
)

// NewCUDA returns ErrUnsupported: this build does not include CUDA.
func NewCUDA(CUDAOptions) (DeviceCopier, error) {
	return nil, fmt.Errorf("copier: this build has no CUDA; build on Linux, with cgo and -tags=cuda: %w", rdma.ErrUnsupported)
}
