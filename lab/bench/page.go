package bench

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Pages are Markdown texts by file name: a summary, and pages with the tables of suites. Results are
// between marker lines.
//
//	<!-- store -->           <!-- /store -->            tables of the suite or section "store"
//	<!-- summary store -->   <!-- /summary store -->    the targets, and how many comparisons met each
//	<!-- machine -->         <!-- /machine -->          the machine of all suites that ran outside a laboratory
type Pages map[string]string

// Put writes the tables and the summary of the report, and of its sections, into the pages, each
// between its markers. A summary whose markers are on no page is left out. If Put returns an error,
// the pages are unchanged.
func (p Pages) Put(r Report) error {
	changed := maps.Clone(p)
	if err := changed.put(r); err != nil {
		return err
	}
	maps.Copy(p, changed)
	return nil
}

func (p Pages) put(r Report) error {
	for _, section := range r.Sections {
		if err := p.suite(section); err != nil {
			return err
		}
	}
	if r.Empty() && len(r.Sections) > 0 {
		return nil
	}
	if err := p.suite(r); err != nil || r.Within != "" {
		return err
	}
	return p.replace("machine", r.Machine)
}

func (p Pages) suite(r Report) error {
	if err := p.replace(r.Suite, r.tables()); err != nil {
		return err
	}
	summary := "summary " + r.Suite
	if p.find(summary) == "" {
		return nil
	}
	return p.replace(summary, r.summary())
}

// replace replaces the text between the two markers of a name, on the page that contains them.
func (p Pages) replace(name, body string) error {
	file := p.find(name)
	if file == "" {
		return fmt.Errorf("bench: none of the pages %s has a line %q to write the results below",
			strings.Join(slices.Sorted(maps.Keys(p)), ", "), marker(name))
	}
	text, err := splice(p[file], name, body)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	p[file] = text
	return nil
}

// find returns the name of the page that has a marker, or "".
func (p Pages) find(name string) string {
	for _, file := range slices.Sorted(maps.Keys(p)) {
		if strings.Contains(p[file], marker(name)+"\n") {
			return file
		}
	}
	return ""
}

func marker(name string) string { return "<!-- " + name + " -->" }

// splice replaces the text between the marker lines "<!-- name -->" and "<!-- /name -->" of a
// page by body.
func splice(page, name, body string) (string, error) {
	begin, end := marker(name)+"\n", marker("/"+name)
	i := strings.Index(page, begin)
	j := strings.Index(page, end)
	if i < 0 || j < i {
		return "", fmt.Errorf("bench: the page has no lines %q and %q in this order to write the results between", marker(name), end)
	}
	return page[:i+len(begin)] + "\n" + strings.TrimSpace(body) + "\n\n" + page[j:], nil
}

// summary returns a table with a row for each measure and target. A row has the number of
// comparisons that met the target, and the range of the medians.
func (r Report) summary() string {
	type key struct{ measure, target, unit string }
	var keys []key
	medians := map[key][]float64{}
	met := map[key]int{}
	for _, res := range r.Results {
		for _, m := range res.Measures {
			if m.Target.Kind == "" {
				continue
			}
			k := key{m.Name, target(m), unit(m.Unit)}
			if medians[k] == nil {
				keys = append(keys, k)
			}
			medians[k] = append(medians[k], m.Median)
			if m.Met {
				met[k]++
			}
		}
	}
	rows := [][]string{{"measure", "target", "met in", "lowest", "median", "highest"}}
	for _, k := range keys {
		all := Summarize(medians[k])
		rows = append(rows, []string{
			k.measure, k.target, fmt.Sprintf("%d of %d", met[k], len(medians[k])),
			number(all.Low) + k.unit, number(all.Median) + k.unit, number(all.High) + k.unit,
		})
	}
	var b strings.Builder
	table(&b, rows)
	fmt.Fprintf(&b, "Commit %s.\n", r.Commit)
	return b.String()
}
