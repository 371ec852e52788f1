package client

import "unsafe"

// addressOf returns the address of the first byte of mem.
//
// Safety: the address is only compared with other addresses, and is never converted to a pointer.
func addressOf(mem []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) }
