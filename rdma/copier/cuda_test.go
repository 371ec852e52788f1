//go:build cuda && cgo && linux

package copier

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier/copiertest"
)

// watchReport returns a check that every driver loaded since has been unloaded without leaks.
// drivers is their number.
func watchReport(t testing.TB) (check func(drivers int)) {
	path := filepath.Join(t.TempDir(), "report")
	if s, ok := t.(interface{ Setenv(k, v string) }); ok {
		s.Setenv("FAKE_CUDA_REPORT", path)
	}
	return func(drivers int) {
		t.Helper()
		raw, _ := os.ReadFile(path)
		if want := strings.Repeat("0 left\n", drivers); string(raw) != want {
			t.Errorf("drivers report %q, want %q", raw, want)
		}
	}
}

// onGPU reports whether tests that work with any driver use that of the machine.
func onGPU() bool { return os.Getenv("PENSTOCK_GPU") == "1" }

func newCUDA(t testing.TB) DeviceCopier {
	t.Helper()
	if onGPU() {
		return openCUDA(t, CUDAOptions{Queue: 4})
	}
	return newTestCUDA(t)
}

// newTestCUDA is newCUDA with the tests' driver, also on a machine with a GPU.
func newTestCUDA(t testing.TB) DeviceCopier {
	t.Helper()
	check := watchReport(t)
	t.Cleanup(func() { check(1) })
	return openCUDA(t, CUDAOptions{Queue: 4, Library: copiertest.Driver(t)})
}

func openCUDA(t testing.TB, o CUDAOptions) DeviceCopier {
	t.Helper()
	c, err := NewCUDA(o)
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, c)
	return c
}

func TestCUDA(t *testing.T) {
	suite(t, func(t testing.TB) Copier { return newCUDA(t) })
}

// TestCUDADevice: host to device, within the device, and back.
func TestCUDADevice(t *testing.T) {
	c := newCUDA(t)
	if i := c.Info(); i.Kind != "cuda" || !onGPU() && i.Detail != "copy engine of fake GPU 0" {
		t.Errorf("%+v", i)
	}
	t.Log(c.Info().Detail)
	const n = 1 << 16
	host, back := make([]byte, n), make([]byte, n)
	for i := range host {
		host[i] = byte(i*31 + i>>8)
	}
	h, b := register(t, c, host), register(t, c, back)
	d, err := c.Alloc(2 * n)
	if err != nil {
		t.Fatal(err)
	}
	defer closeMemory(t, h)
	defer closeMemory(t, b)
	defer closeMemory(t, d)
	if d.Len() != 2*n {
		t.Errorf("%d bytes", d.Len())
	}
	for _, step := range []Batch{
		{Src: h, Dst: d, Spans: []Span{{0, 0, n / 2}, {n / 2, n / 2, n / 2}}},
		{Src: d, Dst: d, Spans: []Span{{0, n, n}}},
		{Src: d, Dst: b, Spans: []Span{{n, 0, n - 1}, {2*n - 1, n - 1, 1}}},
	} {
		if err := do(t, c, step); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(host, back) {
		t.Error("bytes were lost in the round trip")
	}
	if _, err := c.Alloc(1 << 40); err == nil || !strings.Contains(err.Error(), "out of memory") {
		t.Errorf("1 TiB of device memory: %v", err)
	}
}

// TestCUDAFaults: each failed call of the driver is returned, with the call's purpose, as the
// error of the operation that made it. Later batches still work.
func TestCUDAFaults(t *testing.T) {
	for fault, want := range map[string]string{
		"cuInit 1":                   "open GPU 0",
		"cuDeviceGet 1":              "open GPU 0",
		"cuDevicePrimaryCtxRetain 1": "open GPU 0",
		"cuStreamCreate 1":           "open GPU 0",
		"cuEventCreate 3":            "create an event",
		"cuMemHostRegister_v2 1":     "pin 4096 bytes",
		"cuMemAlloc_v2 1":            "allocate 4096 bytes of fake GPU 0",
		"cuMemcpyAsync 2":            "copy span 1 of 3",
		"cuEventRecord 1":            "record an event in stream 0x0",
		"cuEventRecord 2":            "copy span 3 of 3",
		"cuEventSynchronize 1":       "wait for a batch",
		"cuMemFree_v2 1":             "free device memory",
		"cuStreamWaitEvent 1":        "copy span 0 of 3",
		"cuEventCreate 5":            "record an event in stream 0x0",
	} {
		t.Run(fault, func(t *testing.T) {
			t.Setenv("FAKE_CUDA_FAIL", fault)
			check := watchReport(t)
			err := session(t, copiertest.Driver(t))
			if fault != "cuMemFree_v2 1" { // this memory stays allocated
				check(1)
			}
			if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "made to fail") {
				t.Errorf("%v, want %q", err, want)
			}
		})
	}
}

