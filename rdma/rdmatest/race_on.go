//go:build race

package rdmatest

// raceEnabled is true in builds with the race detector, in which some cases are reduced: two
// connections that place overlapping pages write the same bytes at the same time. The contract
// allows that, but the race detector reports it.
const raceEnabled = true
