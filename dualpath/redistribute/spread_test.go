package redistribute

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

// TestSpreadIsTheLeast compares with a search over every choice for every holder.
func TestSpreadIsTheLeast(t *testing.T) {
	mixed := 0
	rapid.Check(t, func(t *rapid.T) {
		m := anyModel(t)
		m.Gather = rapid.SampledFrom([]Gather{{}, PrototypeGather(), {Holder: 1e-6}}).Draw(t, "gather")
		m.Host = rapid.SampledFrom([]Host{{}, {Fixed: 20e-6}, PrototypeHost()}).Draw(t, "host")
		rows := rapid.IntRange(1, 4096).Draw(t, "rows")
		var hs []Holding
		for range rapid.IntRange(1, 8).Draw(t, "holders") {
			h := Holding{Fabric: anyFabric(t), Tokens: rapid.IntRange(1, 1024).Draw(t, "tokens"), Requesters: rapid.IntRange(1, 40).Draw(t, "requesters"), Flows: rapid.IntRange(0, 4).Draw(t, "flows")}
			switch rapid.IntRange(0, 5).Draw(t, "ruled out") {
			case 0:
				h.NoRoute = true
			case 1:
				h.NoFetch = true
			}
			hs = append(hs, h)
		}
		got, err := m.Spread(rows, hs)
		if err != nil {
			t.Fatal(err)
		}
		least := math.Inf(1)
		for choice := range 1 << len(hs) {
			wait, sum, routed, ok := 0.0, 0.0, false, true
			for i, h := range hs {
				f := h.Fabric.Under(h.Flows)
				if choice>>i&1 == 1 {
					ok = ok && !h.NoRoute
					routed = true
					wait = max(wait, f.Probe+f.Turnaround+m.Holder.Seconds(h.Requesters))
					sum += float64(rows) * 2184 / f.Bandwidth
					continue
				}
				ok = ok && !h.NoFetch
				bulk := f.Bulk
				if m.Gather.Bandwidth > 0 {
					bulk = min(bulk, m.Gather.Bandwidth)
				}
				sum += float64(h.Tokens)*1152*27/bulk + 27*m.Gather.Holder
			}
			if routed {
				sum += m.Merge + m.Host.Fixed + m.Host.Row*float64(rows)
			}
			if ok {
				least = min(least, wait+sum)
			}
		}
		if math.Abs(got.Seconds-least) > 1e-9*least {
			t.Fatalf("%v takes %v s, the least is %v", got.Choice, got.Seconds, least)
		}
		routes := 0
		for i, c := range got.Choice {
			if c == Route && hs[i].NoRoute || c == Fetch && hs[i].NoFetch || c == Local {
				t.Fatalf("holding %d: %v is ruled out", i, c)
			}
			if c == Route {
				routes++
			}
		}
		if routes > 0 && routes < len(hs) {
			mixed++
		}
	})
	if mixed == 0 {
		t.Error("every holder has the result of its neighbours")
	}
}

// TestSpreadAgrees: for equal holders, the costs are those of Decide for all of them.
func TestSpreadAgrees(t *testing.T) {
	m := H100(ibgda(t))
	m.Gather = PrototypeGather()
	for _, p := range []Primitive{Route, Fetch} {
		hs := make([]Holding, 4)
		for i := range hs {
			hs[i] = Holding{Fabric: m.Fabric, Tokens: 512, NoFetch: p == Route, NoRoute: p == Fetch}
		}
		s, err := m.Spread(256, hs)
		if err != nil {
			t.Fatal(err)
		}
		d := decide(t, m, Request{Rows: 256, Tokens: 2048, Reuse: Selected, Holders: 4})
		near(t, p.String(), s.Seconds, d.Costs[p].Seconds, 1e-12)
	}
}

func TestSpreadRefuses(t *testing.T) {
	m := H100(ibgda(t))
	good := Holding{Fabric: m.Fabric, Tokens: 10}
	for name, hs := range map[string][]Holding{
		"none": nil, "too many": make([]Holding, MaxHoldings+1), "no fabric": {{Tokens: 1}}, "no tokens": {good, {Fabric: m.Fabric}},
		"neither": {{Fabric: m.Fabric, Tokens: 1, NoRoute: true, NoFetch: true}}, "negative": {{Fabric: m.Fabric, Tokens: 1, Flows: -1}},
	} {
		if s, err := m.Spread(1, hs); err == nil {
			t.Errorf("%s: %+v", name, s)
		}
	}
	if s, err := m.Spread(0, []Holding{good}); err == nil {
		t.Errorf("no rows: %+v", s)
	}
}
