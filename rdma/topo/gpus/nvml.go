//go:build nvml && cgo && linux

package gpus

import (
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/penstock-kv/penstock/rdma/topo"
)

// List returns the GPUs that the driver manages, each with its PCI address, model, UUID and
// memory. An error names the library or the call that failed.
func List() ([]topo.GPU, error) { return list(nvml.New()) }

func list(lib nvml.Interface) ([]topo.GPU, error) {
	if r := lib.Init(); r != nvml.SUCCESS {
		return nil, failure("start libnvidia-ml.so.1", r)
	}
	defer lib.Shutdown()
	count, r := lib.DeviceGetCount()
	if r != nvml.SUCCESS {
		return nil, failure("count the GPUs", r)
	}
	var out []topo.GPU
	for i := range count {
		g, err := one(lib, i)
		if err != nil {
			return out, err
		}
		out = append(out, g)
	}
	return out, nil
}

func one(lib nvml.Interface, index int) (topo.GPU, error) {
	var g topo.GPU
	d, r := lib.DeviceGetHandleByIndex(index)
	if r != nvml.SUCCESS {
		return g, failure(fmt.Sprintf("open GPU %d", index), r)
	}
	pci, r := d.GetPciInfo()
	if r != nvml.SUCCESS {
		return g, failure(fmt.Sprintf("ask GPU %d for its PCI address", index), r)
	}
	g.PCI.Address = pciAddress(pci)
	// Values that the driver does not report stay empty.
	if name, r := d.GetName(); r == nvml.SUCCESS {
		g.Model = name
	}
	if uuid, r := d.GetUUID(); r == nvml.SUCCESS {
		g.UUID = uuid
	}
	if m, r := d.GetMemoryInfo(); r == nvml.SUCCESS {
		g.MemoryBytes = m.Total
	}
	return g, nil
}

// pciAddress returns the PCI address in the format of sysfs. NVML reports function 0 only; the
// other functions of a GPU are its audio and USB devices.
func pciAddress(p nvml.PciInfo) string {
	return fmt.Sprintf("%04x:%02x:%02x.0", p.Domain, p.Bus, p.Device)
}

func failure(doing string, r nvml.Return) error {
	if r == nvml.ERROR_LIBRARY_NOT_FOUND {
		return fmt.Errorf("gpus: %s: the library is not there; it comes with the NVIDIA driver", doing)
	}
	return fmt.Errorf("gpus: %s: %s", doing, strings.ToLower(nvml.ErrorString(r)))
}
