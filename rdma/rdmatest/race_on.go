//go:build race

package rdmatest

// raceEnabled: two connections that place overlapping pages write the same bytes
// at the same time. That is what the promise is about, and what the race
// detector is there to report.
const raceEnabled = true
