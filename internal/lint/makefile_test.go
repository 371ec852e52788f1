package lint

import (
	"bufio"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestCheckedBuild: if a package checks invariants or uses io_uring, itself or through its imports,
// the Makefile tests it in a build that has both: in RACE, in CHECKED or in PROGRAM.
func TestCheckedBuild(t *testing.T) {
	tested := slices.Concat(makeVariable(t, "RACE"), makeVariable(t, "CHECKED"), makeVariable(t, "PROGRAM"))
	n := 0
	for _, p := range load(t) {
		tags := []string{module + "/internal/invariants", module + "/io/uring"}
		depends := slices.ContainsFunc(tags, func(tag string) bool { return slices.Contains(p.deps, tag) })
		hasTests := slices.ContainsFunc(p.files, func(f string) bool { return strings.HasSuffix(f, "_test.go") })
		if !depends || !hasTests {
			continue
		}
		n++
		if !matches(p.path, tested) {
			t.Errorf("%s depends on %s; its tests run in the plain build only: add it to RACE or CHECKED in the Makefile", p.path, list(tags))
		}
	}
	if n == 0 {
		t.Error("no package depends on internal/invariants or io/uring")
	}
}

// makeVariable returns the packages that a variable of the Makefile lists, as patterns.
func makeVariable(t *testing.T, name string) []string {
	t.Helper()
	f, err := os.Open(filepath.Join(root(t), "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if value, ok := strings.CutPrefix(s.Text(), name+" := "); ok {
			return strings.Fields(strings.ReplaceAll(value, "./", ""))
		}
	}
	t.Fatalf("the Makefile does not define %s", name)
	return nil
}
