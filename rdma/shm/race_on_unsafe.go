//go:build race

package shm

import (
	"runtime"
	"unsafe"
)

const raceEnabled = true

// The race detector identifies memory by address. It does not recognize that two mappings of a ring
// are the same memory. If both ends are in one process, these functions report the synchronization
// through one address for all rings, as package syscall does for reads and writes.
var ioSync byte

// released: earlier accesses happen before the accesses of a reader of the ring's change.
func released() {
	// Safety: only the address is used.
	runtime.RaceReleaseMerge(unsafe.Pointer(&ioSync))
}

// acquired: a ring's change has been read.
func acquired() {
	// Safety: only the address is used.
	runtime.RaceAcquire(unsafe.Pointer(&ioSync))
}
