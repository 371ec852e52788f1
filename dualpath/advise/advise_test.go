package advise

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

// cluster and model return small round numbers.
func cluster() Cluster {
	return Cluster{PrefillNodes: 1, DecodeNodes: 1, GPUs: 8, Storage: 50e9, Compute: 50e9, DRAM: 500e9}
}

func model() Model {
	return Model{KVBytes: 50_000, FLOPS: 100e12, Step: 0.010, StepPerRequest: 0.001, DecodeHBM: 1e6, Quota: 0.3, Overhead: 0.03}
}

// agents returns n agents with equal rounds.
func agents(n, rounds int, r Round) [][]Round {
	out := make([][]Round, n)
	for i := range out {
		for range rounds {
			out[i] = append(out[i], r)
		}
	}
	return out
}

// predict returns the prediction, or fails the test.
func predict(t testing.TB, c Cluster, m Model, a [][]Round) Prediction {
	t.Helper()
	p, err := Predict(c, m, a)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func near(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if !(math.Abs(got-want) <= tolerance*math.Abs(want)) {
		t.Errorf("%s: %v, want %v within %v", what, got, want, tolerance)
	}
}

// TestOneAgent: for a single agent, every time is that of the formulas.
func TestOneAgent(t *testing.T) {
	r := Round{Hit: 10_000, Append: 100, Gen: 50, Linear: 8e12, Attention: 10e12}
	p := predict(t, cluster(), model(), agents(1, 20, r))
	read := 10_000 * 50_000 / 50e9 // one NIC
	step := 0.03 + 0.1 + 0.08/8
	moved := 10_100 * 50_000 / 50e9
	want := read + step + moved + 0.005 + 50*0.011
	// The agent has the prefill group to itself. Waiting for half of its own last step is an
	// artefact of the means, as rare as its steps.
	prefill := step * (1 + step/want/2)
	want += prefill - step
	near(t, "a round", p.Seconds/20, want, 0.01)
	near(t, "TTFT", p.TTFT, read+prefill, 0.01)
	near(t, "TPOT", p.TPOT, 0.011, 1e-6)
	if p.Rounds != 20 || math.Abs(p.PrefillReads-0.5) > 1e-9 {
		t.Errorf("%+v", p)
	}
}

// TestBounds: with many agents the scarce resource bounds the throughput, and is named first.
func TestBounds(t *testing.T) {
	const n, rounds = 500, 20
	for _, c := range []struct {
		binds string
		r     Round
		c     Cluster
		// seconds is the time that the job needs on the resource alone.
		seconds float64
	}{
		{StorageNICs, Round{Hit: 60_000, Append: 10, Gen: 5, Linear: 1e9}, cluster(), n * rounds * 60_000 * 50_000 / 100e9},
		{StorageNICs, Round{Hit: 60_000, Append: 10, Gen: 5, Linear: 1e9}, func() Cluster { c := cluster(); c.PrefillOnly = true; return c }(), n * rounds * 60_000 * 50_000 / 50e9},
		{Prefill, Round{Hit: 1000, Append: 1000, Gen: 5, Linear: 80e12, Attention: 20e12}, cluster(), n * rounds * (0.8/8 + 0.2/8*(0.33/0.3))},
		{Decode, Round{Hit: 50_000, Append: 10, Gen: 4000, Linear: 1e9}, cluster(), n * rounds * 4000 / (8 * (1e6 / 54_010) / (0.010 + 0.001*1e6/54_010))},
	} {
		p := predict(t, c.c, model(), agents(n, rounds, c.r))
		if p.Uses[0].Name != c.binds {
			t.Errorf("%s is to bind: %+v", c.binds, p.Uses)
		}
		if p.Seconds < c.seconds*0.99 || p.Seconds > c.seconds*1.15 {
			t.Errorf("%s: the job takes %v s; of the resource alone it needs %v", c.binds, p.Seconds, c.seconds)
		}
		for _, u := range p.Uses {
			if !(u.Used >= 0 && u.Used <= 1.02) {
				t.Errorf("%s: %+v", c.binds, p.Uses)
			}
		}
	}
}

// TestMore: more of any resource never makes the job longer.
func TestMore(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var set [][]Round
	for range 60 {
		var a []Round
		for hit := 0.0; len(a) < 5+rng.IntN(20); hit += 500 {
			a = append(a, Round{Hit: hit, Append: 1 + 500*rng.Float64(), Gen: 1 + 100*rng.Float64(), Linear: 5e12 * rng.Float64(), Attention: 5e12 * rng.Float64()})
		}
		set = append(set, a)
	}
	base := predict(t, cluster(), model(), set).Seconds
	for what, edit := range map[string]func(*Cluster, *Model){
		"storage": func(c *Cluster, _ *Model) { c.Storage *= 2; c.Compute *= 2; c.DRAM *= 2 },
		"compute": func(_ *Cluster, m *Model) { m.FLOPS *= 2 },
		"decode":  func(_ *Cluster, m *Model) { m.Step /= 2 },
		"HBM":     func(_ *Cluster, m *Model) { m.DecodeHBM *= 2 },
		"decode nodes": func(c *Cluster, _ *Model) {
			c.DecodeNodes++
		},
	} {
		c, m := cluster(), model()
		edit(&c, &m)
		if got := predict(t, c, m, set).Seconds; got > base*1.001 {
			t.Errorf("more of %s: %v s instead of %v", what, got, base)
		}
	}
}

func TestDivide(t *testing.T) {
	c, m := cluster(), model()
	c.PrefillNodes, c.DecodeNodes = 2, 4
	d, err := Divide(c, m, agents(200, 5, Round{Hit: 1000, Append: 1000, Gen: 5, Linear: 80e12, Attention: 20e12}))
	if err != nil {
		t.Fatal(err)
	}
	if len(d) != 5 || d[0].PrefillNodes != 1 || d[4].DecodeNodes != 1 {
		t.Fatalf("%+v", d)
	}
	if best := Best(d); best != 4 {
		t.Errorf("all of the work is prefill's, and %dP%dD is the best", d[best].PrefillNodes, d[best].DecodeNodes)
	}
	// 5P1D is outside of the safe range, [1/7, 3.5].
	if !d[1].Safe || d[4].Safe {
		t.Errorf("2P4D safe: %v, 5P1D safe: %v", d[1].Safe, d[4].Safe)
	}
}

func TestRefused(t *testing.T) {
	one := agents(1, 1, Round{Append: 1, Gen: 1})
	for _, c := range []struct {
		says string
		edit func(*Cluster, *Model, *[][]Round)
	}{
		{"decode nodes", func(c *Cluster, _ *Model, _ *[][]Round) { c.DecodeNodes = 0 }},
		{"DRAM", func(c *Cluster, _ *Model, _ *[][]Round) { c.DRAM = math.NaN() }},
		{"FLOP/s", func(_ *Cluster, m *Model, _ *[][]Round) { m.FLOPS = 0 }},
		{"decode HBM", func(_ *Cluster, m *Model, _ *[][]Round) { m.DecodeHBM = math.Inf(1) }},
		{"adds -1 s", func(_ *Cluster, m *Model, _ *[][]Round) { m.StepPerRequest = -1 }},
		{"no rounds", func(_ *Cluster, _ *Model, a *[][]Round) { *a = [][]Round{{}} }},
		{"round 0 of agent 0", func(_ *Cluster, _ *Model, a *[][]Round) { *a = agents(1, 1, Round{Append: 1}) }},
		{"round 0 of agent 0", func(_ *Cluster, _ *Model, a *[][]Round) {
			*a = agents(1, 1, Round{Append: 1, Gen: 1, Hit: math.Inf(1)})
		}},
	} {
		cl, m, a := cluster(), model(), one
		c.edit(&cl, &m, &a)
		if _, err := Predict(cl, m, a); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.says, err)
		}
	}
}

