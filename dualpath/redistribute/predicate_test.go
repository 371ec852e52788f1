package redistribute

import (
	"encoding/json"
	"math"
	"os"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// near fails the test unless got is within the relative tolerance of want.
func near(t testing.TB, what string, got, want, tolerance float64) {
	t.Helper()
	if !(math.Abs(got-want) <= tolerance*math.Abs(want)) {
		t.Errorf("%s: got %v, want %v within %v", what, got, want, tolerance)
	}
}

// ibgda returns the paper's first fabric.
func ibgda(t testing.TB) Fabric {
	t.Helper()
	f, err := FabricNamed("h100-ibgda")
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// decide returns the decision, or fails the test.
func decide(t rapid.TB, m Model, r Request) Decision {
	t.Helper()
	d, err := m.Decide(r)
	if err != nil {
		t.Fatalf("%+v: %v", r, err)
	}
	return d
}

// TestVectors compares with an independent reference, which has neither turnaround nor compute nor
// merge.
func TestVectors(t *testing.T) {
	raw, err := os.ReadFile("testdata/predicate.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Rows       int     `json:"mq"`
		Tokens     int     `json:"ct"`
		Probe      float64 `json:"probe"`
		BW         float64 `json:"bw"`
		C          float64 `json:"cpt"`
		Selected   bool    `json:"selected"`
		Route      float64 `json:"route"`
		Fetch      float64 `json:"fetch"`
		Local      float64 `json:"local"`
		Winner     string  `json:"winner"`
		WireRoute  float64 `json:"wire_route"`
		WireLayer  float64 `json:"wire_fetch_layer"`
		BreakEvens float64 `json:"breakeven_mq"`
	}
	if err := json.Unmarshal(raw, &vectors); err != nil {
		t.Fatal(err)
	}
	if len(vectors) < 9 {
		t.Fatalf("%d vectors", len(vectors))
	}
	for i, v := range vectors {
		m := Model{Payload: DeepSeekV2Lite(), Fabric: Fabric{Probe: v.Probe, Bandwidth: v.BW}, Splice: 3e-3, Prefill: v.C}
		r := Request{Rows: v.Rows, Tokens: v.Tokens}
		if v.Selected {
			r.Reuse = Selected
		}
		d := decide(t, m, r)
		for p, want := range map[Primitive]float64{Route: v.Route, Fetch: v.Fetch, Local: v.Local} {
			near(t, p.String(), d.Costs[p].Seconds, want, 1e-9)
		}
		if d.Winner.String() != v.Winner {
			t.Errorf("vector %d: %v wins, want %s", i, d.Winner, v.Winner)
		}
		near(t, "bytes of route", d.Costs[Route].Bytes, v.WireRoute, 0)
		near(t, "bytes of a layer", m.Payload.LayerBytes(v.Tokens), v.WireLayer, 0)
		near(t, "break-even", m.Payload.BreakEvenRows(v.Tokens), v.BreakEvens, 1e-12)
	}
}

// TestPaper compares with the figures of the text, MQ-2 to MQ-11 of the oracles.
func TestPaper(t *testing.T) {
	p, f := DeepSeekV2Lite(), ibgda(t)
	m := H100(f).Transport()
	if p.Query != 1152 || p.Partial != 1032 || p.Token != 1152 {
		t.Errorf("payload %+v", p)
	}
	near(t, "MQ-2 one layer", p.LayerBytes(2048), 2.36e6, 0.03)
	near(t, "MQ-2 all layers", p.ChunkBytes(2048), 64e6, 0.03)
	near(t, "MQ-2 pull", decide(t, m, Request{Rows: 1, Tokens: 2048}).Costs[Fetch].Terms.Pull, 2.5e-3, 0.03)
	near(t, "MQ-3 break-even at 2048", p.BreakEvenRows(2048), 1080.3, 1e-3)
	near(t, "MQ-3 break-even at 512", p.BreakEvenRows(512), 270.1, 1e-3)
	near(t, "MQ-3 saved", p.Saved(256, 2048), 0.763, 5e-3)
	for rows, us := range map[int]float64{1: 24, 256: 48, 1024: 116, 4096: 388} {
		near(t, "MQ-5", f.RoundTrip(p.RouteBytes(rows, 1)), us*1e-6, 0.05)
	}
	near(t, "MQ-7 at 1024", 3e-3/f.RoundTrip(p.RouteBytes(1024, 1)), 26, 0.01)
	near(t, "MQ-7 at 1", 3e-3/f.RoundTrip(p.RouteBytes(1, 1)), 125, 0.05)
	for c, tokens := range map[float64]float64{1.5e-6: 74, 0.5e-6: 222} {
		m.Prefill = c
		near(t, "MQ-8", m.SpliceTokens(), tokens, 0.02)
		if m.LocalTokens() < m.SpliceTokens() {
			t.Errorf("a pull makes the chunk that is worth computing shorter: %v, without it %v", m.LocalTokens(), m.SpliceTokens())
		}
	}
	near(t, "MQ-9", m.SpliceBandwidth(256), 0.2e9, 0.08)
	if rows := m.RouteRows(Request{Tokens: 2048}); rows < 3e4 || rows > 3e5 {
		t.Errorf("MQ-11: route = fetch at %v rows, want about 1e5", rows)
	}
	low, high := math.Inf(1), 0.0
	for _, f := range Fabrics() {
		got := Fabric{Probe: f.Probe, Turnaround: 0, Bandwidth: f.Bandwidth}.RoundTrip(p.RouteBytes(256, 1))
		low, high = min(low, got), max(high, got+f.Turnaround)
	}
	near(t, "MQ-10 fastest", low, 31e-6, 0.12)
	near(t, "MQ-10 slowest", high, 48e-6, 0.12)
}

// TestCongestion is MQ-12: times are flat with two other flows, and increase with the third.
func TestCongestion(t *testing.T) {
	f, p := ibgda(t), DeepSeekV2Lite()
	alone := f.RoundTrip(p.RouteBytes(1024, 1))
	for k := range 3 {
		near(t, "flat", f.Under(k).RoundTrip(p.RouteBytes(1024, 1)), alone, 0)
	}
	near(t, "K=3 at 1024", f.Under(3).RoundTrip(p.RouteBytes(1024, 1))/alone, 2.19, 0.05)
	near(t, "K=3 at 256", f.Under(3).RoundTrip(p.RouteBytes(256, 1))/f.RoundTrip(p.RouteBytes(256, 1)), 2.08, 0.05)
	near(t, "K=3 probe", f.Under(3).Probe, f.Probe*39.5/14.5, 1e-9)
	if a, b := f.Under(3), f.Under(6); !(b.Probe > a.Probe && b.Bandwidth < a.Bandwidth && b.Bulk < a.Bulk) {
		t.Errorf("beside three flows %+v, beside six %+v", a, b)
	}
	// The ranking never inverts (section 8).
	if d := decide(t, H100(f), Request{Rows: 1024, Tokens: 2048, Flows: 3}); d.Winner != Route || d.Costs[Route].Seconds*8 > 3e-3 {
		t.Errorf("beside three flows %v wins, route takes %v s", d.Winner, d.Costs[Route].Seconds)
	}
}

// TestHolder checks the range of section 6.3, and the boundary of replication.
func TestHolder(t *testing.T) {
	h := H100(ibgda(t)).Holder
	if h.Seconds(1) != h.Seconds(FanIn) || h.Seconds(16) < 15e-6 || h.Seconds(16) > 37e-6 {
		t.Errorf("partial of 1: %v, %d: %v, 16: %v s", h.Seconds(1), FanIn, h.Seconds(FanIn), h.Seconds(16))
	}
	near(t, "saturated", h.Seconds(256), 0.4e-3, 1e-9)
	for n, want := range map[int]int{1: 1, 8: 1, 9: 2, 16: 2, 17: 3} {
		if got := Replicas(n); got != want {
			t.Errorf("%d requesters warrant %d replicas, want %d", n, got, want)
		}
	}
}

// TestGather compares with the times of the paper's prototype for 2048 entries on 1 and 7 holders.
func TestGather(t *testing.T) {
	m := H100(ibgda(t))
	m.Gather = PrototypeGather()
	for holders, want := range map[int]float64{1: 1.3e-3, 7: 3.9e-3} {
		d := decide(t, m, Request{Rows: 1, Tokens: 2048, Reuse: Selected, Holders: holders})
		near(t, "a layer", d.Costs[Fetch].Seconds/27, want, 1e-9)
		if d.Winner != Route {
			t.Errorf("%d holders: %v wins", holders, d.Winner)
		}
	}
}

// TestHost: with the prototype's overhead, a fetch without a splice wins at small batches. A fetch
// with a splice wins no more often than without the overhead.
func TestHost(t *testing.T) {
	m := H100(ibgda(t))
	m.Host = PrototypeHost()
	for _, rows := range []int{1, 64, 256} {
		if d := decide(t, m, Request{Rows: rows, Tokens: 2048, Reuse: Prefix}); d.Winner != Fetch {
			t.Errorf("%d rows of a prefix: %v wins, route takes %v and fetch %v s", rows, d.Winner, d.Costs[Route].Seconds, d.Costs[Fetch].Seconds)
		}
	}
	if d := decide(t, m, Request{Rows: 64, Tokens: 2048}); d.Winner != Route {
		t.Errorf("with the splice %v wins", d.Winner)
	}
}

// anyFabric returns a fabric of Table 2.
func anyFabric(t *rapid.T) Fabric { return rapid.SampledFrom(Fabrics()).Draw(t, "fabric") }

// anyModel returns a model with c between 0.5 and 1.5 us, with and without compute and merge.
func anyModel(t *rapid.T) Model {
	m := H100(anyFabric(t))
	m.Prefill = rapid.Float64Range(0.5e-6, 1.5e-6).Draw(t, "c")
	if rapid.Bool().Draw(t, "transport") {
		m = m.Transport()
	}
	return m
}

// TestRules checks section 5.5, "serving rules of thumb", as properties.
func TestRules(t *testing.T) {
	t.Run("route at decode", rapid.MakeCheck(func(t *rapid.T) {
		m := anyModel(t)
		r := Request{Rows: rapid.IntRange(1, 1000).Draw(t, "rows"), Tokens: rapid.IntRange(220, 1<<17).Draw(t, "tokens")}
		if d := decide(t, m, r); d.Winner != Route {
			t.Fatalf("%v wins: %+v", d.Winner, d.Costs)
		}
	}))
	t.Run("more bytes than the chunk", rapid.MakeCheck(func(t *rapid.T) {
		// The bytes of route exceed one layer of the chunk whenever the batch has more rows than
		// the chunk has tokens.
		p := DeepSeekV2Lite()
		tokens := rapid.IntRange(1, 1<<17).Draw(t, "tokens")
		rows := rapid.IntRange(tokens+1, 1<<18).Draw(t, "rows")
		if p.Saved(rows, tokens) > 0 || float64(rows) < p.BreakEvenRows(tokens) {
			t.Fatalf("routing %d rows to %d tokens saves %v of the bytes", rows, tokens, p.Saved(rows, tokens))
		}
	}))
	t.Run("never route beyond its corner", rapid.MakeCheck(func(t *rapid.T) {
		// For a short chunk, and a batch above the one that takes as long as a fetch, local wins.
		m := anyModel(t)
		r := Request{Tokens: rapid.IntRange(1, 74).Draw(t, "tokens")}
		r.Rows = int(m.RouteRows(r)) + 1 + rapid.IntRange(0, 1<<20).Draw(t, "more")
		if d := decide(t, m, r); d.Winner != Local {
			t.Fatalf("%v wins with %d rows: %+v", d.Winner, r.Rows, d.Costs)
		}
	}))
	t.Run("route the selection", rapid.MakeCheck(func(t *rapid.T) {
		m := anyModel(t).Transport()
		m.Fabric.Bulk = 0
		r := Request{Reuse: Selected, Tokens: rapid.IntRange(64, 4096).Draw(t, "tokens")}
		r.Rows = rapid.IntRange(1, int(m.Payload.BreakEvenRows(r.Tokens))).Draw(t, "rows")
		if d := decide(t, m, r); d.Winner != Route {
			t.Fatalf("%v wins: %+v", d.Winner, d.Costs)
		}
	}))
	t.Run("a faster link changes nothing", rapid.MakeCheck(func(t *rapid.T) {
		m := anyModel(t)
		r := Request{Rows: rapid.IntRange(1, 1000).Draw(t, "rows"), Tokens: rapid.IntRange(220, 1<<17).Draw(t, "tokens")}
		for range rapid.IntRange(1, 10).Draw(t, "doublings") {
			m.Fabric.Bandwidth, m.Fabric.Bulk = 2*m.Fabric.Bandwidth, 2*m.Fabric.Bulk
		}
		if d := decide(t, m, r); d.Winner != Route {
			t.Fatalf("%v wins: %+v", d.Winner, d.Costs)
		}
	}))
	t.Run("more holders never help fetch", rapid.MakeCheck(func(t *rapid.T) {
		m := anyModel(t)
		m.Gather = PrototypeGather()
		r := Request{Rows: 1, Tokens: 2048, Reuse: Selected, Holders: rapid.IntRange(1, 7).Draw(t, "holders")}
		a := decide(t, m, r)
		r.Holders++
		b := decide(t, m, r)
		if !(b.Costs[Fetch].Seconds > a.Costs[Fetch].Seconds) || b.Winner != Route {
			t.Fatalf("%d holders: %+v, one less %+v", r.Holders, b, a)
		}
	}))
	t.Run("fetch only to amortise", rapid.MakeCheck(func(t *rapid.T) {
		m := anyModel(t)
		r := Request{Rows: rapid.IntRange(1, 4096).Draw(t, "rows"), Tokens: rapid.IntRange(300, 1<<15).Draw(t, "tokens"), NoLocal: true,
			Reuse: rapid.SampledFrom([]Reuse{Moved, Prefix}).Draw(t, "reuse")}
		steps := m.AmortiseSteps(r)
		r.Steps = int(steps)
		if d := decide(t, m, r); d.Winner != Fetch {
			t.Fatalf("%v wins at %v steps", d.Winner, steps)
		}
		if r.Steps--; r.Steps > 0 {
			if d := decide(t, m, r); d.Winner != Route {
				t.Fatalf("%v wins one step before %v", d.Winner, steps)
			}
		}
	}))
	t.Run("the break-even in rows", rapid.MakeCheck(func(t *rapid.T) {
		m := anyModel(t)
		r := Request{Tokens: rapid.IntRange(1, 1<<15).Draw(t, "tokens"), NoLocal: true, Reuse: rapid.SampledFrom([]Reuse{Moved, Prefix, Selected}).Draw(t, "reuse"),
			Trips: rapid.SampledFrom([]int{1, 27}).Draw(t, "trips"), Flows: rapid.IntRange(0, 5).Draw(t, "flows")}
		even := m.RouteRows(r)
		if r.Rows = int(even * (1 - 1e-9)); r.Rows > 0 {
			if d := decide(t, m, r); d.Winner != Route {
				t.Fatalf("%v wins with %d rows of %v", d.Winner, r.Rows, even)
			}
		}
		r.Rows = int(even*(1+1e-9)) + 1
		if d := decide(t, m, r); d.Winner != Fetch {
			t.Fatalf("%v wins with %d rows of %v", d.Winner, r.Rows, even)
		}
	}))
}

// TestDecideIsTheLeast compares with a search through costs computed term by term.
func TestDecideIsTheLeast(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := anyModel(t)
		m.Host = rapid.SampledFrom([]Host{{}, PrototypeHost()}).Draw(t, "host")
		m.Gather = rapid.SampledFrom([]Gather{{}, PrototypeGather()}).Draw(t, "gather")
		r := Request{
			Rows: rapid.IntRange(1, 1<<17).Draw(t, "rows"), Tokens: rapid.IntRange(8, 1<<17).Draw(t, "tokens"),
			Reuse: rapid.SampledFrom([]Reuse{Moved, Prefix, Selected}).Draw(t, "reuse"), Steps: rapid.IntRange(1, 1000).Draw(t, "steps"),
			Trips: rapid.IntRange(1, 61).Draw(t, "trips"), Requesters: rapid.IntRange(1, 300).Draw(t, "requesters"), Holders: 1,
			NoRoute: rapid.Bool().Draw(t, "no route"), NoFetch: rapid.Bool().Draw(t, "no fetch"),
		}
		if r.Reuse == Selected {
			r.Holders = rapid.IntRange(1, 8).Draw(t, "holders")
		}
		f := m.Fabric
		partial := m.Holder.Base
		for range max(0, r.Requesters-m.Holder.Elbow) {
			partial += m.Holder.Step
		}
		route := float64(r.Steps) * (float64(r.Trips)*(f.Probe+f.Turnaround+float64(r.Holders*r.Rows*2184)/f.Bandwidth+partial+m.Merge) + m.Host.Fixed + m.Host.Row*float64(r.Rows))
		bytes, bulk := float64(r.Tokens*1152*27), f.Bulk
		var fetch, local float64
		switch prefill := float64(r.Tokens*27) * m.Prefill; r.Reuse {
		case Moved:
			fetch, local = bytes/bulk+3e-3, prefill
		case Prefix:
			fetch, local = bytes/bulk, prefill
		case Selected:
			if b := m.Gather.Bandwidth; b > 0 && b < bulk {
				bulk = b
			}
			fetch, local = float64(r.Steps)*(bytes/bulk+27*float64(r.Holders)*m.Gather.Holder), float64(r.Steps)*prefill
		}
		want, best := Local, local
		if !r.NoFetch && fetch <= best {
			want, best = Fetch, fetch
		}
		if !r.NoRoute && route <= best {
			want, best = Route, route
		}
		d := decide(t, m, r)
		if got := d.Costs[d.Winner].Seconds; d.Winner != want && math.Abs(got-best) > 1e-9*best {
			t.Fatalf("%v wins with %v s, want %v with %v", d.Winner, got, want, best)
		}
		for p, w := range map[Primitive]float64{Route: route, Fetch: fetch, Local: local} {
			if math.Abs(d.Costs[p].Seconds-w) > 1e-9*w {
				t.Fatalf("%v takes %v s, want %v", p, d.Costs[p].Seconds, w)
			}
		}
	})
}

