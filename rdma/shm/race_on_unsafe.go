//go:build race

package shm

import (
	"runtime"
	"unsafe"
)

const raceEnabled = true

// The race detector identifies memory by address, so it does not recognize that two mappings of a
// ring are the same memory. For the case that both ends of a ring are in one process, the
// functions below report the synchronization to the detector, through one address for all rings.
// Package syscall does the same for reads and writes.
var ioSync byte

// released reports to the race detector that all earlier accesses of this goroutine happen before
// the later accesses of a goroutine that calls acquired.
func released() {
	// Safety: only the address is used.
	runtime.RaceReleaseMerge(unsafe.Pointer(&ioSync))
}

// acquired reports to the race detector that this goroutine has read a change of a ring.
func acquired() {
	// Safety: only the address is used.
	runtime.RaceAcquire(unsafe.Pointer(&ioSync))
}
