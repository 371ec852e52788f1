package verbs

import "unsafe"

// addressOf returns the address of b's first byte; 0 if b is empty.
//
// Safety: the number is passed to the card. It is used only while the memory is pinned, or if the
// memory is not in the Go heap.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
