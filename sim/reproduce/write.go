package reproduce

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// Summary counts cells.
type Summary struct {
	Cells int `json:"cells"`
	// Published have a value in the paper.
	Published int `json:"published"`
	// Out lie outside their accepted range; Unexplained deviate without a note.
	Out         int `json:"out_of_range"`
	Unexplained int `json:"unexplained"`
	// MedianDeviation of those published, without sign; NaN without any.
	MedianDeviation float64 `json:"-"`
	Failed          bool    `json:"failed"`
}

// Summarize counts the cells of one result.
func (r Result) Summarize() Summary {
	s := Summary{Failed: r.Err != nil}
	var dev []float64
	for _, t := range r.Tables {
		for _, c := range t.Cells {
			s.Cells++
			if !math.IsNaN(c.Paper) {
				s.Published++
			}
			if d := math.Abs(c.Deviation()); !math.IsNaN(d) {
				dev = append(dev, d)
			}
			if !c.OK() {
				s.Out++
			}
			if c.NeedsNote() {
				s.Unexplained++
			}
		}
	}
	s.MedianDeviation = median(dev)
	return s
}

// OK reports whether the suite ran to its end with every cell in its range and
// every deviation explained.
func (s Summary) OK() bool { return !s.Failed && s.Out == 0 && s.Unexplained == 0 && s.Cells > 0 }

func median(v []float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(v))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

