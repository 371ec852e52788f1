package testkit

import "testing"

// Python returns the path of python3. If there is none, the test is skipped, or fails in CI.
func Python(t testing.TB) string {
	t.Helper()
	return Program(t, "python3", "python3")
}
