package testkit

import (
	"os"
	"os/exec"
	"testing"
)

// Program returns the path of a program of a Debian package. If the program is missing, the test is
// skipped. In CI the test fails instead, because .ci/steps installs the packages.
func Program(t testing.TB, name, debianPackage string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	switch {
	case err == nil:
	case os.Getenv("CI") == "true":
		t.Fatalf("this test needs %s of the package %s, which continuous integration must have", name, debianPackage)
	default:
		t.Skipf("this test needs %s, which is not in PATH (package %s)", name, debianPackage)
	}
	return path
}
