package scenario

import (
	"context"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/sim/agentic"
	"github.com/penstock-kv/penstock/sim/workload"
)

// agenticFile is the YAML section "agentic": a run of package agentic.
type agenticFile struct {
	System string `yaml:"system"`
	// Model is 660b or 27b: the models of the DualPath paper.
	Model        string `yaml:"model"`
	PrefillNodes int    `yaml:"prefill_nodes"`
	DecodeNodes  int    `yaml:"decode_nodes"`
	// PrefillGroup and DecodeGroup are the numbers of nodes per group; 0 means all.
	PrefillGroup int `yaml:"prefill_group"`
	DecodeGroup  int `yaml:"decode_group"`
	GPUs         int `yaml:"gpus"`
	// SNIC and CNIC are in GB/s.
	SNIC float64 `yaml:"snic_gbytes"`
	CNIC float64 `yaml:"cnic_gbytes"`
	// Buffer is the DRAM of a node for the buffers of its engines, in GB; 0 means unlimited.
	Buffer float64 `yaml:"buffer_gbytes"`
	// Set is the name of a set of trajectories in Table 2 of the DualPath paper, Trace a file of
	// trajectories. Exactly one of the two is given.
	Set   string `yaml:"set"`
	Trace string `yaml:"trace"`
	// Agents is the number of agents of an offline job; all of them begin at time 0.
	// AgentsPerSecond is the arrival rate of an online run of the duration Horizon.
	Agents          int           `yaml:"agents"`
	AgentsPerSecond float64       `yaml:"agents_per_second"`
	Horizon         time.Duration `yaml:"horizon"`
	Rounds          int           `yaml:"rounds"`
	Tokens          float64       `yaml:"tokens"`
	Quota           time.Duration `yaml:"quota"`
}

// enginesMax is the maximum number of engines of a cluster. It is limited because Load creates the
// cluster to check its options.
const enginesMax = 1 << 16

// setSize is the number of trajectories in a set of the paper.
const setSize = 500

func (a *agenticFile) runner(at source) (func(context.Context, uint64) (run, error), error) {
	const section = "agentic"
	system, err := agentic.ParseSystem(a.System)
	if err != nil {
		return nil, at.refuse(section+".system", err)
	}
	o := agentic.Options{System: system, PrefillNodes: a.PrefillNodes, DecodeNodes: a.DecodeNodes, PrefillGroup: a.PrefillGroup, DecodeGroup: a.DecodeGroup,
		GPUs: a.GPUs, SNIC: a.SNIC * 1e9, CNIC: a.CNIC * 1e9, BufferBytes: int64(a.Buffer * 1e9), Quota: a.Quota}
	switch strings.ToLower(a.Model) {
	case "660b":
		o.Model = agentic.DeepSeek660B()
	case "27b":
		o.Model = agentic.DeepSeek27B()
	default:
		return nil, at.f.Errorf(section+".model", "is %q; it is 660b or 27b", a.Model)
	}
	if err := at.check(
		bound{section + ".prefill_nodes", float64(a.PrefillNodes), 1, 1 << 14}, bound{section + ".decode_nodes", float64(a.DecodeNodes), 1, 1 << 14},
		bound{section + ".gpus", float64(a.GPUs), 0, 1 << 10}, bound{section + ".snic_gbytes", a.SNIC, 0, 1e6}, bound{section + ".cnic_gbytes", a.CNIC, 0, 1e6},
		bound{section + ".buffer_gbytes", a.Buffer, 0, 1e6},
		bound{section + ".agents", float64(a.Agents), 0, 1 << 20}, bound{section + ".agents_per_second", a.AgentsPerSecond, 0, 1e6},
		bound{section + ".rounds", float64(a.Rounds), 0, 1 << 16}, bound{section + ".tokens", a.Tokens, 0, 1e3}, bound{section + ".quota", a.Quota.Seconds(), 0, 1e6},
		bound{section + ".horizon", a.Horizon.Seconds(), 0, 1e7},
	); err != nil {
		return nil, err
	}
	if n := (a.PrefillNodes + a.DecodeNodes) * max(a.GPUs, 8); n > enginesMax {
		return nil, at.f.Errorf(section+".prefill_nodes", "with the decode nodes are %d engines; at most %d are simulated", n, enginesMax)
	}
	if a.PrefillGroup < 0 || a.PrefillGroup > 0 && a.PrefillNodes%a.PrefillGroup != 0 {
		return nil, at.f.Errorf(section+".prefill_group", "is %d; groups of %d nodes must come out even", a.PrefillGroup, a.PrefillNodes)
	}
	if a.DecodeGroup < 0 || a.DecodeGroup > 0 && a.DecodeNodes%a.DecodeGroup != 0 {
		return nil, at.f.Errorf(section+".decode_group", "is %d; groups of %d nodes must come out even", a.DecodeGroup, a.DecodeNodes)
	}
	if (a.Agents > 0) == (a.AgentsPerSecond > 0) {
		return nil, at.f.Errorf(section, "%d agents at once and %v a second; give one of them", a.Agents, a.AgentsPerSecond)
	}
	if a.Horizon > 0 && a.Agents > 0 {
		return nil, at.f.Errorf(section+".horizon", "applies to agents_per_second only; an offline job ends with its last agent")
	}
	set, longest, err := a.set(at)
	if err != nil {
		return nil, err
	}
	if err := a.possible(o, set(1), longest); err != nil {
		return nil, at.refuse(section, err)
	}
	return func(ctx context.Context, seed uint64) (run, error) {
		return a.simulate(ctx, o, set(seed), longest, seed)
	}, nil
}