// TestTrips: with a round trip for each layer, which the paper does not count, a decode batch is
// still faster than one fetch on every fabric, by a smaller margin.
func TestTrips(t *testing.T) {
	for _, f := range Fabrics() {
		one := decide(t, H100(f), Request{Rows: 256, Tokens: 2048})
		all := decide(t, H100(f), Request{Rows: 256, Tokens: 2048, Trips: 27})
		near(t, f.Name, all.Costs[Route].Seconds, 27*one.Costs[Route].Seconds, 1e-9)
		if a, b := H100(f).AmortiseSteps(Request{Rows: 256, Tokens: 2048}), H100(f).AmortiseSteps(Request{Rows: 256, Tokens: 2048, Trips: 27}); !(b < a) {
			t.Errorf("%s: fetch is repaid after %v steps, with a trip a layer after %v", f.Name, a, b)
		}
	}
}

// TestRank: at degree 2 each rank has half of the bytes, and the columns are paired.
func TestRank(t *testing.T) {
	p := DeepSeekV2Lite()
	for _, n := range []int{1, 2, 4, 8} {
		r, err := p.Rank(n)
		if err != nil {
			t.Fatal(err)
		}
		near(t, "bytes of a rank", r.RouteBytes(256, 1)*float64(n), p.RouteBytes(256, 1), 0.03)
		if r.Query*n != p.Query || r.Token*n != p.Token || (r.Partial-8)*n != p.Partial-8 {
			t.Errorf("%d ranks: %+v", n, r)
		}
	}
	for _, n := range []int{0, -1, 7} {
		if r, err := p.Rank(n); err == nil {
			t.Errorf("%d ranks: %+v", n, r)
		}
	}
}

