package suite

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/sim/workload"
)

// ClusterOptions configures the cluster suite.
type ClusterOptions struct {
	// Agents is the number of concurrent agents, Rounds the number of turns (requests) of each. All
	// token counts of the trace are divided by Divide.
	Agents, Rounds, Divide int
	// Skip is the number of turns of each agent that are in storage when a replay begins. It
	// applies to the comparisons in which storage is the bottleneck.
	Skip int
	// RateBits is the rate of a storage NIC, in bits per second.
	RateBits uint64
	// Env is the environment of the processes.
	Env []string
}

// Metrics of the cluster suite.
const (
	completionMetric = "completion s"
	balanceMetric    = "SNIC max/avg"
	busyMetric       = "prefill busy max/avg"
	decodeMetric     = "decode side %"
	tokenMetric      = "first token p50 ms"
	firstLayerMetric = "first layer ms"
	lastLayerMetric  = "last layer ms"
	failedMetric     = "failed turns"
	wrongMetric      = "wrong blocks"
	caughtMetric     = "caught blocks"
	replanMetric     = "planned anew"
	againMetric      = "recomputed parts"
	longestMetric    = "longest turn s"
	flippedMetric    = "bits flipped"
	cachedMetric     = "cached k tokens"
	usageMetric      = "SNICs busy %"
	middleMetric     = "busy between head and tail %"
	headMetric       = "head s"
	tailMetric       = "tail s"
	cpuMetric        = "CPUs busy %"
	matchMetric      = "a turn: match ms"
	queueMetric      = "a turn: to a start ms"
	prefillMetric    = "a turn: to the first token ms"
	restMetric       = "a turn: to its end ms"
	burstP50Metric   = "burst p50 ms"
	burstP99Metric   = "burst p99 ms"
)

// clusterSuite is one run of the suite.
type clusterSuite struct {
	*suiteRun
	opts ClusterOptions
	// set holds the first Rounds turns of each agent. whole holds the first Rounds + Skip turns;
	// late replays the last Rounds of these.
	set, whole []workload.Trajectory
	// loopback is set if network namespaces are not available.
	loopback bool
}

// Cluster measures clusters on this machine: the gain of dual path where storage is the bottleneck,
// the contribution of each part of dual path, and the cost of faults.
func Cluster(ctx context.Context, w World, o ClusterOptions) (bench.Report, error) {
	s := &clusterSuite{suiteRun: newRun(w, "cluster"), opts: o}
	table, err := workload.Table2Set("64K")
	if err != nil {
		return s.report, err
	}
	generated := table.Generate(o.Agents, 1)
	s.set = workload.Scale{Rounds: o.Rounds, Tokens: 1 / float64(o.Divide)}.Apply(generated)
	s.whole = workload.Scale{Rounds: o.Rounds + o.Skip, Tokens: 1 / float64(o.Divide)}.Apply(generated)
	network, loopback, err := (&cluster.Spec{}).Network()
	if err != nil {
		return s.report, err
	}
	s.loopback = loopback
	s.setup("%s; storage NICs of %d Mbit/s, compute NICs of 8 times that, 2 KiB a token in 8 layers", network, o.RateBits/1e6)
	s.setup("SNIC max/avg: windows of a second with at least 30 %% of the busiest one's load, first half of the replay")
	err = s.all(ctx,
		step{"dual path where storage is the limit", s.shapes},
		step{"dual path where compute is the limit", s.compute},
		step{"balance of the storage NICs", s.balance},
		step{"one long request", s.long},
		step{"ablation", s.ablation},
		step{"traffic isolation", s.isolation},
		step{"faults", s.faults},
	)
	return s.report, err
}

// turns runs a comparison of clusters. It runs one fifth of World.Rounds, at least one, because one
// turn of a cluster takes long.
func (s *clusterSuite) turns(ctx context.Context, c bench.Comparison) error {
	if !s.wants(c.Name) {
		return nil
	}
	if s.Contenders != nil {
		c.Contenders = keep(c.Contenders, func(k bench.Contender) bool { return s.Contenders.MatchString(k.Name) })
	}
	const usual = 5
	res, err := bench.Run(ctx, c, bench.RunOptions{Rounds: max(1, s.Rounds/usual), Rand: s.rng, Progress: s.Progress})
	if err != nil {
		return err
	}
	s.report.Results = append(s.report.Results, res)
	return nil
}

