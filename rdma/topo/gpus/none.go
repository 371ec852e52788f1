//go:build !nvml || !cgo || !linux

package gpus

import (
	"errors"

	"github.com/penstock-kv/penstock/rdma/topo"
)

// List returns an error: this build does not include the driver's library.
func List() ([]topo.GPU, error) {
	return nil, errors.New("gpus: this build can't ask the driver; build on Linux, with cgo and -tags=nvml")
}
