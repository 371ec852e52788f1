package faultio

import (
	"unsafe"

	"github.com/penstock-kv/penstock/io/blockio"
)

// aligned returns memory that a request may use.
//
// Safety: the address is only read. Memory of the Go heap does not move, and the slice keeps it
// alive until the wrapped device has returned.
func aligned(n int) []byte {
	buf := make([]byte, n+blockio.Align)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(buf))) % blockio.Align
	return buf[skip : int(skip)+n : int(skip)+n]
}
