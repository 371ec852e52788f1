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
	// Predictions is the number of predicted cells with a published value. Within is the number of
	// predictions that deviate from the published value by at most NoteAbove.
	Predictions int `json:"predictions"`
	Within      int `json:"within_5_percent"`
	// Fitted, Derived and Checks are the numbers of the other cells, by kind. Checks have no
	// published value.
	Fitted  int `json:"fitted"`
	Derived int `json:"derived"`
	Checks  int `json:"checks"`
	// Out is the number of cells outside their accepted range, Unexplained the number of cells that
	// need a note but have none.
	Out         int `json:"out_of_range"`
	Unexplained int `json:"unexplained"`
	// MedianDeviation is the median of the predictions' absolute deviations. NaN if there
	// are no predictions.
	MedianDeviation float64 `json:"-"`
	Failed          bool    `json:"failed"`
}

// Summarize counts the cells of one result.
func (r Result) Summarize() Summary { return summarize([]Result{r}) }

// summarize counts the cells of several results.
func summarize(results []Result) Summary {
	var s Summary
	var dev []float64
	for _, r := range results {
		s.Failed = s.Failed || r.Err != nil
		for _, t := range r.Tables {
			dev = s.count(t, dev)
		}
	}
	s.MedianDeviation = median(dev)
	return s
}

