//go:build race

package tcp

// raceEnabled: this is a build with the race detector. It knows that what came
// before a write to a socket comes before what follows the read of it, but only
// for write, not for writev.
const raceEnabled = true
