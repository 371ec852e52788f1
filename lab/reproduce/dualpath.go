package reproduce

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/sim/agentic"
	"github.com/penstock-kv/penstock/sim/workload"
)

// DualPath returns the suite of the paper that the planner implements.
func DualPath() Suite {
	return Suite{Name: "dualpath", Paper: "DualPath: Breaking the Storage Bandwidth Bottleneck in Agentic LLM Inference", Drives: dualPathDrives, Run: dualPath}
}

// dualPathDrives is the suite's Drives.
const dualPathDrives = "the planner of `dualpath` and the packing of `dualpath/batch`, which a planner node and its engines run in production. Every assignment and every reading side is its decision; storage, NICs and engines are simulated. The policies `basic`, `layerwise` and `round-robin` are the paper's baselines; what production runs by default is `dualpath-split`."

const dualPathCommand = "penstock sim reproduce dualpath"

// dpSeeds is the number of seeds with which the ablation and the online runs are repeated.
const dpSeeds = 5

// dpFigureNote explains values that were read off a figure.
const dpFigureNote = "read off the figure's bars by others, to 5 %; which trajectories, GPU and free memory the paper had is not known"

func dualPath(ctx context.Context, r *Report) error {
	dpIntensity(r)
	if err := dpBottleneckFree(ctx, r); err != nil {
		return err
	}
	d := newDPRuns(r.Quick())
	if d.quick {
		r.LeftOut("all seeds but the first", "each number of the ablation and of the load balance is of one run")
		r.LeftOut("4096 agents (Figure 7)", "four runs of half a minute")
		r.LeftOut("capacities (Figure 10), DS 27B online, and the rates 0.15, 0.3 and 0.45 agents/s", "each capacity is a search over runs of 90 minutes of virtual time")
		r.LeftOut("large clusters (Table 3)", "up to 1152 engines and 49 152 agents")
	}
	dpTrajectories(r, d)
	d.plan()
	if err := d.run(ctx, r); err != nil {
		return err
	}
	d.offline(r)
	d.ratios(r)
	d.ablation(r)
	d.balance(r)
	d.scaling(r)
	d.online(r)
	d.agentTime(r)
	d.large(r)
	d.assumptions(r)
	r.Missing("Figure 15, details of the large offline run over time", "which quantities it shows is not in the text that we have; the tokens generated over time of the same run are drawn")
	r.Missing("Figure 11, values", "the paper prints none but the working sets that follow from them, which are in the online table")
	r.Missing("Figure 12 on the left, values", "the paper prints none; the parts of the TTFT are below Figure 11's table")
	return nil
}

// dpRuns holds the simulations of the tables. Each simulation is planned under a key and run once;
// its result is looked up by this key.
type dpRuns struct {
	// quick skips the longest simulations. seeds is the number of runs of the ablation and the
	// online runs.
	quick bool
	seeds int

	specs []workload.Spec
	// sets holds the generated sets by seed and name; each is generated at its first use.
	mu   sync.Mutex
	sets map[string][]workload.Trajectory

	jobs       []dpJob
	results    map[string]*agentic.Result
	capacities map[string]float64
}

// dpJob is one simulation. weight estimates its run time, in no particular unit; the job with the
// greatest weight starts first.
type dpJob struct {
	key    string
	weight float64
	run    func(ctx context.Context) error
}

func newDPRuns(quick bool) *dpRuns {
	seeds := dpSeeds
	if quick {
		seeds = 1
	}
	return &dpRuns{
		quick: quick, seeds: seeds,
		specs: workload.Table2(), sets: make(map[string][]workload.Trajectory),
		results: make(map[string]*agentic.Result), capacities: make(map[string]float64),
	}
}

// set returns the 500 trajectories of the named set for a seed, and the specification of the set.
func (d *dpRuns) set(name string, seed uint64) ([]workload.Trajectory, workload.Spec) {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.IndexFunc(d.specs, func(s workload.Spec) bool { return s.Name == name })
	key := fmt.Sprint(name, seed)
	if d.sets[key] == nil {
		d.sets[key] = d.specs[i].Generate(500, seed)
	}
	return d.sets[key], d.specs[i]
}

// dpCase is one offline job: a model, a cluster of k*p prefill nodes and k*d decode nodes, a set of
// trajectories, and a number of agents.
type dpCase struct {
	model   agentic.Model
	p, d, k int
	set     string
	agents  int
	system  agentic.System
	seed    uint64
	// variant names the effect of change, if change is not nil.
	variant string
	change  func(o *agentic.Options, set []workload.Trajectory, maxLen int) []workload.Trajectory
}

