//go:build !race

package gateway

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testnode"
)

// TestOutside builds examples/dualpath in a module outside of the repository and runs it
// against a storage node: a planner, a leader for each of two engines, and two requests.
// Both engines read, for the second request, blocks that the first request has stored.
//
// The program is built without the race detector, so the plain build's run of this test is
// enough.
func TestOutside(t *testing.T) {
	testkit.Long(t, "compiles and runs a module of its own")
	program, err := os.ReadFile(filepath.Join(testkit.RepositoryRoot(t), "examples", "dualpath", "main.go"))
	if err != nil {
		t.Fatal(err)
	}
	node := testnode.Start(t, testnode.Options{})
	m := testkit.OutsideModule(t, map[string]string{"main.go": string(program)})
	out, err := m.Go(t.Context(), "run", ".", "-storage", node.Addr).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	sides := output.FindStringSubmatch(string(out))
	if sides == nil {
		t.Fatalf("the program's output is not\n%v\nbut\n%s", output, out)
	}
	if sides[1] == "0" || sides[2] == "0" {
		t.Errorf("one side read nothing:\n%s", out)
	}
}

// output matches the output of the program. Both sides share the second read. The end of decode
// may reach the planner before that of prefill.
var output = regexp.MustCompile(`^first: 0 of 321 tokens are cached
first: accepted
first: prefill-0 reads 0 tokens, decode-0 reads 0
(?:first: prefilled
)?first: done
second: 320 of 321 tokens are cached
second: accepted
second: prefill-0 reads (\d+) tokens, decode-0 reads (\d+)
(?:second: prefilled
)?second: done
$`)
