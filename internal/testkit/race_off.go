//go:build !race

package testkit

// Race is set in builds with the race detector.
const Race = false
