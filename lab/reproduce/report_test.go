package reproduce

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/internal/chart"
	"github.com/penstock-kv/penstock/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestCells(t *testing.T) {
	nan := math.NaN()
	for _, c := range []struct {
		cell  Cell
		ok    bool
		note  bool
		words string // published, ours, accepted
	}{
		{Near("", "a", "s", 100, 101, 0.02), true, false, "100|101|98 to 102"},
		{Near("", "a", "s", 100, 103, 0.02), false, false, "100|103|98 to 102"},
		{Near("", "a", "s", -100, -101, 0.02), true, false, "-100|-101|-102 to -98"},
		{Near("", "a", "s", 100, 106, 0.1), true, true, "100|106|90 to 110"},
		{Near("", "a", "s", 100, 106, 0.1).Noted("because of %d", 1), true, false, "100|106|90 to 110"},
		{Within("", "a", "s", 100, 106, 105, 110), true, true, "100|106|105 to 110"},
		{Within("", "a", "s", 100, 104, 103, 110), true, true, "100|104|103 to 110"},
		{Within("", "a", "s", nan, 7, 0, math.Inf(1)), true, false, "|7|≥ 0"},
		{Within("", "a", "s", nan, 7, math.Inf(-1), 6.5), false, false, "|7|≤ 6.5"},
		{Within("", "a", "s", nan, nan, 0, 1), false, false, "|none|0 to 1"},
		{Within("", "a", "", 0, 0, 0, 0), true, false, "0|0|exact"},
		{Holds("", "order", true), true, false, "|holds|"},
		{Holds("", "order", false), false, false, "|does not hold|"},
		{Cell{Name: "a", Paper: 10, Ours: 10.25, Std: 0.125, Low: 9, High: 11}, true, false, "10|10.25 ± 0.12|9 to 11"},
	} {
		words := published(c.cell) + "|" + ours(c.cell) + "|" + accepted(c.cell)
		if c.cell.OK() != c.ok || c.cell.NeedsNote() != c.note || words != c.words {
			t.Errorf("%+v: ok %v, needs a note %v, %q; want %v, %v, %q", c.cell, c.cell.OK(), c.cell.NeedsNote(), words, c.ok, c.note, c.words)
		}
	}
	if d := Near("", "a", "", 200, 150, 1).Deviation(); d != -0.25 {
		t.Error(d)
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 3: "3", -3: "-3", 3.24: "3.24", 3.2466: "3.247", 0.882: "0.882", 0.00012345: "0.0001234", 0.5: "0.5", 0.99999: "1",
		12.345: "12.35", 1969.4: "1969", 27313.2: "27313", 1e-7: "1e-07", -0.0456: "-0.0456",
	} {
		if got := Number(v); got != want {
			t.Errorf("%v is %q, want %q", v, got, want)
		}
	}
}

// fake returns a suite with one valid table, a figure, and the additional cells.
func fake(name string, more ...Cell) Suite {
	return Suite{Name: name, Paper: "A paper", Run: func(ctx context.Context, r *Report) error {
		v := make([]float64, 8)
		err := r.Each(ctx, "squares", len(v), func(_ context.Context, i int) error {
			v[i] = float64(i * i)
			return nil
		})
		cells := append([]Cell{Near("X-1", "last square", "s", 49, v[7], 0.01), Holds("X-2", "they grow | always", v[7] > v[1])}, more...)
		r.Missing("cubes", "none were asked for")
		r.Table(Table{Title: "Squares", Kind: Predicted, Source: "A paper, Table 1", Text: "Nothing was assumed.", Command: "penstock sim reproduce " + name, Cells: cells})
		r.Figure(Figure{Name: name + "-fig1", Title: "Squares", Chart: chart.Chart{Title: "Squares", Series: []chart.Series{{Name: "ours", X: []float64{0, 1, 2}, Y: []float64{0, 1, math.NaN()}}}}})
		return err
	}}
}

