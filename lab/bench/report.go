package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// Report has the results of one suite on one machine.
type Report struct {
	Suite string `json:"suite"`
	// Machine, Commit and Command describe the run.
	Machine string `json:"machine"`
	Commit  string `json:"commit"`
	Command string `json:"command"`
	// Within, if not empty, is the laboratory (such as a virtual machine) in which the suite ran.
	// Machine then differs from the machine of the other suites on a page.
	Within string   `json:"within,omitempty"`
	Setup  []string `json:"setup,omitempty"`
	// Results are in the order in which the suite ran them.
	Results []Result `json:"results"`
	// Text is preformatted output that is not a comparison.
	Text   []string  `json:"text,omitempty"`
	NotRun []Missing `json:"not_run,omitempty"`
	// Sections are parts of the suite with a separate setup and a separate place in a page.
	Sections []Report `json:"sections,omitempty"`
}

// Ran sets the machine, the commit and the command of the suite and its sections.
func (r *Report) Ran(machine, commit, command string) {
	r.Machine, r.Commit, r.Command = machine, commit, command
	for i := range r.Sections {
		r.Sections[i].Ran(machine, commit, command)
	}
}

// Empty reports whether the suite, without its sections, has no result, no missing contender and no
// text.
func (r Report) Empty() bool { return len(r.Results)+len(r.NotRun)+len(r.Text) == 0 }

// Merge returns r with the results of newer: a result replaces the result of the same name, or is
// added. It is for a suite of which some comparisons were repeated. Sections are merged by name.
func (r Report) Merge(newer Report) Report {
	r.Sections = slices.Clone(r.Sections)
	for _, section := range newer.Sections {
		i := slices.IndexFunc(r.Sections, func(old Report) bool { return old.Suite == section.Suite })
		if i < 0 {
			r.Sections = append(r.Sections, section)
			continue
		}
		r.Sections[i] = r.Sections[i].Merge(section)
	}
	if newer.Empty() && len(newer.Sections) > 0 {
		return r
	}
	for _, res := range newer.Results {
		i := slices.IndexFunc(r.Results, func(old Result) bool { return old.Name == res.Name })
		if i < 0 {
			r.Results = append(r.Results, res)
			continue
		}
		r.Results[i] = res
	}
	r.Commit, r.Command, r.Machine, r.Within = newer.Commit, newer.Command, newer.Machine, newer.Within
	if len(newer.Setup) > 0 {
		r.Setup = newer.Setup
	}
	if len(newer.Text) > 0 {
		r.Text = newer.Text
	}
	r.NotRun = newer.NotRun
	return r
}

// ReadReport reads the format of WriteJSON.
func ReadReport(in io.Reader) (Report, error) {
	var r Report
	err := json.NewDecoder(in).Decode(&r)
	return r, err
}

// WriteJSON writes the report as one object.
func (r Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(r)
}

// Markdown returns the report as tables that are readable as plain text: the measures with their
// targets, then the figures of the contenders.
func (r Report) Markdown() string {
	var parts []string
	if !r.Empty() || len(r.Sections) == 0 {
		parts = append(parts, r.tables())
	}
	for _, section := range r.Sections {
		parts = append(parts, section.Markdown())
	}
	return strings.Join(parts, "\n")
}

// tables returns the report, without its sections, as Markdown.
func (r Report) tables() string {
	var b strings.Builder
	ratios := [][]string{{"work", "measure", "target", "median", "spread", ""}}
	figures := [][]string{{"work", "contender", "rate", "CPU", "other"}}
	var wide [][][]string
	var missing []Missing
	var notes []string
	for _, res := range r.Results {
		for i, m := range res.Measures {
			ratios = append(ratios, []string{once(i, res.Name), m.Name, target(m), number(m.Median) + unit(m.Unit), number(m.Low) + "–" + number(m.High), verdict(m)})
		}
		if len(res.otherMetrics()) > manyMetrics {
			wide = append(wide, res.byMetric())
		} else {
			for i, a := range res.Absolute {
				figures = append(figures, figureRow(once(i, res.Name), res.Unit, a))
			}
		}
		for _, k := range res.NotRun {
			missing = append(missing, Missing{res.Name + ", " + k.What, k.Why})
		}
		for _, n := range res.Notes {
			notes = append(notes, res.Name+": "+n)
		}
	}
	if r.Within != "" {
		fmt.Fprintf(&b, "- measured in %s: %s\n", r.Within, r.Machine)
	}
	for _, s := range r.Setup {
		fmt.Fprintf(&b, "- %s\n", s)
	}
	if r.Within != "" || len(r.Setup) > 0 {
		b.WriteString("\n")
	}
	table(&b, ratios)
	table(&b, figures)
	for _, rows := range wide {
		table(&b, rows)
	}
	for _, t := range r.Text {
		fmt.Fprintf(&b, "```text\n%s\n```\n\n", strings.TrimRight(t, "\n"))
	}
	for _, n := range notes {
		fmt.Fprintf(&b, "- %s\n", n)
	}
	for _, k := range slices.Concat(missing, r.NotRun) {
		fmt.Fprintf(&b, "- not run: %s: %s\n", k.What, oneLine(k.Why))
	}
	if len(notes)+len(missing)+len(r.NotRun) > 0 {
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "Command: `%s`, commit %s.\n", r.Command, r.Commit)
	return b.String()
}

