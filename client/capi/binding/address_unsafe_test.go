package binding

import "unsafe"

// addressOf is where b lies.
//
// Safety: b is of an arena, which Go does not move.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
