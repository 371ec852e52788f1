//go:build !race

package tcp

// raceEnabled: see race_on.go.
const raceEnabled = false
