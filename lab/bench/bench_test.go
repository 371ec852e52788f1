package bench

import (
	"context"
	"errors"
	"flag"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestSummarize(t *testing.T) {
	for _, c := range []struct {
		in   []float64
		want Summary
	}{
		{[]float64{3}, Summary{3, 3, 3}},
		{[]float64{5, 1, 3}, Summary{3, 1, 5}},
		{[]float64{4, 1, 3, 2}, Summary{2.5, 1, 4}},
	} {
		before := slices.Clone(c.in)
		if got := Summarize(c.in); got != c.want {
			t.Errorf("Summarize(%v) = %v, want %v", c.in, got, c.want)
		}
		if !slices.Equal(before, c.in) {
			t.Errorf("Summarize changed its argument to %v", c.in)
		}
	}
}

func TestQuantile(t *testing.T) {
	d := make([]time.Duration, 100)
	for i := range d {
		d[99-i] = time.Duration(i)
	}
	for q, want := range map[float64]time.Duration{0: 0, 0.5: 50, 0.99: 99, 1: 99} {
		if got := Quantile(d, q); got != want {
			t.Errorf("Quantile(0…99, %v) = %v, want %v", q, got, want)
		}
	}
	if got := Quantile(nil, 0.5); got != 0 {
		t.Errorf("Quantile of nothing = %v", got)
	}
}

// script is a contender that returns the given rates in order.
func script(name string, rates ...float64) Contender {
	return Contender{Name: name, Turn: func(context.Context) (Sample, error) {
		r := rates[0]
		if rates = rates[1:]; r < 0 {
			return nil, errors.New("no power")
		}
		return Sample{Rate: r, CPU: 100 / r}, nil
	}}
}

func options(rounds, warmup int) RunOptions {
	return RunOptions{Rounds: rounds, Warmup: warmup, Rand: rand.New(rand.NewPCG(1, 2))}
}

// TestRatioWithinRound: the machine slows down tenfold from round to round, and the ratio does not
// change.
func TestRatioWithinRound(t *testing.T) {
	res, err := Run(t.Context(), Comparison{
		Name:       "work",
		Contenders: []Contender{script("a", 1e9, 900, 90, 9), script("b", 1, 1000, 100, 10)},
		Measures:   []Measure{Ratio("a/b", Rate, "a", "b", AtLeast(0.9)), Ratio("cpu", CPU, "a", "b", AtMost(1))},
	}, options(3, 1))
	if err != nil {
		t.Fatal(err)
	}
	if m := res.Measures[0]; m.Summary != (Summary{0.9, 0.9, 0.9}) || !m.Met {
		t.Errorf("a/b = %+v, want 0.9 in each round, and met", m)
	}
	if m := res.Measures[1]; m.Met {
		t.Errorf("cpu = %+v is above its target and counts as met", m)
	}
	if got := res.Absolute[0].Metrics[Rate]; got != (Summary{90, 9, 900}) {
		t.Errorf("rate of a = %+v: the warm-up round counts?", got)
	}
}

// TestMissing: a contender that cannot run, or fails later, is listed with the reason. Measures
// that need it are computed from the rounds that have it.
func TestMissing(t *testing.T) {
	res, err := Run(t.Context(), Comparison{
		Name: "work",
		Contenders: []Contender{
			script("a", 1, 2, 3),
			{Name: "b", NotRun: "b is not installed"},
			script("c", 2, -1),
		},
		Measures: []Measure{Ratio("a/b", Rate, "a", "b", Target{}), Ratio("a/c", Rate, "a", "c", Target{})},
	}, options(3, 0))
	if err != nil {
		t.Fatal(err)
	}
	want := []Missing{{"b", "b is not installed"}, {"c", "no power"}}
	if !slices.Equal(res.NotRun, want) {
		t.Errorf("not run: %v, want %v", res.NotRun, want)
	}
	if len(res.Measures) != 1 || res.Measures[0].Name != "a/c" || res.Measures[0].Median != 0.5 {
		t.Errorf("measures: %+v, want a/c = 0.5 only", res.Measures)
	}
}

// TestShuffle: each contender is first in some round.
func TestShuffle(t *testing.T) {
	var order strings.Builder
	contender := func(name string) Contender {
		return Contender{Name: name, Turn: func(context.Context) (Sample, error) {
			order.WriteString(name)
			return Sample{Rate: 1}, nil
		}}
	}
	if _, err := Run(t.Context(), Comparison{Contenders: []Contender{contender("a"), contender("b")}}, options(20, 0)); err != nil {
		t.Fatal(err)
	}
	first := make(map[byte]int)
	for i := 0; i < order.Len(); i += 2 {
		first[order.String()[i]]++
	}
	if first['a'] == 0 || first['b'] == 0 || first['a']+first['b'] != 20 {
		t.Errorf("who came first: %v", first)
	}
}

func TestCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	_, err := Run(ctx, Comparison{Name: "work", Contenders: []Contender{{Name: "a", Turn: func(context.Context) (Sample, error) {
		cancel()
		return nil, ctx.Err()
	}}}}, options(3, 0))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("err = %v, want context.Canceled", err)
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.00123: "0.0012", 0.5: "0.50", 9.994: "9.99", 12.34: "12.3", 99.96: "100", 1234567: "1,234,567", -1234: "-1,234", -123: "-123",
	} {
		if got := number(v); got != want {
			t.Errorf("number(%v) = %q, want %q", v, got, want)
		}
	}
}

