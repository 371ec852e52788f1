package netcost

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/internal/testkit"
)

// TestPlanner runs testdata/planner.td: the production planner with the network as
// one of its inputs. A token has 1 MB of KV, a storage NIC reads 10 000 tokens a
// second, and a decode engine has room for 100 000 tokens. Times are milliseconds.
//
//	planner [policy=P] [overlap] [reserve=TOKENS]
//	up      group=G role=prefill|decode engines=(ID@NODE,…)
//	places  (NODE=POD/RACK/HOST …) [congestion=(c0,c1,c2,c3)] [bandwidth=(MB/s,…)]     one report
//	submit  id=N prompt=N [hit=N] [resident=(TOKENS@ENGINE,…)]                      what decode engines hold of the prompt
//	epoch   number=N                                                                 new weights
//	fetch   group=G [queue=(…)] [hbm=(N)]
//	finished request=N side=prefill|decode
//	explain request=N
//	flying  NODE                                                                     own transfers by tier
func TestPlanner(t *testing.T) {
	datadriven.RunTest(t, "testdata/planner.td", (&story{}).run)
}

// story is the state of a transcript.
type story struct {
	p    *dualpath.Planner
	n    *Planner
	now  time.Duration
	seen uint64
	spec map[dualpath.GroupID][]dualpath.EngineSpec
}

// run performs one command.
func (s *story) run(t *testing.T, d *datadriven.TestData) string {
	num := func(name string) (v int) {
		d.MaybeScanArgs(t, name, &v)
		return v
	}
	list := func(name string) []string {
		for _, a := range d.CmdArgs {
			if a.Key == name {
				return a.Vals
			}
		}
		return nil
	}
	if d.HasArg("at") {
		s.now = time.Duration(num("at")) * time.Millisecond
	}
	switch d.Cmd {
	case "planner":
		n, err := NewPlanner(PlannerOptions{Fabric: FatTree(), BytesPerToken: 1e6, Overlap: d.HasArg("overlap"), Model: Model{Reserve: int64(num("reserve")) * 1e6}})
		if err != nil {
			t.Fatal(err)
		}
		policy := "split"
		d.MaybeScanArgs(t, "policy", &policy)
		o := dualpath.Options{ReadRate: 10_000, MinPart: 128, Network: n, PrefillRate: 20_000}
		if o.Policy, err = dualpath.ParseReadPolicy(policy); err != nil {
			t.Fatal(err)
		}
		if s.p, err = dualpath.New(o); err != nil {
			t.Fatal(err)
		}
		s.n, s.now, s.seen, s.spec = n, 0, 0, map[dualpath.GroupID][]dualpath.EngineSpec{}
		return ""
	case "up":
		g := dualpath.GroupUp{At: s.now, Group: dualpath.GroupID(num("group")), Role: dualpath.Prefill}
		if list("role")[0] == "decode" {
			g.Role = dualpath.Decode
		}
		for _, pair := range list("engines") {
			spec := dualpath.EngineSpec{HBMTokens: 100_000}
			if _, err := fmt.Sscanf(pair, "%d@%d", &spec.Engine, &spec.Node); err != nil {
				t.Fatalf("engine %q: %v", pair, err)
			}
			g.Engines = append(g.Engines, spec)
		}
		s.spec[g.Group] = g.Engines
		return s.step(g)
	case "places":
		r := dualpath.NetworkReport{At: s.now, Bandwidth: FatTree().Bandwidth, Latency: FatTree().Latency, Measured: s.now}
		for i, v := range list("congestion") {
			fmt.Sscan(v, &r.Congestion[i])
		}
		for i, v := range list("bandwidth") {
			fmt.Sscan(v, &r.Bandwidth[i])
			r.Bandwidth[i] *= 1e6
		}
		for _, a := range d.CmdArgs {
			var id int
			if _, err := fmt.Sscanf(a.Key, "%d", &id); err == nil {
				at := strings.Split(a.Vals[0], "/")
				r.Places = append(r.Places, dualpath.NodePlace{Node: dualpath.NodeID(id), Pod: at[0], Rack: at[1], Host: at[2]})
			}
		}
		return s.step(r)
	case "submit":
		r := dualpath.Request{ID: dualpath.RequestID(num("id")), Prompt: num("prompt"), Hit: num("hit")}
		for _, pair := range list("resident") {
			var h dualpath.Resident
			if _, err := fmt.Sscanf(pair, "%d@%d", &h.Tokens, &h.Engine); err != nil {
				t.Fatalf("resident %q: %v", pair, err)
			}
			r.Resident = append(r.Resident, h)
		}
		return s.step(dualpath.Submit{At: s.now, Request: r})
	case "epoch":
		return s.step(dualpath.Epoch{At: s.now, Epoch: uint64(num("number"))})
	case "fetch":
		f := dualpath.Fetch{At: s.now, Group: dualpath.GroupID(num("group")), Seen: s.seen}
		for _, v := range s.p.View() {
			if v.Group != f.Group {
				continue
			}
			for _, en := range v.Engines {
				f.Engines = append(f.Engines, dualpath.EngineReport{Engine: en.Engine, Tokens: en.Tokens, Requests: en.Requests, HBMFree: en.HBMFree})
				if l := list("hbm"); len(l) > 0 {
					fmt.Sscan(l[0], &f.Engines[len(f.Engines)-1].HBMFree)
				}
			}
			for i, n := range v.Nodes {
				queue := n.ReadQueue
				if l := list("queue"); i < len(l) {
					fmt.Sscan(l[i], &queue)
				}
				f.Nodes = append(f.Nodes, dualpath.NodeReport{Node: n.Node, ReadQueue: queue, Rate: n.Rate})
			}
		}
		return s.step(f)
	case "finished":
		role := dualpath.Prefill
		if list("side")[0] == "decode" {
			role = dualpath.Decode
		}
		return s.step(dualpath.Finished{At: s.now, Request: dualpath.RequestID(num("request")), Role: role})
	case "explain":
		x, ok := s.p.Explain(dualpath.RequestID(num("request")))
		if !ok {
			return "not remembered\n"
		}
		return x.String()
	case "flying":
		node := dualpath.NodeID(num("node"))
		var b strings.Builder
		for tier := range Tier(Tiers) {
			if n := s.n.Oracle().InFlight(node, tier); n > 0 {
				fmt.Fprintf(&b, "%d on tier %d (%v)\n", n, tier, tier)
			}
		}
		if b.Len() == 0 {
			return "none\n"
		}
		return b.String()
	}
	t.Fatalf("%s: no such command", d.Cmd)
	return ""
}

