package copier

import (
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
)

// CUDAOptions configure NewCUDA. The zero value is the first GPU.
type CUDAOptions struct {
	// Device is the GPU's index in the CUDA driver.
	Device int
	// Library is the file name of the driver's library. Default libcuda.so.1, which the dynamic
	// linker finds.
	Library string
	// Queue is the largest number of batches in flight. Default 64.
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
	// Import makes device memory usable that another library of the process has allocated, for
	// example for an inference engine's KV cache: the sizeBytes bytes at address. This memory must
	// stay allocated until Close of the Memory has returned. Import returns ErrRange for a range
	// that is empty or wraps around.
	Import(address, sizeBytes uint64) (Memory, error)
	// Alloc allocates sizeBytes of device memory. Close of the Memory frees it.
	Alloc(sizeBytes uint64) (Memory, error)
	// Mark records an event in a stream that another library of the process has created in the
	// device's primary context, and returns at once. Stream 0 is the default stream. A Batch with
	// the Mark waits on the device until the work is done that the stream had at the call.
	Mark(stream uint64) (Mark, error)
}

// Mark is a point in the stream of another library.
type Mark interface {
	// Close frees the mark. The batches that were submitted with it wait for it nevertheless. It
	// may be called twice. Close of the copier closes open marks.
	Close() error
}
