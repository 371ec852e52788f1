//go:build !cgo || !linux

package gpus

import (
	"errors"

	"github.com/penstock-kv/penstock/rdma/topo"
)

// List answers that this build can't ask the driver.
func List() ([]topo.GPU, error) {
	return nil, errors.New("gpus: built without cgo, so libnvidia-ml.so.1 can't be loaded; GPUs are shown as sysfs has them")
}