// possible checks the options by creating the cluster with one agent.
func (a *agenticFile) possible(o agentic.Options, set []workload.Trajectory, longest int) error {
	o.Agents = workload.Agents(set, min(len(set), 1), longest, 1)
	_, err := agentic.New(o)
	return err
}

// set returns a function that returns the trajectories for a seed. It also returns the length of
// the longest context, in tokens.
func (a *agenticFile) set(at source) (func(seed uint64) []workload.Trajectory, int, error) {
	scale := workload.Scale{Rounds: a.Rounds, Tokens: a.Tokens}
	switch {
	case a.Set != "" && a.Trace != "":
		return nil, 0, at.f.Errorf("agentic.trace", "set %s is given too; keep one of them", a.Set)
	case a.Trace != "":
		path, err := at.trace("agentic.trace", a.Trace)
		if err != nil {
			return nil, 0, err
		}
		read, err := workload.ReadTrajectories(path)
		if err != nil {
			return nil, 0, at.refuse("agentic.trace", err)
		}
		read = scale.Apply(read)
		longest := 0
		for i := range read {
			longest = max(longest, read[i].Total())
		}
		return func(uint64) []workload.Trajectory { return read }, longest, nil
	}
	spec, err := workload.Table2Set(a.Set)
	if err != nil {
		return nil, 0, at.refuse("agentic.set", err)
	}
	longest := spec.MaxLen
	if a.Tokens > 0 {
		longest = int(math.Ceil(float64(longest) * a.Tokens))
	}
	return func(seed uint64) []workload.Trajectory { return scale.Apply(spec.Generate(setSize, seed)) }, longest, nil
}

func (a *agenticFile) simulate(ctx context.Context, o agentic.Options, set []workload.Trajectory, longest int, seed uint64) (run, error) {
	o.Seed = seed
	if a.AgentsPerSecond > 0 {
		horizon := a.Horizon
		if horizon == 0 {
			horizon = agentic.DefaultHorizon
		}
		r, err := agentic.RunOnline(ctx, o, agentic.Online{Set: set, MaxLen: longest, APS: a.AgentsPerSecond, Horizon: horizon})
		if err != nil {
			return run{}, err
		}
		return run{metrics: agenticMetrics(r, r.Steady(horizon)), digest: r.Digest}, nil
	}
	o.Agents = workload.Agents(set, a.Agents, longest, seed)
	c, err := agentic.New(o)
	if err != nil {
		return run{}, err
	}
	r, err := c.Run(ctx)
	if err != nil {
		return run{}, err
	}
	return run{metrics: agenticMetrics(r, r.Latency), digest: r.Digest}, nil
}

// The balance of the storage NICs is the traffic of the busiest NIC divided by the mean. It is
// measured in windows of a second in the first half of the job in which the NICs together read at
// more than 30 % of their capacity.
const (
	balanceWindow = time.Second
	balanceFloor  = 0.3
)

// agenticMetrics returns the metrics of a run. Latencies cover the rounds of w; the other metrics
// cover the whole run.
func agenticMetrics(r *agentic.Result, w agentic.Window) []Metric {
	return []Metric{
		value("job completion time", "s", r.JCT.Seconds()), value("agents done", "", float64(r.Agents)), value("rounds done", "", float64(r.Rounds)),
		value("TTFT, mean", "s", w.MeanTTFT()), value("TTFT, P50", "s", w.TTFTs.Quantile(0.5)), value("TTFT, P99", "s", w.TTFTs.Quantile(0.99)),
		value("TTFT of 4 s and TPOT of 50 ms kept", "share", w.Attainment()), value("TTST, mean", "s", w.MeanTTST()), value("TPOT, mean", "s", w.MeanTPOT()),
		value("waited for engines, mean", "s", w.Queued/float64(w.Rounds)), value("waited for storage, mean", "s", w.Reading/float64(w.Rounds)), value("prefill, mean", "s", w.Prefill/float64(w.Rounds)),
		value("storage NICs used", "share", r.StorageShare()),
		value("storage NICs, max/avg", "", r.NICBalance(balanceWindow, r.JCT/2, balanceFloor, len(r.Read))),
		value("attention, max/avg in the first 5 %", "", r.AttentionBalance(r.JCT/20)),
	}
}

func itoa(i int) string { return strconv.Itoa(i) }