// step passes an event to the planner and prints the actions.
func (s *story) step(ev dualpath.Event) string {
	var b strings.Builder
	for _, a := range s.p.Step(ev) {
		s.seen = max(s.seen, a.Seq)
		fmt.Fprintf(&b, "%v request %d", a.Kind, a.Request)
		switch a.Kind {
		case dualpath.Assign:
			fmt.Fprintf(&b, ": %v engine %d", a.Side, a.Engine)
		case dualpath.Start:
			fmt.Fprintf(&b, ": prefill %d, decode %d", a.PE, a.DE)
		}
		for _, part := range a.Parts[:a.NParts] {
			fmt.Fprintf(&b, "; %v [%d, %d)", part.Side, part.From, part.To)
		}
		if a.Why != dualpath.NoReason {
			fmt.Fprintf(&b, "; %v: %d, at most %d", a.Why, a.Need, a.Most)
		}
		b.WriteByte('\n')
	}
	if b.Len() == 0 {
		return "nothing\n"
	}
	return b.String()
}

// TestPlannerCountsNoEndedTransfer: after any events, no transfer remains counted, and two planners with the same
// events take the same actions.
func TestPlannerCountsNoEndedTransfer(t *testing.T) {
	testkit.Long(t, "20 random planners, twice each")
	for seed := range uint64(20) {
		a, b := randomPlanner(t, seed), randomPlanner(t, seed)
		if a != b {
			t.Errorf("seed %d: two planners with the same events took different actions", seed)
		}
	}
}

