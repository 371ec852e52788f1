//go:build race

package rdmatest

// raceEnabled is true in builds with the race detector, in which the case of overlapping pages is
// skipped: there two connections write the same bytes at the same time. The contract allows that,
// but the race detector reports it.
const raceEnabled = true
