package testkit

import "testing"

// repeatMax is the maximum number of calls of try by Repeat.
const repeatMax = 20

// Repeat calls try until it returns true. After repeatMax calls it fails the test with the text
// missed. It is for events that depend on the timing of another process: try reports whether the
// event has happened.
func Repeat(t testing.TB, missed string, try func() bool) {
	t.Helper()
	for range repeatMax {
		if try() || t.Failed() {
			return
		}
	}
	t.Fatalf("in %d attempts %s", repeatMax, missed)
}
