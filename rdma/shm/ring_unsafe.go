package shm

import "unsafe"

// A ring fits its pages.
var _ [ringBytes - unsafe.Sizeof(ring{})]byte

// ringOf returns the ring in a mapping of ringBytes.
func ringOf(mem []byte) *ring {
	_ = mem[ringBytes-1]
	// Safety: the mapping starts at a page, is at least as long as a ring, and
	// is unmapped only after the last use of the ring (endpoint.free).
	return (*ring)(unsafe.Pointer(unsafe.SliceData(mem)))
}

// addressOf returns the address of b in this process.
func addressOf(b []byte) uint64 {
	// Safety: the number is only compared with other addresses, or sent to a peer. The peer reads
	// at this address by a system call, which checks the address. Registered memory is not moved or
	// freed, because its object of type memory holds the slice.
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}
