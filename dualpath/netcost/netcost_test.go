package netcost

import (
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"
)

// oracle returns an oracle over four instances in one pod's racks and another pod.
func oracle(t testing.TB, m Model, c Congestion) *Oracle[string] {
	t.Helper()
	o, err := NewOracle(m, Snapshot[string]{Fabric: FatTree(), Congestion: c, Places: map[string]Place{
		"p": {"a", "1", "x"}, "node": {"a", "1", "x"}, "rack": {"a", "1", "y"}, "pod": {"a", "2", "x"}, "far": {"b", "1", "x"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestTierOf(t *testing.T) {
	o := oracle(t, Model{}, Congestion{})
	for to, want := range map[string]Tier{"node": SameNode, "rack": SameRack, "pod": SamePod, "far": CrossPod, "unheard of": CrossPod} {
		if got := o.Snapshot().Tier("p", to); got != want {
			t.Errorf("p to %s: %v, want %v", to, got, want)
		}
	}
	// Two missing names are not the same name.
	if got := TierOf(Place{}, Place{}); got != CrossPod {
		t.Errorf("nowhere to nowhere: %v", got)
	}
	if got := TierOf(Place{Pod: "a"}, Place{Pod: "a"}); got != SamePod {
		t.Errorf("racks unknown: %v", got)
	}
	o.snapshot.Pairs = map[[2]string]Tier{{"p", "far"}: SameRack}
	if got := o.Snapshot().Tier("p", "far"); got != SameRack {
		t.Errorf("a pair that is given: %v", got)
	}
}

// TestInFlight: the count is capped when it is read; transfers above the cap are counted until they
// end.
func TestInFlight(t *testing.T) {
	o := oracle(t, Model{}, Congestion{})
	idle := o.Bandwidth("p", SamePod)
	for n := 1; n <= 40; n++ {
		o.Begin("p", SamePod)
		if got, want := o.Bandwidth("p", SamePod), idle/float64(1+min(n, 16)); math.Abs(got-want) > 1 {
			t.Fatalf("%d in flight: %v B/s, want %v", n, got, want)
		}
	}
	for n := 39; n >= 0; n-- {
		o.End("p", SamePod)
		if got, want := o.Bandwidth("p", SamePod), idle/float64(1+min(n, 16)); math.Abs(got-want) > 1 {
			t.Fatalf("%d left in flight: %v B/s, want %v", n, got, want)
		}
	}
	o.End("p", SamePod) // a transfer that never began
	if got := o.InFlight("p", SamePod); got != 0 || len(o.own) != 0 {
		t.Errorf("%d in flight, %d sources, after all ended", got, len(o.own))
	}
	o.Begin("p", SamePod)
	if o.Bandwidth("p", CrossPod) != FatTree().Bandwidth[CrossPod] || o.Bandwidth("rack", SamePod) != idle {
		t.Error("another tier, or another source, was slowed down")
	}

	blind := oracle(t, Model{CongestionHasOwn: true}, Congestion{})
	blind.Begin("p", SamePod)
	if got := blind.Bandwidth("p", SamePod); got != idle {
		t.Errorf("telemetry counts our own, and so do we: %v B/s", got)
	}
}

func TestPolicies(t *testing.T) {
	// near has nothing cached, far has nearly everything; near's tier is congested and busy.
	candidates := []Candidate[string]{
		{ID: "far", Hit: 6000, Free: 1e12, Batch: 10},
		{ID: "pod", Hit: 0, Free: 1e12, Batch: 9},
		{ID: "rack", Hit: 2000, Free: 1e12, Batch: 40},
	}
	for _, c := range []struct {
		policy Policy
		c      Congestion
		own    int
		want   []string
	}{
		{RoundRobin, Congestion{}, 0, []string{"far", "pod", "rack", "far"}},
		{LoadAware, Congestion{}, 0, []string{"pod", "pod"}},
		{CacheAware, Congestion{}, 0, []string{"far", "far"}},
		{CacheLoad, Congestion{}, 0, []string{"far"}},
		// 6000 tokens over 100 Gbit/s cost less than 2000 over 25 Gbit/s, until the rack is full.
		{Full, Congestion{}, 0, []string{"rack", "rack"}},
		{Full, Congestion{SameRack: 0.9}, 0, []string{"far"}},
		{Static, Congestion{SameRack: 0.9}, 0, []string{"rack"}},
		{Static, Congestion{SameRack: 0.9}, 16, []string{"far"}},
		{TopoOnly, Congestion{SameRack: 0.9}, 16, []string{"rack"}},
	} {
		o := oracle(t, Model{}, c.c)
		for range c.own {
			o.Begin("p", SameRack)
		}
		ch, err := NewChooser(c.policy, Weights{}, o)
		if err != nil {
			t.Fatal(err)
		}
		r := Request[string]{ID: 7, From: "p", Tokens: 8000, Bytes: 8000 * 320 << 10, Priority: 3}
		for i, want := range c.want {
			d, err := ch.Choose(&r, candidates)
			if err != nil || d.Intent.To != want {
				t.Errorf("%v, congestion %v, %d in flight, choice %d: %q, %v, want %q", c.policy, c.c, c.own, i, d.Intent.To, err, want)
				continue
			}
			in := d.Intent
			if in.Request != 7 || in.From != "p" || in.Priority != 3 || in.Bytes != d.Cost.Bytes || candidates[d.Index].ID != in.To {
				t.Errorf("%v: intent %+v of decision %+v", c.policy, in, d)
			}
		}
	}
}

// TestTies: equal candidates are chosen in turn, the less loaded first.
func TestTies(t *testing.T) {
	o := oracle(t, Model{}, Congestion{})
	for _, p := range []Policy{Full, TopoOnly, LoadAware, CacheAware, CacheLoad} {
		c, err := NewChooser(p, Weights{}, o)
		if err != nil {
			t.Fatal(err)
		}
		equal := []Candidate[string]{{ID: "pod", Free: 1e12}, {ID: "pod", Free: 1e12}, {ID: "pod", Free: 1e12}}
		r := Request[string]{From: "p", Tokens: 10, Bytes: 10}
		for i := range 7 {
			if d, err := c.Choose(&r, equal); err != nil || d.Index != i%3 {
				t.Errorf("%v: choice %d of equals is %d, %v", p, i, d.Index, err)
			}
		}
		equal[1].Queued = 1
		equal[2].Queued = 2
		for range 3 {
			if d, err := c.Choose(&r, equal); err != nil || d.Index != 0 {
				t.Errorf("%v: with queues of 0, 1, 2: %d, %v", p, d.Index, err)
			}
		}
	}
}

func TestPolicyNames(t *testing.T) {
	for p := range Policy(policies) {
		if got, err := ParsePolicy(p.String()); err != nil || got != p {
			t.Errorf("%v: %v, %v", p, got, err)
		}
	}
	if _, err := ParsePolicy("x"); err == nil || !strings.Contains(err.Error(), `"x"`) {
		t.Errorf("policy x: %v", err)
	}
	if _, err := NewChooser(policies, Weights{}, oracle(t, Model{}, Congestion{})); err == nil {
		t.Error("an unknown policy was accepted")
	}
	for _, w := range []Weights{{-1, 1}, {math.NaN(), 1}, {math.Inf(1), 1}} {
		if _, err := NewChooser(CacheLoad, w, oracle(t, Model{}, Congestion{})); err == nil {
			t.Errorf("weights %v were taken", w)
		}
	}
}

// TestRefused: a value out of range is refused with its name and value, and the last snapshot
// stays.
func TestRefused(t *testing.T) {
	good := Snapshot[string]{Fabric: FatTree()}
	o, err := NewOracle(Model{}, good)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what string
		edit func(*Snapshot[string])
		says string
	}{
		{"no bandwidth", func(s *Snapshot[string]) { s.Bandwidth[2] = 0 }, "bandwidth of tier 2 (same pod) is 0"},
		{"NaN bandwidth", func(s *Snapshot[string]) { s.Bandwidth[2] = math.NaN() }, "NaN"},
		{"infinite bandwidth", func(s *Snapshot[string]) { s.Bandwidth[0] = math.Inf(1) }, "+Inf"},
		{"negative latency", func(s *Snapshot[string]) { s.Latency[3] = -1 }, "latency of tier 3"},
		{"full tier", func(s *Snapshot[string]) { s.Congestion[1] = 1 }, "congestion of tier 1 (same rack) is 1"},
		{"negative congestion", func(s *Snapshot[string]) { s.Congestion[1] = -0.1 }, "-0.1"},
		{"NaN congestion", func(s *Snapshot[string]) { s.Congestion[1] = math.NaN() }, "NaN"},
		{"tier 4", func(s *Snapshot[string]) { s.Pairs = map[[2]string]Tier{{"a", "b"}: 4} }, "tier of a to b is 4"},
	} {
		s := good
		c.edit(&s)
		if err := o.Update(s); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.what, err)
		}
		if _, err := NewOracle(Model{}, s); err == nil {
			t.Errorf("%s: a new oracle accepted it", c.what)
		}
	}
	if o.Snapshot().Fabric != FatTree() {
		t.Error("a refused snapshot changed the state")
	}
	if err := o.Measured(Congestion{2: 1}, 0); err == nil {
		t.Error("a full tier was accepted")
	}
	if err := o.Measured(Congestion{2: 0.5}, 3*time.Second); err != nil || o.Snapshot().Age(5*time.Second) != 2*time.Second {
		t.Errorf("measured: %v, age %v", err, o.Snapshot().Age(5*time.Second))
	}
	for _, m := range []Model{{Step: -1}, {MaxBatch: -1}, {Reserve: -1}, {InFlightMax: -1}, {StepPerRequest: -1}} {
		if _, err := NewOracle(m, good); err == nil {
			t.Errorf("model %+v was taken", m)
		}
	}
}

// TestStaleness is Proposition 2 as a property: while the error of the congestion is below the
// bound, the order of two tiers is the true one; beyond the bound there is an error that inverts
// the order.
func TestStaleness(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	turned := 0
	for range 20_000 {
		fast, slow := 1+rng.Float64()*9, 1.0
		cf, cs := rng.Float64(), rng.Float64()
		left := func(ef, es float64) bool { return fast*(1-cf-ef) > slow*(1-cs-es) }
		if !left(0, 0) {
			continue
		}
		bound := StalenessBound(fast, slow, cf, cs)
		if bound <= 0 {
			t.Fatalf("the faster tier has no tolerance: %v", bound)
		}
		for range 8 {
			ef, es := (2*rng.Float64()-1)*bound*0.999, (2*rng.Float64()-1)*bound*0.999
			if !left(ef, es) {
				t.Fatalf("B %v %v, c %v %v: errors %v, %v within %v changed the order", fast, slow, cf, cs, ef, es, bound)
			}
		}
		if !left(bound*1.001, -bound*1.001) {
			turned++
		}
	}
	if turned == 0 {
		t.Error("no error beyond the bound changed an order: the bound is not tight")
	}
}

// TestNearer is Proposition 1 as a property: Wins agrees with a comparison of the costs.
func TestNearer(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	wins := 0
	for range 20_000 {
		f := FatTree()
		f.Latency = [Tiers]time.Duration{}
		c := Congestion{SameRack: rng.Float64() * 0.9, CrossPod: rng.Float64() * 0.9}
		o, err := NewOracle(Model{MaxBatch: 8}, Snapshot[int]{Fabric: f, Congestion: c, Pairs: map[[2]int]Tier{{0, 1}: SameRack, {0, 2}: CrossPod}})
		if err != nil {
			t.Fatal(err)
		}
		r := Request[int]{Tokens: 10_000, Bytes: rng.Int64N(10e9) + 1}
		near, far := Candidate[int]{ID: 1, Hit: rng.IntN(10_000), Free: 1e12, Queued: rng.IntN(20), Batch: 3}, Candidate[int]{ID: 2, Hit: rng.IntN(10_000), Free: 1e12, Queued: rng.IntN(20), Batch: 3}
		cn, cf := o.Cost(&r, &near), o.Cost(&r, &far)
		if math.Abs(cn.Total()-cf.Total()) < 1e-9 {
			continue
		}
		n := Nearer{
			HitNear: float64(near.Hit) / 10_000, HitFar: float64(far.Hit) / 10_000, CongestionNear: c[SameRack], CongestionFar: c[CrossPod],
			Bandwidth: f.Bandwidth[SameRack], Ratio: f.Bandwidth[SameRack] / f.Bandwidth[CrossPod],
			Bytes: float64(r.Bytes), QueueNear: cn.Queue, QueueFar: cf.Queue,
		}
		if got, want := n.Wins(), cn.Total() < cf.Total(); got != want {
			t.Fatalf("%+v: wins %v, costs %v and %v", n, got, cn.Total(), cf.Total())
		}
		if n.Wins() {
			wins++
		}
	}
	if wins == 0 || wins == 20_000 {
		t.Errorf("the near one won %d times: the cases are all alike", wins)
	}
}

func TestPrefix(t *testing.T) {
	held := map[int]bool{1: true, 2: true, 4: true}
	has := func(h int) bool { return held[h] }
	for _, c := range []struct {
		blocks []int
		want   int
	}{{nil, 0}, {[]int{3, 1}, 0}, {[]int{1, 2, 3, 4}, 32}, {[]int{1, 2}, 32}, {[]int{4}, 16}} {
		if got := Prefix(c.blocks, 16, has); got != c.want {
			t.Errorf("prefix of %v: %d tokens, want %d", c.blocks, got, c.want)
		}
	}
}

func TestBalance(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	hop := func() Hop { return Hop{1 + rng.Float64()*99, rng.Float64(), rng.Float64() * 100} }
	for range 10_000 {
		a, b := []Hop{hop(), hop()}, []Hop{hop(), hop()}
		bytes := rng.Float64() * 1000
		x := Balance(bytes, a, b)
		ta, tb := Seconds(x, a...), Seconds(bytes-x, b...)
		switch {
		case x < 0 || x > bytes:
			t.Fatalf("%v of %v bytes", x, bytes)
		case x == 0 && Seconds(0, a...) < tb-1e-9:
			t.Fatalf("nothing over a (%v s), all over b (%v s)", Seconds(0, a...), tb)
		case x == bytes && Seconds(0, b...) < ta-1e-9:
			t.Fatalf("all over a (%v s), nothing over b (%v s)", ta, Seconds(0, b...))
		case x > 0 && x < bytes && math.Abs(ta-tb) > 1e-6:
			t.Fatalf("a takes %v s, b %v s", ta, tb)
		}
	}
}

func TestChooseAllocatesNothing(t *testing.T) {
	o := oracle(t, Model{}, Congestion{})
	candidates := []Candidate[string]{{ID: "pod", Free: 1e12}, {ID: "far", Free: 1e12}, {ID: "rack", Free: 1e12}}
	r := Request[string]{From: "p", Tokens: 10, Bytes: 10}
	for p := range Policy(policies) {
		c, err := NewChooser(p, Weights{}, o)
		if err != nil {
			t.Fatal(err)
		}
		if n := testing.AllocsPerRun(100, func() { _, _ = c.Choose(&r, candidates) }); n != 0 {
			t.Errorf("%v: %v allocations a choice", p, n)
		}
	}
}

// FuzzChoose compares Choose with the simplest argmin, and checks for NaN.
func FuzzChoose(f *testing.F) {
	f.Add(uint64(1), uint8(0))
	f.Add(uint64(77), uint8(6))
	f.Fuzz(func(t *testing.T, seed uint64, policy uint8) {
		p := Policy(policy % uint8(policies))
		rng := rand.New(rand.NewPCG(seed, 9))
		s := Snapshot[int]{Fabric: FatTree(), Pairs: map[[2]int]Tier{}, Congestion: Congestion{rng.Float64(), rng.Float64(), rng.Float64(), rng.Float64()}}
		var candidates []Candidate[int]
		for id := range 1 + rng.IntN(12) {
			s.Pairs[[2]int{0, id}] = Tier(rng.IntN(Tiers))
			candidates = append(candidates, Candidate[int]{id, rng.IntN(120), rng.Int64N(200), rng.IntN(100), rng.IntN(65)})
		}
		o, err := NewOracle(Model{Reserve: rng.Int64N(20)}, s)
		if err != nil {
			t.Fatal(err)
		}
		for range rng.IntN(50) {
			o.Begin(0, Tier(rng.IntN(Tiers)))
		}
		c, err := NewChooser(p, Weights{}, o)
		if err != nil {
			t.Fatal(err)
		}
		r := Request[int]{Tokens: 1 + rng.IntN(100), Bytes: rng.Int64N(200)}
		d, err := c.Choose(&r, candidates)

		// value is the policy's objective as written in the paper.
		value := func(k Candidate[int]) float64 {
			hit := min(float64(k.Hit)/float64(r.Tokens), 1)
			// Free is in whole bytes, but the need is not. A shortage of less than a byte fits.
			if float64(k.Free) <= float64(r.Bytes)*(1-hit)+float64(o.model.Reserve)-1 {
				return math.Inf(1)
			}
			tier := s.Pairs[[2]int{0, k.ID}]
			iter := func(n int) float64 { return 0.0123 + 0.00016*float64(n) }
			load := iter(k.Batch + 1)
			if over := k.Queued - (64 - k.Batch); over > 0 {
				load += float64(over) * iter(k.Batch)
			}
			c, n := s.Congestion[tier], min(o.InFlight(0, tier), 16)
			switch p {
			case RoundRobin:
				return 0
			case LoadAware:
				return load
			case CacheAware:
				return -float64(k.Hit)
			case CacheLoad:
				return -float64(k.Hit)/float64(r.Tokens) + float64(k.Queued+k.Batch)/64
			case Static:
				c = 0
			case TopoOnly:
				c, n = 0, 0
			}
			return float64(r.Bytes)*(1-hit)/(s.Bandwidth[tier]*(1-c)/float64(1+n)) + s.Latency[tier].Seconds() + load
		}
		least := math.Inf(1)
		for _, k := range candidates {
			least = min(least, value(k))
		}
		switch {
		case math.IsNaN(d.Cost.Total()):
			t.Fatal("the cost is not a number")
		case (err != nil) != math.IsInf(least, 1):
			t.Fatalf("least value %v, error %v", least, err)
		case err == nil && value(candidates[d.Index]) > least+1e-9*math.Abs(least):
			t.Fatalf("%v chose %d with %v; the least is %v", p, d.Index, value(candidates[d.Index]), least)
		}
	})
}

func BenchmarkChoose(b *testing.B) {
	s := Snapshot[int]{Fabric: FatTree(), Places: map[int]Place{}}
	var candidates []Candidate[int]
	for i := range 768 {
		s.Places[i] = Place{Pod: string(rune('a' + i%8)), Rack: string(rune('a' + i%5)), Node: string(rune('a' + i%3))}
		candidates = append(candidates, Candidate[int]{ID: i, Free: 1 << 40, Batch: i % 30})
	}
	o, err := NewOracle(Model{}, s)
	if err != nil {
		b.Fatal(err)
	}
	for _, n := range []int{12, 768} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			c, err := NewChooser(Full, Weights{}, o)
			if err != nil {
				b.Fatal(err)
			}
			r := Request[int]{Tokens: 8000, Bytes: 8000 * 320 << 10}
			for b.Loop() {
				if _, err := c.Choose(&r, candidates[:n]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