// late returns a replay of agents that begin in the middle of their trajectories. So the cached KV
// of each turn is in storage from the first replayed turn on, as for nearly all turns of a real
// agent.
func (s *clusterSuite) late() cluster.Workload {
	warm, agents := cluster.Late("bench", s.whole, s.opts.Skip, s.opts.Rounds)
	return cluster.Workload{Warm: warm, Agents: agents}
}

// lateSpec returns a cluster for late. A decode engine has room, in device memory and in its
// buffer, for all requests that two prefill engines may have at a time. The storage node has memory
// for all its loads, because KV whose load returns Busy is recomputed and would be missing from the
// bytes of the storage NICs. Beta, the maximum number of unfinished tokens of a prefill engine, is
// large enough that the storage NICs never wait because of it. The DualPath paper computes Beta
// from seconds of compute (section A.4), but here compute takes no time.
func lateSpec(prefill, decode int) cluster.Spec {
	return cluster.Spec{Prefill: prefill, Decode: decode, Beta: 128 << 10, HBMBytes: 512 << 20, BufferBytes: 512 << 20, ArenaBytes: 1 << 30}
}

// lately runs a comparison of clusters that replay the agents of late.
func (s *clusterSuite) lately(ctx context.Context, c bench.Comparison) error {
	c.Notes = append(c.Notes,
		fmt.Sprintf("%d agents of DualPath's 64K set, %d turns each, the %d before them in storage already, lengths divided by %d", s.opts.Agents, s.opts.Rounds, s.opts.Skip, s.opts.Divide),
		"SNICs busy: what those that may read have received, of what they could have from first to last; head: until a window of a second had 90 % of the best one; tail: after the last such window, when few agents are left",
		"a turn: means of its parts, one after the other; its end is when its last block is stored")
	return s.turns(ctx, c)
}

// replay runs a comparison of clusters that replay the suite's agents. The comparison's notes
// describe the agents, because parts of a report may come from runs with other agents.
func (s *clusterSuite) replay(ctx context.Context, c bench.Comparison) error {
	return s.replayOf(ctx, c, s.opts.Agents)
}

// replayOf runs a comparison of clusters that replay at most n of the agents.
func (s *clusterSuite) replayOf(ctx context.Context, c bench.Comparison, n int) error {
	c.Notes = append(c.Notes, fmt.Sprintf("%d agents of DualPath's 64K set, the first %d turns, lengths divided by %d", len(s.first(n)), s.opts.Rounds, s.opts.Divide))
	return s.turns(ctx, c)
}

// first returns the first n agents.
func (s *clusterSuite) first(n int) []workload.Trajectory { return s.set[:min(len(s.set), n)] }

func keep(in []bench.Contender, ok func(bench.Contender) bool) (out []bench.Contender) {
	for _, c := range in {
		if ok(c) {
			out = append(out, c)
		}
	}
	return out
}

// run runs one replay on a new cluster.
func (s *clusterSuite) run(ctx context.Context, spec cluster.Spec, load cluster.Workload) (_ *cluster.Result, _ bench.Sample, err error) {
	dir, remove, err := s.tempDir("cluster")
	if err != nil {
		return nil, nil, err
	}
	defer remove()
	spec.Dir, spec.Env, spec.SNICBits = dir, s.opts.Env, s.opts.RateBits
	if load.Agents == nil {
		load.Agents = cluster.Sessions("bench", s.set)
	}
	if load.Parallel == 0 {
		load.Parallel = s.opts.Agents
	}
	r, err := cluster.Run(ctx, spec, load)
	if err != nil {
		return nil, nil, err
	}
	sample := bench.Sample{
		completionMetric: r.Completion.Seconds(), tokenMetric: ms(r.FirstTokenP50),
		failedMetric: float64(r.Failed), wrongMetric: float64(r.WrongBlocks),
	}
	if read := r.PrefillTokens + r.DecodeTokens; read > 0 {
		sample[decodeMetric] = 100 * float64(r.DecodeTokens) / float64(read)
	}
	if r.SNICBalance > 0 {
		sample[balanceMetric] = r.SNICBalance
	}
	if r.BusyBalance > 0 {
		sample[busyMetric] = r.BusyBalance
	}
	return r, sample, nil
}

