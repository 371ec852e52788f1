package reproduce

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/sim/netkv"
)

// TestNetKV makes every table from two windows and one seed, a fifteenth of the runs of `make
// reproduce`. Values of formulas are in their range, nearly all simulated values are too, and every
// deviation has a note.
func TestNetKV(t *testing.T) {
	testkit.Long(t, "simulates whole clusters")
	dir := filepath.Dir(testkit.TraceFile(t, netkvTrace))
	short := Suite{Name: "netkv", Paper: "NetKV", Run: func(ctx context.Context, r *Report) error {
		return netKV(ctx, r, netkv.Windows()[:2], 1)
	}}
	results, err := Run(context.Background(), []Suite{short}, Options{Workers: 2, Traces: []string{dir}})
	if err != nil {
		t.Fatal(err)
	}
	r := results[0]
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	cells, out := 0, 0
	for i, table := range r.Tables {
		for _, c := range table.Cells {
			cells++
			if c.NeedsNote() {
				t.Errorf("%s: %s: ours %v, paper %v, and no note", table.Title, c.Name, c.Ours, c.Paper)
			}
			if c.OK() {
				continue
			}
			out++
			if t.Logf("%s: %s: ours %v, accepted %v to %v", table.Title, c.Name, c.Ours, c.Low, c.High); i < 2 {
				t.Errorf("%s: %s is out of its range", table.Title, c.Name)
			}
		}
	}
	if len(r.Tables) != 12 || cells < 150 || len(r.Figures) < 6 {
		t.Errorf("%d tables, %d cells, %d figures", len(r.Tables), cells, len(r.Figures))
	}
	if out > cells/20 {
		t.Errorf("%d of %d cells are out of their range", out, cells)
	}
}

// TestNetKVWithoutTrace: the error names the missing trace.
func TestNetKVWithoutTrace(t *testing.T) {
	results, err := Run(context.Background(), []Suite{NetKV()}, Options{Traces: []string{t.TempDir()}})
	if err != nil {
		t.Fatal(err)
	}
	if results[0].Err == nil || results[0].Summarize().OK() {
		t.Error("a suite without its trace passed")
	}
}
