package blockio

import "unsafe"

// Aligned reports whether b starts at a multiple of Align.
func Aligned(b []byte) bool {
	// Safety: the address is only looked at; it is never turned back into a
	// pointer.
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))%Align == 0
}