// count adds the cells of a table to s. It appends the deviations of the table's predictions to
// dev, and returns dev.
func (s *Summary) count(t Table, dev []float64) []float64 {
	for _, c := range t.Cells {
		s.Cells++
		switch {
		case c.Kind == Fitted:
			s.Fitted++
		case c.Kind == Derived:
			s.Derived++
		case !c.Published():
			s.Checks++
		default:
			s.Predictions++
			d := math.Abs(c.Deviation())
			if d <= NoteAbove || c.Ours == c.Paper {
				s.Within++
			}
			if !math.IsNaN(d) { // the published value is not 0
				dev = append(dev, d)
			}
		}
		if !c.OK() {
			s.Out++
		}
		if c.NeedsNote() {
			s.Unexplained++
		}
	}
	return dev
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
		textOmissions(&b, "not reproduced", r.Missing)
		textOmissions(&b, "left out of this quick run", r.LeftOut)
		if r.Err != nil {
			fmt.Fprintf(&b, "%s failed: %v\n\n", r.Suite, r.Err)
		}
	}
	tw := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "suite\tpredictions\twithin 5 %\tmedian deviation\tfitted\tderived\tchecks\tout of range\tunexplained\ttime")
	for _, r := range results {
		s := r.Summarize()
		fmt.Fprintf(tw, "%s\t%d\t%d\t%s\t%d\t%d\t%d\t%d\t%d\t%s\n", r.Suite, s.Predictions, s.Within, percent(s.MedianDeviation, false), s.Fitted, s.Derived, s.Checks, s.Out, s.Unexplained, r.Elapsed.Round(time.Millisecond))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// textOmissions lists the omissions for a terminal.
func textOmissions(b *strings.Builder, title string, omitted []Omission) {
	for _, o := range omitted {
		fmt.Fprintf(b, "%s: %s: %s\n", title, o.What, o.Why)
	}
	if len(omitted) > 0 {
		b.WriteByte('\n')
	}
}

func textTable(b *strings.Builder, t Table) {
	fmt.Fprintf(b, "%s (%s)\n", t.Title, t.Source)
	tw := tabwriter.NewWriter(b, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "  \tid\tkind\tpaper\tours\tdeviation\taccepted\t")
	var notes []string
	for _, c := range t.Cells {
		mark := verdict(c)
		if c.Note != "" {
			mark = strings.TrimSpace(fmt.Sprintf("%s [%d]", mark, note(&notes, c.Note)))
		}
		fmt.Fprintf(tw, "  %s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", named(c), c.ID, c.Claim(), published(c), ours(c), percent(c.Deviation(), true), accepted(c), mark)
	}
	_ = tw.Flush() // writing to a strings.Builder never fails
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
	if slices.ContainsFunc(results, func(r Result) bool { return len(r.LeftOut) > 0 }) {
		b.WriteString("**This page is of a quick run** (`--quick`). Each suite ends with what that leaves out.\n\n")
	}
	b.WriteString("| suite | paper | predictions | within 5 % | median deviation |\n| --- | --- | --- | --- | --- |\n")
	row := func(suite, paper string, s Summary) {
		fmt.Fprintf(&b, "| %s | %s | %d | %d | %s |\n", suite, paper, s.Predictions, s.Within, percent(s.MedianDeviation, false))
	}
	for _, r := range results {
		row(fmt.Sprintf("[%s](#%s)", r.Suite, r.Suite), r.Paper, r.Summarize())
	}
	all := summarize(results)
	row("all", "", all)
	fmt.Fprintf(&b, "\nNot in these totals: %d fitted cells, %d derived cells and %d checks. Of all %d cells, %d lie outside their accepted range.\n\n", all.Fitted, all.Derived, all.Checks, all.Cells, all.Out)
	b.WriteString("Which code of the product each suite runs:\n\n")
	for _, r := range results {
		fmt.Fprintf(&b, "- **%s**: %s\n", r.Suite, r.Drives)
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
		markdownOmissions(&b, "Not reproduced", r.Suite, r.Missing)
		markdownOmissions(&b, "Left out of this quick run", r.Suite, r.LeftOut)
		if r.Err != nil {
			fmt.Fprintf(&b, "\n**This suite failed:** %s\n", cell(r.Err.Error()))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

const pageHead = `# The papers' numbers and ours

This page is made by ` + "`make reproduce`" + ` (` + "`penstock sim reproduce --write docs/reproduction.md`" + `), which fails if a number leaves its accepted
range or deviates from the paper by more than 5 % without a note. Networks and engines are simulated in virtual time.
Seeds are fixed: two runs give the same page.

Each cell is of one kind:

- **predicted**: no constant that the number depends on was chosen to meet it or another number of its figure or table. A published number is compared once.
- **fitted**: such a constant was. That such a cell agrees shows that the model can have the paper's shape, not that it foretells it.
- **derived**: arithmetic on numbers that the paper prints. It shows that our formula is the paper's.
- **check**: the paper prints no number; the accepted range is ours, or an order that the paper states in words.

The totals count predictions only.

`

// markdownOmissions lists a suite's omissions for docs/reproduction.md.
func markdownOmissions(b *strings.Builder, title, suite string, omitted []Omission) {
	if len(omitted) == 0 {
		return
	}
	fmt.Fprintf(b, "\n### %s: %s\n\n", title, suite)
	for _, o := range omitted {
		fmt.Fprintf(b, "- %s: %s\n", o.What, o.Why)
	}
}

func markdownTable(b *strings.Builder, t Table) {
	fmt.Fprintf(b, "\n### %s\n\n%s.", t.Title, strings.TrimSuffix(t.Source, "."))
	if t.Text != "" {
		fmt.Fprintf(b, " %s", t.Text)
	}
	if t.Command != "" {
		fmt.Fprintf(b, " `%s`", t.Command)
	}
	b.WriteString("\n\n| | id | kind | paper | ours | deviation | accepted | |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n")
	var notes []string
	for _, c := range t.Cells {
		mark := verdict(c)
		if c.Note != "" {
			mark = strings.TrimSpace(fmt.Sprintf("%s (%d)", mark, note(&notes, c.Note)))
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s | %s | %s |\n", cell(named(c)), c.ID, c.Claim(), published(c), ours(c), percent(c.Deviation(), true), accepted(c), mark)
	}
	if len(notes) > 0 {
		b.WriteByte('\n')
	}
	for i, n := range notes {
		fmt.Fprintf(b, "%d. %s\n", i+1, n)
	}
}

// cell escapes text so that it stays within one cell of a table.
func cell(s string) string {
	return strings.NewReplacer("|", "\\|", "\n", " ").Replace(s)
}

// note returns the number of a note, counted from 1, and appends the note if it is new.
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

// Number formats a value with four significant digits, or with more if the integer part is longer.
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

// JSON returns the value that WriteJSON encodes, for callers that encode JSON themselves.
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

// SaveFigures writes every figure into dir as PNG and SVG and returns their number.
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
