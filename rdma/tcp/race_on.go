//go:build race

package tcp

// raceEnabled is true in builds with the race detector. The detector orders a write to a socket
// before the read of the written data if the call is write, but not if it is writev.
const raceEnabled = true