// randomPlanner passes random events to a planner, ends all requests and returns the actions.
func randomPlanner(t *testing.T, seed uint64) string {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 1))
	n, err := NewPlanner(PlannerOptions{Fabric: FatTree(), BytesPerToken: 1000})
	if err != nil {
		t.Fatal(err)
	}
	p, err := dualpath.New(dualpath.Options{Network: n, MaxAttempts: 100})
	if err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	flying := 0
	begun := map[dualpath.RequestID]bool{}
	step := func(ev dualpath.Event) {
		for _, a := range p.Step(ev) {
			fmt.Fprintf(&said, "%+v\n", a)
			begun[a.Request] = begun[a.Request] || a.Kind == dualpath.Start
		}
		for node := range dualpath.NodeID(6) {
			for tier := range Tier(Tiers) {
				flying = max(flying, n.Oracle().InFlight(node, tier))
			}
		}
	}
	up := func(g dualpath.GroupID) {
		role, e := dualpath.Prefill, dualpath.EngineSpec{Engine: dualpath.EngineID(g), Node: dualpath.NodeID(g)}
		if g >= 3 {
			role, e.HBMTokens = dualpath.Decode, 50_000
		}
		step(dualpath.GroupUp{Group: g, Role: role, Engines: []dualpath.EngineSpec{e}})
	}
	for g := range dualpath.GroupID(6) {
		up(g)
	}
	const requests = 60
	for i := range 2000 {
		id, g := dualpath.RequestID(rng.IntN(requests)), dualpath.GroupID(rng.IntN(6))
		now := time.Duration(i) * time.Millisecond
		role := dualpath.Role(1 + rng.IntN(2))
		switch rng.IntN(12) {
		case 0, 1:
			step(dualpath.Submit{At: now, Request: dualpath.Request{ID: id, Prompt: 1000 + rng.IntN(9000), Hit: 64 * rng.IntN(10)}})
		case 2, 3, 4, 5, 6:
			free := 50_000 * rng.IntN(2)
			step(dualpath.Fetch{At: now, Group: g, Seen: math.MaxUint64, Engines: []dualpath.EngineReport{{Engine: dualpath.EngineID(g), HBMFree: free}}})
		case 7:
			step(dualpath.Finished{At: now, Request: id, Role: role})
		case 8:
			step(dualpath.Failed{At: now, Request: id, Role: role})
		case 9:
			step(dualpath.Cancelled{At: now, Request: id})
		case 10:
			if rng.IntN(3) == 0 {
				step(dualpath.GroupDown{At: now, Group: g})
				up(g)
			}
		case 11:
			r := dualpath.NetworkReport{At: now, Bandwidth: FatTree().Bandwidth, Latency: FatTree().Latency, Congestion: [Tiers]float64{2: rng.Float64(), 3: rng.Float64()}}
			for node := range dualpath.NodeID(6) {
				r.Places = append(r.Places, dualpath.NodePlace{Node: node, Pod: string('a' + rune(rng.IntN(2))), Rack: string('a' + rune(rng.IntN(2)))})
			}
			step(r)
		}
	}
	if flying == 0 || len(begun) < requests/2 {
		t.Fatalf("seed %d: at most %d transfers in flight, %d requests started: nothing was tested", seed, flying, len(begun))
	}
	for id := range dualpath.RequestID(requests) {
		step(dualpath.Cancelled{At: time.Hour, Request: id})
	}
	if len(n.oracle.own) != 0 {
		t.Errorf("seed %d: all requests ended, and %d sources have transfers in flight", seed, len(n.oracle.own))
	}
	return said.String()
}

func TestPlannerRefuses(t *testing.T) {
	if _, err := NewPlanner(PlannerOptions{Fabric: FatTree()}); err == nil || !strings.Contains(err.Error(), "KV a token") {
		t.Errorf("no bytes a token: %v", err)
	}
	if _, err := NewPlanner(PlannerOptions{BytesPerToken: 1}); err == nil || !strings.Contains(err.Error(), "bandwidth") {
		t.Errorf("no fabric: %v", err)
	}
	n, err := NewPlanner(PlannerOptions{Fabric: FatTree(), BytesPerToken: 1})
	if err != nil {
		t.Fatal(err)
	}
	n.Update(&dualpath.NetworkReport{Bandwidth: [Tiers]float64{1, 1, 1, 0}})
	if n.Oracle().Snapshot().Fabric != FatTree() {
		t.Error("a report without a bandwidth was accepted")
	}
}

