package screen

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/cockroachdb/datadriven"

	"github.com/penstock-kv/penstock/internal/top"
)

// TestTranscripts runs testdata/*.td:
//
//	new VIEW [SORT] [reverse] [limit=N]  a new state
//	frame NAME                           the next frame, one of frames
//	press KEY…                           keys: a character, or up, down, left, right, pgdn, pgup, home, end, space, tab
//	screen WIDTH HEIGHT                  the lines, between bars
//	styles WIDTH HEIGHT                  the lines with their styles
//	table VIEW [SORT] [reverse]          the plain table of the frame
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		s := New(Nodes, Order{}, 0, 2*time.Second)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var words []string
			for _, a := range d.CmdArgs {
				words = append(words, a.String())
			}
			switch d.Cmd {
			case "new":
				v, o, limit := parseView(t, words)
				s = New(v, o, limit, 2*time.Second)
			case "frame":
				f, ok := frames()[words[0]]
				if !ok {
					d.Fatalf(t, "unknown frame %q", words[0])
				}
				s.Frame, s.Taken = f, now
			case "press":
				var said []string
				for _, w := range words {
					if s.Press(key(t, w)) {
						said = append(said, w+" quits\n")
					}
				}
				return strings.Join(said, "")
			case "screen", "styles":
				width, height := atoi(t, words[0]), atoi(t, words[1])
				return draw(t, &s, width, height, d.Cmd == "styles")
			case "table":
				v, o, limit := parseView(t, words)
				return strings.Join(Table(v, s.Frame, o, limit, now), "\n") + "\n"
			default:
				d.Fatalf(t, "unknown command %q", d.Cmd)
			}
			return ""
		})
	})
}

