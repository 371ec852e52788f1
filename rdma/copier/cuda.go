package copier

import (
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
)

// CUDAOptions configure NewCUDA. The zero value is the first GPU.
type CUDAOptions struct {
	// Device is the GPU's index in the CUDA driver.
	Device int
	// Library is the driver's library. Default libcuda.so.1, found by the dynamic linker.
	Library string
	// Queue is how many batches may be in flight. Default 64.
	Queue int
}

// EnsureDefaults sets each zero field to its default.
func (o *CUDAOptions) EnsureDefaults() {
	if o.Library == "" {
		o.Library = "libcuda.so.1"
	}
	if o.Queue == 0 {
		o.Queue = 64
	}
}

// Validate returns an error that names the first option out of its range.
func (o *CUDAOptions) Validate() error {
	if o.Device < 0 {
		return fmt.Errorf("copier: GPU %d: %w", o.Device, rdma.ErrRange)
	}
	if o.Queue < 1 || o.Queue > 1<<16 {
		return fmt.Errorf("copier: a queue of %d batches; 1 to %d are possible", o.Queue, 1<<16)
	}
	return nil
}

// DeviceCopier is a Copier to and from the memory of a device.
type DeviceCopier interface {
	Copier
	// Import makes sizeBytes of device memory at address usable, which another library of the
	// process has allocated, such as an inference engine's KV cache. It must stay allocated until
	// Close of the Memory has returned. ErrRange for an empty range, or one that wraps around.
	Import(address, sizeBytes uint64) (Memory, error)
	// Alloc allocates sizeBytes of device memory, which Close frees.
	Alloc(sizeBytes uint64) (Memory, error)
}
