package screen

import (
	"strings"
	"time"
	"unicode/utf8"

	"github.com/penstock-kv/penstock/internal/top"
)

// gap separates columns.
const gap = "  "

// shown is a column with its index and its width.
type shown struct {
	column
	index, width int
}

// widths returns the columns of a view as wide as their widest cell.
func widths(v View, rows []row) []shown {
	out := make([]shown, len(columns[v]))
	for i, c := range columns[v] {
		out[i] = shown{column: c, index: i, width: len(c.title)}
		for _, r := range rows {
			if i < len(r.cells) {
				out[i].width = max(out[i].width, utf8.RuneCountInString(r.cells[i].text))
			}
		}
	}
	return out
}

// firstMin is the smallest width of the first column, in characters.
const firstMin = 8

// reasonMin is the smallest width of a reason, whose text is cut to the rest of the line.
const reasonMin = 12

// choose returns the columns that fit into width: the first one, the sort column, and the others in
// their order until one does not fit. If not all fit, the first column gets at least a third of the
// width, and its text is cut.
func choose(all []shown, width, sorted int) []shown {
	total := -len(gap)
	for _, c := range all {
		total += len(gap) + c.width
	}
	if total <= width {
		return all
	}
	name := all[0]
	name.width = min(name.width, width, max(firstMin, width/3))
	room := width - name.width
	if need := len(gap) + all[sorted].width; sorted > 0 && need <= room {
		room -= need
	} else {
		sorted = 0
	}
	chosen, full := []shown{name}, false
	for _, c := range all[1:] {
		need := len(gap) + c.width
		switch {
		case c.index == sorted:
			chosen = append(chosen, c)
		case !full && need <= room:
			chosen = append(chosen, c)
			room -= need
		case !full && c.key == "reason" && room >= len(gap)+reasonMin:
			c.width = room - len(gap)
			chosen = append(chosen, c)
			room, full = 0, true
		default:
			full = true
		}
	}
	chosen[0].width = min(all[0].width, name.width+room)
	return chosen
}

// header returns the titles of columns.
func header(cs []shown) string {
	titles := make([]string, len(cs))
	for i, c := range cs {
		titles[i] = fit(c.title, c.width, c.left)
	}
	return strings.Join(titles, gap)
}

// line returns a row in columns.
func (r row) line(cs []shown) Line {
	var l Line
	for i, c := range cs {
		if i > 0 {
			l = append(l, Span{Text: gap})
		}
		if c.index >= len(r.cells) {
			return append(l, Span{r.message, r.style})
		}
		cell := r.cells[c.index]
		l = append(l, Span{fit(cell.text, c.width, c.left), cell.style | r.style})
	}
	return l
}

// Table returns the table of a view as plain lines with all columns, the header first. limit bounds
// the rows; 0 means all.
func Table(v View, f top.Frame, o Order, limit int, now time.Time) []string {
	all := limited(rows(v, f, o, now), limit)
	cs := widths(v, all)
	out := []string{strings.TrimRight(header(cs), " ")}
	for _, r := range all {
		out = append(out, strings.TrimRight(r.line(cs).String(), " "))
	}
	return out
}

// Sorted returns the frame with only the rows of a view, and the nodes, in an order.
func Sorted(v View, f top.Frame, o Order, limit int, now time.Time) top.Frame {
	out := top.Frame{Total: f.Total, Nodes: f.Nodes}
	all := limited(rows(v, f, o, now), limit)
	switch v {
	case Nodes:
		out.Nodes = []top.NodeRow{}
	case Namespaces:
		out.Namespaces = []top.NamespaceRow{}
	case NICs:
		out.NICs = []top.NICRow{}
	case Volumes:
		out.Volumes = []top.VolumeRow{}
	}
	for _, r := range all {
		switch r := r.json.(type) {
		case top.NodeRow:
			if v == Nodes {
				out.Nodes = append(out.Nodes, r)
			}
		case top.NamespaceRow:
			out.Namespaces = append(out.Namespaces, r)
		case top.NICRow:
			out.NICs = append(out.NICs, r)
		case top.VolumeRow:
			out.Volumes = append(out.Volumes, r)
		}
	}
	return out
}

func limited(rows []row, limit int) []row {
	if limit > 0 && len(rows) > limit {
		return rows[:limit]
	}
	return rows
}
