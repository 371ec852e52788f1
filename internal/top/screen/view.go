package screen

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/internal/top"
)

// View is a table of the screen.
type View int

// The views, in their order on the screen.
const (
	Nodes View = iota
	Namespaces
	NICs
	Volumes
	viewCount
)

var viewNames = [viewCount]string{"nodes", "namespaces", "nics", "volumes"}

// String returns the name of the view.
func (v View) String() string { return viewNames[v] }

// Names returns the names of all views.
func Names() []string { return viewNames[:] }

// Parse returns the view of a name.
func Parse(name string) (View, error) {
	if i := slices.Index(viewNames[:], name); i >= 0 {
		return View(i), nil
	}
	return 0, fmt.Errorf("unknown view %q; want one of %s", name, strings.Join(viewNames[:], ", "))
}

// cell is one value of a row: its text, and the value by which rows are sorted.
type cell struct {
	text  string
	value top.Value
	style Style
}

// row is one line of a table. message, if not empty, replaces all cells but the first.
type row struct {
	cells   []cell
	message string
	style   Style
	json    any
}

// column is a column of a view.
type column struct {
	key, title string
	// left: the text is at the left, and rows are sorted by the text, A first. Otherwise they are
	// sorted by the value, the largest first.
	left bool
}

// columns are the columns of each view, the most important first.
var columns = [viewCount][]column{
	Nodes: {
		{"node", "NODE", true}, {"state", "STATE", true}, {"fill", "FILL", false}, {"reads", "READS/s", false}, {"read-bytes", "READ B/s", false},
		{"writes", "WRITES/s", false}, {"write-bytes", "WRITE B/s", false}, {"hit", "HIT", false}, {"evictions", "EVICT/s", false}, {"busy", "BUSY/s", false},
		{"queue", "QUEUE", false}, {"volumes", "VOLUMES", true}, {"tokens", "TOKENS/s", false}, {"used", "USED", false}, {"up", "UP", false}, {"reason", "REASON", true},
	},
	Namespaces: {
		{"namespace", "NAMESPACE", true}, {"epoch", "EPOCH", false}, {"changed", "CHANGED", false}, {"hit", "HIT", false}, {"used", "USED", false}, {"quota", "QUOTA", false},
		{"reads", "READS/s", false}, {"read-bytes", "READ B/s", false}, {"writes", "WRITES/s", false}, {"write-bytes", "WRITE B/s", false}, {"evictions", "EVICT/s", false},
		{"old", "OLD", false}, {"live", "LIVE", false}, {"tokens", "TOKENS/s", false}, {"leases", "LEASES", false}, {"nodes", "NODES", false},
	},
	NICs: {
		{"node", "NODE", true}, {"nic", "NIC", true}, {"state", "STATE", true}, {"sent", "SENT B/s", false}, {"sent-share", "SENT", false},
		{"received", "RECEIVED B/s", false}, {"received-share", "RECEIVED", false}, {"link", "LINK", false}, {"address", "ADDRESS", true}, {"reason", "REASON", true},
	},
	Volumes: {
		{"node", "NODE", true}, {"volume", "VOLUME", true}, {"state", "STATE", true}, {"fill", "FILL", false}, {"read-bytes", "READ B/s", false}, {"write-bytes", "WRITE B/s", false},
		{"failures", "FAILURES/s", false}, {"in-flight", "IN FLIGHT", false}, {"used", "USED", false}, {"capacity", "CAPACITY", false}, {"reason", "REASON", true},
	},
}

// firstOrder is the order of a view until the user chooses another.
var firstOrder = [viewCount]string{Nodes: "node", Namespaces: "read-bytes", NICs: "node", Volumes: "node"}

// Keys returns the sort keys of a view.
func (v View) Keys() []string {
	keys := make([]string, len(columns[v]))
	for i, c := range columns[v] {
		keys[i] = c.key
	}
	return keys
}

// column returns the index of a sort key, or -1.
func (v View) column(key string) int {
	return slices.IndexFunc(columns[v], func(c column) bool { return c.key == key })
}