// FuzzPredict: for any cluster and agents, a prediction ends, is finite, and is no shorter than the
// time that each resource alone needs.
func FuzzPredict(f *testing.F) {
	f.Add(uint64(1))
	f.Add(uint64(99))
	f.Fuzz(func(t *testing.T, seed uint64) {
		rng := rand.New(rand.NewPCG(seed, 3))
		scale := func(low, high float64) float64 { return low * math.Pow(high/low, rng.Float64()) }
		c := Cluster{PrefillNodes: 1 + rng.IntN(8), DecodeNodes: 1 + rng.IntN(8), GPUs: 1 + rng.IntN(8), Storage: scale(1e8, 1e12), Compute: scale(1e8, 1e12), DRAM: scale(1e10, 1e13), PrefillOnly: rng.IntN(2) == 0}
		m := Model{KVBytes: scale(100, 1e6), FLOPS: scale(1e10, 1e16), Step: scale(1e-4, 1), StepPerRequest: rng.Float64() * 0.01, DecodeHBM: scale(1e3, 1e7), Quota: scale(1e-3, 10), Overhead: rng.Float64()}
		var set [][]Round
		bytes, flop := 0.0, 0.0
		for range 1 + rng.IntN(50) {
			var a []Round
			for range 1 + rng.IntN(10) {
				r := Round{Hit: rng.Float64() * 1e5, Append: 1 + rng.Float64()*1e4, Gen: 1 + rng.Float64()*1e3, Linear: scale(1, 1e15), Attention: rng.Float64() * 1e14}
				bytes += r.Hit * m.KVBytes
				flop += r.Linear + r.Attention
				a = append(a, r)
			}
			set = append(set, a)
		}
		p, err := Predict(c, m, set)
		if err != nil {
			if strings.Contains(err.Error(), "positive") {
				return
			}
			t.Fatal(err)
		}
		least := max(flop/m.FLOPS/float64((c.PrefillNodes+c.DecodeNodes)*c.GPUs), bytes/c.Storage/float64(c.PrefillNodes+c.DecodeNodes))
		for what, v := range map[string]float64{"seconds": p.Seconds, "throughput": p.Throughput, "TTFT": p.TTFT, "TPOT": p.TPOT} {
			if !(v > 0) || math.IsInf(v, 0) {
				t.Errorf("%s is %v", what, v)
			}
		}
		if p.Seconds < least*0.9 {
			t.Errorf("%v s; the work and the bytes need %v", p.Seconds, least)
		}
	})
}
