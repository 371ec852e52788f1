package testkit

import (
	"os"
	"os/exec"
	"testing"
)

// Python returns the path of python3. Without python3 the test is skipped, and under continuous
// integration it fails.
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