// Order is the order of the rows of a view.
type Order struct {
	Key     string
	Reverse bool
}

// rows returns the rows of a view in an order. Unknown values are last, and equal rows are ordered
// by their first columns. Every view has a row for each node that did not answer.
func rows(v View, f top.Frame, o Order, now time.Time) []row {
	var out []row
	switch v {
	case Nodes:
		for _, n := range f.Nodes {
			out = append(out, nodeRow(n))
		}
	case Namespaces:
		for _, n := range f.Namespaces {
			out = append(out, namespaceRow(n, now))
		}
		for _, n := range f.Nodes {
			if n.ListFailure != "" {
				out = append(out, row{cells: []cell{text(nodeName(n))}, message: clean("namespaces unknown: " + n.ListFailure), style: Bad, json: n})
			}
		}
	case NICs:
		for _, n := range f.NICs {
			out = append(out, nicRow(n))
		}
	case Volumes:
		for _, v := range f.Volumes {
			out = append(out, volumeRow(v))
		}
	}
	for _, n := range f.Nodes {
		if v != Nodes && n.Failure != "" {
			out = append(out, nodeRow(n))
		}
	}
	by := max(0, v.column(o.Key))
	slices.SortStableFunc(out, func(a, b row) int {
		if c := compare(columns[v][by], by, a, b, o.Reverse); c != 0 {
			return c
		}
		for i := range min(2, len(a.cells), len(b.cells)) {
			if c := strings.Compare(a.cells[i].text, b.cells[i].text); c != 0 {
				return c
			}
		}
		return 0
	})
	return out
}

