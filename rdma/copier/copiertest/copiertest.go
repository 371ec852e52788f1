// Package copiertest has a CUDA driver for tests on machines without a GPU.
//
// It does not simulate a GPU: device memory is host memory. Memory of Device is accessible to the
// CPU only while the driver copies, so a program that accesses device memory directly crashes.
//
//	copier.NewCUDA(Library: Driver(t)) ─► testdata/fakecuda.c ─ memcpy ─► Memory.Address   PROT_NONE between copies
//	                                                                      Memory.Bytes     the same pages, for the test
package copiertest

import (
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

//go:embed testdata/fakecuda.c
var source []byte

var built = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "fakecuda")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	c, so := filepath.Join(dir, "fakecuda.c"), filepath.Join(dir, "libfakecuda.so")
	if err := os.WriteFile(c, source, 0o600); err != nil {
		return nil, err
	}
	if out, err := exec.Command("cc", "-shared", "-fPIC", "-O1", "-pthread", "-o", so, c).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, out)
	}
	return os.ReadFile(so)
})

// Driver returns the path of a copy of the driver that is only for this test, so that its counters
// are separate. Without a C compiler it skips the test, or fails it in CI.
func Driver(t testing.TB) string {
	t.Helper()
	if _, err := exec.LookPath("cc"); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("no C compiler (cc) in PATH")
		}
		t.Skip("no C compiler (cc) in PATH")
	}
	raw, err := built()
	if err != nil {
		t.Fatal(err)
	}
	so := filepath.Join(t.TempDir(), "libfakecuda.so")
	if err := os.WriteFile(so, raw, 0o755); err != nil {
		t.Fatal(err)
	}
	return so
}

// Memory is device memory of the test's driver. The driver uses it at Address, which the CPU
// cannot access. Bytes are the same memory, accessible to the test.
type Memory struct {
	Address uint64
	Bytes   []byte
}

// Device returns device memory, which is unmapped at the end of the test. The test must not run in
// parallel with others, because the memory is passed to the driver in the environment.
func Device(t *testing.T, sizeBytes int) Memory {
	t.Helper()
	fd, err := unix.MemfdCreate("device", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	pages := (sizeBytes + os.Getpagesize() - 1) / os.Getpagesize() * os.Getpagesize()
	if err := unix.Ftruncate(fd, int64(pages)); err != nil {
		t.Fatal(err)
	}
	mapped := func(prot int) []byte {
		mem, err := unix.Mmap(fd, 0, pages, prot, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Munmap(mem); err != nil {
				t.Error(err)
			}
		})
		return mem
	}
	m := Memory{addressOf(mapped(unix.PROT_NONE)), mapped(unix.PROT_READ | unix.PROT_WRITE)[:sizeBytes]}
	all := append(strings.Split(os.Getenv("FAKE_CUDA_DEVICE"), ","), fmt.Sprintf("%x:%x", m.Address, pages))
	t.Setenv("FAKE_CUDA_DEVICE", strings.TrimPrefix(strings.Join(all, ","), ","))
	return m
}