// TestCUDAFailedBatchHasEnded: when a batch ends with an error of the driver, the copies that were
// started have ended too.
func TestCUDAFailedBatchHasEnded(t *testing.T) {
	const n = 4096
	for fault, copied := range map[string]int{"cuEventRecord 1": n, "cuEventSynchronize 1": n, "cuMemcpyAsync 2": n / 2} {
		t.Run(fault, func(t *testing.T) {
			t.Setenv("FAKE_CUDA_FAIL", fault)
			device := copiertest.Device(t, n)
			c := openCUDA(t, CUDAOptions{Library: copiertest.Driver(t)})
			d, err := c.Import(device.Address, n)
			if err != nil {
				t.Fatal(err)
			}
			host := bytes.Repeat([]byte{1}, n)
			b := Batch{Src: register(t, c, host), Dst: d, Spans: []Span{{0, 0, n / 2}, {n / 2, n / 2, n / 2}}}
			if err := do(t, c, b); err == nil || !strings.Contains(err.Error(), "made to fail") {
				t.Fatal(err)
			}
			if got := bytes.Count(device.Bytes, []byte{1}); got != copied {
				t.Errorf("%d bytes have been copied at the end of the batch; want %d", got, copied)
			}
		})
	}
}

// session performs one operation of each kind and returns the first error.
func session(t *testing.T, library string) (first error) {
	note := func(err error) {
		if first == nil {
			first = err
		}
	}
	c, err := NewCUDA(CUDAOptions{Library: library, Queue: 4})
	if err != nil {
		return err
	}
	defer func() { note(c.Close()) }()
	h, err := c.Register(make([]byte, 4096), rdma.RegisterOptions{})
	if err != nil {
		return err
	}
	d, err := c.Alloc(4096)
	if err != nil {
		return err
	}
	after, err := c.Mark(0)
	if err != nil {
		return err
	}
	defer func() { note(after.Close()) }()
	b := Batch{Src: h, Dst: d, Spans: []Span{{0, 0, 1}, {1, 1, 1}, {2, 2, 1}}, After: after}
	note(do(t, c, b))
	if err := do(t, c, b); err != nil {
		t.Errorf("the batch after the fault: %v", err)
	}
	note(h.Close(context.Background()))
	note(d.Close(context.Background()))
	return first
}