// contender returns a contender that replays load on a cluster of spec.
func (s *clusterSuite) contender(name string, spec cluster.Spec, load cluster.Workload) bench.Contender {
	return bench.Contender{Name: name, Turn: func(ctx context.Context) (bench.Sample, error) {
		r, sample, err := s.run(ctx, spec, load)
		if err != nil {
			return nil, err
		}
		sample[cachedMetric], sample[againMetric] = float64(r.HitTokens)/1e3, float64(r.Planner.Recomputes)
		sample[cpuMetric] = 100 * r.CPU.Seconds() / r.Life.Seconds() / float64(runtime.NumCPU())
		sample[matchMetric], sample[queueMetric], sample[prefillMetric], sample[restMetric] = ms(r.MeanMatch), ms(r.MeanQueue), ms(r.MeanPrefill), ms(r.MeanDecode)
		if u := r.Usage; u.Whole > 0 {
			sample[usageMetric], sample[middleMetric] = 100*u.Whole, 100*u.Middle
			sample[headMetric], sample[tailMetric] = u.Head.Seconds(), u.Tail.Seconds()
		}
		return sample, nil
	}}
}

// shapes compares the clusters of section 7.4 of the DualPath paper, with compute that takes no
// time.
func (s *clusterSuite) shapes(ctx context.Context) error {
	c := bench.Comparison{Name: "dual path where storage is the limit", Notes: []string{
		"x of the bound: completion of basic over that of dualpath, over (P+D)/P, which is what the number of storage NICs allows (DualPath, section 4.2)",
	}}
	for _, shape := range [][2]int{{1, 1}, {2, 1}, {1, 2}, {2, 4}} {
		spec := lateSpec(shape[0], shape[1])
		name := spec.Shape()
		basic := spec
		basic.Policy = dualpath.PrefillOnly
		c.Contenders = append(c.Contenders, s.contender(name+" basic", basic, s.late()), s.contender(name+" dualpath", spec, s.late()))
		bound := float64(spec.Prefill+spec.Decode) / float64(spec.Prefill)
		c.Measures = append(c.Measures, bench.Measure{
			Name: fmt.Sprintf("%s: x of the bound %.2g", name, bound), Target: bench.AtLeast(0.93),
			Of: func(r bench.Round) (float64, bool) {
				x, ok := quotient(r, name+" basic", name+" dualpath")
				return x / bound, ok
			},
		})
	}
	apart := func(a, b string, most float64) bench.Measure {
		return bench.Measure{Name: fmt.Sprintf("|%s / %s - 1|", a, b), Target: bench.AtMost(most), Of: func(r bench.Round) (float64, bool) {
			x, ok := quotient(r, a, b)
			return math.Abs(x - 1), ok
		}}
	}
	c.Measures = append(c.Measures, apart("1P1D basic", "1P2D basic", 0.03), apart("1P1D dualpath", "2P1D basic", 0.12))
	return s.lately(ctx, c)
}

// quotient returns the completion time of contender a divided by the completion time of contender
// b.
func quotient(r bench.Round, a, b string) (float64, bool) {
	x, okA := r.Get(a, completionMetric)
	y, okB := r.Get(b, completionMetric)
	return x / y, okA && okB
}

// heavy returns spec with a compute time per token that exceeds the time in which two storage NICs
// read the KV.
func heavy(spec cluster.Spec) cluster.Spec {
	spec.Model.Linear = 2e-3
	return spec
}

// compute compares clusters in which compute is the bottleneck, so that loading KV costs time only
// where it does not overlap with compute.
func (s *clusterSuite) compute(ctx context.Context) error {
	spec := heavy(cluster.Spec{Prefill: 2, Decode: 2})
	oracle := spec
	oracle.Oracle = true
	const name = "dual path where compute is the limit, 2P2D"
	return s.replay(ctx, bench.Comparison{
		Name: name, Contenders: []bench.Contender{s.contender("dualpath", spec, cluster.Workload{}), s.contender("oracle", oracle, cluster.Workload{})},
		Measures: []bench.Measure{
			bench.Ratio("completion, dualpath / oracle", completionMetric, "dualpath", "oracle", bench.AtMost(1.12)),
			bench.Figure("prefill engines' compute, max/avg", "", busyMetric, "dualpath", bench.AtMost(1.06)),
		},
	})
}

// balance compares policies that decide which node reads. The measured value is the traffic of the
// busiest storage NIC divided by the mean over all storage NICs.
func (s *clusterSuite) balance(ctx context.Context) error {
	c := bench.Comparison{Name: "balance of the storage NICs, 2P4D", Notes: []string{"the paper has 1.53 for round robin and 1.18 for its scheduler (section 7.5)"}}
	for _, p := range []dualpath.ReadPolicy{dualpath.RoundRobin, dualpath.Shorter, dualpath.Split} {
		spec := lateSpec(2, 4)
		spec.Policy = p
		c.Contenders = append(c.Contenders, s.contender(p.String(), spec, s.late()))
		target := bench.AtMost(1.18)
		if p == dualpath.RoundRobin {
			target = bench.Target{}
		}
		c.Measures = append(c.Measures, bench.Figure(p.String()+": SNIC max/avg", "", balanceMetric, p.String(), target))
	}
	return s.lately(ctx, c)
}

