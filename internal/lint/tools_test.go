package lint

import (
	"bytes"
	"go/format"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/testkit"
)

func TestGofmt(t *testing.T) {
	for _, p := range load(t) {
		for _, path := range p.files {
			src, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			want, err := format.Source(src)
			if err != nil {
				t.Errorf("%s: %v", path, err)
			} else if !bytes.Equal(src, want) {
				t.Errorf("%s is not formatted; run gofmt -w on it", path)
			}
		}
	}
}

// checkers are programs that check the whole module. Each runs on the plain build and on the build
// with every tag.
var checkers = []struct {
	name string
	args func(tags string) []string
}{
	{"vet", func(tags string) []string { return []string{"vet", "-tags=" + tags, "./..."} }},
	{"staticcheck", func(tags string) []string { return []string{"tool", "staticcheck", "-tags=" + tags, "./..."} }},
}

func TestCheckers(t *testing.T) {
	testkit.Long(t, "vet and staticcheck of all packages, in both builds")
	if invariants.Enabled {
		t.Skip("built with a tag: the plain run of this test checks both builds, and twice would only be slow")
	}
	load(t) // so that the test cache detects changes
	for _, c := range checkers {
		for _, tags := range []string{"", allTags} {
			t.Run(c.name+" "+tags, func(t *testing.T) {
				cmd := exec.Command("go", c.args(tags)...)
				cmd.Dir = root(t)
				// The checkers allocate much and need little memory. GOGC of the tests is not for them.
				cmd.Env = append(cmd.Environ(), "GOGC=400")
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Errorf("go %s: %v\n%s", strings.Join(cmd.Args[1:], " "), err, out)
				}
			})
		}
	}
}