func TestPairRanks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		degrees := []int{1, 2, 3, 4, 6, 8, 12, 16}
		const width = 576
		a, b := rapid.SampledFrom(degrees).Draw(t, "requester"), rapid.SampledFrom(degrees).Draw(t, "holder")
		pairs, err := PairRanks(width, a, b)
		if err != nil {
			t.Fatal(err)
		}
		// Each column is sent once, from its owner to its owner.
		column := 0
		for _, p := range pairs {
			if p.Low != column || p.High <= p.Low {
				t.Fatalf("%d columns covered, then %+v", column, p)
			}
			for ; column < p.High; column++ {
				if column*a/width != p.Requester || column*b/width != p.Holder {
					t.Fatalf("column %d of %+v", column, p)
				}
			}
		}
		if column != width || (a == b && len(pairs) != a) {
			t.Fatalf("%d columns covered by %d pairs", column, len(pairs))
		}
	})
	for _, bad := range [][3]int{{576, 0, 1}, {576, 1, 5}, {0, 1, 1}} {
		if p, err := PairRanks(bad[0], bad[1], bad[2]); err == nil {
			t.Errorf("%v: %v", bad, p)
		}
	}
}

func TestRefuses(t *testing.T) {
	good, r := H100(ibgda(t)), Request{Rows: 1, Tokens: 2048}
	for name, spoil := range map[string]func(m *Model, r *Request){
		"query row": func(m *Model, _ *Request) { m.Payload.Query = 0 }, "partial row": func(m *Model, _ *Request) { m.Payload.Partial = -1 },
		"cached token": func(m *Model, _ *Request) { m.Payload.Token = 1 << 40 }, "layers": func(m *Model, _ *Request) { m.Payload.Layers = 0 },
		"statistics": func(m *Model, _ *Request) { m.Payload.Stats = 2000 }, "bandwidth of": func(m *Model, _ *Request) { m.Fabric.Bandwidth = math.NaN() },
		"probe": func(m *Model, _ *Request) { m.Fabric.Probe = -1 }, "turnaround": func(m *Model, _ *Request) { m.Fabric.Turnaround = math.Inf(1) },
		"contention": func(m *Model, _ *Request) { m.Fabric.Contention.Probe = 0.5 }, "splice": func(m *Model, _ *Request) { m.Splice = math.NaN() },
		"prefill of a token": func(m *Model, _ *Request) { m.Prefill = -1 }, "host overhead": func(m *Model, _ *Request) { m.Host.Fixed = -1 },
		"query rows": func(_ *Model, r *Request) { r.Rows = 0 }, "tokens": func(_ *Model, r *Request) { r.Tokens = -5 },
		"steps": func(_ *Model, r *Request) { r.Steps = -1 }, "other flows": func(_ *Model, r *Request) { r.Flows = -1 },
		"scattered": func(_ *Model, r *Request) { r.Holders = 2 }, "without a token": func(_ *Model, r *Request) { r.Reuse, r.Holders, r.Tokens = Selected, 3, 2 },
		"nothing is left": func(_ *Model, r *Request) { r.NoRoute, r.NoFetch, r.NoLocal = true, true, true }, "reuse": func(_ *Model, r *Request) { r.Reuse = 9 },
	} {
		m, r := good, r
		spoil(&m, &r)
		if _, err := m.Decide(r); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := FabricNamed("token-ring"); err == nil {
		t.Error("an unknown fabric was found")
	}
	for _, w := range reuseNames {
		if r, err := ParseReuse(w); err != nil || r.String() != w {
			t.Errorf("%s: %v, %v", w, r, err)
		}
	}
	if _, err := ParseReuse("often"); err == nil {
		t.Error("reuse often was accepted")
	}
}

func TestDecideAllocatesNothing(t *testing.T) {
	m, r := H100(ibgda(t)), Request{Rows: 256, Tokens: 2048, Reuse: Selected, Holders: 4}
	if n := testing.AllocsPerRun(100, func() { _, _ = m.Decide(r) }); n != 0 {
		t.Errorf("%v allocations a decision", n)
	}
}

// BenchmarkDecide measures the predicate, which is evaluated for each chunk of each request.
func BenchmarkDecide(b *testing.B) {
	m, r := H100(Fabrics()[0]), Request{Rows: 256, Tokens: 2048, Reuse: Selected, Holders: 4}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := m.Decide(r); err != nil {
			b.Fatal(err)
		}
	}
}
