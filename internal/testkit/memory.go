package testkit

import (
	"syscall"
	"testing"
)

// AlignedBuffer returns sizeBytes of zeroed memory that starts at a page and is outside the Go
// heap, so that a device may read and write it directly. The memory is unmapped when t ends, so
// that a later access by a device faults. The buffer has 4 KiB pages; benchmarks need huge pages
// and should use internal/arena.
func AlignedBuffer(t testing.TB, sizeBytes int) []byte {
	t.Helper()
	if sizeBytes <= 0 {
		t.Fatalf("testkit: buffer of %d bytes", sizeBytes)
	}
	buf, err := syscall.Mmap(-1, 0, sizeBytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatalf("testkit: map %d bytes: %v", sizeBytes, err)
	}
	t.Cleanup(func() {
		if err := syscall.Munmap(buf); err != nil {
			t.Errorf("testkit: unmap: %v", err)
		}
	})
	return buf
}