// key returns the name of a case.
func (c dpCase) key() string {
	return fmt.Sprintf("%s %dP%dD x%d %s %d agents %v seed %d %s", c.model.Name, c.p, c.d, c.k, c.set, c.agents, c.system, c.seed, c.variant)
}

// options returns the options of the case without its agents.
func (c dpCase) options() agentic.Options {
	return agentic.Options{
		System: c.system, Model: c.model, PrefillNodes: c.p * c.k, DecodeNodes: c.d * c.k, PrefillGroup: c.p, DecodeGroup: c.d, Seed: c.seed,
	}
}

// add plans a case, once.
func (d *dpRuns) add(c dpCase) {
	key := c.key()
	if slices.ContainsFunc(d.jobs, func(j dpJob) bool { return j.key == key }) {
		return
	}
	d.jobs = append(d.jobs, dpJob{key, float64(c.agents) * float64(c.k), func(ctx context.Context) error {
		set, spec := d.set(c.set, c.seed)
		o := c.options()
		if c.change != nil {
			set = c.change(&o, set, spec.MaxLen)
		}
		o.Agents = workload.Agents(set, c.agents*c.k, spec.MaxLen, c.seed)
		cluster, err := agentic.New(o)
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		res, err := cluster.Run(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		d.keep(key, res)
		return nil
	}})
}

// dpOnline is one online run with an open loop of arriving agents.
type dpOnline struct {
	dpCase
	aps     float64
	horizon time.Duration
}

// key returns the name of a run.
func (o dpOnline) key() string { return fmt.Sprintf("%s at %v/s", o.dpCase.key(), o.aps) }

// onlineOf returns the options of the open loop of a run.
func (d *dpRuns) onlineOf(o dpOnline, slo agentic.SLO) agentic.Online {
	set, spec := d.set(o.set, o.seed)
	return agentic.Online{Set: set, MaxLen: spec.MaxLen, APS: o.aps * float64(o.k), Horizon: o.horizon, SLO: slo}
}

// addOnline plans an online run without an SLO, so the run does not end when latencies grow.
func (d *dpRuns) addOnline(o dpOnline) {
	key := o.key()
	d.jobs = append(d.jobs, dpJob{key, o.aps * float64(o.k) * o.horizon.Seconds(), func(ctx context.Context) error {
		res, err := agentic.RunOnline(ctx, o.options(), d.onlineOf(o, agentic.SLO{}))
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		d.keep(key, res)
		return nil
	}})
}

// dpCapacityStep is the resolution of a capacity, in agents per second.
const dpCapacityStep = 0.025

// addCapacity plans the search for the highest arrival rate that meets the SLO, up to most agents
// per second.
func (d *dpRuns) addCapacity(c dpCase, most float64) {
	key := c.key()
	d.jobs = append(d.jobs, dpJob{key + " capacity", 5 * most * agentic.DefaultHorizon.Seconds(), func(ctx context.Context) error {
		got, err := agentic.Capacity(ctx, c.options(), d.onlineOf(dpOnline{dpCase: c}, agentic.PaperSLO()), dpCapacityStep, most, nil)
		if err != nil {
			return fmt.Errorf("%s capacity: %w", key, err)
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		d.capacities[key] = got
		return nil
	}})
}

// keep stores a result.
func (d *dpRuns) keep(key string, r *agentic.Result) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.results[key] = r
}

// run runs the planned simulations, the longest first.
func (d *dpRuns) run(ctx context.Context, r *Report) error {
	slices.SortStableFunc(d.jobs, func(a, b dpJob) int { return int(math.Copysign(1, b.weight-a.weight)) })
	return r.Each(ctx, "DualPath's clusters", len(d.jobs), func(ctx context.Context, i int) error { return d.jobs[i].run(ctx) })
}

// of returns the result of a planned case.
func (d *dpRuns) of(c dpCase) *agentic.Result { return d.results[c.key()] }

// jct returns the duration of the job in seconds.
func (d *dpRuns) jct(c dpCase) float64 { return d.of(c).JCT.Seconds() }

// The cases. Each is derived from the paper's default clusters (section 7.2).

func dp660(system agentic.System, set string, agents int) dpCase {
	return dpCase{model: agentic.DeepSeek660B(), p: 2, d: 4, k: 1, set: set, agents: agents, system: system, seed: 1}
}

func dp27(system agentic.System, p, d int) dpCase {
	return dpCase{model: agentic.DeepSeek27B(), p: p, d: d, k: 1, set: "64K", agents: 2048, system: system, seed: 1}
}

// with returns the case with another seed.
func (c dpCase) with(seed uint64) dpCase {
	c.seed = seed
	return c
}

// scaled returns the case with k times as many nodes and agents.
func (c dpCase) scaled(k int) dpCase {
	c.k = k
	return c
}

// appends returns the case with each append length multiplied by factor. generates does the same
// for each generated length.
func (c dpCase) appends(factor float64) dpCase {
	c.variant = fmt.Sprintf("append x%v", factor)
	c.change = func(_ *agentic.Options, set []workload.Trajectory, maxLen int) []workload.Trajectory {
		return workload.ScaleAppend(set, factor, maxLen)
	}
	return c
}

func (c dpCase) generates(factor float64) dpCase {
	c.variant = fmt.Sprintf("gen x%v", factor)
	c.change = func(_ *agentic.Options, set []workload.Trajectory, maxLen int) []workload.Trajectory {
		return workload.ScaleGen(set, factor, maxLen)
	}
	return c
}

// assuming returns the case with a changed assumption.
func (c dpCase) assuming(what string, f func(*agentic.Options)) dpCase {
	c.variant = what
	c.change = func(o *agentic.Options, set []workload.Trajectory, _ int) []workload.Trajectory {
		f(o)
		return set
	}
	return c
}

// noQuota returns the case without the compute quota.
func (c dpCase) noQuota() dpCase {
	return c.assuming("without quota", func(o *agentic.Options) { o.NoQuota = true })
}

// storageOnly returns the case with compute and compute NICs so fast that they are never the
// bottleneck. The planner's constant beta, which follows from PrefillRate, keeps its value for the
// real GPU.
func (c dpCase) storageOnly() dpCase {
	c.variant = "compute and compute NICs out of the way"
	c.change = func(o *agentic.Options, set []workload.Trajectory, _ int) []workload.Trajectory {
		o.Agents = set
		o.Planner.PrefillRate = o.ProfilePrefill()
		o.Model.FLOPS, o.Model.StepBase, o.Model.StepPer = 1e18, time.Millisecond, 0
		o.StepOverhead, o.FetchEvery = time.Millisecond, 5*time.Millisecond
		o.CNIC = 1e15
		return set
	}
	return c
}

// sizes returns the numbers of agents of Figure 7, by set.
func (d *dpRuns) sizes() map[string][]int {
	if d.quick {
		return map[string][]int{"32K": {512, 1024}, "48K": {512, 1024}, "64K": {256, 512, 1024, 2048}}
	}
	return map[string][]int{"32K": {512, 1024, 2048}, "48K": {512, 1024, 2048}, "64K": {256, 512, 1024, 2048, 4096}}
}

// rates returns the rates of the online runs, in agents per second.
func (d *dpRuns) rates() []float64 {
	if d.quick {
		return []float64{0.1, 0.2, 0.4}
	}
	return []float64{0.1, 0.15, 0.2, 0.3, 0.4, 0.45}
}

// onlineModels returns the number of clusters of Figure 10 that are simulated: both, or in a quick
// run only the first, DS 660B.
func (d *dpRuns) onlineModels() int {
	if d.quick {
		return 1
	}
	return 2
}

// The large clusters of Table 3, as multiples of a cluster of 2 prefill and 4 decode nodes.
const (
	dpLargeOffline = 24
	dpLargeOnline  = 22
)

// dpLargeHorizon is the duration of the large online run, and of the small online run with which it
// is compared.
const dpLargeHorizon = time.Hour

// plan plans every simulation.
func (d *dpRuns) plan() {
	for _, s := range d.specs {
		for _, n := range d.sizes()[s.Name] {
			for _, system := range []agentic.System{agentic.Basic, agentic.DualPath, agentic.Oracle} {
				d.add(dp660(system, s.Name, n))
			}
		}
	}
	for _, n := range []int{1024, 2048} {
		for system := agentic.Basic; system <= agentic.Oracle; system++ {
			for seed := range uint64(d.seeds) {
				d.add(dp660(system, "64K", n).with(seed + 1))
			}
		}
	}
	for _, pd := range [][2]int{{1, 1}, {2, 1}, {1, 2}} {
		for _, system := range []agentic.System{agentic.Basic, agentic.Layerwise, agentic.DualPath, agentic.DualPathSplit, agentic.Oracle} {
			d.add(dp27(system, pd[0], pd[1]))
		}
	}
	d.add(dp27(agentic.RoundRobin, 1, 2))
	for _, pd := range dpBounds() {
		for _, system := range []agentic.System{agentic.Layerwise, agentic.DualPath, agentic.DualPathSplit} {
			d.add(dpBoundCase(system, pd))
		}
	}
	for _, f := range dpFactors() {
		for _, system := range []agentic.System{agentic.Basic, agentic.DualPath, agentic.Oracle} {
			d.add(dp660(system, "64K", 1024).appends(f))
			d.add(dp660(system, "64K", 1024).generates(f))
		}
	}
	d.add(dp660(agentic.DualPath, "64K", 1024).noQuota())
	for _, c := range dpAssumptions() {
		d.add(c)
	}
	if !d.quick {
		for _, k := range []int{1, 4, dpLargeOffline} {
			d.add(dp660(agentic.DualPath, "48K", 2048).scaled(k))
		}
	}
	for _, system := range []agentic.System{agentic.Basic, agentic.DualPath, agentic.Oracle} {
		if !d.quick {
			d.addCapacity(dp660(system, "64K", 0), 0.8)
			d.addCapacity(dp27(system, 1, 1), 1.2)
		}
		for _, aps := range d.rates() {
			if system == agentic.Basic && aps > 0.2 {
				continue // at a rate far above the capacity of Basic (without dual path), there is no steady state
			}
			for m := range d.onlineModels() {
				d.addOnline(dpOnline{dpOnlineCase(system, m), aps, agentic.DefaultHorizon})
			}
		}
	}
	if d.quick {
		return
	}
	for seed := range uint64(d.seeds - 1) {
		d.addOnline(dpOnline{dp660(agentic.DualPath, "64K", 0).with(seed + 2), 0.4, agentic.DefaultHorizon})
	}
	d.addOnline(dpOnline{dp660(agentic.DualPath, "64K", 0), 0.4, dpLargeHorizon}.named("an hour"))
	d.addOnline(dpOnline{dp660(agentic.DualPath, "64K", 0).scaled(dpLargeOnline), 0.4, dpLargeHorizon}.named("an hour"))
}

// dpOnlineCase returns one of the two clusters of Figure 10.
func dpOnlineCase(s agentic.System, model int) dpCase {
	if model == 0 {
		return dp660(s, "64K", 0)
	}
	return dp27(s, 1, 1)
}

// named returns the run under another name.
func (o dpOnline) named(variant string) dpOnline {
	o.variant = variant
	return o
}

// dpBounds returns the clusters, as numbers of prefill and decode nodes, that the cells DP-4
// compare with the bound on the speedup.
func dpBounds() [][2]int { return [][2]int{{1, 1}, {2, 1}, {1, 2}, {2, 4}} }

// dpBoundCase returns the offline job on one of the clusters of dpBounds.
func dpBoundCase(system agentic.System, pd [2]int) dpCase {
	c := dp660(system, "64K", 1024)
	c.p, c.d = pd[0], pd[1]
	return c.storageOnly()
}

// dpFactors returns the factors of the append and generation lengths in Figure 9.
func dpFactors() []float64 { return []float64{1, 2, 4} }

// dpAssumptions returns one case for each detail that the paper does not state. In the case, the
// simulation makes the opposite of its usual assumption about this detail.
func dpAssumptions() []dpCase {
	base := dp660(agentic.DualPath, "64K", 1024)
	return []dpCase{
		base.assuming("the rest of the context's last block is computed again", func(o *agentic.Options) { o.RecomputeTail = true }),
		base.assuming("the quota of 300 ms is one layer's", func(o *agentic.Options) { o.Quota = 61 * 300 * time.Millisecond }),
		base.assuming("groups fetch every 100 ms", func(o *agentic.Options) { o.FetchEvery = 100 * time.Millisecond }),
		base.assuming("engines share buffers of 80 GB a node", func(o *agentic.Options) { o.BufferBytes = 80e9 }), // section A.4
		base.assuming("all KV in 8 bits, 43 KB a token", func(o *agentic.Options) { o.Model.KVBytes = 61 * 704 }),
	}
}