// long replays one agent alone. It compares a read that is split between the prefill node and the
// decode node with a read of the whole request at one node.
func (s *clusterSuite) long(ctx context.Context) error {
	one := []workload.Trajectory{{Rounds: []workload.Round{{Append: 6000, Gen: 1}}}}
	for range 20 {
		one[0].Rounds = append(one[0].Rounds, workload.Round{Append: 60, Gen: 1})
	}
	c := bench.Comparison{Name: "one long request at a time, 1P1D", Notes: []string{"median over 20 turns of 6,000 cached tokens; from the start on the engine until the layer's KV is in device memory"}}
	for _, p := range []dualpath.ReadPolicy{dualpath.Shorter, dualpath.Split} {
		c.Contenders = append(c.Contenders, bench.Contender{Name: p.String(), Turn: func(ctx context.Context) (bench.Sample, error) {
			r, sample, err := s.run(ctx, cluster.Spec{Policy: p}, cluster.Workload{Agents: cluster.Sessions("long", one), Parallel: 1})
			if err != nil {
				return nil, err
			}
			var first, last []time.Duration
			for _, l := range r.Loads {
				if l.Hit > 0 {
					first, last = append(first, l.First), append(last, l.Last)
				}
			}
			if len(first) == 0 {
				return nil, errors.New("no turn had cached tokens")
			}
			sample[firstLayerMetric] = ms(bench.Quantile(first, 0.5))
			sample[lastLayerMetric] = ms(bench.Quantile(last, 0.5))
			return sample, nil
		}})
	}
	over := func(what, metric string) bench.Measure {
		return bench.Ratio(what+", split / one side", metric, dualpath.Split.String(), dualpath.Shorter.String(), bench.AtMost(1))
	}
	c.Measures = []bench.Measure{over("first layer", firstLayerMetric), over("last layer", lastLayerMetric)}
	return s.turns(ctx, c)
}

// ablation adds one part of dual path after another, as section 7.5 of the DualPath paper does, and
// finally the split of reads, which the paper does not have. Compute takes about as long as
// loading, and device memory is small, so that each part can have an effect.
func (s *clusterSuite) ablation(ctx context.Context) error {
	spec := cluster.Spec{Prefill: 2, Decode: 4, HBMBytes: 64 << 20, ArenaBytes: 1 << 30, Layers: 8}
	spec.Model.Linear = 4e-4
	with := func(change func(*cluster.Spec)) cluster.Spec {
		out := spec
		change(&out)
		return out
	}
	steps := []struct {
		name string
		spec cluster.Spec
	}{
		{"basic", with(func(o *cluster.Spec) { o.Policy, o.Window = dualpath.PrefillOnly, o.Layers })},
		{"+ layerwise prefill", with(func(o *cluster.Spec) { o.Policy = dualpath.PrefillOnly })},
		{"+ dual path", with(func(o *cluster.Spec) { o.Policy = dualpath.RoundRobin })},
		{"+ scheduler", with(func(o *cluster.Spec) { o.Policy = dualpath.Shorter })},
		{"+ split", with(func(o *cluster.Spec) { o.Policy = dualpath.Split })},
	}
	c := bench.Comparison{Name: "ablation, 2P4D", Notes: []string{"dual path alone: the sides take turns; the scheduler: the shorter reading queue reads; the split: both do (the paper: -17 %, -38 %, -46 %, no split)"}}
	for i, k := range steps {
		c.Contenders = append(c.Contenders, s.contender(k.name, k.spec, s.late()))
		if i > 0 {
			c.Measures = append(c.Measures, bench.Measure{Name: k.name + ": completion against basic", Unit: "%", Of: func(r bench.Round) (float64, bool) {
				x, ok := quotient(r, k.name, "basic")
				return 100 * (x - 1), ok
			}})
		}
	}
	return s.lately(ctx, c)
}

// Parameters of the isolation comparison. A burst has 4 MiB, so that the packet of KV that is on
// the wire when a burst begins is small in comparison. The NICs are slow enough that this machine's
// CPUs are not the bottleneck.
const (
	burstBytes    = 4 << 20
	burstPause    = 30 * time.Millisecond
	burstCount    = 150
	burstSNICBits = 25e6
	// burstAgents is the number of agents: enough to load KV for the duration of the bursts, and
	// not much longer.
	burstAgents = 48
)

