package record

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// recorder is a planner with a record of its steps.
type recorder struct {
	t    *testing.T
	p    *dualpath.Planner
	file []byte
}

// newRecorder returns a recorder whose record has a header.
func newRecorder(t *testing.T, opts dualpath.Options, network *netcost.PlannerOptions) *recorder {
	t.Helper()
	if network != nil {
		n, err := netcost.NewPlanner(*network)
		if err != nil {
			t.Fatal(err)
		}
		opts.Network = n
	}
	p, err := dualpath.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	file, err := AppendHeader(nil, Header{opts, network})
	if err != nil {
		t.Fatal(err)
	}
	return &recorder{t, p, file}
}

// step passes an event to the planner.
func (r *recorder) step(ev dualpath.Event) {
	r.t.Helper()
	var err error
	if r.file, err = AppendStep(r.file, ev, r.p.Step(ev)); err != nil {
		r.t.Fatal(err)
	}
}

// everyEvent returns one event of each kind, in a plausible order.
func everyEvent() []dualpath.Event {
	request := dualpath.Request{ID: 1, Namespace: 2, Epoch: 3, Exact: true, Prompt: 9000, Hit: 8192, Output: 100, Deadline: time.Hour, Tenant: "a", Priority: -3, FirstToken: time.Minute}
	other := request
	other.ID = 2
	node := func(n dualpath.NodeID) []dualpath.NodeReport {
		return []dualpath.NodeReport{{Node: n, ReadQueue: 5, Rate: 123.5}}
	}
	return []dualpath.Event{
		dualpath.NetworkReport{At: 1, Bandwidth: netcost.FatTree().Bandwidth, Latency: netcost.FatTree().Latency, Places: []dualpath.NodePlace{{Node: 1, Pod: "p", Rack: "r", Host: "a"}}},
		dualpath.GroupUp{At: 2, Group: 1, Role: dualpath.Prefill, Engines: []dualpath.EngineSpec{{Engine: 1, Node: 1}}},
		dualpath.GroupUp{At: 3, Group: 2, Role: dualpath.Decode, Engines: []dualpath.EngineSpec{{Engine: 2, Node: 2, HBMTokens: 1 << 20}}, Holding: []dualpath.Held{{Request: other, Engine: 2}}},
		dualpath.Submit{At: 4, Request: request},
		dualpath.Fetch{At: 5, Group: 1, Engines: []dualpath.EngineReport{{Engine: 1, Tokens: 7, Requests: 1}}, Nodes: node(1)},
		dualpath.Fetch{At: 6, Group: 2, Seen: 1, Engines: []dualpath.EngineReport{{Engine: 2, HBMFree: 1 << 19}}, Nodes: node(2)},
		dualpath.Progress{At: 7, Request: 1, Attempt: 3, Side: dualpath.Prefill, Upto: 64, Landed: 80},
		dualpath.Stopped{At: 8, Request: 1, Attempt: 3, Side: dualpath.Prefill, Upto: 128, Failed: true},
		dualpath.Failed{At: 9, Request: 1, Attempt: 3, Role: dualpath.Decode, Upto: 64},
		dualpath.SwitchRole{At: 9, Group: 1, Role: dualpath.Decode, Drain: dualpath.DrainFinish},
		dualpath.SwitchRefused{At: 9, Group: 1},
		dualpath.Epoch{At: 10, Namespace: 2, Epoch: 4, Drain: dualpath.DrainFinish},
		dualpath.Finished{At: 11, Request: 2, Role: dualpath.Decode},
		dualpath.Cancelled{At: 12, Request: 1},
		dualpath.Tick{At: 13},
		dualpath.GroupDown{At: 14, Group: 1},
	}
}

