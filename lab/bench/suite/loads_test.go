package suite

import (
	"io/fs"
	"math"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/bench/peer"
	"github.com/penstock-kv/penstock/python/engines"
)

// loadsDriver serves loads without an engine. A prompt has 1000 cached tokens of 16 KiB of KV, and
// its computation takes 0.1 s. Whole prompts take the sum of load and computation, layers the longer
// of both.
const loadsDriver = `
from harness import process

received = 0

def start_loads(agents, tokens, hidden, layers):
    global received
    received = 16384e3 * agents if tokens > 128 else 16384e3 * agents - 1
    return {"cached_tokens": 1000, "new_tokens": 256, "compute": 0.1}

def load(load, bits, seed, at_once):
    carry = 8 * 16384e3 / bits
    first = {"async": carry + 0.1, "layers": max(carry, 0.1)}[load]
    return {"completion": 1 if at_once else 2, "first_token": first, "failed": 0, "bytes": received}

process.serve({"start_loads": start_loads, "load": load, "stop": lambda: None})
`

func startLoads(t *testing.T, tokens int) *vllmSuite {
	t.Helper()
	files := fstest.MapFS{"driver.py": {Data: []byte(loadsDriver)}}
	for _, name := range []string{"harness/__init__.py", "harness/process.py"} {
		text, err := fs.ReadFile(engines.Files, name)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = &fstest.MapFile{Data: text}
	}
	s := &vllmSuite{suiteRun: newRun(testWorld(t), vllmSection), opts: VLLMOptions{Agents: 2, PromptTokens: tokens}}
	s.Progress = func(string) {}
	var err error
	if s.driver, err = peer.StartDriver(t.Context(), testkit.Python(t), files, filepath.Join(t.TempDir(), "drivers"), "driver.py"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.driver.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// TestLoads: the NIC's rates are such that the KV of a prompt takes four times the computation, and
// the same time. The section has the ratio of layers to whole prompts in each comparison.
func TestLoads(t *testing.T) {
	s := startLoads(t, 256)
	if err := s.loads(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(s.report.Sections) != 1 || s.report.Sections[0].Suite != loadsSection {
		t.Fatalf("sections %+v", s.report.Sections)
	}
	results := s.report.Sections[0].Results
	if len(results) != len(loadShapes) {
		t.Fatalf("%d comparisons; want %d", len(results), len(loadShapes))
	}
	for i, want := range []float64{0.8, 0.8, 0.5, 0.5} {
		if got := results[i].Measures[0].Median; math.Abs(got-want) > 1e-6 {
			t.Errorf("%s: ratio %v; want %v", results[i].Name, got, want)
		}
	}
}

// TestLoadsFromTheEngine: a contender whose turn did not load all KV of the prompts over the NIC is
// not in the results.
func TestLoadsFromTheEngine(t *testing.T) {
	s := startLoads(t, 128)
	if err := s.loads(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, r := range s.report.Sections[0].Results {
		if len(r.NotRun) != 2 || !strings.Contains(r.NotRun[0].Why, "received 32767999 bytes, less than the 32768000 bytes") {
			t.Errorf("%s: not run %+v", r.Name, r.NotRun)
		}
	}
}
