package reproduce

import (
	"context"
	"testing"
)

// TestMoveTheQuery: every cell is in its range or has a note.
func TestMoveTheQuery(t *testing.T) {
	results, err := Run(context.Background(), []Suite{MoveTheQuery()}, Options{Workers: 2})
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
	if cells < 40 || len(r.Figures) < 8 {
		t.Errorf("%d cells, %d figures", cells, len(r.Figures))
	}
	for _, f := range r.Figures {
		for _, s := range f.Chart.Series {
			for i, y := range s.Y {
				if !(y > 0) {
					t.Errorf("%s: %s at %v is %v", f.Name, s.Name, s.X[i], y)
				}
			}
		}
	}
}
