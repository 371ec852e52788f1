package sys

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapAligned maps sizeBytes at a multiple of HugePageSize. It reserves addresses for one huge page
// more than needed, and unmaps the parts before and after the mapping.
func mapAligned(sizeBytes, fd, prot, flags int) ([]byte, error) {
	room := uintptr(sizeBytes + HugePageSize)
	reserved, err := unix.MmapPtr(-1, 0, nil, room, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("sys: reserve %d bytes of addresses: %w", room, err)
	}
	head := -uintptr(reserved) & (HugePageSize - 1)
	// Safety: start lies inside the reservation, at most HugePageSize-1 bytes from its beginning.
	start := unsafe.Add(reserved, head)
	// Safety: MAP_FIXED replaces only addresses that the reservation above holds.
	p, err := unix.MmapPtr(fd, 0, start, uintptr(sizeBytes), prot, flags|unix.MAP_FIXED)
	if err != nil {
		_ = unix.MunmapPtr(reserved, room)
		return nil, fmt.Errorf("sys: mmap of %d bytes: %w", sizeBytes, err)
	}
	if head > 0 {
		_ = unix.MunmapPtr(reserved, head)
	}
	if tail := HugePageSize - head; tail > 0 {
		_ = unix.MunmapPtr(unsafe.Add(start, sizeBytes), tail)
	}
	// Safety: p maps sizeBytes, off the Go heap, until munmap.
	return unsafe.Slice((*byte)(p), sizeBytes), nil
}

// mapReserved maps sizeBytes of the reserved huge page pool. The kernel aligns the mapping.
func mapReserved(sizeBytes int) ([]byte, error) {
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(sizeBytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB|unix.MAP_HUGE_2MB)
	if err != nil {
		return nil, fmt.Errorf("sys: mmap of %d bytes of reserved huge pages: %w", sizeBytes, err)
	}
	// Safety: p maps sizeBytes, off the Go heap, until munmap.
	return unsafe.Slice((*byte)(p), sizeBytes), nil
}

// munmap removes a whole mapping that mapAligned or mapReserved made.
func munmap(b []byte) error {
	// Safety: the caller guarantees that b is no longer used.
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)))
}

// address returns the start of b as smaps prints it.
func address(b []byte) uint64 {
	// Safety: the number is only compared with other addresses.
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}
