package reproduce

import (
	"context"
	"testing"
)

// TestDualPathClosedForms checks the values that need no simulation of a cluster. `make reproduce`
// runs the whole suite; the tests of sim/agentic check it at a smaller size.
func TestDualPathClosedForms(t *testing.T) {
	results, err := Run(t.Context(), []Suite{{Name: "dualpath", Paper: "closed forms", Run: func(ctx context.Context, r *Report) error {
		dpIntensity(r)
		dpTrajectories(r, newDPRuns(false))
		return dpBottleneckFree(ctx, r)
	}}}, Options{Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	if results[0].Err != nil {
		t.Fatal(results[0].Err)
	}
	cells := 0
	for _, table := range results[0].Tables {
		for _, c := range table.Cells {
			cells++
			if !c.OK() || c.NeedsNote() {
				t.Errorf("%s: %s: ours %v, paper %v, accepted %v to %v, note %q", table.Title, c.Name, c.Ours, c.Paper, c.Low, c.High, c.Note)
			}
		}
	}
	if cells < 40 {
		t.Errorf("%d cells", cells)
	}
}

// TestDualPathPlan: no two simulations have the same name. Otherwise a table would show the wrong
// one.
func TestDualPathPlan(t *testing.T) {
	d := newDPRuns(false)
	d.plan()
	seen := make(map[string]bool)
	for _, j := range d.jobs {
		if seen[j.key] {
			t.Errorf("two simulations are called %q", j.key)
		}
		seen[j.key] = true
	}
	if len(d.jobs) < 100 {
		t.Errorf("%d simulations", len(d.jobs))
	}
}