func TestRun(t *testing.T) {
	broken := Suite{Name: "broken", Paper: "Another", Run: func(context.Context, *Report) error { return errors.New("no trace") }}
	var mu sync.Mutex
	last := make(map[string]int)
	results, err := Run(t.Context(), []Suite{fake("good"), broken, fake("bad", Near("", "far off", "", 1, 2, 0.1), Near("", "unsaid", "", 1, 1.2, 0.5),
		Near("", "chosen so", "", 1, 1, 0).As(Fitted), Near("", "worked out", "", 1, 1, 0).As(Derived))},
		Options{Workers: 2, Progress: func(suite string, done, total int, what string) {
			mu.Lock()
			defer mu.Unlock()
			if total != 8 || what != "squares" {
				t.Errorf("progress %d of %d, %s", done, total, what)
			}
			last[suite] = max(last[suite], done)
		}})
	if err != nil {
		t.Fatal(err)
	}
	if last["good"] != 8 || last["bad"] != 8 {
		t.Errorf("progress ended at %v", last)
	}
	want := []Summary{{Cells: 2, Predictions: 1, Within: 1, Checks: 1}, {Failed: true}, {Cells: 6, Predictions: 3, Within: 1, Checks: 1, Fitted: 1, Derived: 1, Out: 1, Unexplained: 2}}
	for i, r := range results {
		s := r.Summarize()
		s.MedianDeviation = 0
		if s != want[i] {
			t.Errorf("%s: %+v, want %+v", r.Suite, s, want[i])
		}
		if s.OK() != (i == 0) {
			t.Errorf("%s: ok %v", r.Suite, s.OK())
		}
	}

	var text, page, raw bytes.Buffer
	if err := errors.Join(WriteText(&text, results), WriteJSON(&raw, results),
		WriteMarkdown(&page, results, func(f Figure) string { return "figures/" + f.Name + ".svg" })); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"Squares (A paper, Table 1)", "far off", "OUT", "UNEXPLAINED", "broken failed: no trace", "not reproduced: cubes: none were asked for"} {
		if !strings.Contains(text.String(), line) {
			t.Errorf("the text has no %q:\n%s", line, &text)
		}
	}
	for _, line := range []string{
		"| last square, s | X-1 | predicted | 49 | 49 | +0.0 % | 48.51 to 49.49 |  |\n",
		"| they grow \\| always | X-2 | check |  | holds |  |  |  |\n",
		"| far off |  | predicted | 1 | 2 | +100.0 % | 0.9 to 1.1 | OUT |\n",
		"![Squares](figures/bad-fig1.svg)", "**This suite failed:** no trace", "## good", "| chosen so |  | fitted |", "| worked out |  | derived |", "| all |  | 4 | 2 | 10.0 % |\n",
		"Not in these totals: 1 fitted cells, 1 derived cells and 2 checks. Of all 8 cells, 1 lie outside", "### Not reproduced: good\n\n- cubes: none were asked for\n",
	} {
		if !strings.Contains(page.String(), line) {
			t.Errorf("the page has no %q:\n%s", line, &page)
		}
	}
	var back []struct {
		Suite, Error string
		OK           bool
		Tables       []struct{ Cells []map[string]any }
		Figures      []struct{ Chart chart.Chart }
	}
	if err := json.Unmarshal(raw.Bytes(), &back); err != nil {
		t.Fatal(err)
	}
	if !back[0].OK || back[1].Error != "no trace" || back[0].Tables[0].Cells[1]["paper"] != nil || back[0].Tables[0].Cells[0]["paper"] != 49.0 {
		t.Errorf("%+v", back)
	}
	if len(back[0].Figures[0].Chart.Series[0].Y) != 3 {
		t.Error("a figure without its data")
	}
	dir := t.TempDir()
	if n, err := SaveFigures(dir, results); n != 2 || err != nil {
		t.Error(n, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "good-fig1.png")); err != nil {
		t.Error(err)
	}
}