// once returns the name of the work for its first row (i = 0), and "" for the other rows.
func once(i int, name string) string {
	if i > 0 {
		return ""
	}
	return name
}

func target(m Measured) string {
	if m.Target.Kind == "" {
		return "–"
	}
	return m.Target.String() + unit(m.Unit)
}

func verdict(m Measured) string {
	switch {
	case m.Target.Kind == "":
		return ""
	case m.Met:
		return "met"
	}
	return "**missed**"
}

func figureRow(name, rateUnit string, a Absolute) []string {
	row := []string{name, a.Contender, a.figure(Rate, rateUnit), a.figure(CPU, "ms/GiB"), ""}
	others := a.otherMetrics()
	for i, metric := range others {
		others[i] = metric + " " + number(a.Metrics[metric].Median)
	}
	row[4] = strings.Join(others, ", ")
	return row
}

// manyMetrics is the maximum number of metrics besides rate and CPU in a row of the common table. A
// comparison with more metrics has a table of its own.
const manyMetrics = 5

// byMetric returns a table of metrics and contenders. Either the contenders or the metrics are the
// columns: those with the shorter names.
func (r Result) byMetric() [][]string {
	rows := [][]string{{r.Name}, {"rate"}, {"CPU"}}
	others := r.otherMetrics()
	for _, metric := range others {
		rows = append(rows, []string{metric})
	}
	for _, a := range r.Absolute {
		rows[0] = append(rows[0], a.Contender)
		rows[1] = append(rows[1], a.figure(Rate, r.Unit))
		rows[2] = append(rows[2], a.figure(CPU, "ms/GiB"))
		for i, metric := range others {
			rows[3+i] = append(rows[3+i], a.figure(metric, ""))
		}
	}
	rows = slices.DeleteFunc(rows, func(row []string) bool { return strings.Join(row[1:], "") == "" })
	columns := transpose(rows)
	if len(strings.Join(columns[0], "")) < len(strings.Join(rows[0], "")) {
		return columns
	}
	return rows
}

func transpose(rows [][]string) [][]string {
	columns := make([][]string, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			columns[i] = append(columns[i], cell)
		}
	}
	return columns
}

// figure returns the median of a metric, or "" if the contender has no such metric.
func (a Absolute) figure(metric, unitOf string) string {
	s, ok := a.Metrics[metric]
	if !ok {
		return ""
	}
	return number(s.Median) + unit(unitOf)
}

// otherMetrics returns the names of the metrics besides rate and CPU, sorted.
func (a Absolute) otherMetrics() []string {
	names := slices.Sorted(maps.Keys(a.Metrics))
	return slices.DeleteFunc(names, func(metric string) bool { return metric == Rate || metric == CPU })
}

// otherMetrics returns the names of the metrics besides rate and CPU that any contender has,
// sorted.
func (r Result) otherMetrics() (all []string) {
	for _, a := range r.Absolute {
		all = append(all, a.otherMetrics()...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func unit(u string) string {
	if u == "" {
		return ""
	}
	return " " + u
}

// number prints three significant digits, and whole numbers with a separator for thousands.
func number(v float64) string {
	switch a := math.Abs(v); {
	case a == 0:
		return "0"
	case a < 0.0095:
		return fmt.Sprintf("%.4f", v)
	case a < 9.995:
		return fmt.Sprintf("%.2f", v)
	case a < 99.95:
		return fmt.Sprintf("%.1f", v)
	}
	s := fmt.Sprintf("%.0f", v)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// widest is the maximum width of a column, in characters. A longer cell does not widen its column.
const widest = 70

// table prints rows; the first is the head. It prints nothing if there is only a head.
func table(b *strings.Builder, rows [][]string) {
	if len(rows) < 2 {
		return
	}
	width := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			if n := utf8.RuneCountInString(cell); n <= widest {
				width[i] = max(width[i], n)
			}
		}
	}
	line := func(cells []string, fill string) {
		for i, w := range width {
			cell := cells[i]
			fmt.Fprintf(b, "| %s%s ", cell, strings.Repeat(fill, max(0, w-utf8.RuneCountInString(cell))))
		}
		b.WriteString("|\n")
	}
	line(rows[0], " ")
	line(make([]string, len(width)), "-")
	for _, row := range rows[1:] {
		line(row, " ")
	}
	b.WriteString("\n")
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
