//go:build cuda && cgo && linux

package binding

import (
	"errors"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/rdma/copier"
	"github.com/penstock-kv/penstock/rdma/copier/copiertest"
)

// TestTransfersOnDevice is TestTransfers with device memory that neither CPU nor NIC may touch.
func TestTransfersOnDevice(t *testing.T) {
	newPairIn(t, func(p *pair) (TrafficOptions, []byte) {
		o, mem := p.trafficOptions()
		device := copiertest.Device(t, len(mem))
		library := copiertest.Driver(t)
		o.Address, o.Copier = device.Address, func() (copier.DeviceCopier, error) {
			return copier.NewCUDA(copier.CUDAOptions{Library: library})
		}
		return o, device.Bytes
	}).testTransfers()
}

// TestNoDevice: a device that cannot be opened fails OpenTraffic with the reason, and leaves nothing open.
func TestNoDevice(t *testing.T) {
	p := newPair(t)
	for library, want := range map[string]string{"libnosuch.so.1": "libnosuch.so.1", copiertest.Driver(t): "open GPU 3"} {
		o, _ := p.trafficOptions()
		o.Copier = func() (copier.DeviceCopier, error) {
			return copier.NewCUDA(copier.CUDAOptions{Library: library, Device: 3})
		}
		if _, err := p.ns.OpenTraffic(o); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want an invalid option and %q", err, want)
		}
	}
}