func compare(c column, by int, a, b row, reverse bool) int {
	sign := 1
	if reverse {
		sign = -1
	}
	hasA, hasB := by < len(a.cells), by < len(b.cells)
	if !hasA || !hasB {
		return cmp.Compare(boolInt(hasB), boolInt(hasA))
	}
	x, y := a.cells[by], b.cells[by]
	if c.left {
		return sign * strings.Compare(x.text, y.text)
	}
	if x.value.Known != y.value.Known {
		return cmp.Compare(boolInt(y.value.Known), boolInt(x.value.Known))
	}
	return -sign * cmp.Compare(x.value.Of, y.value.Of)
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

func text(s string) cell                   { return cell{text: clean(s)} }
func number(v top.Value) cell              { return cell{text: numberText(v), value: v} }
func bytes(v top.Value) cell               { return cell{text: bytesText(v), value: v} }
func share(v top.Value) cell               { return cell{text: shareText(v), value: v} }
func whole[T ~int | ~int64](n T) top.Value { return top.Known(float64(n)) }

// fill returns the cell of a share. From 95 % on it has the style Warn.
func fill(v top.Value) cell {
	c := share(v)
	if v.Of >= 0.95 {
		c.style = Warn
	}
	return c
}

// stateStyles are the styles of the states that are not normal.
var stateStyles = map[string]Style{
	"draining": Warn, "read_only": Warn, "suspect": Warn, "removed": Warn, "below_floor": Warn, "failed": Bad, "down": Bad,
}

func state(word string) cell {
	return cell{text: clean(word), style: stateStyles[word]}
}

// nodeName returns the name of a node, or its address if the node has not answered yet.
func nodeName(n top.NodeRow) string {
	if n.Name == "" {
		return n.Address
	}
	return n.Name
}

func nodeRow(n top.NodeRow) row {
	name := text(nodeName(n))
	if n.Failure != "" {
		message := "no answer: " + n.Failure
		if n.Name != "" {
			message = "no answer from " + n.Address + ": " + n.Failure
		}
		return row{cells: []cell{name}, message: clean(message), style: Bad, json: n}
	}
	word := state(n.State)
	if n.Restarted {
		word = cell{text: word.text + ", restarted", style: Warn}
	}
	queue := cell{text: unknown}
	if n.WaitingReads.Known {
		// Reads that run use the node, and reads that wait are its queue.
		queue = cell{text: fmt.Sprintf("%s+%s/%s", numberText(n.WaitingReads), numberText(n.RunningReads), numberText(n.ReadsMax)), value: n.WaitingReads.Plus(n.RunningReads)}
		if n.WaitingReads.Of > 0 {
			queue.style = Warn
		}
	}
	busy := number(n.BusyCalls)
	if n.BusyCalls.Of > 0 {
		busy.style = Warn
	}
	return row{json: n, cells: []cell{
		name, word, fill(n.Fill), number(n.ReadBlocks), bytes(n.ReadBytes), number(n.WrittenBlocks), bytes(n.WrittenBytes), share(n.HitRate),
		number(n.EvictedBlocks), busy, queue, volumesCell(n.VolumeStates), number(n.QueriedTokens), bytes(whole(n.UsedBytes)),
		{text: secondsText(n.Up), value: n.Up}, text(n.Reason),
	}}
}

// volumesCell counts volumes by state: "2 ok, 1 failed".
func volumesCell(states map[string]int) cell {
	var words []string
	var style Style
	for _, s := range slices.Sorted(maps.Keys(states)) {
		words = append(words, fmt.Sprintf("%d %s", states[s], s))
		style = max(style, stateStyles[s])
	}
	slices.SortStableFunc(words, func(a, b string) int {
		return cmp.Compare(boolInt(strings.HasSuffix(b, " ok")), boolInt(strings.HasSuffix(a, " ok")))
	})
	return cell{text: clean(strings.Join(words, ", ")), style: style}
}

func namespaceRow(n top.NamespaceRow, now time.Time) row {
	epoch := cell{text: fmt.Sprint(n.Epoch), value: top.Known(float64(n.Epoch))}
	if n.LowestEpoch != n.Epoch {
		epoch.text, epoch.style = fmt.Sprintf("%d..%d", n.LowestEpoch, n.Epoch), Warn
	}
	changed := cell{text: unknown}
	if !n.EpochSince.IsZero() {
		// The largest value is the latest change.
		changed = cell{text: ageText(now.Sub(n.EpochSince)) + " ago", value: top.Known(float64(n.EpochSince.Unix()))}
	}
	quota := cell{text: "none"}
	if n.QuotaUsed.Known {
		quota = fill(n.QuotaUsed)
		quota.text += " of " + bytesText(whole(n.QuotaBytes))
	}
	return row{json: n, cells: []cell{
		text(n.Name), epoch, changed, share(n.HitRate), bytes(whole(n.UsedBytes)), quota,
		number(n.ReadBlocks), bytes(n.ReadBytes), number(n.WrittenBlocks), bytes(n.WrittenBytes), number(n.EvictedBlocks),
		bytes(n.OldBytes), number(whole(n.LiveEpochs)), number(n.QueriedTokens), number(whole(n.Leases)), number(whole(n.Nodes)),
	}}
}

func nicRow(n top.NICRow) row {
	word := "up"
	if !n.Up {
		word = "down"
	}
	return row{json: n, cells: []cell{
		text(n.Node), text(n.Name), state(word), bytes(n.Sent), fill(n.SentShare), bytes(n.Received), fill(n.ReceivedShare),
		{text: bitsText(n.LinkBits), value: n.LinkBits}, text(n.Address), text(n.Reason),
	}}
}

func volumeRow(v top.VolumeRow) row {
	failures := number(v.Failures)
	if v.Failures.Of > 0 {
		failures.style = Bad
	}
	inFlight := bytes(whole(v.InFlightBytes))
	inFlight.text += "/" + bytesText(whole(v.InFlightLimitBytes))
	return row{json: v, cells: []cell{
		text(v.Node), text(v.Path), state(v.State), fill(v.Fill), bytes(v.ReadBytes), bytes(v.WrittenBytes), failures, inFlight,
		bytes(whole(v.UsedBytes)), bytes(whole(v.CapacityBytes)), text(v.Reason),
	}}
}