// isolation measures the duration of bursts over the compute network: without KV traffic, with KV
// in a traffic class of lower priority, and with KV in the class of the bursts.
func (s *clusterSuite) isolation(ctx context.Context) error {
	if s.loopback {
		return errors.New("needs network namespaces (root): shaped connections have no classes")
	}
	c := bench.Comparison{Name: "traffic isolation on the compute network, 1P1D", Notes: []string{
		fmt.Sprintf("%d bursts of %d MiB from the prefill to the decode node, as a collective's, over compute NICs of %d Mbit/s; priority by qdisc class (htb) and DSCP", burstCount, burstBytes>>20, int(8*burstSNICBits/1e6)),
	}}
	for _, k := range []struct {
		name         string
		loaded, asKV bool
	}{{"no KV", false, false}, {"KV in the class below", true, false}, {"KV in the same class", true, true}} {
		c.Contenders = append(c.Contenders, bench.Contender{Name: k.name, Turn: func(ctx context.Context) (bench.Sample, error) { return s.burst(ctx, k.loaded, k.asKV) }})
	}
	c.Measures = []bench.Measure{
		bench.Ratio("p99 of bursts, KV in the class below / no KV", burstP99Metric, "KV in the class below", "no KV", bench.AtMost(1.03)),
		bench.Ratio("p99 of bursts, KV in the same class / no KV", burstP99Metric, "KV in the same class", "no KV", bench.Target{}),
	}
	return s.replayOf(ctx, c, burstAgents)
}

// burst measures bursts on a cluster. With loaded, the cluster replays agents at the same time.
func (s *clusterSuite) burst(ctx context.Context, loaded, asKV bool) (bench.Sample, error) {
	var took []time.Duration
	enough := errors.New("the bursts have ended")
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	set := s.first(burstAgents)
	load := cluster.Workload{Agents: cluster.Sessions("bench", set), Parallel: len(set), During: func(ctx context.Context, c *cluster.Cluster) (err error) {
		if loaded {
			if err := c.AfterTurns(ctx, len(set)); err != nil {
				return err
			}
		}
		took, err = c.Burst(ctx, cluster.Bursts{From: "P0", To: "D0", Bytes: burstBytes, Pause: burstPause, N: burstCount, AsKV: asKV})
		cancel(enough)
		return err
	}}
	if !loaded {
		// A single agent with one long turn keeps the cluster running without traffic.
		load.Agents, load.Parallel = cluster.Sessions("quiet", []workload.Trajectory{{Rounds: []workload.Round{{Append: 64, Gen: 100_000}}}}), 1
	}
	spec := cluster.Spec{Classes: true}
	spec.Model.Base = time.Millisecond
	rate := s.opts.RateBits
	s.opts.RateBits = burstSNICBits
	defer func() { s.opts.RateBits = rate }()
	if _, _, err := s.run(ctx, spec, load); !errors.Is(err, enough) && err != nil {
		return nil, err
	}
	if len(took) == 0 {
		return nil, errors.New("the replay ended before the bursts")
	}
	return bench.Sample{burstP50Metric: ms(bench.Quantile(took, 0.5)), burstP99Metric: ms(bench.Quantile(took, 0.99))}, nil
}

// ms returns d in milliseconds.
func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }

// fault is one fault in the middle of a replay.
type fault struct {
	name string
	do   func(ctx context.Context, c *cluster.Cluster) error
}

// Parameters of the faults.
const (
	// outage is the time for which a killed process or an unplugged NIC is down.
	outage = 3 * time.Second
	// flips is the number of bit flips in memory, at the interval flipEvery. storedFlips is the
	// number of bit flips on disk.
	flipEvery   = 5 * time.Millisecond
	flips       = 1000
	storedFlips = 2000
	// slowShare is the factor by which a slow NIC is slowed down. deadline is the time limit of a
	// turn.
	slowShare = 100
	deadline  = time.Minute
	// faultAgents is the number of agents: just enough to keep all nodes busy, because there are
	// thirteen replays.
	faultAgents = 24
)

// faultList returns all faults.
func (s *clusterSuite) faultList() []fault {
	kill := func(node string) func(context.Context, *cluster.Cluster) error {
		return func(_ context.Context, c *cluster.Cluster) error { return c.Kill(node) }
	}
	again := func(node string) func(context.Context, *cluster.Cluster) error {
		return func(ctx context.Context, c *cluster.Cluster) error {
			if err := c.Kill(node); err != nil {
				return err
			}
			if err := pause(ctx, outage); err != nil {
				return err
			}
			return c.Restart(ctx, node)
		}
	}
	slow := func(n cluster.NIC) func(context.Context, *cluster.Cluster) error {
		return func(_ context.Context, c *cluster.Cluster) error { return c.SetRate(n, s.opts.RateBits/slowShare) }
	}
	pull := func(n cluster.NIC) func(context.Context, *cluster.Cluster) error {
		return func(ctx context.Context, c *cluster.Cluster) error {
			if err := c.Plug(n, false); err != nil {
				return err
			}
			return errors.Join(pause(ctx, outage), c.Plug(n, true))
		}
	}
	flip := func(node string) func(context.Context, *cluster.Cluster) error {
		return func(_ context.Context, c *cluster.Cluster) error { return c.FlipBuffer(node, flipEvery, flips) }
	}
	return []fault{
		{"none", nil},
		{"kill -9 of a decode node", kill("D1")},
		{"kill -9 of a prefill node", kill("P1")},
		{"kill -9 of the planner, back after 3 s", again("planner")},
		{"kill -9 of the storage node, back after 3 s", again("storage")},
		{"a decode node stands still for 7 s", func(ctx context.Context, c *cluster.Cluster) error {
			if err := c.Pause("D0"); err != nil {
				return err
			}
			return errors.Join(pause(ctx, 7*time.Second), c.Resume("D0"))
		}},
		{"a prefill SNIC at 1 % of its rate", slow(cluster.NIC{Node: "P0", Storage: true})},
		{"a decode SNIC at 1 % of its rate", slow(cluster.NIC{Node: "D0", Storage: true})},
		{"storage network cut off from a prefill node for 3 s", pull(cluster.NIC{Node: "P0", Storage: true})},
		{"compute network cut off from a decode node for 3 s", pull(cluster.NIC{Node: "D0"})},
		{"bits flipped on storage", func(_ context.Context, c *cluster.Cluster) error {
			_, err := c.FlipStored(storedFlips, rand.New(rand.NewPCG(s.Seed, 2)))
			return err
		}},
		{"bits flipped in a PE buffer, the relay's", flip("P0")},
		{"bits flipped in a DE buffer", flip("D0")},
	}
}

// pause waits for d.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// faults measures the cost of each fault and checks that no byte is wrong.
func (s *clusterSuite) faults(ctx context.Context) error {
	c := bench.Comparison{Name: "faults in the middle of a replay, 2P2D", Notes: []string{
		"each begins when a third of the turns have ended; a turn's deadline is a minute; blocks that a checksum kept from a device are caught, those that reached one would be wrong",
	}}
	set := s.first(faultAgents)
	turns := 0
	for _, t := range set {
		turns += len(t.Rounds)
	}
	for _, f := range s.faultList() {
		c.Contenders = append(c.Contenders, bench.Contender{Name: f.name, Turn: func(ctx context.Context) (bench.Sample, error) {
			load := cluster.Workload{Agents: cluster.Sessions("bench", set), Parallel: len(set)}
			if f.do != nil {
				load.During = func(ctx context.Context, k *cluster.Cluster) error {
					if err := k.AfterTurns(ctx, turns/3); err != nil {
						return err
					}
					return f.do(ctx, k)
				}
			}
			r, sample, err := s.run(ctx, cluster.Spec{Prefill: 2, Decode: 2, Deadline: deadline}, load)
			if err != nil {
				return nil, err
			}
			sample[caughtMetric], sample[replanMetric], sample[againMetric] = float64(r.CaughtBlocks), float64(r.Replans), float64(r.Planner.Recomputes)
			sample[longestMetric] = r.Longest.Seconds()
			if r.Flipped > 0 {
				sample[flippedMetric] = float64(r.Flipped)
			}
			if len(r.Failures) > 0 {
				s.Progress(f.name + ": " + strings.Join(r.Failures, "; "))
			}
			return sample, nil
		}})
		c.Measures = append(c.Measures, bench.Figure(f.name+": wrong blocks", "", wrongMetric, f.name, bench.AtMost(0)),
			bench.Figure(f.name+": longest turn", "s", longestMetric, f.name, bench.AtMost(deadline.Seconds()+1)))
	}
	return s.replayOf(ctx, c, faultAgents)
}
