package reproduce

import (
	"context"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// TestPrfaaS: every cell is in its range, and deviations have notes, with one of the five seeds of
// make reproduce.
func TestPrfaaS(t *testing.T) {
	testkit.Long(t, "simulates whole clusters")
	one := PrfaaS()
	one.Run = func(ctx context.Context, r *Report) error { return prfaaS(ctx, r, 1) }
	results, err := Run(t.Context(), []Suite{one}, Options{Workers: 2})
	if err != nil {
		t.Fatal(err)
	}
	r := results[0]
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	for _, table := range r.Tables {
		for _, c := range table.Cells {
			if !c.OK() || c.NeedsNote() {
				t.Errorf("%s: %s: ours %v, paper %v, accepted %v to %v, note %q", table.Title, c.Name, c.Ours, c.Paper, c.Low, c.High, c.Note)
			}
		}
	}
	if s := r.Summarize(); s.Cells < 40 || len(r.Figures) < 3 {
		t.Errorf("%d cells, %d figures", s.Cells, len(r.Figures))
	}
}