// TestEveryEvent: each kind of event is decoded unchanged, and a replay decides the same, with and
// without a network.
func TestEveryEvent(t *testing.T) {
	network := &netcost.PlannerOptions{Model: netcost.Model{Step: 12 * time.Millisecond, MaxBatch: 64}, Fabric: netcost.FatTree(), BytesPerToken: 78_080}
	for _, n := range []*netcost.PlannerOptions{nil, network} {
		rec := newRecorder(t, dualpath.Options{MinPart: 64, Policy: dualpath.Shorter, Weights: map[string]float64{"a": 2}}, n)
		events := everyEvent()
		for _, ev := range events {
			rec.step(ev)
		}
		r, err := NewReader(bytes.NewReader(rec.file))
		if err != nil {
			t.Fatal(err)
		}
		if h := r.Header(); h.Options.Policy != dualpath.Shorter || h.Options.MinPart != 64 || h.Options.Weights["a"] != 2 || !reflect.DeepEqual(h.Network, n) {
			t.Errorf("header %+v", h)
		}
		for i, want := range events {
			got, _, err := r.Next()
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("event %d is %+v; want %+v", i, got, want)
			}
		}
		if _, _, err := r.Next(); !errors.Is(err, io.EOF) {
			t.Errorf("after the last event: %v", err)
		}
		r, err = NewReader(bytes.NewReader(rec.file))
		if err != nil {
			t.Fatal(err)
		}
		sum, err := Replay(r)
		if err != nil {
			t.Fatal(err)
		}
		if sum.Events != len(events) || len(sum.Kinds) != 14 || sum.Actions < 5 || sum.Span != 13 || sum.Stats != rec.p.Stats() {
			t.Errorf("replayed %+v; want %d events of 14 kinds and %+v", sum, len(events), rec.p.Stats())
		}
	}
}

// TestKinds: the package supports every event of package dualpath.
func TestKinds(t *testing.T) {
	seen := make(map[string]bool)
	for _, ev := range everyEvent() {
		seen[reflect.TypeOf(ev).Name()] = true
	}
	// A kind that everyEvent lacks would be refused when it is read; the count is
	// that of the at methods in dualpath.
	if len(seen) != 14 {
		t.Errorf("%d kinds of events", len(seen))
	}
}

// TestDifference: a decision that differs from this planner's is found, with its line.
func TestDifference(t *testing.T) {
	rec := newRecorder(t, dualpath.Options{}, nil)
	for _, ev := range everyEvent() {
		rec.step(ev)
	}
	file := bytes.Replace(rec.file, []byte(`"kind":"assign"`), []byte(`"kind":"reject"`), 1)
	r, err := NewReader(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	_, err = Replay(r)
	var d *Difference
	if !errors.As(err, &d) {
		t.Fatalf("a record with another decision: %v", err)
	}
	want := 1 + bytes.Count(file[:bytes.Index(file, []byte(`"kind":"reject"`))], []byte("\n"))
	if d.Line != want || len(d.Recorded) == 0 || !strings.Contains(err.Error(), "decides otherwise") {
		t.Errorf("the difference is at line %d; want %d: %v", d.Line, want, err)
	}
}

func TestBrokenRecords(t *testing.T) {
	const head = `{"penstock_planner_record":3,"options":{}}` + "\n"
	for name, c := range map[string]struct{ file, want string }{
		"empty":           {"", "empty file"},
		"something else":  {"{}\n", "line 1 does not name the format"},
		"later version":   {`{"penstock_planner_record":9,"options":{}}` + "\n", "version 9"},
		"cut line":        {head + `{"e":"Tick","v":{"At":`, "line 2"},
		"no event":        {head + `{"e":"Tick"}` + "\n", "line 2"},
		"unknown event":   {head + `{"e":"Storm","v":{}}` + "\n", `"Storm"`},
		"unknown field":   {head + `{"e":"Tick","v":{"At":1,"Moon":2}}` + "\n", "Moon"},
		"wrong type":      {head + `{"e":"Tick","v":{"At":"noon"}}` + "\n", "line 2"},
		"impossible rate": {`{"penstock_planner_record":3,"options":{"ReadRate":-1}}` + "\n", "ReadRate"},
		"bad network":     {`{"penstock_planner_record":3,"options":{},"network":{}}` + "\n", "network"},
		"endless line":    {head + strings.Repeat("x", MaxLine+1), "longer than"},
	} {
		r, err := NewReader(strings.NewReader(c.file))
		if err == nil {
			_, err = Replay(r)
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
}

// FuzzReplay: for any file the replay ends without a panic. A record that it accepts has the
// decisions of this planner.
func FuzzReplay(f *testing.F) {
	rec := newRecorder(&testing.T{}, dualpath.Options{}, nil)
	for _, ev := range everyEvent() {
		rec.step(ev)
	}
	f.Add(rec.file)
	f.Add([]byte(`{"penstock_planner_record":3,"options":{}}` + "\n" + `{"e":"Tick","v":{"At":5}}`))
	f.Fuzz(func(t *testing.T, file []byte) {
		r, err := NewReader(bytes.NewReader(file))
		if err != nil {
			return
		}
		// A planner that keeps a million requests is allowed, but slow.
		if o := r.Header().Options; o.MaxExplain > 1<<16 {
			return
		}
		if sum, err := Replay(r); err == nil && sum.Events != r.Line()-1 {
			t.Errorf("%d events in %d lines", sum.Events, r.Line())
		}
	})
}