// TestFaults: an invalid table, figure or cell fails its suite.
func TestFaults(t *testing.T) {
	cells := []Cell{Holds("", "h", true).As(Predicted)}
	c := chart.Chart{Title: "T", Series: []chart.Series{{X: []float64{1}, Y: []float64{1}}}}
	for word, hand := range map[string]func(r *Report){
		"both must be given": func(r *Report) { r.Table(Table{Title: "T", Cells: cells}) },
		"has no cells":       func(r *Report) { r.Table(Table{Title: "T", Source: "S"}) },
		"two cells":          func(r *Report) { r.Table(Table{Title: "T", Source: "S", Cells: append(cells, cells...)}) },
		"has no name": func(r *Report) {
			r.Table(Table{Title: "T", Source: "S", Kind: Predicted, Cells: []Cell{Holds("", "", true)}})
		},
		"say whether": func(r *Report) { r.Table(Table{Title: "T", Source: "S", Cells: []Cell{Holds("", "h", true)}}) },
		"asserts nothing": func(r *Report) {
			r.Table(Table{Title: "T", Source: "S", Kind: Predicted, Cells: []Cell{Within("", "a", "", math.NaN(), 1, math.Inf(-1), math.Inf(1))}})
		},
		"must be a range": func(r *Report) {
			r.Table(Table{Title: "T", Source: "S", Kind: Predicted, Cells: []Cell{Within("", "a", "", 1, 1, 2, 1)}})
		},
		"no series":       func(r *Report) { r.Figure(Figure{Name: "f"}) },
		"must be that of": func(r *Report) { r.Figure(Figure{Name: "a/b", Chart: c}) },
		"are called":      func(r *Report) { r.Figure(Figure{Name: "f", Chart: c}); r.Figure(Figure{Name: "f", Chart: c}) },
	} {
		results, err := Run(t.Context(), []Suite{{Name: "s", Run: func(_ context.Context, r *Report) error { hand(r); return nil }}}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if results[0].Err == nil || !strings.Contains(results[0].Err.Error(), word) {
			t.Errorf("%v; want %q", results[0].Err, word)
		}
	}
	if _, err := Run(t.Context(), nil, Options{Workers: -1}); err == nil {
		t.Error("-1 workers were taken")
	}
}

// TestPool: all suites together run exactly as many concurrent jobs as there are workers.
func TestPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now, most atomic.Int64
		suite := func(name string) Suite {
			return Suite{Name: name, Run: func(ctx context.Context, r *Report) error {
				return r.Each(ctx, "jobs", 20, func(context.Context, int) error {
					n := now.Add(1)
					for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
					}
					time.Sleep(time.Second)
					now.Add(-1)
					return nil
				})
			}}
		}
		start := time.Now()
		if _, err := Run(t.Context(), []Suite{suite("a"), suite("b"), suite("c")}, Options{Workers: 4}); err != nil {
			t.Fatal(err)
		}
		if most.Load() != 4 || time.Since(start) != 15*time.Second {
			t.Errorf("%d jobs at once, %v for 60 jobs of a second", most.Load(), time.Since(start))
		}
	})
}

