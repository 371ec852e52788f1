package binding

import "unsafe"

// bytesAt returns the n bytes of the caller's memory at addr.
//
// Safety: the memory lies outside of Go's heap, so Go neither moves nor frees it. The
// caller keeps registered memory allocated until penstock_unregister or penstock_close
// has returned, device memory until penstock_traffic_close or penstock_close has, and the memory of a
// batch until the batch is complete. The library drops the slice before that.
func bytesAt(addr, n uint64) []byte {
	address := uintptr(addr)
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&address))), n)
}
