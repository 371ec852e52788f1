package binding

import "unsafe"

// bytesAt is the caller's memory, n bytes at addr.
//
// Safety: the memory is outside of Go's heap, which neither moves nor frees it. The caller of
// penstock_register keeps it allocated until penstock_unregister or penstock_close has
// returned, and that of a batch until the batch is complete; the slice is kept no longer.
func bytesAt(addr, n uint64) []byte {
	address := uintptr(addr)
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&address))), n)
}
