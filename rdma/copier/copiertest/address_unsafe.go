package copiertest

import "unsafe"

// addressOf returns the address of memory outside of the Go heap.
//
// Safety: the address is a number; nothing in Go dereferences it.
func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }
