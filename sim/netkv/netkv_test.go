package netkv

import (
	"context"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/internal/trace"
	"github.com/penstock-kv/penstock/sim/workload"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// run returns the result of a simulation, or fails the test.
func run(t *testing.T, o Options, arrivals []workload.Arrival, seed uint64) *Result {
	t.Helper()
	r, err := Run(context.Background(), o, arrivals, seed)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// sample returns arrivals of the trace in the repository, at a tenth of its lengths: its agents'
// prompts are ten times as long as those of people.
func sample(t *testing.T, n int) []workload.Arrival {
	t.Helper()
	r, err := trace.Sample(trace.Options{MaxRequests: n})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var out []workload.Arrival
	for q, err := range r.All() {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, workload.Arrival{At: q.Time, Input: max(q.InputTokens/10, 1), Output: q.OutputTokens})
	}
	out, err = workload.Compress(out, 6)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestOneRequest: on an idle cluster every time follows from the formulas: prefill, bytes divided
// by the tier's bandwidth, latency, one step.
func TestOneRequest(t *testing.T) {
	for _, c := range []struct {
		policy netcost.Policy
		tier   netcost.Tier
		skip   int
	}{{netcost.Full, netcost.SamePod, 0}, {netcost.RoundRobin, netcost.CrossPod, 4}} {
		o := Paper()
		o.Policy, o.Share, o.Warmup = c.policy, 0, c.skip
		// RoundRobin's first four requests go within the pod, long before the measured one.
		var arrivals []workload.Arrival
		for i := range c.skip + 1 {
			arrivals = append(arrivals, workload.Arrival{At: time.Duration(i) * 30 * time.Second, Input: 10_000, Output: 5})
		}
		r := run(t, o, arrivals, 1)
		f := o.fabric()
		transfer := 10_000*327_680/f.Bandwidth[c.tier] + f.Latency[c.tier].Seconds()
		ttft := 0.106 + 10_000*77e-6 + transfer + 0.0123 + 0.00016
		if r.Tiers[c.tier] != 1 {
			t.Errorf("%v: tiers %v, want all on %v", c.policy, r.Tiers, c.tier)
		}
		for what, v := range map[string][2]float64{"transfer": {r.Transfer.Seconds(), transfer}, "TTFT": {r.TTFT.Seconds(), ttft}, "P99": {r.P99.Seconds(), ttft}, "TBT": {r.TBT.Seconds(), 0.01246}} {
			if math.Abs(v[0]-v[1]) > 1e-6 {
				t.Errorf("%v: %s is %v s, want %v", c.policy, what, v[0], v[1])
			}
		}
	}
}

// TestSharedBandwidth: simultaneous transfers to one instance share its NICs, and a single one gets
// its tier's bandwidth. This is the paper's validation (§VI-B) on the whole cluster.
func TestSharedBandwidth(t *testing.T) {
	o := Paper()
	o.Policy, o.Share, o.NICs, o.Oversubscription = netcost.RoundRobin, 0, 2, 1
	// Twelve requests come from four sources at once: three from each source, which has 100 Gbit/s.
	var arrivals []workload.Arrival
	for range 12 {
		arrivals = append(arrivals, workload.Arrival{Input: 10_000, Output: 2})
	}
	o.Warmup = 0
	r := run(t, o, arrivals, 1)
	// If uplinks collide, a transfer takes longer; a third of the source's bandwidth is the upper
	// bound.
	alone := 10_000 * 327_680 / (100 * netcost.Gbit)
	if got := r.Transfer.Seconds(); got < 3*alone*0.999 {
		t.Errorf("three transfers of a source took %v s on average; one takes %v s alone", got, alone)
	}
}

// TestReplay: the same seed gives the same run, another seed another, and every request is decoded
// with every policy and network.
func TestReplay(t *testing.T) {
	arrivals := sample(t, 150)
	for _, p := range []netcost.Policy{netcost.Full, netcost.Static, netcost.TopoOnly, netcost.RoundRobin, netcost.LoadAware, netcost.CacheAware, netcost.CacheLoad} {
		o := Paper()
		o.Policy, o.Warmup, o.Background, o.Swing = p, 30, 0.2, time.Second
		a, b, c := run(t, o, arrivals, 1), run(t, o, arrivals, 1), run(t, o, arrivals, 2)
		if a.Digest != b.Digest || a.TTFT != b.TTFT {
			t.Errorf("%v: one seed, two runs: %x and %x", p, a.Digest, b.Digest)
		}
		if a.Digest == c.Digest {
			t.Errorf("%v: two seeds, one run", p)
		}
		sum := 0.0
		for _, s := range a.Tiers {
			sum += s
		}
		if a.Requests != 120 || math.Abs(sum-1) > 1e-9 || a.P50 > a.P95 || a.P95 > a.P99 || a.TTFT <= a.Transfer || a.Hit <= 0 {
			t.Errorf("%v: %+v", p, a)
		}
	}
}

// TestMemory: requests wait for room in order, and all of them get it.
func TestMemory(t *testing.T) {
	o := Paper()
	o.Policy, o.Warmup = netcost.Full, 0
	arrivals := sample(t, 100)
	most := 0
	for _, a := range arrivals {
		most = max(most, a.Input+a.Output)
	}
	o.Memory = int64(most+1) * o.KVToken
	tight := run(t, o, arrivals, 1)
	o.Memory *= 100
	if wide := run(t, o, arrivals, 1); wide.TTFT >= tight.TTFT {
		t.Errorf("TTFT %v with room for one long request an instance, %v with a hundred times that", tight.TTFT, wide.TTFT)
	}
	o.Memory = int64(most-1) * o.KVToken
	if _, err := Run(context.Background(), o, arrivals, 1); err == nil || !strings.Contains(err.Error(), "filter the trace") {
		t.Errorf("a request that fits nowhere: %v", err)
	}
}

func TestRefused(t *testing.T) {
	arrivals := []workload.Arrival{{Input: 1}, {Input: 1}}
	for _, c := range []struct {
		edit func(*Options)
		says string
	}{
		{func(o *Options) { o.Pods = 3 }, "Pods is 3"},
		{func(o *Options) { o.Oversubscription = 0.5 }, "Oversubscription is 0.5"},
		{func(o *Options) { o.Background = math.NaN() }, "Background is NaN"},
		{func(o *Options) { o.Background = 0.5 }, "Background is 0.5"},
		{func(o *Options) { o.Share = 1.1 }, "Share is 1.1"},
		{func(o *Options) { o.Refresh = 0 }, "Refresh is 0"},
		{func(o *Options) { o.Warmup = 2 }, "none is measured"},
		{func(o *Options) { o.Policy = 99 }, "policy 99"},
		{func(o *Options) { o.Model.MaxBatch = -1 }, "MaxBatch"},
	} {
		o := Paper()
		c.edit(&o)
		if _, err := Run(context.Background(), o, arrivals, 1); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q: %v", c.says, err)
		}
	}
	if _, err := (Study{}).Run(context.Background(), nil); err == nil {
		t.Error("a study of nothing ran")
	}
	w, err := PaperWorkload("rag")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Take(arrivals, 0, 1); err == nil || !strings.Contains(err.Error(), "are needed") {
		t.Errorf("a trace that is too short: %v", err)
	}
	if _, err := PaperWorkload("x"); err == nil {
		t.Error("a workload that there is not")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Run(ctx, Paper(), arrivals, 1); err == nil {
		t.Error("a run continued after its context had ended")
	}
}

// TestPrefixes compares the cache with sets of block hashes and the production code's longest
// common prefix.
func TestPrefixes(t *testing.T) {
	const groups, block = 5, 16
	rng := rand.New(rand.NewPCG(1, 1))
	cache := newPrefixes(groups)
	held := map[[2]int]bool{}
	var order []int // least recently used first
	use := func(g int) {
		for i, o := range order {
			if o == g {
				order = append(order[:i], order[i+1:]...)
				break
			}
		}
		order = append(order, g)
	}
	isHeld := func(g int) bool { return held[[2]int{g, 0}] }
	for range 20_000 {
		g, blocks := rng.IntN(groups), 1+rng.IntN(30)
		hashes := make([][2]int, blocks)
		for i := range hashes {
			hashes[i] = [2]int{g, i}
		}
		want := netcost.Prefix(hashes, block, func(h [2]int) bool { return held[h] })
		if got := cache.match(g, blocks*block); got != want {
			t.Fatalf("group %d, %d blocks: %d tokens, the set has %d", g, blocks, got, want)
		}
		switch rng.IntN(3) {
		case 0:
			cache.touch(g)
			if isHeld(g) {
				use(g)
			}
		case 1:
			cache.add(g, blocks*block)
			for _, h := range hashes {
				held[h] = true
			}
			use(g)
		case 2:
			limit := rng.IntN(100 * block)
			cache.shrink(limit)
			for len(held)*block > limit {
				for h := range held {
					if h[0] == order[0] {
						delete(held, h)
					}
				}
				order = order[1:]
			}
		}
		if cache.total != len(held)*block {
			t.Fatalf("%d tokens held, the set has %d", cache.total, len(held)*block)
		}
	}
	if cache.match(-1, 100) != 0 {
		t.Error("a request of no group has a hit")
	}
}

// studies runs the studies of one window on the real trace.
func studies(t *testing.T, load float64, policies ...netcost.Policy) []*Summary {
	t.Helper()
	all, err := workload.ReadArrivals(testkit.TraceFile(t, "mooncake_conversation_trace.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	w, err := PaperWorkload("rag")
	if err != nil {
		t.Fatal(err)
	}
	var out []*Summary
	for _, p := range policies {
		s, err := Study{Workload: w, Policy: p, Load: load, Windows: Windows(), Seeds: 5}.Run(context.Background(), all)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, s)
	}
	return out
}

// TestOrder is the paper's first finding, on the trace: policies that use the network have the
// lower TTFT, in every window, without slower decoding.
func TestOrder(t *testing.T) {
	for _, load := range []float64{1, 2.5} {
		s := studies(t, load, netcost.RoundRobin, netcost.CacheLoad, netcost.Full)
		rr, cla, full := s[0], s[1], s[2]
		for i := range rr.ByWindow {
			if !(full.ByWindow[i] < cla.ByWindow[i] && cla.ByWindow[i] < rr.ByWindow[i]) {
				t.Errorf("load %v, window %d: NetKV %v, CLA* %v, RR %v", load, i, full.ByWindow[i], cla.ByWindow[i], rr.ByWindow[i])
			}
		}
		if d := full.TBT - cla.TBT; d < 0 || d > 800*time.Microsecond {
			t.Errorf("load %v: NetKV's TBT is %v above CLA*'s", load, d)
		}
		if math.Abs(full.Rest().Seconds()/rr.Rest().Seconds()-1) > 0.01 {
			t.Errorf("load %v: TTFT without transfer %v and %v", load, full.Rest(), rr.Rest())
		}
	}
}
