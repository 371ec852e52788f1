package dualpath

import (
	"math"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// near fails unless got is want within a relative 1e-9.
func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 1e-9*math.Max(1, math.Abs(want)) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// newPlanner returns a planner, or fails.
func newPlanner(t testing.TB, o Options) *Planner {
	t.Helper()
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPrefillVectors(t *testing.T) {
	type vector struct {
		Engines []struct{ Tok, Readq int }
		Alpha   int
		Beta    int
		Reqs    []int
		Picks   []int
	}
	for i, v := range testkit.Vectors[vector](t, "testdata/vectors.json", "dualpath.pe_select") {
		p := newPlanner(t, Options{Alpha: v.Alpha, Beta: v.Beta})
		up, fetch := GroupUp{Group: 1, Role: Prefill}, Fetch{Group: 1}
		for e, en := range v.Engines {
			up.Engines = append(up.Engines, EngineSpec{Engine: EngineID(e), Node: NodeID(e)})
			fetch.Engines = append(fetch.Engines, EngineReport{Engine: EngineID(e), Tokens: en.Tok})
			fetch.Nodes = append(fetch.Nodes, NodeReport{Node: NodeID(e), ReadQueue: en.Readq})
		}
		p.Step(up)
		p.Step(GroupUp{Group: 2, Role: Decode, Engines: []EngineSpec{{Engine: 1000, Node: 1000}}})
		for id, n := range v.Reqs {
			p.Step(Submit{Request: Request{ID: RequestID(id), Prompt: n}})
		}
		same(t, i, picksOf(t, p, fetch, Prefill), v.Picks)
	}
}

// picksOf returns the engines of one role to which a fetch gives requests. The requests are
// numbered from 0 in order.
func picksOf(t *testing.T, p *Planner, f Fetch, role Role) (picks []int) {
	t.Helper()
	for _, a := range p.Step(f) {
		switch {
		case a.Kind == Start, a.Kind == Assign && a.Side != role:
		case a.Kind != Assign || a.Request != RequestID(len(picks)):
			t.Fatalf("action %+v", a)
		default:
			picks = append(picks, int(a.Engine))
		}
	}
	return picks
}

func TestDecodeGroupVectors(t *testing.T) {
	type vector struct {
		Groups [][]int
		Reqs   []int
		Picks  []int
	}
	for i, v := range testkit.Vectors[vector](t, "testdata/vectors.json", "dualpath.de_phase1") {
		p := newPlanner(t, Options{})
		engine := EngineID(0)
		for g, toks := range v.Groups {
			up, fetch := GroupUp{Group: GroupID(g), Role: Decode}, Fetch{Group: GroupID(g)}
			for _, tok := range toks {
				up.Engines = append(up.Engines, EngineSpec{Engine: engine, Node: NodeID(engine), HBMTokens: 1 << 20})
				fetch.Engines = append(fetch.Engines, EngineReport{Engine: engine, Tokens: tok})
				engine++
			}
			p.Step(up)
			p.Step(fetch)
		}
		for id, n := range v.Reqs {
			p.Step(Submit{Request: Request{ID: RequestID(id), Prompt: n}})
		}
		p.route()
		picks := make([]int, len(v.Reqs))
		for id := range v.Reqs {
			picks[id] = int(p.requests[RequestID(id)].home.id)
		}
		same(t, i, picks, v.Picks)
	}
}

func TestDecodeEngineVectors(t *testing.T) {
	type vector struct {
		Engines []struct{ Tok, Seq, HBM int }
		Queue   []int
		Z       float64
		R       int
		Picks   []int
	}
	for i, v := range testkit.Vectors[vector](t, "testdata/vectors.json", "dualpath.de_phase2") {
		p := newPlanner(t, Options{BlockTokens: 1, Beta: 1 << 20})
		up, fetch := GroupUp{Group: 1, Role: Decode}, Fetch{Group: 1}
		for e, en := range v.Engines {
			up.Engines = append(up.Engines, EngineSpec{Engine: EngineID(e), Node: NodeID(e), HBMTokens: 1 << 20})
			fetch.Engines = append(fetch.Engines, EngineReport{Engine: EngineID(e), Tokens: en.Tok, Requests: en.Seq, HBMFree: en.HBM})
		}
		p.Step(up)
		p.Step(fetch)
		for id, n := range v.Queue {
			p.Step(Submit{Request: Request{ID: RequestID(id), Prompt: n}})
		}
		p.Step(GroupUp{Group: 2, Role: Prefill, Engines: []EngineSpec{{Engine: 1000, Node: 1000}}})
		p.route()
		z, fitting := p.threshold(p.groups[1])
		near(t, "Z", z, v.Z)
		if fitting != v.R {
			t.Errorf("vector %d: %d requests fit, want %d", i, fitting, v.R)
		}
		same(t, i, picksOf(t, p, Fetch{Group: 2}, Decode), v.Picks)
	}
}

func TestReadSideVectors(t *testing.T) {
	type vector struct {
		PE, DE int
		Side   string
	}
	for i, v := range testkit.Vectors[vector](t, "testdata/vectors.json", "dualpath.read_side") {
		a, b := &node{queue: v.PE, total: 10}, &node{queue: v.DE, total: 10}
		switch v.Side {
		case "pe":
			if !shorter(a, b) {
				t.Errorf("vector %d: the decode side reads", i)
			}
		case "de":
			if shorter(a, b) {
				t.Errorf("vector %d: the prefill side reads", i)
			}
		default: // a tie goes to the one with fewer assigned tokens
			if a.total = 9; !shorter(a, b) {
				t.Errorf("vector %d: a tie goes to the decode side, which was given more", i)
			}
			if a.total = 11; shorter(a, b) {
				t.Errorf("vector %d: a tie goes to the prefill side, which was given more", i)
			}
		}
	}
}

func TestRangeVectors(t *testing.T) {
	type vector struct{ G, S, B, M, Lo, Hi float64 }
	for _, v := range testkit.Vectors[vector](t, "testdata/vectors.json", "dualpath.range") {
		a, err := Analyze(Cluster{PrefillNodes: 1, DecodeNodes: 1, GPUs: int(v.G), CNIC: v.B, SNICs: v.S, DRAM: v.M})
		if err != nil {
			t.Fatal(err)
		}
		near(t, "low", a.Safe.Low, v.Lo)
		near(t, "high", a.Safe.High, v.Hi)
	}
}

func TestLoadVectors(t *testing.T) {
	type vector struct {
		P, D, G             int
		S, B, M, Saturation float64
		PECnicRead          float64 `json:"pe_cnic_read"`
		PECnicWrite         float64 `json:"pe_cnic_write"`
		DECnicRead          float64 `json:"de_cnic_read"`
		DECnicWrite         float64 `json:"de_cnic_write"`
		PEDram              float64 `json:"pe_dram"`
		DEDram              float64 `json:"de_dram"`
	}
	for _, v := range testkit.Vectors[vector](t, "testdata/vectors.json", "dualpath.loads") {
		a, err := Analyze(Cluster{PrefillNodes: v.P, DecodeNodes: v.D, GPUs: v.G, CNIC: v.B, SNICs: v.S, DRAM: v.M})
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range []float64{v.PECnicRead, v.PECnicWrite, v.DECnicRead, v.DECnicWrite, v.PEDram, v.DEDram} {
			near(t, a.Resources[i].Name, a.Resources[i].Load, want)
		}
		near(t, "saturation", a.Saturation, v.Saturation)
		if inside := a.Safe.Holds(float64(v.P) / float64(v.D)); inside != (a.Saturation >= 1-1e-9) {
			t.Errorf("%dP%dD: in the safe range: %v, but %v of the storage bandwidth is reached", v.P, v.D, inside, a.Saturation)
		}
	}
}

// TestBound is DP-4 of the oracles: the largest gain of dual path.
func TestBound(t *testing.T) {
	for _, v := range []struct {
		p, d int
		want float64
	}{{1, 1, 2}, {2, 1, 1.5}, {1, 2, 3}, {2, 4, 3}} {
		a, err := Analyze(Cluster{PrefillNodes: v.p, DecodeNodes: v.d, GPUs: 8, CNIC: 50, SNICs: 1, DRAM: 500})
		if err != nil {
			t.Fatal(err)
		}
		near(t, "bound", a.Bound, v.want)
	}
}

func TestAnalyzeRefuses(t *testing.T) {
	good := Cluster{PrefillNodes: 1, DecodeNodes: 1, GPUs: 8, CNIC: 50, SNICs: 1, DRAM: 500}
	for name, spoil := range map[string]func(*Cluster){
		"prefill nodes": func(c *Cluster) { c.PrefillNodes = 0 }, "decode nodes": func(c *Cluster) { c.DecodeNodes = -1 },
		"GPUs of a node": func(c *Cluster) { c.GPUs = 0 }, "bandwidth of a compute NIC": func(c *Cluster) { c.CNIC = math.NaN() },
		"storage NICs of a node": func(c *Cluster) { c.SNICs = math.Inf(1) }, "DRAM bandwidth": func(c *Cluster) { c.DRAM = 0 },
	} {
		c := good
		spoil(&c)
		if _, err := Analyze(c); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// same fails unless the choices are equal.
func same(t *testing.T, vector int, got, want []int) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("vector %d: picks %v, want %v", vector, got, want)
		return
	}
	for i := range got {
		if got[i] != want[i] {
			t.Errorf("vector %d: picks %v, want %v", vector, got, want)
			return
		}
	}
}
