package simrdma

import "unsafe"

// address is that of the first byte of b, which is not empty.
//
// Safety: the number is compared and shown to peers, never made a pointer again.
func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