func testReport() Report {
	return Report{
		Suite: "store", Machine: "2 × a CPU", Commit: "abc", Command: "penstock bench store", Setup: []string{"on huge pages"},
		Results: []Result{{
			Name: "read 64 KiB", Unit: "MiB/s", Rounds: 3,
			Measures: []Measured{
				{Name: "bandwidth / fio", Target: AtLeast(0.95), Summary: Summary{0.97, 0.9, 1.02}, Met: true},
				{Name: "CPU / fio", Target: AtMost(1.3), Summary: Summary{1.5, 1.4, 1.6}},
				{Name: "p99", Unit: "µs", Summary: Summary{12345, 1, 99999}, Met: true},
			},
			Absolute: []Absolute{
				{"ours", map[string]Summary{Rate: {1940, 1900, 2000}, CPU: {120, 110, 130}, "p99 µs": {7, 6, 8}, "p50 µs": {3, 2, 4}}},
				{"fio", map[string]Summary{Rate: {2000, 1, 2}}},
			},
			NotRun: []Missing{{"a rival", "it is\nnot installed"}},
			Notes:  []string{"whole slots"},
		}, {
			Name: "turns", Unit: "turns/s",
			Absolute: []Absolute{
				{"basic", map[string]Summary{Rate: {3, 3, 3}, "a ms": {1, 1, 1}, "b ms": {2, 2, 2}, "c ms": {3, 3, 3}, "d ms": {4, 4, 4}, "e ms": {5, 5, 5}}},
				{"dualpath", map[string]Summary{Rate: {6, 6, 6}, "a ms": {1, 1, 1}, "f ms": {1234, 1, 2}}},
			},
		}, {Name: "write", Measures: []Measured{{Name: "ratio", Summary: Summary{1, 1, 1}, Met: true}}}},
		Text:   []string{"LRU  1\nFIFO 2\n"},
		NotRun: []Missing{{"local", "no arena"}},
	}
}

// TestMarkdown compares the report with testdata/report.md. go test -update rewrites the file.
func TestMarkdown(t *testing.T) {
	golden := filepath.Join("testdata", "report.md")
	got := testReport().Markdown()
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the report is\n%s\nand %s has\n%s", got, golden, want)
	}
}

var update = flag.Bool("update", false, "write the golden files anew")