// WriteText prints the tables for a terminal.
func WriteText(w io.Writer, results []Result) error {
	var b strings.Builder
	for _, r := range results {
		fmt.Fprintf(&b, "%s: %s\n\n", r.Suite, r.Paper)
		for _, t := range r.Tables {
			textTable(&b, t)
		}
		if r.Err != nil {
			fmt.Fprintf(&b, "%s failed: %v\n\n", r.Suite, r.Err)
		}
	}
	tw := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "suite\tcells\tpublished\tmedian deviation\tout of range\tunexplained\ttime")
	for _, r := range results {
		s := r.Summarize()
		fmt.Fprintf(tw, "%s\t%d\t%d\t%s\t%d\t%d\t%s\n", r.Suite, s.Cells, s.Published, percent(s.MedianDeviation, false), s.Out, s.Unexplained, r.Elapsed.Round(time.Millisecond))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func textTable(b *strings.Builder, t Table) {
	fmt.Fprintf(b, "%s (%s)\n", t.Title, t.Source)
	tw := tabwriter.NewWriter(b, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "  \tid\tpaper\tours\tdeviation\taccepted\t")
	var notes []string
	for _, c := range t.Cells {
		mark := verdict(c)
		if c.Note != "" {
			mark = strings.TrimSpace(fmt.Sprintf("%s [%d]", mark, note(&notes, c.Note)))
		}
		fmt.Fprintf(tw, "  %s\t%s\t%s\t%s\t%s\t%s\t%s\n", named(c), c.ID, published(c), ours(c), percent(c.Deviation(), true), accepted(c), mark)
	}
	_ = tw.Flush() // a strings.Builder takes everything
	for i, n := range notes {
		fmt.Fprintf(b, "  [%d] %s\n", i+1, n)
	}
	b.WriteByte('\n')
}

// WriteMarkdown prints the page docs/reproduction.md. figure returns the link to
// a figure, or "" for none.
func WriteMarkdown(w io.Writer, results []Result, figure func(Figure) string) error {
	var b strings.Builder
	b.WriteString(pageHead)
	b.WriteString("| suite | paper | cells | published | median deviation | out of range |\n| --- | --- | --- | --- | --- | --- |\n")
	for _, r := range results {
		s := r.Summarize()
		fmt.Fprintf(&b, "| [%s](#%s) | %s | %d | %d | %s | %d |\n", r.Suite, r.Suite, r.Paper, s.Cells, s.Published, percent(s.MedianDeviation, false), s.Out)
	}
	for _, r := range results {
		fmt.Fprintf(&b, "\n## %s\n\n%s. Alone: `penstock sim reproduce %s`.\n", r.Suite, r.Paper, r.Suite)
		for _, t := range r.Tables {
			markdownTable(&b, t)
		}
		for _, f := range r.Figures {
			if link := figure(f); link != "" {
				fmt.Fprintf(&b, "\n![%s](%s)\n", f.Title, link)
			}
		}
		if r.Err != nil {
			fmt.Fprintf(&b, "\n**This suite failed:** %s\n", cell(r.Err.Error()))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

const pageHead = `# The papers' numbers and ours

This page is made by ` + "`make reproduce`" + ` (` + "`penstock sim reproduce --write docs/reproduction.md`" + `), which fails if a number leaves its accepted
range or deviates from the paper by more than 5 % without a note. The decisions are made by the planner that production
runs; the networks and engines around it are simulated in virtual time. Seeds are fixed: two runs give the same page.

`

func markdownTable(b *strings.Builder, t Table) {
	fmt.Fprintf(b, "\n### %s\n\n%s.", t.Title, strings.TrimSuffix(t.Source, "."))
	if t.Text != "" {
		fmt.Fprintf(b, " %s", t.Text)
	}
	if t.Command != "" {
		fmt.Fprintf(b, " `%s`", t.Command)
	}
	b.WriteString("\n\n| | id | paper | ours | deviation | accepted | |\n| --- | --- | --- | --- | --- | --- | --- |\n")
	var notes []string
	for _, c := range t.Cells {
		mark := verdict(c)
		if c.Note != "" {
			mark = strings.TrimSpace(fmt.Sprintf("%s (%d)", mark, note(&notes, c.Note)))
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s | %s |\n", cell(named(c)), c.ID, published(c), ours(c), percent(c.Deviation(), true), accepted(c), mark)
	}
	if len(notes) > 0 {
		b.WriteByte('\n')
	}
	for i, n := range notes {
		fmt.Fprintf(b, "%d. %s\n", i+1, n)
	}
}

// cell keeps text within one cell of a table.
func cell(s string) string {
	return strings.NewReplacer("|", "\\|", "\n", " ").Replace(s)
}

// note returns the number of a note, from 1; one that is there already is not
// repeated.
func note(notes *[]string, text string) int {
	if i := slices.Index(*notes, text); i >= 0 {
		return i + 1
	}
	*notes = append(*notes, text)
	return len(*notes)
}

func named(c Cell) string {
	if c.Unit == "" || c.Unit == UnitHolds {
		return c.Name
	}
	return c.Name + ", " + c.Unit
}

func published(c Cell) string {
	if math.IsNaN(c.Paper) {
		return ""
	}
	return Number(c.Paper)
}

func ours(c Cell) string {
	if c.Unit == UnitHolds {
		if c.Ours == 1 {
			return "holds"
		}
		return "does not hold"
	}
	if c.Std != 0 {
		return Number(c.Ours) + " ± " + digits(c.Std, 2)
	}
	return Number(c.Ours)
}

func accepted(c Cell) string {
	switch {
	case c.Unit == UnitHolds:
		return ""
	case math.IsInf(c.Low, -1) && math.IsInf(c.High, 1):
		return "any"
	case math.IsInf(c.Low, -1):
		return "≤ " + Number(c.High)
	case math.IsInf(c.High, 1):
		return "≥ " + Number(c.Low)
	case c.Low == c.High:
		return "exact"
	}
	return Number(c.Low) + " to " + Number(c.High)
}

func verdict(c Cell) string {
	switch {
	case !c.OK():
		return "OUT"
	case c.NeedsNote():
		return "UNEXPLAINED"
	}
	return ""
}

// Number words a value with four significant digits, and all those before the
// point.
func Number(v float64) string { return digits(v, 4) }

func digits(v float64, significant int) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v):
		return "none"
	case a >= 1000 || a == math.Trunc(a):
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a < 1e-4:
		return strconv.FormatFloat(v, 'g', 3, 64)
	default:
		behind := max(significant-1-int(math.Floor(math.Log10(a))), 0)
		text := strconv.FormatFloat(v, 'f', behind, 64)
		if behind == 0 {
			return text
		}
		return strings.TrimSuffix(strings.TrimRight(text, "0"), ".")
	}
}

func percent(v float64, signed bool) string {
	if math.IsNaN(v) {
		return ""
	}
	if signed {
		return fmt.Sprintf("%+.1f %%", 100*v)
	}
	return fmt.Sprintf("%.1f %%", 100*v)
}

// resultJSON is a result with its error as text.
type resultJSON struct {
	Result
	Error   string  `json:"error,omitempty"`
	OK      bool    `json:"ok"`
	Seconds float64 `json:"seconds"`
	Summary Summary `json:"summary"`
}

// JSON is what WriteJSON writes, for callers that print JSON themselves.
func JSON(results []Result) any {
	out := make([]resultJSON, len(results))
	for i, r := range results {
		s := r.Summarize()
		out[i] = resultJSON{Result: r, OK: s.OK(), Seconds: r.Elapsed.Seconds(), Summary: s}
		if r.Err != nil {
			out[i].Error = r.Err.Error()
		}
	}
	return out
}

// WriteJSON writes the results for a program.
func WriteJSON(w io.Writer, results []Result) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(JSON(results))
}

// SaveFigures writes every figure into dir as PNG and SVG and returns how many
// there were.
func SaveFigures(dir string, results []Result) (int, error) {
	n := 0
	for _, r := range results {
		for _, f := range r.Figures {
			if _, err := f.Chart.Save(dir, f.Name); err != nil {
				return n, err
			}
			n++
		}
	}
	return n, nil
}
