package testkit

import "testing"

// Python returns the path of python3. Without python3 the test is skipped, and under continuous
// integration it fails.
func Python(t testing.TB) string {
	t.Helper()
	return Program(t, "python3", "python3")
}
