package screen

import (
	"fmt"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/internal/top"
)

// State is the state of the screen.
type State struct {
	View   View
	Orders [viewCount]Order
	// Limit bounds the rows; 0 means all.
	Limit    int
	Interval time.Duration
	Paused   bool
	Help     bool

	// Frame has the rows, and Taken is the time of its sample. Taken is zero before the first one.
	Frame top.Frame
	Taken time.Time

	// first is the index of the first row on the screen.
	first int
	// page is the number of rows that the last call of Lines had room for.
	page int
}

// New returns the state at the start.
func New(v View, o Order, limit int, interval time.Duration) State {
	s := State{View: v, Limit: limit, Interval: interval}
	for i, key := range firstOrder {
		s.Orders[i].Key = key
	}
	if o.Key == "" {
		o.Key = firstOrder[v]
	}
	s.Orders[v] = o
	return s
}

// Press applies a key. It reports whether the key ends the program.
func (s *State) Press(k Key) (quit bool) {
	if s.Help {
		// Any key closes the help, and q also ends the program.
		s.Help = false
		return k == 'q'
	}
	order := &s.Orders[s.View]
	switch k {
	case 'q':
		return true
	case 'h', '?':
		s.Help = true
	case 'n':
		s.show(Nodes)
	case 's':
		s.show(Namespaces)
	case 'i':
		s.show(NICs)
	case 'v':
		s.show(Volumes)
	case '\t':
		s.show((s.View + 1) % viewCount)
	case '<', Left:
		s.sortBy(-1)
	case '>', Right:
		s.sortBy(1)
	case 'r':
		order.Reverse = !order.Reverse
	case ' ':
		s.Paused = !s.Paused
	case Up:
		s.first--
	case Down:
		s.first++
	case PageUp:
		s.first -= max(1, s.page)
	case PageDown:
		s.first += max(1, s.page)
	case Home:
		s.first = 0
	case End:
		s.first = 1 << 30
	}
	return false
}

func (s *State) show(v View) {
	if v != s.View {
		s.View, s.first = v, 0
	}
}

// sortBy moves the sort column by step, and keeps it within the columns.
func (s *State) sortBy(step int) {
	order := &s.Orders[s.View]
	keys := s.View.Keys()
	i := min(max(s.View.column(order.Key)+step, 0), len(keys)-1)
	if keys[i] != order.Key {
		*order = Order{Key: keys[i]}
	}
}

// frameLines is the number of lines around the rows: two of totals, the views, the titles, and the
// keys.
const frameLines = 5

// Lines returns the lines of the screen, at most height lines of at most width characters. It also
// moves the first row, so that the screen is full if there are enough rows.
func (s *State) Lines(width, height int) []Line {
	var out []Line
	if s.Help {
		out = s.help()
	} else {
		out = s.table(width, height)
	}
	if len(out) > height {
		out = out[:max(0, height)]
	}
	for i := range out {
		out[i] = out[i].cut(max(0, width))
	}
	return out
}

func (s *State) table(width, height int) []Line {
	all := limited(rows(s.View, s.Frame, s.Orders[s.View], s.Taken), s.Limit)
	s.page = max(0, height-frameLines)
	s.first = max(0, min(s.first, len(all)-s.page))
	last := min(len(all), s.first+s.page)
	cs := choose(widths(s.View, all), width, s.View.column(s.Orders[s.View].Key))
	out := []Line{s.title(), s.sums(), s.tabs(len(cs)), {{fit(header(cs), width, true), Reverse}}}
	for _, r := range all[s.first:last] {
		out = append(out, r.line(cs))
	}
	if len(all) == 0 && s.page > 0 {
		out = append(out, Line{{Text: s.emptyText()}})
	}
	for len(out) < height-1 {
		out = append(out, nil)
	}
	return append(out, s.foot(last, len(all)))
}