// TestCUDAMissing: without a driver, or with a wrong one, the error names it.
func TestCUDAMissing(t *testing.T) {
	_, err := NewCUDA(CUDAOptions{Library: "libcuda-that-is-not-there.so.1"})
	if !errors.Is(err, rdma.ErrUnsupported) || !strings.Contains(err.Error(), "libcuda-that-is-not-there.so.1") {
		t.Errorf("%v", err)
	}
	if _, err := NewCUDA(CUDAOptions{Library: "libc.so.6"}); !errors.Is(err, rdma.ErrUnsupported) || !strings.Contains(err.Error(), "has no cuInit") {
		t.Errorf("%v", err)
	}
	if _, err := NewCUDA(CUDAOptions{Library: copiertest.Driver(t), Device: 3}); err == nil || !strings.Contains(err.Error(), "open GPU 3: CUDA error 101, invalid device ordinal") {
		t.Errorf("%v", err)
	}
	for _, o := range []CUDAOptions{{Device: -1}, {Queue: -1}, {Queue: 1 << 20}} {
		if _, err := NewCUDA(o); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
}

// TestCUDAClosesMemory: Close of the copier frees each open memory once.
func TestCUDAClosesMemory(t *testing.T) {
	c := newCUDA(t)
	h := register(t, c, make([]byte, 100))
	d, err := c.Alloc(100)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	closeMemory(t, h)
	closeMemory(t, d)
}

// TestCUDAAfterClose: allocating or freeing memory while the copier closes or afterwards finds
// no driver, and no memory of an unloaded driver is accessed.
func TestCUDAAfterClose(t *testing.T) {
	c := newCUDA(t)
	const n = 64
	var kept [n]Memory
	for i := range kept {
		kept[i] = register(t, c, make([]byte, 100))
	}
	var wg sync.WaitGroup
	for i := range kept {
		wg.Go(func() { closeMemory(t, kept[i]) })
		wg.Go(func() {
			m, err := c.Alloc(100)
			if err == nil {
				err = m.Close(context.Background())
			}
			if err != nil && !errors.Is(err, rdma.ErrClosed) {
				t.Error(err)
			}
		})
		if i == n/2 {
			wg.Go(func() {
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	if _, err := c.Alloc(100); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("device memory of a closed copier: %v", err)
	}
	if _, err := c.Register(make([]byte, 100), rdma.RegisterOptions{}); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("host memory with a closed copier: %v", err)
	}
}

// BenchmarkCUDA copies 4 MiB between host and device in pages, as blocks of KV are copied. With
// PENSTOCK_GPU=1 it measures the copy engine of the GPU; otherwise it measures the cost of the calls.
func BenchmarkCUDA(b *testing.B) {
	const size = 4 << 20
	for _, page := range []uint64{16 << 10, 256 << 10, size} {
		for _, direction := range []string{"to device", "to host"} {
			b.Run(fmt.Sprintf("%d KiB pages %s", page>>10, direction), func(b *testing.B) {
				c := newCUDA(b)
				h := register(b, c, make([]byte, size))
				defer closeMemory(b, h)
				d, err := c.Alloc(size)
				if err != nil {
					b.Fatal(err)
				}
				defer closeMemory(b, d)
				batch := Batch{Src: h, Dst: d}
				if direction == "to host" {
					batch.Src, batch.Dst = d, h
				}
				for at := uint64(0); at < size; at += page {
					// Pages are in reverse order at the destination, so that adjacent pages are not
					// copied as one.
					batch.Spans = append(batch.Spans, Span{at, size - page - at, page})
				}
				b.SetBytes(size)
				for b.Loop() {
					if err := do(b, c, batch); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// TestCUDAImport: memory that another library of the process has allocated on the GPU is copied
// to and from, and is not given back to the driver.
func TestCUDAImport(t *testing.T) {
	const n = 3 << 10
	device := copiertest.Device(t, 2*n)
	c := newTestCUDA(t)
	d, err := c.Import(device.Address, 2*n)
	if err != nil {
		t.Fatal(err)
	}
	host := make([]byte, 2*n)
	for i := range n {
		host[i] = byte(i*7 + i>>8)
	}
	h := register(t, c, host)
	for _, step := range []Batch{{Src: h, Dst: d, Spans: []Span{{0, n, n}}}, {Src: d, Dst: h, Spans: []Span{{n, n, n}}}} {
		if err := do(t, c, step); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(device.Bytes[n:], host[:n]) || !bytes.Equal(host[n:], host[:n]) {
		t.Error("other bytes after the copies")
	}
	closeMemory(t, d)
	closeMemory(t, h)
	for _, bad := range [][2]uint64{{0, 1}, {device.Address, 0}, {1 << 63, 1 << 63}} {
		if _, err := c.Import(bad[0], bad[1]); !errors.Is(err, rdma.ErrRange) {
			t.Errorf("%d bytes at %#x: %v", bad[1], bad[0], err)
		}
	}
}

// TestCUDAAfter: Submit returns while an engine's stream has work, and the copies begin after the
// work that the stream had at Mark. Batches without a mark do not wait for it.
func TestCUDAAfter(t *testing.T) {
	const n = 1 << 10
	library := copiertest.Driver(t)
	page, computed := copiertest.Device(t, n), copiertest.Device(t, n)
	for i := range computed.Bytes {
		computed.Bytes[i] = byte(i*5 + 1)
	}
	engine := copiertest.NewStream(t, library)
	open := engine.Gate(t)
	engine.Copy(page, computed)
	saves, loads := openCUDA(t, CUDAOptions{Library: library}), openCUDA(t, CUDAOptions{Library: library})
	mark, err := saves.Mark(engine.Handle())
	if err != nil {
		t.Fatal(err)
	}
	saved, other := make([]byte, n), make([]byte, n)
	from := func(c DeviceCopier, host []byte) Batch {
		t.Helper()
		d, err := c.Import(page.Address, n)
		if err != nil {
			t.Fatal(err)
		}
		return Batch{Src: d, Dst: register(t, c, host), Spans: []Span{{0, 0, n}}}
	}
	after := from(saves, saved)
	if err := do(t, loads, from(loads, other)); err != nil || other[0] != 0 {
		t.Errorf("%v; a copy without a mark waited for the stream: %d", err, other[0])
	}
	f := rdma.NewFlag()
	after.Done, after.After = f.Set, mark
	if err := saves.Submit(t.Context(), after); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := mark.Close(); err != nil {
			t.Error(err)
		}
	}
	open()
	if err := f.Wait(t.Context()); err != nil || !bytes.Equal(saved, computed.Bytes) {
		t.Errorf("%v; the copy has other bytes than the stream computed", err)
	}
	wrong := from(loads, make([]byte, n))
	wrong.After = mark
	if err := loads.Submit(t.Context(), wrong); !errors.Is(err, rdma.ErrForeign) {
		t.Errorf("a mark of another copier: %v", err)
	}
}

// TestCUDAClosesMarks: Close of a copier frees the marks that are open.
func TestCUDAClosesMarks(t *testing.T) {
	c := newTestCUDA(t)
	m, err := c.Mark(0)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if _, err := c.Mark(0); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("a mark of a closed copier: %v", err)
	}
}
