package simrdma

import (
	"os"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/rdmatest"
)

// device is memory without an address for the engine: a file. It begins in the middle of a
// page.
func device(t testing.TB, _ rdma.Engine, n int) rdmatest.Device {
	t.Helper()
	const skip = 4096 + 100
	file, err := os.CreateTemp(t.TempDir(), "device")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	if err := file.Truncate(int64(n) + skip); err != nil {
		t.Fatal(err)
	}
	must := func(_ int, err error) {
		if err != nil {
			t.Error(err)
		}
	}
	return rdmatest.Device{
		Options: rdma.RegisterOptions{DMABuf: &rdma.DMABuf{FD: int(file.Fd()), Offset: skip, Len: uint64(n), Addr: 7 << 40}},
		Read:    func(off uint64, b []byte) { must(file.ReadAt(b, skip+int64(off))) },
		Write:   func(off uint64, b []byte) { must(file.WriteAt(b, skip+int64(off))) },
	}
}
