//go:build !race

package group

// raceEnabled: this build has the race detector.
const raceEnabled = false
