package lint

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
)

const module = "github.com/penstock-kv/penstock"

// allTags selects every file of the repository that this machine can build.
const allTags = "uring,invariants,nvml,cuda"

// pkg is the output of "go list" for one package of the repository, with paths relative to the
// module: "trie", "io/blockio", "." for the root. The lists combine the plain build and the build
// with allTags.
type pkg struct {
	path    string
	name    string
	dir     string
	imports []string // of its code
	tests   []string // of its tests, without imports
	deps    []string // of its code, indirect imports included
	files   []string // absolute, of all builds, tests included
}

// packages lists the repository's packages once for all tests.
var packages = sync.OnceValues(func() ([]*pkg, error) {
	byPath := make(map[string]*pkg)
	for _, tags := range []string{"", allTags} {
		listed, err := goList(tags)
		if err != nil {
			return nil, err
		}
		for _, l := range listed {
			p := byPath[l.ImportPath]
			if p == nil {
				p = &pkg{path: relative(l.ImportPath), name: l.Name, dir: l.Dir}
				byPath[l.ImportPath] = p
			}
			p.imports = union(p.imports, l.Imports)
			p.tests = union(p.tests, append(l.TestImports, l.XTestImports...))
			p.deps = union(p.deps, l.Deps)
			for _, names := range [][]string{l.GoFiles, l.CgoFiles, l.IgnoredGoFiles, l.TestGoFiles, l.XTestGoFiles} {
				for _, n := range names {
					p.files = union(p.files, []string{filepath.Join(l.Dir, n)})
				}
			}
		}
	}
	var out []*pkg
	for _, p := range byPath {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b *pkg) int { return strings.Compare(a.path, b.path) })
	return out, nil
})

type listed struct {
	ImportPath, Name, Dir                                        string
	Imports, TestImports, XTestImports, Deps                     []string
	GoFiles, CgoFiles, IgnoredGoFiles, TestGoFiles, XTestGoFiles []string
}

func goList(tags string) ([]listed, error) {
	cmd := exec.Command("go", "list", "-e", "-json", "-tags="+tags, module+"/...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, errors.Join(err, errors.New(stderr.String()))
	}
	var all []listed
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var l listed
		if err := d.Decode(&l); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		all = append(all, l)
	}
}

func load(t *testing.T) []*pkg {
	t.Helper()
	pkgs, err := packages()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	return pkgs
}

// ours returns the path of a package relative to the module, and whether the package belongs to the
// module.
func ours(importPath string) (string, bool) {
	if importPath == module {
		return ".", true
	}
	return strings.CutPrefix(importPath, module+"/")
}

func relative(importPath string) string {
	p, _ := ours(importPath)
	return p
}

// under reports whether path is dir or inside it.
func under(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, dir+"/")
}

// matches reports whether path is one of patterns; "dir/..." is dir and all
// inside it.
func matches(path string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		if dir, ok := strings.CutSuffix(p, "/..."); ok {
			return under(path, dir)
		}
		return path == p || p == "..."
	})
}

func union(a, b []string) []string {
	a = append(slices.Clone(a), b...)
	slices.Sort(a)
	return slices.Compact(a)
}

func root(t *testing.T) string { return testkit.RepositoryRoot(t) }
