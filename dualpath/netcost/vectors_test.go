package netcost

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// near fails the test unless got equals want within a relative 1e-9.
func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if !(math.Abs(got-want) <= 1e-9*math.Max(1, math.Abs(want))) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func TestChooseVectors(t *testing.T) {
	type vector struct {
		S, Len, Mmin float64
		Step         float64 `json:"a"`
		PerRequest   float64 `json:"b"`
		Insts        []struct {
			Tier    Tier
			Hit     float64
			Mem     float64
			Q, Beta int
		}
		B        [Tiers]float64 `json:"B"`
		C        [Tiers]float64
		L        [Tiers]float64
		Inflight [Tiers]int
		Bmax     int
		Pick     int
		Costs    []*float64
	}
	for i, v := range testkit.Vectors[vector](t, "testdata/vectors.json", "netkv.choose") {
		// The unit is gigabytes; lengths are multiplied by ten, because one has a tenth of a token.
		s := Snapshot[int]{Congestion: v.C, Pairs: map[[2]int]Tier{}}
		for k := range v.B {
			s.Bandwidth[k], s.Latency[k] = v.B[k]*1e9, time.Duration(math.Round(v.L[k]*1e9))
		}
		const from = -1
		r := Request[int]{From: from, Tokens: int(v.Len * 10), Bytes: int64(v.S * 1e9)}
		var candidates []Candidate[int]
		for id, d := range v.Insts {
			s.Pairs[[2]int{from, id}] = d.Tier
			candidates = append(candidates, Candidate[int]{id, int(math.Round(d.Hit * 10)), int64(d.Mem * 1e9), d.Q, d.Beta})
		}
		seconds := func(s float64) time.Duration { return time.Duration(math.Round(s * 1e9)) }
		o, err := NewOracle(Model{Step: seconds(v.Step), StepPerRequest: seconds(v.PerRequest), MaxBatch: v.Bmax, Reserve: int64(v.Mmin * 1e9)}, s)
		if err != nil {
			t.Fatal(err)
		}
		for tier, n := range v.Inflight {
			for range n {
				o.Begin(from, Tier(tier))
			}
		}
		for k, want := range v.Costs {
			got := o.Cost(&r, &candidates[k])
			if got.Feasible != (want != nil) {
				t.Errorf("vector %d, candidate %d: feasible %v", i, k, got.Feasible)
			} else if want != nil {
				near(t, "cost", got.Total(), *want)
			}
		}
		c, err := NewChooser(Full, Weights{}, o)
		if err != nil {
			t.Fatal(err)
		}
		if d, err := c.Choose(&r, candidates); err != nil || d.Index != v.Pick {
			t.Errorf("vector %d: chose %d, %v, want %d", i, d.Index, err, v.Pick)
		}
	}
}

func TestStalenessVectors(t *testing.T) {
	type vector struct{ Bfast, Bslow, Cfast, Cslow, Eps float64 }
	for _, v := range testkit.Vectors[vector](t, "testdata/vectors.json", "netkv.prop2") {
		near(t, "bound", StalenessBound(v.Bfast, v.Bslow, v.Cfast, v.Cslow), v.Eps)
	}
}

// TestPrinted compares with the numbers printed in the paper: NK-1 to NK-4 of the oracles.
func TestPrinted(t *testing.T) {
	if got := KVBytes(80, 8, 128, 2, 1); got != 320<<10 {
		t.Errorf("a token of Llama-3-70B has %d bytes of KV, want 320 KiB", got)
	}
	if got := KVBytes(80, 2, 128, 2, 1); got != 80<<10 {
		t.Errorf("a TP=4 shard of it has %d bytes, want 80 KiB", got)
	}
	if got := KVBytes(80, 8, 128, 2, 128<<10); got != 40<<30 {
		t.Errorf("128K tokens have %d bytes, want 40 GiB", got)
	}

	// §III-D, the worked example.
	s := Snapshot[string]{Fabric: FatTree(), Congestion: Congestion{2: 0.2, 3: 0.2},
		Places: map[string]Place{"p": {"a", "r1", "n1"}, "d1": {"a", "r2", "n2"}, "d2": {"b", "r3", "n3"}}}
	o, err := NewOracle(Model{}, s)
	if err != nil {
		t.Fatal(err)
	}
	o.Begin("p", SamePod)
	r := Request[string]{From: "p", Tokens: 32768, Bytes: 10e9}
	d1 := Candidate[string]{ID: "d1", Hit: 16384, Free: 100e9}
	d2 := Candidate[string]{ID: "d2", Hit: 29491, Free: 100e9} // 90 %, to a token
	near(t, "Beff(d1)", o.Bandwidth("p", SamePod), 2.5e9)
	near(t, "Beff(d2)", o.Bandwidth("p", CrossPod), 2.5e9)
	transfer := func(d Candidate[string]) float64 {
		c := o.Cost(&r, &d)
		return c.Transfer - s.Latency[c.Tier].Seconds()
	}
	near(t, "T(d1)", transfer(d1), 2.0)
	within := func(what string, got, want float64) {
		if math.Abs(got-want) > 1e-4*want {
			t.Errorf("%s: got %v, want %v", what, got, want)
		}
	}
	within("T(d2)", transfer(d2), 0.4)
	if err := o.Measured(Congestion{2: 0.2, 3: 0.5}, time.Second); err != nil {
		t.Fatal(err)
	}
	within("T(d2) at c3 = 0.5", transfer(d2), 0.64)

	// The examples of Propositions 1 and 2.
	n := Nearer{HitFar: 0.5, Ratio: 4}
	if left, right := n.Sides(); left != 1 || right != 2 || !n.Wins() {
		t.Errorf("proposition 1: %v < %v", left, right)
	}
	near(t, "proposition 2", StalenessBound(4, 1, 0.3, 0.3), 0.42)
}

func TestNoRoom(t *testing.T) {
	o, err := NewOracle(Model{Reserve: 10}, Snapshot[int]{Fabric: FatTree()})
	if err != nil {
		t.Fatal(err)
	}
	for p := range Policy(policies) {
		c, err := NewChooser(p, Weights{}, o)
		if err != nil {
			t.Fatal(err)
		}
		r := Request[int]{Tokens: 10, Bytes: 100}
		// Half of the tokens are there: 50 bytes to send, 10 in reserve.
		if _, err := c.Choose(&r, []Candidate[int]{{ID: 1, Hit: 5, Free: 59}}); !errors.Is(err, ErrNoRoom) {
			t.Errorf("%v: 59 bytes free: %v", p, err)
		}
		if d, err := c.Choose(&r, []Candidate[int]{{ID: 1, Hit: 5, Free: 59}, {ID: 2, Hit: 5, Free: 60}}); err != nil || d.Intent.To != 2 {
			t.Errorf("%v: 60 bytes free: %+v, %v", p, d, err)
		}
		if _, err := c.Choose(&r, nil); !errors.Is(err, ErrNoRoom) {
			t.Errorf("%v: no candidates: %v", p, err)
		}
		if _, err := c.Choose(&Request[int]{}, nil); err == nil || errors.Is(err, ErrNoRoom) {
			t.Errorf("%v: a request without tokens: %v", p, err)
		}
	}
}
