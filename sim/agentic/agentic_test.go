package agentic

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/sim"
	"github.com/penstock-kv/penstock/sim/workload"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// run simulates a job, and fails the test on an error.
func run(t testing.TB, o Options) *Result {
	t.Helper()
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// agents64K returns n agents of the 64K set.
func agents64K(n int) []workload.Trajectory {
	s := workload.Table2()[2]
	return workload.Agents(s.Generate(500, 20260225), n, s.MaxLen, 1)
}

// between fails the test unless lo <= x <= hi.
func between(t *testing.T, what string, x, lo, hi float64) {
	t.Helper()
	if !(x >= lo && x <= hi) {
		t.Errorf("%s is %.4g; want %.4g to %.4g", what, x, lo, hi)
	}
}

// TestOneRound compares one agent on an empty cluster with a calculation by hand.
func TestOneRound(t *testing.T) {
	m := Model{
		Name: "round numbers", KVBytes: 1000, Linear: 1e9, AttentionFixed: 1e9, AttentionPerContext: 1e6, FLOPS: 1e12,
		StepBase: 10 * time.Millisecond, StepPer: 2 * time.Millisecond, PrefillHBM: 1 << 20, DecodeHBM: 1 << 20,
	}
	o := Options{
		Model: m, PrefillNodes: 1, DecodeNodes: 1, GPUs: 2, SNIC: 1e6, CNIC: 1e7, StepOverhead: 5 * time.Millisecond, FetchEvery: time.Nanosecond,
		Agents: []workload.Trajectory{{ID: 0, Rounds: []workload.Round{{Append: 100, Gen: 28}, {Append: 50, Gen: 4}}}},
	}
	// Round 0 has nothing cached. Its attention is that of 100 tokens without context; the rest of
	// the model's work is divided between both engines.
	ms := func(x float64) float64 { return x / 1e3 }
	step0 := ms(5) + 100*(1e9+1e6*50)/1e12 + 100*1e9/1e12/2
	copy0 := 100. / 1e4
	round0 := step0 + copy0 + 27*ms(12)
	// Round 1: a context of 128 tokens, two blocks, read at 1000 tokens/s.
	ttft1 := 0.128 + ms(5) + 50*(1e9+1e6*(128+25))/1e12 + 50*1e9/1e12/2
	round1 := ttft1 + 178./1e4 + 3*ms(12)
	r := run(t, o.with(DualPath))
	between(t, "JCT", r.JCT.Seconds(), (round0+round1)*(1-1e-6), (round0+round1)*(1+1e-6))
	between(t, "TTFT", r.Latency.TTFT, (step0+ttft1)*(1-1e-6), (step0+ttft1)*(1+1e-6))
	between(t, "reading", r.Latency.Reading, 0.128*(1-1e-6), 0.128*(1+1e-6))
	if got := r.Read[0] + r.Read[1]; got != 128 || r.Cached != 128 || r.Rounds != 2 || r.Agents != 1 {
		t.Errorf("read %d, cached %d, %d rounds, %d agents", got, r.Cached, r.Rounds, r.Agents)
	}
	// The oracle neither reads nor copies. The tail is the part of the context that fills no block.
	oracle := run(t, o.with(Oracle))
	want := round0 + round1 - 0.128 - copy0 - 178./1e4
	between(t, "oracle's JCT", oracle.JCT.Seconds(), want*(1-1e-6), want*(1+1e-6))
	// 130 cached tokens are two blocks and a tail of 2, which is computed again.
	o.Agents = []workload.Trajectory{{ID: 0, Rounds: []workload.Round{{Append: 100, Gen: 30}, {Append: 50, Gen: 4}}}}
	plain := run(t, o.with(Oracle))
	o.RecomputeTail = true
	tail := run(t, o.with(Oracle))
	more := (52*(1e9+1e6*(128+26)) - 50*(1e9+1e6*(130+25)) + 2*1e9/2) / 1e12
	between(t, "the tail's cost", (tail.JCT - plain.JCT).Seconds(), more*(1-1e-3), more*(1+1e-3))
}

// with returns the options for a system.
func (o Options) with(s System) Options {
	o.System = s
	return o
}

// TestConservation is DP-A12: the NICs read exactly the cached tokens of the rounds, in whole
// blocks.
func TestConservation(t *testing.T) {
	testkit.Long(t, "simulates whole jobs")
	t.Parallel()
	agents := agents64K(100)
	want, rounds := int64(0), 0
	for i := range agents {
		context := 0
		for _, r := range agents[i].Rounds {
			want += int64(context - context%64)
			context += r.Append + r.Gen
			rounds++
		}
	}
	for s := Basic; s <= Oracle; s++ {
		r := run(t, Options{System: s, Model: DeepSeek660B(), PrefillNodes: 2, DecodeNodes: 4, Agents: agents})
		read := int64(0)
		for nic, n := range r.Read {
			read += n
			if s <= Layerwise && nic >= 2 && n != 0 {
				t.Errorf("%v: the decode node %d read %d tokens", s, nic, n)
			}
		}
		if s == Oracle {
			read = want
		}
		if read != want || r.Cached != want || r.Rounds != rounds || r.Agents != len(agents) {
			t.Errorf("%v: read %d tokens, cached %d, want %d; %d of %d rounds, %d of %d agents", s, read, r.Cached, want, r.Rounds, rounds, r.Agents, len(agents))
		}
		sum := 0.0
		for _, second := range r.traffic {
			for _, n := range second {
				sum += n
			}
		}
		if s != Oracle {
			between(t, s.String()+": tokens in the windows", sum, float64(want)*(1-1e-9), float64(want)*(1+1e-9))
		}
	}
}

// TestOneSeed: two runs with one seed have the same events.
func TestOneSeed(t *testing.T) {
	testkit.Long(t, "simulates whole jobs twice")
	t.Parallel()
	set := workload.Table2()[0].Generate(100, 1)
	for s := Basic; s <= Oracle; s++ {
		digest := func(seed uint64) uint64 {
			r, err := RunOnline(t.Context(), Options{System: s, Model: DeepSeek27B(), PrefillNodes: 1, DecodeNodes: 1, Seed: seed}, Online{Set: set, MaxLen: 32 << 10, APS: 0.3, Horizon: 5 * time.Minute})
			if err != nil {
				t.Fatal(err)
			}
			return r.Digest
		}
		if a, b := digest(1), digest(1); a != b {
			t.Errorf("%v: one seed, digests %x and %x", s, a, b)
		}
		if digest(1) == digest(2) {
			t.Errorf("%v: two seeds, one digest", s)
		}
	}
}

// TestAblation is DP-A1, A2, A3, A6 and A7 at 1024 agents.
func TestAblation(t *testing.T) {
	testkit.Long(t, "simulates whole jobs")
	t.Parallel()
	var jct [Oracle + 1]float64
	o := Options{Model: DeepSeek660B(), PrefillNodes: 2, DecodeNodes: 4, Agents: agents64K(1024)}
	for s := Basic; s <= Oracle; s++ {
		r := run(t, o.with(s))
		jct[s] = r.JCT.Seconds()
		nic := r.NICBalance(5*time.Second, r.JCT/2, 0.3, 6)
		attention := r.AttentionBalance(r.JCT / 20)
		t.Logf("%-14v JCT %5.0f s, storage max/avg %.2f, attention max/avg %.2f, %d events", s, jct[s], nic, attention, r.Events)
		switch s {
		case Basic:
			between(t, "Basic: attention max/avg", attention, 1.3, 4)
		case RoundRobin:
			between(t, "round robin: storage max/avg", nic, 1.45, 1.62)
		case DualPath, DualPathSplit:
			between(t, s.String()+": storage max/avg", nic, 1, map[System]float64{DualPath: 1.20, DualPathSplit: 1.22}[s])
			between(t, s.String()+": attention max/avg", attention, 1, 1.10)
		}
	}
	for s := Layerwise; s <= DualPath; s++ {
		if jct[s] >= jct[s-1] {
			t.Errorf("JCT of %v is %.0f s, of %v %.0f s; each adds something", s, jct[s], s-1, jct[s-1])
		}
	}
	between(t, "layerwise: reduction", 1-jct[Layerwise]/jct[Basic], 0.08, 0.25)
	between(t, "round robin: reduction", 1-jct[RoundRobin]/jct[Basic], 0.30, 0.48)
	between(t, "DualPath: reduction", 1-jct[DualPath]/jct[Basic], 0.40, 0.55)
	between(t, "DualPath/Oracle", jct[DualPath]/jct[Oracle], 1, 1.15)
	between(t, "split/DualPath", jct[DualPathSplit]/jct[DualPath], 0, 1.01)
	o.NoQuota, o.Until = true, 150*time.Second // a twentieth of the job
	between(t, "without quota: attention max/avg", run(t, o.with(DualPath)).AttentionBalance(o.Until), 1.3, 4)
}

// TestStorageBound is DP-A4: if only storage limits the cluster, because compute and the compute
// NICs are fast, the gain is (P+D)/P.
func TestStorageBound(t *testing.T) {
	testkit.Long(t, "simulates whole jobs")
	t.Parallel()
	real := DeepSeek660B()
	fast := real
	fast.FLOPS, fast.StepBase, fast.StepPer = 1e18, time.Millisecond, 0
	agents := agents64K(384)
	for _, pd := range [][2]int{{2, 1}, {1, 2}} {
		o := Options{Model: real, PrefillNodes: pd[0], DecodeNodes: pd[1], Agents: agents, CNIC: 1e15, StepOverhead: time.Millisecond, FetchEvery: 5 * time.Millisecond}
		// Beta is the work of a real GPU in 5 s, not that of the fast one.
		o.Planner.PrefillRate = o.ProfilePrefill()
		o.Model = fast
		// The gain may exceed the bound a little, because layerwise prefill loads the
		// prefill nodes' NICs unevenly.
		bound := float64(pd[0]+pd[1]) / float64(pd[0])
		layer := run(t, o.with(Layerwise)).JCT.Seconds()
		for _, s := range []System{DualPath, DualPathSplit} {
			gain := layer / run(t, o.with(s)).JCT.Seconds()
			t.Logf("%v, %dP%dD: %.3f of %.3f", s, pd[0], pd[1], gain, bound)
			between(t, fmt.Sprintf("gain of %v with %dP%dD", s, pd[0], pd[1]), gain, 0.93*bound, 1.03*bound)
		}
	}
}

// TestScale is DP-A8 with four times the cluster and the agents. The ratios of two seeds differ by
// 0.03.
func TestScale(t *testing.T) {
	testkit.Long(t, "simulates whole jobs")
	t.Parallel()
	jct := func(k int) float64 {
		return run(t, Options{
			System: DualPath, Model: DeepSeek660B(), PrefillNodes: 2 * k, DecodeNodes: 4 * k, PrefillGroup: 2, DecodeGroup: 4, Agents: agents64K(300 * k),
		}).JCT.Seconds()
	}
	// The JCT is that of the slowest agent. Among four times as many agents the slowest has
	// more rounds, and each round waits for its transfers.
	between(t, "JCT at 4 times the size over JCT", jct(4)/jct(1), 0.9, 1.1)
}

// TestOnline: below capacity latencies are steady and DualPath's are near the oracle's (DP-A9);
// above capacity the run ends at the SLO.
func TestOnline(t *testing.T) {
	testkit.Long(t, "simulates whole jobs")
	set := agents64K(500)
	on := Online{Set: set, MaxLen: 64 << 10, APS: 0.2, Horizon: 40 * time.Minute, SLO: PaperSLO()}
	o := Options{Model: DeepSeek660B(), PrefillNodes: 2, DecodeNodes: 4, Seed: 3}
	ttft := map[System]float64{}
	for _, s := range []System{Basic, DualPath, Oracle} {
		r, err := RunOnline(t.Context(), o.with(s), on)
		if err != nil {
			t.Fatal(err)
		}
		if r.Exceeded != (s == Basic) {
			t.Errorf("%v at 0.2 agents/s: SLO exceeded: %v", s, r.Exceeded)
		}
		w := r.Steady(on.Horizon)
		ttft[s] = w.MeanTTFT()
		if s == Basic {
			continue
		}
		between(t, s.String()+": SLO attainment", w.Attainment(), 0.99, 1)
		between(t, s.String()+": goodput over the rate of rounds", w.Goodput(on.Horizon/3)/(float64(w.Rounds)/(on.Horizon/3).Seconds()), 0.99, 1)
		p50, p99 := w.TTFTs.Quantile(0.5), w.TTFTs.Quantile(0.99)
		if !(p50 > 0.2 && p50 < 2*w.MeanTTFT() && p99 > w.MeanTTFT() && p99 < 4) {
			t.Errorf("%v: TTFT p50 %v, mean %v, p99 %v s", s, p50, w.MeanTTFT(), p99)
		}
	}
	between(t, "TTFT of DualPath over Oracle's", ttft[DualPath]/ttft[Oracle], 1, 1.15)
	if _, err := RunOnline(t.Context(), o, Online{Set: set, APS: math.NaN()}); err == nil {
		t.Error("NaN agents a second were accepted")
	}
}

// TestDistribution: a quantile is within 6 % of that of the sorted times.
func TestDistribution(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	var d Distribution
	if q := d.Quantile(0.5); !math.IsNaN(q) {
		t.Errorf("a quantile of nothing is %v", q)
	}
	var all []float64
	for range 10_000 {
		x := math.Exp(2 * rng.NormFloat64())
		d.add(x)
		all = append(all, x)
	}
	slices.Sort(all)
	for _, q := range []float64{0.01, 0.5, 0.9, 0.99} {
		want := all[int(q*float64(len(all)))]
		between(t, fmt.Sprintf("quantile %v", q), d.Quantile(q), want*0.92, want*1.08)
	}
	first, last := d[0], d[len(d)-1]
	d.add(0)
	d.add(1e9)
	if d[0] != first+1 || d[len(d)-1] != last+1 {
		t.Error("times beyond the ends are not counted at the ends")
	}
}

func TestCapacity(t *testing.T) {
	set := workload.Scale{Rounds: 20}.Apply(agents64K(500))
	o := Options{System: Layerwise, Model: DeepSeek27B(), PrefillNodes: 1, DecodeNodes: 1}
	var tried []string
	c, err := Capacity(t.Context(), o, Online{Set: set, MaxLen: 64 << 10, Horizon: 10 * time.Minute, SLO: PaperSLO()}, 1, 31, func(aps float64, ok bool) {
		tried = append(tried, fmt.Sprint(aps, ok))
	})
	if err != nil {
		t.Fatal(err)
	}
	if c <= 0 || c >= 31 || len(tried) != 5 {
		t.Errorf("capacity %v after %v", c, tried)
	}
}

// TestRefusals: the error for an invalid option names the option.
func TestRefusals(t *testing.T) {
	good := Options{Model: DeepSeek660B(), PrefillNodes: 2, DecodeNodes: 4, Agents: agents64K(2)}
	for want, change := range map[string]func(*Options){
		"groups must come out even": func(o *Options) { o.PrefillGroup = 3 },
		"at least 1 of each":        func(o *Options) { o.DecodeNodes = 0 },
		"no agents":                 func(o *Options) { o.Agents = nil },
		"each needs one":            func(o *Options) { o.Arrivals = make([]time.Duration, 1) },
		"storage NIC of NaN":        func(o *Options) { o.SNIC = math.NaN() },
		"FLOP/s":                    func(o *Options) { o.Model.FLOPS = math.Inf(1) },
		"it must be one of":         func(o *Options) { o.System = 99 },
		"has no rounds":             func(o *Options) { o.Agents = []workload.Trajectory{{}} },
		"both must be at least 1":   func(o *Options) { o.Agents = []workload.Trajectory{{Rounds: []workload.Round{{Append: 1}}}} },
		"an engine of DS 660B":      func(o *Options) { o.Model.DecodeHBM = 1000 },
		"ReadRate":                  func(o *Options) { o.Planner.ReadRate = -1 },
	} {
		o := good
		change(&o)
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want a refusal with %q: %v", want, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c, err := New(good)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("a run whose context has ended: %v", err)
	}
	for s := Basic; s <= Oracle; s++ {
		if got, err := ParseSystem(s.String()); got != s || err != nil {
			t.Errorf("ParseSystem(%q) = %v, %v", s, got, err)
		}
	}
	if _, err := ParseSystem("x"); err == nil {
		t.Error("a system x was accepted")
	}
}

// FuzzCluster: small clusters of any shape complete all rounds of any agents, and read the cached
// tokens.
func FuzzCluster(f *testing.F) {
	f.Add(uint64(1), uint8(0), uint8(20))
	f.Add(uint64(2), uint8(3), uint8(60))
	f.Add(uint64(3), uint8(4), uint8(40))
	f.Fuzz(func(t *testing.T, seed uint64, system, n uint8) {
		rng := rand.New(rand.NewPCG(seed, 0))
		m := DeepSeek27B()
		m.PrefillHBM, m.DecodeHBM = 20_000+rng.IntN(50_000), 20_000+rng.IntN(50_000)
		o := Options{
			System: System(system % uint8(Oracle+1)), Model: m, PrefillNodes: 1 + rng.IntN(3), DecodeNodes: 1 + rng.IntN(3), GPUs: 1 + rng.IntN(3),
			SNIC: 1e9 * (1 + 50*rng.Float64()), Quota: time.Duration(1 + rng.IntN(1e9)), NoQuota: rng.IntN(4) == 0, RecomputeTail: rng.IntN(2) == 0,
			BlockTokens: 1 + rng.IntN(200), FetchEvery: time.Duration(1 + rng.IntN(5e7)), Seed: seed,
		}
		if rng.IntN(2) == 0 {
			o.PrefillGroup, o.DecodeGroup = 1, 1
		}
		want, rounds := int64(0), 0
		for i := range 1 + int(n)%64 {
			a := workload.Trajectory{ID: i}
			context := 0
			for range 1 + rng.IntN(8) {
				r := workload.Round{Append: 1 + rng.IntN(1500), Gen: 1 + rng.IntN(500)}
				a.Rounds = append(a.Rounds, r)
				want += int64(context / o.BlockTokens * o.BlockTokens)
				context += r.Append + r.Gen
				rounds++
			}
			o.Agents = append(o.Agents, a)
			o.Arrivals = append(o.Arrivals, time.Duration(rng.IntN(3))*time.Second)
		}
		r := run(t, o)
		read := int64(0)
		for _, n := range r.Read {
			read += n
		}
		if o.System == Oracle {
			read = want
		}
		if read != want || r.Rounds != rounds {
			t.Errorf("%v: read %d tokens of %d, %d rounds of %d", o.System, read, want, r.Rounds, rounds)
		}
	})
}

// tokenDue is a sequence of the naive decode engine.
type tokenDue struct {
	at  time.Duration
	gen int
	id  int
}

// byArrival is a heap of sequences by arrival.
type byArrival []tokenDue

func (h byArrival) Len() int           { return len(h) }
func (h byArrival) Less(i, j int) bool { return h[i].at < h[j].at }
func (h byArrival) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }

