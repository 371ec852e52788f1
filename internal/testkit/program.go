package testkit

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
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

// BuildPenstock builds the program penstock of this checkout with the given flags of go build, and
// returns its path. The file is removed when the test ends.
func BuildPenstock(t testing.TB, flags ...string) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "penstock")
	args := append(append([]string{"build"}, flags...), "-o", binary, "./cmd/penstock")
	build := exec.Command("go", args...)
	build.Dir = RepositoryRoot(t)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return binary
}
