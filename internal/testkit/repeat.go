package testkit

import "testing"

// repeatMax is how often Repeat calls its function.
const repeatMax = 20

// Repeat calls try until it returns true, and fails the test with missed when it has not
// done so in repeatMax calls. It is for events that only the timing of another process
// decides: try returns whether the event has happened.
func Repeat(t testing.TB, missed string, try func() bool) {
	t.Helper()
	for range repeatMax {
		if try() || t.Failed() {
			return
		}
	}
	t.Fatalf("in %d attempts %s", repeatMax, missed)
}