// TestEachEnds: after the first error, or the end of the context, no further calls begin; running
// calls are awaited.
func TestEachEnds(t *testing.T) {
	var ran atomic.Int64
	results, err := Run(t.Context(), []Suite{{Name: "s", Run: func(ctx context.Context, r *Report) error {
		return r.Each(ctx, "jobs", 1000, func(ctx context.Context, i int) error {
			ran.Add(1)
			if i == 3 {
				return errors.New("job 3")
			}
			return nil
		})
	}}}, Options{Workers: 1})
	if err != nil || results[0].Err == nil || !strings.Contains(results[0].Err.Error(), "jobs, part 4 of 1000: job 3") {
		t.Error(err, results[0].Err)
	}
	if n := ran.Load(); n > 6 {
		t.Errorf("%d jobs ran after the error", n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	results, err = Run(ctx, []Suite{{Name: "s", Run: func(ctx context.Context, r *Report) error {
		return r.Each(ctx, "jobs", 10, func(ctx context.Context, i int) error {
			cancel()
			<-ctx.Done()
			return ctx.Err()
		})
	}}}, Options{})
	if !errors.Is(err, context.Canceled) || !errors.Is(results[0].Err, context.Canceled) {
		t.Error(err, results[0].Err)
	}
}

func TestTrace(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "t.jsonl"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	r := &Report{opts: Options{Traces: []string{"/nonexistent", dir}}}
	if p, err := r.Trace("t.jsonl"); err != nil || p != filepath.Join(dir, "t.jsonl") {
		t.Error(p, err)
	}
	if _, err := r.Trace("u.jsonl"); err == nil || !strings.Contains(err.Error(), "/nonexistent") {
		t.Error(err)
	}
	if _, err := (&Report{}).Trace("t.jsonl"); err == nil || !strings.Contains(err.Error(), "PENSTOCK_TRACES") {
		t.Error(err)
	}
}

func TestFind(t *testing.T) {
	all, err := Find(nil)
	if err != nil || len(all) != len(Suites()) {
		t.Fatal(err)
	}
	seen := make(map[string]bool)
	for _, s := range all {
		if s.Name == "" || s.Paper == "" || s.Run == nil || seen[s.Name] {
			t.Errorf("suite %+v", s)
		}
		seen[s.Name] = true
		if one, err := Find([]string{s.Name}); err != nil || len(one) != 1 || one[0].Name != s.Name {
			t.Error(s.Name, err)
		}
	}
	if _, err := Find([]string{"nothing"}); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", "nothing")) {
		t.Error(err)
	}
}

// TestPage reads docs/reproduction.md: its totals agree with its tables, and in the
// suite dualpath no published number is predicted by two cells, which would count one
// agreement twice. (A figure of netkv has one printed range for five points.)
func TestPage(t *testing.T) {
	page, err := os.ReadFile("../../docs/reproduction.md")
	if err != nil {
		t.Fatal(err)
	}
	suite, kinds := "", make(map[string]int)
	predicted, published := make(map[string]int), make(map[string]string)
	for line := range strings.Lines(string(page)) {
		if name, ok := strings.CutPrefix(line, "## "); ok {
			suite = strings.TrimSpace(name)
		}
		c := strings.Split(line, " | ")
		if len(c) < 7 || suite == "" {
			continue
		}
		kinds[c[2]]++
		if c[2] != "predicted" {
			continue
		}
		predicted[suite]++
		if twin := published[suite+c[3]]; twin != "" && suite == "dualpath" {
			t.Errorf("%q and %q are predictions of one published number, %s", strings.TrimPrefix(twin, "| "), strings.TrimPrefix(c[0], "| "), c[3])
		}
		published[suite+c[3]] = c[0]
	}
	all := 0
	for name, n := range predicted {
		all += n
		if row := fmt.Sprintf("| [%s](#%s) | ", name, name); !strings.Contains(string(page), row) {
			t.Errorf("no total of suite %s", name)
		} else if _, rest, _ := strings.Cut(string(page), row); !strings.Contains(rest[:strings.IndexByte(rest, '\n')], fmt.Sprintf(" | %d | ", n)) {
			t.Errorf("suite %s has %d predictions, and its total is %q", name, n, rest[:strings.IndexByte(rest, '\n')])
		}
	}
	if want := fmt.Sprintf("\n| all |  | %d | ", all); !strings.Contains(string(page), want) {
		t.Errorf("no row %q", want)
	}
	if want := fmt.Sprintf("%d fitted cells, %d derived cells and %d checks", kinds["fitted"], kinds["derived"], kinds["check"]); !strings.Contains(string(page), want) {
		t.Errorf("no text %q", want)
	}
}
