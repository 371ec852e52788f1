package testkit

import (
	"os"
	"os/exec"
	"testing"
)

// Python returns the path of python3. If there is none, the test is skipped, or fails in CI.
func Python(t testing.TB) string {
	t.Helper()
	path, err := exec.LookPath("python3")
	switch {
	case err == nil:
	case os.Getenv("CI") == "true":
		t.Fatal("this test needs python3, which continuous integration must have")
	default:
		t.Skip("this test needs python3, which is not in PATH")
	}
	return path
}