// Push implements heap.Interface.
func (h *byArrival) Push(x any) { *h = append(*h, x.(tokenDue)) }

// Pop implements heap.Interface.
func (h *byArrival) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

// naiveDecode simulates every step and returns the time at which each sequence is done.
func naiveDecode(arrivals []tokenDue, m Model) map[int]time.Duration {
	h := byArrival(append([]tokenDue(nil), arrivals...))
	heap.Init(&h)
	done := map[int]time.Duration{}
	left := map[int]int{}
	now := time.Duration(0)
	for len(h) > 0 || len(left) > 0 {
		if len(left) == 0 {
			now = max(now, h[0].at)
		}
		for len(h) > 0 && h[0].at <= now {
			a := heap.Pop(&h).(tokenDue)
			if a.gen == 1 {
				done[a.id] = now
				continue
			}
			left[a.id] = a.gen - 1
		}
		if len(left) == 0 {
			continue
		}
		now += m.StepBase + time.Duration(len(left))*m.StepPer
		for id := range left {
			if left[id]--; left[id] == 0 {
				done[id] = now
				delete(left, id)
			}
		}
	}
	return done
}

// FuzzDecode compares the decode engine, which counts steps, with one that simulates each step.
func FuzzDecode(f *testing.F) {
	f.Add(uint64(1), uint8(20))
	f.Add(uint64(2), uint8(3))
	f.Fuzz(func(t *testing.T, seed uint64, n uint8) {
		rng := rand.New(rand.NewPCG(seed, 0))
		m := DeepSeek27B()
		m.StepBase, m.StepPer = time.Duration(1+rng.IntN(50)), time.Duration(rng.IntN(10))
		c := &Cluster{opts: Options{Model: m, CNIC: 1}, k: sim.New(1)}
		done := map[int]time.Duration{}
		e := newDecoder(c, nil, nil, 0)
		e.finish = func(r *request) { done[r.agent] = c.k.Now() }
		var arrivals []tokenDue
		for i := range int(n) % 64 {
			a := tokenDue{at: time.Duration(rng.IntN(2000)), gen: 1 + rng.IntN(40), id: i}
			arrivals = append(arrivals, a)
			c.k.At(a.at, func() { e.join(&request{agent: a.id, gen: a.gen}) })
		}
		if err := c.k.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := naiveDecode(arrivals, m)
		if len(done) != len(want) {
			t.Fatalf("%d sequences are done; want %d", len(done), len(want))
		}
		for id, at := range want {
			if done[id] != at {
				t.Errorf("sequence %d of %d is done at %d; step by step at %d", id, len(arrivals), done[id], at)
			}
		}
	})
}

// BenchmarkCluster measures a job of the paper's Table 3 by the size of the cluster; nodes and
// agents grow together. It reports rounds per second of real time.
func BenchmarkCluster(b *testing.B) {
	s := workload.Table2()[1]
	set := s.Generate(500, 1)
	for _, k := range []int{1, 4, 24} {
		b.Run(fmt.Sprintf("engines=%d", 48*k), func(b *testing.B) {
			if testing.Short() && k > 1 {
				b.Skip("takes minutes; not with -short")
			}
			rounds := 0
			for b.Loop() {
				r := run(b, Options{
					System: DualPath, Model: DeepSeek660B(), PrefillNodes: 2 * k, DecodeNodes: 4 * k, PrefillGroup: 2, DecodeGroup: 4,
					Agents: workload.Agents(set, 2048*k, s.MaxLen, 1),
				})
				rounds += r.Rounds
			}
			b.ReportMetric(float64(rounds)/b.Elapsed().Seconds(), "rounds/s")
		})
	}
}
