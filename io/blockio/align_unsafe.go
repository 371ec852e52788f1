package blockio

import "unsafe"

// Aligned reports whether b starts at a multiple of Align.
func Aligned(b []byte) bool {
	// Safety: the address is only read; it is never converted back to a pointer.
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))%Align == 0
}