func atoi(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func parseView(t *testing.T, words []string) (v View, o Order, limit int) {
	t.Helper()
	v, err := Parse(words[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range words[1:] {
		if n, ok := strings.CutPrefix(w, "limit="); ok {
			limit = atoi(t, n)
		} else if w == "reverse" {
			o.Reverse = true
		} else {
			o.Key = w
		}
	}
	return v, o, limit
}

func key(t *testing.T, name string) Key {
	named := map[string]Key{"up": Up, "down": Down, "left": Left, "right": Right, "pgup": PageUp, "pgdn": PageDown, "home": Home, "end": End, "space": ' ', "tab": '\t'}
	if k, ok := named[name]; ok {
		return k
	}
	if len(name) != 1 {
		t.Fatalf("unknown key %q", name)
	}
	return Key(name[0])
}

var styleNames = []struct {
	style Style
	name  string
}{{Bold, "bold"}, {Reverse, "reverse"}, {Warn, "warn"}, {Bad, "bad"}}

// draw returns the lines between bars, and checks that they fit.
func draw(t *testing.T, s *State, width, height int, styles bool) string {
	t.Helper()
	var b strings.Builder
	lines := s.Lines(width, height)
	if len(lines) > height {
		t.Errorf("%d lines on a screen of %d", len(lines), height)
	}
	for _, l := range lines {
		if n := utf8.RuneCountInString(l.String()); n > width {
			t.Errorf("a line of %d characters on a screen of %d: %s", n, width, l)
		}
		b.WriteByte('|')
		for _, span := range l {
			text := span.Text
			if styles {
				for _, n := range styleNames {
					if span.Style&n.style != 0 {
						text = "<" + n.name + " " + text + ">"
					}
				}
			}
			b.WriteString(text)
		}
		b.WriteString("|\n")
	}
	return b.String()
}

// now is the time of the frames.
var now = time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)

// frames are the frames of the transcripts, by name.
func frames() map[string]top.Frame {
	known := top.Known
	work := func(n float64) top.Rates {
		return top.Rates{
			ReadBlocks: known(n), ReadBytes: known(n * (1 << 20)), WrittenBlocks: known(n / 10), WrittenBytes: known(n * 100_000), QueriedTokens: known(n * 64),
			HitTokens: known(n * 60), HitRate: known(0.9375), EvictedBlocks: known(n / 20), EvictedBytes: known(n * 50_000),
		}
	}
	node := func(name string, n float64) top.NodeRow {
		return top.NodeRow{
			Address: name + ":7420", Name: name, State: "serving", Up: known(90061), CapacityBytes: 2 << 40, UsedBytes: 1 << 40, Fill: known(0.5), Rates: work(n),
			BusyCalls: known(0), RunningReads: known(12), WaitingReads: known(0), ReadsMax: known(256), Reservations: known(3), VolumeStates: map[string]int{"ok": 2},
		}
	}
	sick := node("node-b", 12)
	sick.State, sick.Reason, sick.Fill = "read_only", "/data/1: failed (EIO)", known(0.991)
	sick.VolumeStates, sick.WaitingReads, sick.BusyCalls = map[string]int{"ok": 1, "failed": 1, "suspect": 2}, known(256), known(3.25)
	begun := top.NodeRow{Address: "node-c:7420", Name: "node-c", State: "serving", Restarted: true, Up: known(1), VolumeStates: map[string]int{"ok": 1}}
	silent := top.NodeRow{Address: "node-d:7420", Failure: "connection refused"}
	evil := node("evil\x1b[2J\x07", 1)
	evil.Reason = "\u202egnp.exe\r\n\u009b31m"
	busy := top.Frame{
		Total: top.Total{Nodes: 4, Answering: 3, Rates: work(12_352), CapacityBytes: 4 << 40, UsedBytes: 2 << 40},
		Nodes: []top.NodeRow{node("node-a", 12_340), sick, begun, silent},
		Namespaces: []top.NamespaceRow{
			{Name: "chat/70b", Nodes: 3, Epoch: 8, LowestEpoch: 7, EpochSince: now.Add(-3 * time.Hour), LiveEpochs: 2, UsedBytes: 900 << 30, OldBytes: known(100 << 30), QuotaBytes: 1 << 40, QuotaUsed: known(0.88), Leases: 12, Rates: work(12_000)},
			{Name: "code", Nodes: 1, Epoch: 1, LowestEpoch: 1, LiveEpochs: 1, UsedBytes: 1 << 30, OldBytes: known(0), Rates: work(0)},
			{Name: "rollout", Nodes: 2, Epoch: 31, LowestEpoch: 31, EpochSince: now.Add(-5 * time.Second), LiveEpochs: 1, UsedBytes: 100 << 30, OldBytes: known(99 << 30), QuotaBytes: 100 << 30, QuotaUsed: known(1)},
		},
		NICs: []top.NICRow{
			{Node: "node-a", Name: "mlx5_0", Address: "10.0.0.1:7421", Up: true, Sent: known(24e9), SentShare: known(0.96), Received: known(1e9), ReceivedShare: known(0.04), LinkBits: known(200e9)},
			{Node: "node-a", Name: "mlx5_1", Address: "10.0.1.1:7421", Reason: "has no carrier", Sent: known(0), Received: known(0)},
		},
		Volumes: []top.VolumeRow{
			{Node: "node-a", Path: "/data/0", State: "ok", CapacityBytes: 1 << 40, UsedBytes: 1 << 39, Fill: known(0.5), ReadBytes: known(3e9), WrittenBytes: known(1e8), Failures: known(0), InFlightBytes: 4 << 20, InFlightLimitBytes: 8 << 20},
			{Node: "node-b", Path: "/data/1", State: "failed", Reason: "EIO", ReadBytes: known(0), WrittenBytes: known(0), Failures: known(2)},
		},
	}
	many := top.Frame{Total: top.Total{Nodes: 1, Answering: 1}, Nodes: []top.NodeRow{node("node-a", 1)}}
	for i := range 30 {
		many.Namespaces = append(many.Namespaces, top.NamespaceRow{Name: fmt.Sprintf("ns-%02d", i), Epoch: 1, LowestEpoch: 1, LiveEpochs: 1, OldBytes: known(0), Rates: work(float64(100 - i))})
	}
	return map[string]top.Frame{
		"busy": busy, "many": many,
		"evil":     {Total: top.Total{Nodes: 1, Answering: 1}, Nodes: []top.NodeRow{evil}},
		"silent":   {Total: top.Total{Nodes: 1}, Nodes: []top.NodeRow{silent}},
		"unlisted": {Total: top.Total{Nodes: 1, Answering: 1}, Nodes: []top.NodeRow{{Address: "a:1", Name: "node-a", State: "serving", ListFailure: "permission denied"}}},
	}
}

// TestFits: whatever the size, the view and the keys, the lines fit the screen.
func TestFits(t *testing.T) {
	all := frames()
	names := []string{"busy", "many", "evil", "silent", "unlisted"}
	keys := []Key{'n', 's', 'i', 'v', '<', '>', 'r', ' ', 'h', '\t', Up, Down, Left, Right, PageUp, PageDown, Home, End, 'x', 0}
	random := rand.New(rand.NewPCG(15, 6))
	s := New(Nodes, Order{}, 0, time.Second)
	for range 5000 {
		if random.IntN(5) == 0 {
			s.Frame, s.Taken = all[names[random.IntN(len(names))]], now
		}
		s.Press(keys[random.IntN(len(keys))])
		draw(t, &s, random.IntN(200), random.IntN(40), false)
	}
}

// TestSortColumnStays: the sort column is on the screen, if it fits beside the name.
func TestSortColumnStays(t *testing.T) {
	for v := range viewCount {
		for i, c := range columns[v] {
			s := New(v, Order{Key: c.key}, 0, time.Second)
			s.Frame, s.Taken = frames()["busy"], now
			all := widths(v, rows(v, s.Frame, s.Orders[v], now))
			width := firstMin + len(gap) + all[i].width + 24
			shown := slices.ContainsFunc(choose(all, width, i), func(s shown) bool { return s.index == i })
			if !shown {
				t.Errorf("%v sorted by %s: the column is not on a screen of %d", v, c.key, width)
			}
		}
	}
}

// TestCellsMatchColumns: each row of each view has a cell for each column.
func TestCellsMatchColumns(t *testing.T) {
	for v := range viewCount {
		for _, r := range rows(v, frames()["busy"], Order{}, now) {
			if r.message == "" && len(r.cells) != len(columns[v]) {
				t.Errorf("%v: a row of %d cells and %d columns", v, len(r.cells), len(columns[v]))
			}
		}
	}
}

func TestKeys(t *testing.T) {
	for in, want := range map[string][]Key{
		"":                {},
		"q":               {'q'},
		"ns<":             {'n', 's', '<'},
		"\x1b[A\x1b[B":    {Up, Down},
		"\x1bOC\x1bOD":    {Right, Left},
		"\x1b[5~\x1b[6~":  {PageUp, PageDown},
		"\x1b[1~\x1b[F":   {Home, End},
		"\x1b[1;5Cq":      {'q'}, // Ctrl and an arrow
		"\x1b[200~q":      {'q'},
		"\x1bq":           {'q'}, // ESC, and then q
		"\x1b\x1b[A":      {Up},
		"\x1b[Ar\x1b[6~ ": {Up, 'r', PageDown, ' '},
	} {
		got, rest := Keys([]byte(in))
		if !slices.Equal(got, want) || len(rest) > 0 {
			t.Errorf("%q: %v and %q; want %v", in, got, rest, want)
		}
		// The bytes may arrive one by one.
		var single []Key
		rest = nil
		for i := range len(in) {
			var keys []Key
			keys, rest = Keys(append(slices.Clone(rest), in[i]))
			single = append(single, keys...)
		}
		if !slices.Equal(single, want) {
			t.Errorf("%q, byte by byte: %v; want %v", in, single, want)
		}
	}
	if keys, rest := Keys([]byte("\x1b[" + strings.Repeat("1", 100))); len(rest) > sequenceMax || len(keys) == 0 {
		t.Errorf("an endless sequence: %v, and %d bytes are kept", keys, len(rest))
	}
}

func TestANSI(t *testing.T) {
	l := Line{{"a", Bold | Bad}, {"b", 0}, {"c", Warn}}
	if got, want := l.ANSI(true), "\x1b[1;31ma\x1b[0mb\x1b[33mc\x1b[0m"; got != want {
		t.Errorf("%q; want %q", got, want)
	}
	if got, want := l.ANSI(false), "\x1b[1ma\x1b[0mbc"; got != want {
		t.Errorf("without colour: %q; want %q", got, want)
	}
}

func TestTexts(t *testing.T) {
	for of, want := range map[float64]string{0: "0", 0.01: "<0.1", 0.25: "0.2", 7: "7", 12.34: "12", 95.97: "96", 9.97: "10", 340: "340", 9999: "9999", 12_340: "12.3k", 123_456: "123k", 3.4e6: "3.4M", 999_600: "1.0M", 5e15: "5000T"} {
		if got := numberText(top.Known(of)); got != want {
			t.Errorf("%v is %q; want %q", of, got, want)
		}
	}
	for d, want := range map[time.Duration]string{-time.Second: "0s", 0: "0s", 59 * time.Second: "59s", time.Minute: "1m", 90 * time.Minute: "1h 30m", 26*time.Hour + time.Minute: "1d 2h", 49 * time.Hour: "2d 1h", 24*time.Hour + time.Second: "1d"} {
		if got := ageText(d); got != want {
			t.Errorf("%v is %q; want %q", d, got, want)
		}
	}
	got := []string{bytesText(top.Value{}), bytesText(top.Known(-2048)), bytesText(top.Known(1536)), shareText(top.Known(0.9375)), bitsText(top.Known(400e9)), bitsText(top.Known(2.5e9))}
	if want := []string{"-", "-2.0 KiB", "1.5 KiB", "93.8 %", "400 Gb/s", "2.5 Gb/s"}; !reflect.DeepEqual(got, want) {
		t.Errorf("%q; want %q", got, want)
	}
}
