// Package reproduce compares the papers' tables with reproduced values. A suite is one paper: it
// runs the simulators and the closed forms and reports cells. Each cell has the published value,
// the reproduced value ("ours"), and the accepted range of the reproduced value. The package
// contains no simulator and no scheduling policy. Suite.Drives names the production code that a
// suite runs, and whether a server runs it too.
//
//	Suite ── Run(ctx, *Report) ──┬── Table{Cells…} ──┐            ┌── WriteText      a terminal
//	  netkv.go                   ├── Figure{Chart}   ├─ []Result ─┼── WriteMarkdown  docs/reproduction.md
//	  prfaas.go                  ├── Progress        │            ├── WriteJSON      a program
//	  dualpath.go                └── Each ── pool ───┘            └── SaveFigures    PNG, SVG
//	  movethequery.go
//
// # Cells
//
//	Near(id, name, unit, paper, ours, tolerance)    ours within tolerance (a share) of the published value
//	Within(id, name, unit, paper, ours, low, high)  ours within a range, published or not
//	Holds(id, name, condition)                      a statement, such as an order
//
// Each cell, or its table, has a Kind: Predicted, Fitted (a constant of the simulation was chosen
// to match the number, or another number of its figure or table), or Derived (arithmetic on printed
// numbers). Totals count predictions with a published value. No cell compares a formula with a
// constant that the formula contains, because that would be no evidence. Report.Missing names the
// results of a paper that have no cell.
//
// A cell is out of range if ours lies outside Low..High: the reproduction then fails. A cell needs
// a Note with the reason if it deviates from its published value by more than NoteAbove, or if its
// accepted range does not include the published value; without the note the reproduction fails too.
// A note only explains: it does not widen the accepted range.
//
// # A suite
//
//	func NetKV() Suite {
//		return Suite{Name: "netkv", Paper: "NetKV, …", Run: func(ctx context.Context, r *Report) error {
//			path, err := r.Trace("mooncake_conversation_trace.jsonl.gz")  // or an error that lists the searched directories
//			…
//			ours := make([]float64, len(runs))
//			err = r.Each(ctx, "Table II", len(runs), func(ctx context.Context, i int) error {
//				ours[i], err = simulate(runs[i])                      // on a core of the pool
//				…
//			})
//			r.Table(Table{Title: …, Kind: Predicted, Source: "NetKV, Table II", Command: "penstock sim run …", Cells: …})
//			return nil
//		}}
//	}
//
// Suites run concurrently. Their calls of Each share one pool of workers, so expensive work must
// run in Each. Tables and figures appear in the order in which a suite reports them, so a suite
// reports from its own goroutine, after Each.
//
// A run with Options.Quick, for continuous integration, skips the longest simulations and runs only
// the first seed. A suite reports skipped simulations with Report.LeftOut. The remaining cells keep
// their ranges.
//
// # Determinism
//
// A suite takes every seed from its own constants, so two runs give the same cells. The run time is
// printed and is in no document.
//
// # Locks
//
// Report has one mutex, for the reported results. No call is made under it.
package reproduce
