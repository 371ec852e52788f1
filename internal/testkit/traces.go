package testkit

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// TracesEnv is the environment variable with the directory of the shared traces, for checkouts that
// are not beside that directory.
const TracesEnv = "PENSTOCK_TRACES"

// TraceFile returns the path of one of the shared traces, which are too large for the repository.
// It looks in $PENSTOCK_TRACES, or else in shared/traces beside or inside the repository. If there
// is no such directory, the test is skipped. If the directory exists, or the variable is set, but
// the file is missing, the test fails.
func TraceFile(t testing.TB, name string) string {
	t.Helper()
	dir, named := os.LookupEnv(TracesEnv)
	if !named {
		dir = findTraces(t)
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("trace %s is missing: %v; %s names the directory", name, err, TracesEnv)
	}
	return path
}

func findTraces(t testing.TB) string {
	t.Helper()
	root := RepositoryRoot(t)
	for _, dir := range []string{filepath.Join(root, "..", "shared", "traces"), filepath.Join(root, "shared", "traces")} {
		if info, err := os.Stat(dir); err == nil && info.IsDir() {
			return dir
		}
	}
	t.Skipf("no shared traces beside %s; set %s to the directory that holds them to run this test", root, TracesEnv)
	return ""
}

// RepositoryRoot returns the directory of go.mod.
func RepositoryRoot(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatalf("testkit: %v", err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		} else if !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("testkit: %v", err)
		}
		if dir == filepath.Dir(dir) {
			t.Fatal("testkit: no go.mod above the working directory")
		}
		dir = filepath.Dir(dir)
	}
}