func TestJSON(t *testing.T) {
	var b strings.Builder
	if err := testReport().WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	back, err := ReadReport(strings.NewReader(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	if back.Markdown() != testReport().Markdown() {
		t.Errorf("the report changed on its way through JSON:\n%s", back.Markdown())
	}
}

func TestMerge(t *testing.T) {
	old := Report{Suite: "s", Commit: "1", Results: []Result{{Name: "a", Rounds: 1}, {Name: "b", Rounds: 1}}, Text: []string{"kept"}}
	got := old.Merge(Report{Suite: "s", Commit: "2", Results: []Result{{Name: "b", Rounds: 2}, {Name: "c", Rounds: 2}}})
	var names []string
	for _, r := range got.Results {
		names = append(names, r.Name)
	}
	if strings.Join(names, "") != "abc" || got.Results[0].Rounds != 1 || got.Results[1].Rounds != 2 || got.Commit != "2" || len(got.Text) != 1 {
		t.Errorf("merged: %+v", got)
	}
}

// TestSections: a section is merged by its name, printed below the suite, and goes to a
// place of its own in a page. A run of a section alone leaves the suite's results alone.
func TestSections(t *testing.T) {
	results := func(name string) []Result { return []Result{{Name: name, NotRun: []Missing{{"x", "why"}}}} }
	whole := Report{Suite: "s", Results: results("a"), Sections: []Report{{Suite: "s-one", Results: results("b")}}}
	whole.Ran("here", "1", "bench s")
	part := Report{Suite: "s", Sections: []Report{{Suite: "s-one", Results: results("c")}, {Suite: "s-two", Results: results("d")}}}
	part.Ran("there", "2", "bench s")
	got := whole.Merge(part)
	if got.Commit != "1" || len(got.Results) != 1 || len(got.Sections) != 2 || len(got.Sections[0].Results) != 2 || got.Sections[0].Commit != "2" || got.Sections[1].Machine != "there" {
		t.Errorf("merged: %+v", got)
	}
	if len(whole.Sections[0].Results) != 1 {
		t.Error("Merge changed the older report")
	}
	const a = "- not run: a, x: why\n\nCommand: `bench s`, commit 1.\n"
	const b = "- not run: b, x: why\n\nCommand: `bench s`, commit 1.\n"
	if text := whole.Markdown(); text != a+"\n"+b {
		t.Errorf("Markdown %q", text)
	}
	if text := part.Markdown(); strings.Contains(text, "a, x") || !strings.HasPrefix(text, "- not run: c") {
		t.Errorf("Markdown of sections %q", text)
	}
	const page = "<!-- s -->\nold\n<!-- /s -->\n<!-- s-one -->\nold\n<!-- /s-one -->\n<!-- machine -->\nold\n<!-- /machine -->\n"
	pages := Pages{"p": page}
	err := pages.Put(whole)
	if want := "<!-- s -->\n\n" + a + "\n<!-- /s -->\n<!-- s-one -->\n\n" + b + "\n<!-- /s-one -->\n<!-- machine -->\n\nhere\n\n<!-- /machine -->\n"; err != nil || pages["p"] != want {
		t.Errorf("page %q, %v; want %q", pages["p"], err, want)
	}
	part.Sections = part.Sections[:1]
	pages = Pages{"p": page}
	err = pages.Put(part)
	if text := pages["p"]; err != nil || !strings.HasPrefix(text, "<!-- s -->\nold\n") || !strings.Contains(text, "c, x: why") || !strings.Contains(text, "<!-- machine -->\nold\n") {
		t.Errorf("page %q, %v", text, err)
	}
	part.Sections[0].Suite = "s-three"
	if err := pages.Put(part); err == nil {
		t.Error("a page without a place for the section was accepted")
	}
}

func TestSplice(t *testing.T) {
	page := "# Results\n<!-- store -->\nold\n<!-- /store -->\ntail\n"
	got, err := splice(page, "store", "new\n\n")
	if err != nil || got != "# Results\n<!-- store -->\n\nnew\n\n<!-- /store -->\ntail\n" {
		t.Errorf("splice = %q, %v", got, err)
	}
	again, err := splice(got, "store", "new")
	if err != nil || again != got {
		t.Errorf("splicing the same again gives %q, %v", again, err)
	}
	if _, err := splice(page, "index", "x"); err == nil {
		t.Error("a page without the markers was accepted")
	}
}

// TestPages: a report's tables go to the page with its suite's markers. The report names the
// machine of the summary unless it ran in a laboratory, which its tables then name.
func TestPages(t *testing.T) {
	const summary = "<!-- machine -->\nold machine\n<!-- /machine -->\n"
	const rdma = "<!-- rdma -->\nold\n<!-- /rdma -->\n<!-- rdma-verbs -->\nold\n<!-- /rdma-verbs -->\n"
	pages := Pages{"summary.md": summary, "rdma.md": rdma}
	if err := pages.Put(Report{Suite: "rdma", Machine: "two CPUs", Command: "bench rdma", Commit: "1"}); err != nil {
		t.Fatal(err)
	}
	if want := strings.Replace(summary, "-->\nold machine\n", "-->\n\ntwo CPUs\n\n", 1); pages["summary.md"] != want {
		t.Errorf("summary %q, want %q", pages["summary.md"], want)
	}
	want := "<!-- rdma -->\n\nCommand: `bench rdma`, commit 1.\n\n<!-- /rdma -->\n<!-- rdma-verbs -->\nold\n<!-- /rdma-verbs -->\n"
	if pages["rdma.md"] != want {
		t.Errorf("page %q, want %q", pages["rdma.md"], want)
	}
	before := maps.Clone(pages)
	if err := pages.Put(Report{Suite: "rdma-verbs", Machine: "emulated CPUs", Within: "a guest", Command: "bench rdma", Commit: "2"}); err != nil {
		t.Fatal(err)
	}
	want = strings.Replace(want, "-->\nold\n", "-->\n\n- measured in a guest: emulated CPUs\n\nCommand: `bench rdma`, commit 2.\n\n", 1)
	if pages["rdma.md"] != want || pages["summary.md"] != before["summary.md"] {
		t.Errorf("pages %q, want %q and the summary as before", pages, want)
	}
	before = maps.Clone(pages)
	if err := pages.Put(Report{Suite: "rdma", Sections: []Report{{Suite: "rdma-shm"}}}); err == nil || !maps.Equal(pages, before) {
		t.Errorf("a report without a place: error %v, pages %q", err, pages)
	}
}

// TestSummary: a measure with a target has one row over all comparisons that have it.
func TestSummary(t *testing.T) {
	one := func(name string, median float64, met bool) Result {
		return Result{Name: name, Measures: []Measured{
			{Name: "bandwidth / fio", Target: AtLeast(0.95), Summary: Summary{Median: median}, Met: met},
			{Name: "CPU / fio", Summary: Summary{Median: 7}},
		}}
	}
	r := testReport()
	r.Results = append(r.Results, one("read 1 MiB", 0.9, false), one("read 4 MiB", 1.1, true))
	pages := Pages{"p": "<!-- store -->\n<!-- /store -->\n<!-- summary store -->\n<!-- /summary store -->\n<!-- machine -->\n<!-- /machine -->\n"}
	if err := pages.Put(r); err != nil {
		t.Fatal(err)
	}
	const want = `<!-- summary store -->

| measure         | target | met in | lowest | median | highest |
| --------------- | ------ | ------ | ------ | ------ | ------- |
| bandwidth / fio | ≥ 0.95 | 2 of 3 | 0.90   | 0.97   | 1.10    |
| CPU / fio       | ≤ 1.30 | 0 of 1 | 1.50   | 1.50   | 1.50    |

Commit abc.

<!-- /summary store -->`
	if !strings.Contains(pages["p"], want) {
		t.Errorf("page %s\nwant %s", pages["p"], want)
	}
}
