package simrdma

import "unsafe"

// address returns the address of the first byte of b, which is not empty.
//
// Safety: the number is compared and sent to peers. It is never converted to a pointer.
func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
