//go:build race

package tcp

// raceEnabled is true in builds with the race detector. The detector orders a write to a socket
// before the read of its data for write, but not for writev.
const raceEnabled = true
