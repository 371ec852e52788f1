package top

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestTranscripts runs testdata/*.td. "sample AT" takes a sample; each line of its input is a node,
// or a namespace, NIC or volume of the node above it, with fields key=value:
//
//	a start=1 up=10s read=500 …          an answer of the node at address a
//	b silent=reason                      no answer
//	  ns chat id=1 epoch=7 used=100 …
//	  nic eth0 sent=1 received=2 link=8000
//	  volume /v state=failed read=10
//
// The output has the rows of the frame; rates are per second.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var m Meter
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd != "sample" {
				d.Fatalf(t, "unknown command %q", d.Cmd)
			}
			at, err := time.ParseDuration(d.CmdArgs[0].String())
			if err != nil {
				d.Fatalf(t, "%v", err)
			}
			return m.Add(Sample{At: at, Nodes: parse(t, d.Input)}).text()
		})
	})
}

// fields are the fields of a line of a transcript.
type fields struct {
	t    *testing.T
	text map[string]string
}

func (f fields) number(key string) int64 {
	f.t.Helper()
	s, ok := f.text[key]
	if !ok {
		return 0
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		f.t.Fatal(err)
	}
	return n
}

func (f fields) count(key string) uint64 { return uint64(f.number(key)) }

// counters returns nil for an older version of a node.
func (f fields) counters() *Counters {
	if f.text["old"] != "" {
		return nil
	}
	return &Counters{
		QueriedTokens: f.count("queried"), HitTokens: f.count("hit"), ReadBlocks: f.count("read"), ReadBytes: f.count("readbytes"),
		WrittenBlocks: f.count("written"), WrittenBytes: f.count("writtenbytes"), EvictedBlocks: f.count("evicted"), EvictedBytes: f.count("evictedbytes"),
	}
}

func parse(t *testing.T, input string) (nodes []Node) {
	t.Helper()
	for line := range strings.Lines(input) {
		words := strings.Fields(line)
		f := fields{t: t, text: make(map[string]string)}
		for _, w := range words {
			if key, value, ok := strings.Cut(w, "="); ok {
				f.text[key] = value
			}
		}
		if !strings.HasPrefix(line, " ") {
			n := Node{Address: words[0], Failure: f.text["silent"]}
			if n.Failure == "" {
				up, err := time.ParseDuration(f.text["up"])
				if err != nil {
					t.Fatal(err)
				}
				n.Name, n.State, n.Reason, n.Listed = f.text["name"], "serving", f.text["reason"], f.text["unlisted"] == ""
				n.Started, n.Up = time.Unix(f.number("start"), 0), up
				n.CapacityBytes, n.UsedBytes, n.Counters, n.BusyCalls = f.number("capacity"), f.number("used"), f.counters(), f.count("busy")
			}
			nodes = append(nodes, n)
			continue
		}
		n := &nodes[len(nodes)-1]
		switch words[0] {
		case "ns":
			ns := Namespace{
				ID: uint32(f.number("id")), Name: words[1], Epoch: f.count("epoch"), LiveEpochs: int(f.number("live")),
				UsedBytes: f.number("used"), NewestBytes: f.number("newest"), QuotaBytes: f.number("quota"), Counters: f.counters(),
			}
			if s := f.number("since"); s != 0 {
				ns.EpochSince = time.Unix(s, 0)
			}
			n.Namespaces = append(n.Namespaces, ns)
		case "nic":
			n.NICs = append(n.NICs, NIC{Name: words[1], Up: f.text["down"] == "", SentBytes: f.count("sent"), ReceivedBytes: f.count("received"), LinkBits: f.number("link")})
		case "volume":
			n.Volumes = append(n.Volumes, Volume{Path: words[1], State: f.text["state"], Reason: f.text["reason"], BelowFloor: f.text["full"] != "", ReadBytes: f.count("read"), WriteBytes: f.count("written"), Failures: f.count("failures")})
		default:
			t.Fatalf("unknown kind %q", words[0])
		}
	}
	return nodes
}

func (v Value) String() string {
	if !v.Known {
		return "-"
	}
	return strconv.FormatFloat(v.Of, 'g', 5, 64)
}

func (r Rates) String() string {
	return fmt.Sprintf("read %v/s %v B/s  written %v/s %v B/s  hit %v of %v tokens/s  evicted %v/s %v B/s",
		r.ReadBlocks, r.ReadBytes, r.WrittenBlocks, r.WrittenBytes, r.HitRate, r.QueriedTokens, r.EvictedBlocks, r.EvictedBytes)
}

func (f Frame) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "total %d of %d: %v  busy %v/s\n", f.Total.Answering, f.Total.Nodes, f.Total.Rates, f.Total.BusyCalls)
	for _, n := range f.Nodes {
		if n.Failure != "" {
			fmt.Fprintf(&b, "node %s %s: no answer: %s\n", n.Address, n.Name, n.Failure)
			continue
		}
		note := ""
		if n.Restarted {
			note = ", restarted"
		}
		fmt.Fprintf(&b, "node %s %s%s: %v  busy %v/s  fill %v  volumes %v %s\n", n.Address, n.State, note, n.Rates, n.BusyCalls, n.Fill, n.VolumeStates, n.Reason)
	}
	for _, n := range f.Namespaces {
		since := "-"
		if !n.EpochSince.IsZero() {
			since = fmt.Sprint(n.EpochSince.Unix())
		}
		fmt.Fprintf(&b, "ns %s on %d: epoch %d..%d since %s, %d live, old %v of %d, quota %d %v: %v\n",
			n.Name, n.Nodes, n.LowestEpoch, n.Epoch, since, n.LiveEpochs, n.OldBytes, n.UsedBytes, n.QuotaBytes, n.QuotaUsed, n.Rates)
	}
	for _, n := range f.NICs {
		fmt.Fprintf(&b, "nic %s %s up=%v: sent %v B/s %v  received %v B/s %v  link %v\n", n.Node, n.Name, n.Up, n.Sent, n.SentShare, n.Received, n.ReceivedShare, n.LinkBits)
	}
	for _, v := range f.Volumes {
		fmt.Fprintf(&b, "volume %s %s %s: read %v B/s  written %v B/s  failures %v/s\n", v.Node, v.Path, v.State, v.ReadBytes, v.WrittenBytes, v.Failures)
	}
	return b.String()
}

// simulated is a node whose true counts the test computes.
type simulated struct {
	start, up int64 // Unix time in seconds, and milliseconds
	count     uint64
	answers   bool
	old       bool
}

// TestModel compares the meter with a model that keeps the whole history: the rate of a node is its
// growth since the last earlier sample that it answered, if the node has not started since. Nodes
// restart, are silent and work at random.
func TestModel(t *testing.T) {
	type answered struct {
		simulated
		at time.Duration
	}
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 15))
		var m Meter
		nodes := make([]simulated, 1+random.IntN(4))
		for i := range nodes {
			nodes[i] = simulated{start: int64(i + 1), up: 1, old: random.IntN(4) == 0}
		}
		histories := make([][]answered, len(nodes)) // of each node: its answers, the last one last
		at := time.Duration(0)
		for range 40 {
			step := int64(1 + random.IntN(4000))
			at += time.Duration(step) * time.Millisecond
			s := Sample{At: at}
			for i := range nodes {
				n := &nodes[i]
				n.up += step
				n.count += random.Uint64N(1 << random.IntN(40))
				if random.IntN(8) == 0 { // a restart during the interval
					n.start += 1 + random.Int64N(100)
					n.up, n.count = 1+random.Int64N(step), random.Uint64N(1000)
				}
				n.answers = random.IntN(5) > 0
				sample := Node{Address: fmt.Sprint(i), Failure: "silent"}
				if n.answers {
					sample = Node{Address: fmt.Sprint(i), State: "serving", Started: time.Unix(n.start, 0), Counters: &Counters{ReadBlocks: n.count}}
					if !n.old {
						sample.Up = time.Duration(n.up) * time.Millisecond
					}
					histories[i] = append(histories[i], answered{*n, at})
				}
				s.Nodes = append(s.Nodes, sample)
			}
			f := m.Add(s)
			for i, row := range f.Nodes {
				h := histories[i]
				var want Value
				if nodes[i].answers && len(h) > 1 {
					now, before := h[len(h)-1], h[len(h)-2]
					seconds := float64(now.up-before.up) / 1000
					if now.old {
						seconds = (now.at - before.at).Seconds()
					}
					if now.start == before.start && seconds >= shortestSpan.Seconds() {
						want = Known(float64(now.count-before.count) / seconds)
					}
				}
				if got := row.ReadBlocks; got.Known != want.Known || math.Abs(got.Of-want.Of) > 1e-9*want.Of {
					t.Fatalf("seed %d, node %d at %v: rate %v; want %v", seed, i, at, got, want)
				}
			}
		}
	}
}

// TestUnknownIsNull: an unknown value is null in JSON, and a known 0 is 0.
func TestUnknownIsNull(t *testing.T) {
	raw, err := json.Marshal([]Value{{}, Known(0), Known(1.5)})
	if err != nil || string(raw) != "[null,0,1.5]" {
		t.Errorf("%s, %v", raw, err)
	}
}
