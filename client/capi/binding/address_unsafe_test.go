package binding

import "unsafe"

// addressOf returns the address of b's first byte.
//
// Safety: b lies in an arena, outside of Go's heap, so its address does not change.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