// BenchmarkPlanner measures all events of a request in the planner, with and without the network:
// 384 prefill and 768 decode engines on 144 machines.
func BenchmarkPlanner(b *testing.B) {
	for _, with := range []bool{false, true} {
		name := "without"
		var o dualpath.Options
		if with {
			name = "with"
			n, err := NewPlanner(PlannerOptions{Fabric: FatTree(), BytesPerToken: 78_080})
			if err != nil {
				b.Fatal(err)
			}
			o.Network = n
		}
		b.Run(name, func(b *testing.B) {
			p, err := dualpath.New(o)
			if err != nil {
				b.Fatal(err)
			}
			up := func(g dualpath.GroupID, role dualpath.Role, from, engines int) dualpath.Fetch {
				u, f := dualpath.GroupUp{Group: g, Role: role}, dualpath.Fetch{Group: g, Seen: math.MaxUint64}
				for i := from; i < from+engines; i++ {
					e := dualpath.EngineSpec{Engine: dualpath.EngineID(i), Node: dualpath.NodeID(i / 8), HBMTokens: 600_000}
					u.Engines = append(u.Engines, e)
					f.Engines = append(f.Engines, dualpath.EngineReport{Engine: e.Engine, HBMFree: e.HBMTokens})
				}
				p.Step(u)
				return f
			}
			pf, df := up(1, dualpath.Prefill, 0, 384), up(2, dualpath.Decode, 384, 768)
			r := dualpath.NetworkReport{Bandwidth: FatTree().Bandwidth, Latency: FatTree().Latency}
			for i := range 144 {
				r.Places = append(r.Places, dualpath.NodePlace{Node: dualpath.NodeID(i), Pod: fmt.Sprint(i / 32), Rack: fmt.Sprint(i / 4), Host: fmt.Sprint(i)})
			}
			p.Step(r)
			const batch = 64
			id := dualpath.RequestID(0)
			for b.Loop() {
				first := id
				for range batch {
					p.Step(dualpath.Submit{Request: dualpath.Request{ID: id, Prompt: 33_000, Hit: 32_704, Output: 170}})
					id++
				}
				p.Step(pf)
				p.Step(df)
				for q := first; q < id; q++ {
					p.Step(dualpath.Finished{Request: q, Role: dualpath.Prefill})
					p.Step(dualpath.Finished{Request: q, Role: dualpath.Decode})
				}
			}
			if s := p.Stats(); s.Finished != uint64(id) {
				b.Fatalf("%+v", s)
			}
			b.ReportMetric(float64(id)/b.Elapsed().Seconds(), "requests/s")
		})
	}
}

// TestSwitchingGroup: a decode group that is being drained gets no request, although it is the
// nearest.
func TestSwitchingGroup(t *testing.T) {
	n, err := NewPlanner(PlannerOptions{Fabric: FatTree(), BytesPerToken: 78_080})
	if err != nil {
		t.Fatal(err)
	}
	p, err := dualpath.New(dualpath.Options{Network: n})
	if err != nil {
		t.Fatal(err)
	}
	report := dualpath.NetworkReport{Bandwidth: FatTree().Bandwidth, Latency: FatTree().Latency}
	for g, pod := range []string{"", "near", "near", "far"} {
		if g == 0 {
			continue
		}
		role := dualpath.Decode
		if g == 1 {
			role = dualpath.Prefill
		}
		p.Step(dualpath.GroupUp{Group: dualpath.GroupID(g), Role: role, Engines: []dualpath.EngineSpec{{Engine: dualpath.EngineID(g), Node: dualpath.NodeID(g), HBMTokens: 600_000}}})
		report.Places = append(report.Places, dualpath.NodePlace{Node: dualpath.NodeID(g), Pod: pod, Rack: pod, Host: fmt.Sprint(g)})
	}
	p.Step(report)
	for id, want := range []dualpath.EngineID{2, 3} {
		p.Step(dualpath.Submit{Request: dualpath.Request{ID: dualpath.RequestID(id), Prompt: 3000, Output: 10}})
		started := dualpath.EngineID(0)
		for _, a := range p.Step(dualpath.Fetch{Group: 1, Seen: math.MaxUint64, Engines: []dualpath.EngineReport{{Engine: 1, HBMFree: 600_000}}}) {
			if a.Kind == dualpath.Start {
				started = a.DE
			}
		}
		if started != want {
			t.Errorf("request %d decodes on engine %d; want %d", id, started, want)
		}
		p.Step(dualpath.SwitchRole{Group: 2, Role: dualpath.Prefill, Drain: dualpath.DrainFinish})
	}
}
