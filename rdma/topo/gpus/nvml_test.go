//go:build nvml && cgo && linux

package gpus

import (
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"

	"github.com/penstock-kv/penstock/rdma/topo"
)

// driver is a driver with GPUs. fail names the call that fails.
func driver(fail string) nvml.Interface {
	answer := func(call string) nvml.Return {
		if call == fail {
			return nvml.ERROR_UNKNOWN
		}
		return nvml.SUCCESS
	}
	return &mock.Interface{
		InitFunc:           func() nvml.Return { return answer("init") },
		ShutdownFunc:       func() nvml.Return { return nvml.SUCCESS },
		DeviceGetCountFunc: func() (int, nvml.Return) { return 2, answer("count") },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) {
			return &mock.Device{
				GetPciInfoFunc: func() (nvml.PciInfo, nvml.Return) {
					return nvml.PciInfo{Domain: 0, Bus: uint32(0x1b + i), Device: 0}, answer("pci")
				},
				GetNameFunc:       func() (string, nvml.Return) { return "NVIDIA H100 80GB HBM3", answer("name") },
				GetUUIDFunc:       func() (string, nvml.Return) { return "GPU-1", answer("uuid") },
				GetMemoryInfoFunc: func() (nvml.Memory, nvml.Return) { return nvml.Memory{Total: 80 << 30}, answer("memory") },
			}, answer("open")
		},
	}
}

func TestList(t *testing.T) {
	got, err := list(driver(""))
	if err != nil {
		t.Fatal(err)
	}
	want := []topo.GPU{
		{PCI: topo.PCI{Address: "0000:1b:00.0"}, Model: "NVIDIA H100 80GB HBM3", UUID: "GPU-1", MemoryBytes: 80 << 30},
		{PCI: topo.PCI{Address: "0000:1c:00.0"}, Model: "NVIDIA H100 80GB HBM3", UUID: "GPU-1", MemoryBytes: 80 << 30},
	}
	if !slices.EqualFunc(got, want, func(a, b topo.GPU) bool {
		return a.PCI.Address == b.PCI.Address && a.Model == b.Model && a.UUID == b.UUID && a.MemoryBytes == b.MemoryBytes
	}) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestListReportsFailures(t *testing.T) {
	for fail, word := range map[string]string{"init": "start libnvidia-ml", "count": "count", "open": "open GPU 0", "pci": "PCI address"} {
		if _, err := list(driver(fail)); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%s fails: %v, want %q in it", fail, err, word)
		}
	}
	// A GPU is kept if the driver does not report its other values.
	for _, fail := range []string{"name", "uuid", "memory"} {
		if got, err := list(driver(fail)); err != nil || len(got) != 2 {
			t.Errorf("%s fails: %d GPUs, %v; want 2", fail, len(got), err)
		}
	}
}

// TestWithoutLibrary: on a host without the driver the error names the library.
func TestWithoutLibrary(t *testing.T) {
	_, err := list(nvml.New(nvml.WithLibraryPath("libnvidia-ml-that-is-not-there.so.1")))
	if err == nil || !strings.Contains(err.Error(), "libnvidia-ml") {
		t.Errorf("%v, want an error that names the library", err)
	}
}
