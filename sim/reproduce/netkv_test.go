package reproduce

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// TestNetKV: every cell is in its range and explains itself.
func TestNetKV(t *testing.T) {
	if testing.Short() {
		t.Skip("170 clusters of 18 to 30 runs each: not with -short; make reproduce runs them")
	}
	dir := filepath.Dir(testkit.TraceFile(t, netkvTrace))
	results, err := Run(context.Background(), []Suite{NetKV()}, Options{Workers: 2, Traces: []string{dir}})
	if err != nil {
		t.Fatal(err)
	}
	r := results[0]
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	cells := 0
	for _, table := range r.Tables {
		for _, c := range table.Cells {
			cells++
			if !c.OK() || c.NeedsNote() {
				t.Errorf("%s: %s: ours %v, paper %v, accepted %v to %v, note %q", table.Title, c.Name, c.Ours, c.Paper, c.Low, c.High, c.Note)
			}
		}
	}
	if len(r.Tables) != 11 || cells < 120 || len(r.Figures) < 6 {
		t.Errorf("%d tables, %d cells, %d figures", len(r.Tables), cells, len(r.Figures))
	}
}

// TestNetKVWithoutTrace: what is missing is said.
func TestNetKVWithoutTrace(t *testing.T) {
	results, err := Run(context.Background(), []Suite{NetKV()}, Options{Traces: []string{t.TempDir()}})
	if err != nil {
		t.Fatal(err)
	}
	if results[0].Err == nil || results[0].Summarize().OK() {
		t.Error("a suite without its trace passed")
	}
}