// emptyText is shown in place of the rows of an empty table.
func (s *State) emptyText() string {
	if s.Taken.IsZero() {
		return "waiting for the first answers"
	}
	return "no " + s.View.String()
}

func (s *State) title() Line {
	t := s.Frame.Total
	l := Line{{"penstock top", Bold}}
	if s.Taken.IsZero() {
		return l
	}
	l = append(l, Span{Text: fmt.Sprintf("  %s, every %v, %s", s.Taken.Format(time.TimeOnly), s.Interval, plural(t.Nodes, "node"))})
	if silent := t.Nodes - t.Answering; silent > 0 {
		l = append(l, Span{Text: ", "}, Span{fmt.Sprintf("%d without an answer", silent), Bad | Bold})
	}
	if s.Paused {
		l = append(l, Span{Text: "  "}, Span{"PAUSED", Reverse})
	}
	return l
}

func plural(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

func (s *State) sums() Line {
	t := s.Frame.Total
	if t.Answering == 0 {
		return nil
	}
	return Line{{Text: fmt.Sprintf("hit %s  reads %s/s, %s/s  writes %s/s, %s/s  evictions %s/s  %s of %s used",
		shareText(t.HitRate), numberText(t.ReadBlocks), bytesText(t.ReadBytes), numberText(t.WrittenBlocks), bytesText(t.WrittenBytes),
		numberText(t.EvictedBlocks), bytesText(whole(t.UsedBytes)), bytesText(whole(t.CapacityBytes)))}}
}

// tabs has the views, the present one in brackets, the order, and the number of columns that fit.
func (s *State) tabs(fitting int) Line {
	var l Line
	for v := range viewCount {
		if v == s.View {
			l = append(l, Span{"[" + v.String() + "]", Bold})
		} else {
			l = append(l, Span{Text: " " + v.String() + " "})
		}
	}
	o := s.Orders[s.View]
	l = append(l, Span{Text: " by " + o.Key + ", " + s.direction(o)})
	if all := len(columns[s.View]); fitting < all {
		l = append(l, Span{Text: fmt.Sprintf("  %d of %d columns", fitting, all)})
	}
	return l
}

// direction describes an order: "A first", "largest first".
func (s *State) direction(o Order) string {
	ends := [2]string{"largest", "smallest"}
	if columns[s.View][max(0, s.View.column(o.Key))].left {
		ends = [2]string{"A", "Z"}
	}
	return ends[boolInt(o.Reverse)] + " first"
}

// foot has the keys, and the numbers of the rows if not all are visible.
func (s *State) foot(last, all int) Line {
	l := Line{{Text: "q quit  n s i v views  < > sort  r reverse  space pause  h help"}}
	if s.first > 0 || last < all {
		l = append(Line{{fmt.Sprintf("rows %d to %d of %d", s.first+1, last, all), Bold}, {Text: "  "}}, l...)
	}
	return l
}

// helpText is the help of the keys.
const helpText = `q            quit
n            nodes
s            namespaces
i            NICs of the data plane
v            volumes
Tab          the next view
< >, ← →     another sort column
r            reverse the order
↑ ↓          scroll, also with PgUp, PgDn, Home and End
space        pause, and continue
h or ?       this help

Rates are per second, over the time since the sample before. "-" is unknown:
there is no earlier sample, or the node has started again since.
HIT      tokens found by Match calls, of the tokens that they requested
BUSY/s   calls that were refused because a limit was reached
QUEUE    reads that wait + reads that run / the most that may run
OLD      bytes of blocks of older epochs, until they are freed
CHANGED  the time since the epoch began; unknown if no node has run since
SENT, RECEIVED  the part of the link's rate that is used`

func (s *State) help() []Line {
	out := []Line{{{"penstock top: keys and columns", Bold}, {Text: " (any key closes this help)"}}}
	for text := range strings.Lines(helpText) {
		out = append(out, Line{{Text: strings.TrimSuffix(text, "\n")}})
	}
	return out
}
