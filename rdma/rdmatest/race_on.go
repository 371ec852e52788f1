//go:build race

package rdmatest

// raceEnabled: two connections that place overlapping pages write the same bytes at the same time.
// The contract allows that, but the race detector reports it.
const raceEnabled = true
