//go:build race

package shm

import (
	"runtime"
	"unsafe"
)

const raceEnabled = true

// The race detector knows memory by address, and does not see that what one
// mapping of a ring is told, another shows. Where both ends are in one process it
// is told, by one address for all, as package syscall does for reads and writes.
var ioSync byte

// released: what was done before can be seen by who learns of a ring's change.
func released() {
	// Safety: the address alone counts.
	runtime.RaceReleaseMerge(unsafe.Pointer(&ioSync))
}

// acquired: a ring's change has been seen.
func acquired() {
	// Safety: the address alone counts.
	runtime.RaceAcquire(unsafe.Pointer(&ioSync))
}
