package testkit

import "testing"

// repeatMax bounds the calls of try by Repeat.
const repeatMax = 20

// Repeat calls try until it returns true, and fails the test with missed after repeatMax calls. It
// is for events that depend on the timing of another process: try reports whether the event has
// happened.
func Repeat(t testing.TB, missed string, try func() bool) {
	t.Helper()
	for range repeatMax {
		if try() || t.Failed() {
			return
		}
	}
	t.Fatalf("in %d attempts %s", repeatMax, missed)
}
