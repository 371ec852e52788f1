//go:build uring

package uring

import (
	"os"
	"strconv"
	"strings"
	"testing"
)

// skipUnlessNew skips a test because io_uring is missing. It fails the test on a kernel that has
// io_uring (6.1 and later), unless the process is in a container that is known to refuse it.
func skipUnlessNew(t testing.TB, why string) {
	t.Helper()
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	major, rest, _ := strings.Cut(string(release), ".")
	minor, _, _ := strings.Cut(rest, ".")
	a, _ := strconv.Atoi(major)
	b, _ := strconv.Atoi(minor)
	if (a > 6 || a == 6 && b >= 1) && os.Getenv("PENSTOCK_NO_URING") == "" {
		t.Fatalf("kernel %sshould have io_uring, but: %s (set PENSTOCK_NO_URING=1 where it is refused on purpose)", release, why)
	}
	t.Skip("no io_uring here: " + why)
}

// skipWithout skips a test because something is missing that .ci/run provides. In CI (CI=true) it
// fails the test.
func skipWithout(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("CI without %s", what)
	}
	t.Skipf("needs %s", what)
}
