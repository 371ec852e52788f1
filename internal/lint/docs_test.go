package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// pages are the documents that people read.
var pages = []string{"*.md", "docs/*.md", "docs/*/*.md", "deploy/*.md", "deploy/*/*.md"}

// document and source match names of files in texts. A name after a scheme or a host belongs to
// another site.
var (
	document = regexp.MustCompile(`(?:^|[\s("'` + "`" + `])([A-Za-z0-9_][A-Za-z0-9_./-]*\.md)\b`)
	source   = regexp.MustCompile("`" + `([a-z0-9_]+/[A-Za-z0-9_./-]*\.(?:go|proto|yaml|sh))` + "`")
)

// readersPage stands in help texts for a file name that the reader chooses.
const readersPage = "PAGE.md"

// TestNamesOfFiles: every page exists to which a comment or another page refers, and so does every
// source file that a page names. Help texts are in docs/cli.md.
func TestNamesOfFiles(t *testing.T) {
	dir := root(t)
	check := func(path string, text []byte, name *regexp.Regexp) {
		for _, m := range name.FindAllSubmatch(text, -1) {
			named := string(m[1])
			found := named == readersPage || slices.ContainsFunc([]string{dir, filepath.Join(dir, "docs"), filepath.Dir(path)}, func(from string) bool {
				_, err := os.Stat(filepath.Join(from, named))
				return err == nil
			})
			if !found {
				t.Errorf("%s names %s, which is not at the root, in docs or beside the page: use the present name", strings.TrimPrefix(path, dir+"/"), named)
			}
		}
	}
	read := func(path string) []byte {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	for _, p := range load(t) {
		for _, path := range p.files {
			f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
			if err != nil {
				t.Error(err)
				continue
			}
			for _, g := range f.Comments {
				check(path, []byte(g.Text()), document)
			}
		}
	}
	seen := 0
	for _, pattern := range pages {
		paths, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			text := read(path)
			check(path, text, document)
			check(path, text, source)
			seen++
		}
	}
	if seen == 0 {
		t.Error("no page was found")
	}
}

var (
	step = regexp.MustCompile("(?m)^\\|[^|\n]*\\| `([a-z0-9_/]+\\.go)` \\| ((?:`[A-Za-z.]+` ?)+)\\|$")
	// place is a directory or a file of the repository, in the code font of a page.
	place = regexp.MustCompile("`([a-z0-9_]+(?:/[A-Za-z0-9_.-]+)+)`")
)

// TestArchitecture: each directory and file that ARCHITECTURE.md and CONTRIBUTING.md name exists, and each
// declaration that a step of ARCHITECTURE.md names is in the step's file.
func TestArchitecture(t *testing.T) {
	dir := root(t)
	steps, places := 0, 0
	for _, page := range []string{"ARCHITECTURE.md", "CONTRIBUTING.md"} {
		text, err := os.ReadFile(filepath.Join(dir, page))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range place.FindAllStringSubmatch(string(text), -1) {
			if _, err := os.Stat(filepath.Join(dir, strings.TrimSuffix(m[1], "/..."))); err != nil {
				t.Errorf("%s names %s, which does not exist", page, m[1])
			}
			places++
		}
		for _, m := range step.FindAllStringSubmatch(string(text), -1) {
			declared, err := declarations(filepath.Join(dir, m[1]))
			if err != nil {
				t.Error(err)
				continue
			}
			for _, name := range strings.Fields(m[2]) {
				if name = strings.Trim(name, "`"); !slices.Contains(declared, name) {
					t.Errorf("%s: %s has no declaration of %s", page, m[1], name)
				}
			}
			steps++
		}
	}
	if steps < 15 || places < 50 {
		t.Errorf("%d steps and %d places were found; want at least 15 and 50", steps, places)
	}
}

// declarations returns the functions of a file, and its methods as Type.Method.
func declarations(path string) (names []string, err error) {
	f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		return nil, err
	}
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		name := fn.Name.Name
		if fn.Recv != nil {
			recv := fn.Recv.List[0].Type
			if star, ok := recv.(*ast.StarExpr); ok {
				recv = star.X
			}
			if ident, ok := recv.(*ast.Ident); ok {
				name = ident.Name + "." + name
			}
		}
		names = append(names, name)
	}
	return names, nil
}
