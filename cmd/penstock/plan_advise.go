package main

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/dualpath/advise"
	"github.com/penstock-kv/penstock/dualpath/prfaas"
	"github.com/penstock-kv/penstock/internal/yamlfile"
	"github.com/penstock-kv/penstock/sim/agentic"
	"github.com/penstock-kv/penstock/sim/workload"
)

// advisorYAML is an example file.
const advisorYAML = `# A cluster for penstock plan advise. Bandwidths are gigabits a second.
prefill_nodes: 2
decode_nodes: 4
gpus: 8                 # engines of a node, each with a compute NIC
storage_gbps: 400       # a node's storage NIC
compute_gbps: 400       # a compute NIC
memory_gbps: 4000       # a node's memory
reads: both             # or prefill: only prefill nodes read from storage
agents: 1024            # agents at once; the trace's are repeated
max_tokens: 65536       # longer trajectories are cut
profile: ds-660b        # or ds-27b; what model gives takes its place
# model:
#   kv_bytes_per_token: 78080
#   linear_gflop_per_token: 74            # outside of attention
#   attention_gflop_per_token: 34.8       # whatever the context
#   attention_mflop_per_context_token: 1.0
#   tflops: 163                           # of a GPU, achieved in prefill
#   step_ms: 18
#   step_per_request_ms: 0.7
#   decode_hbm_tokens: 600000
#   prefill_hbm_tokens: 260000
# prfaas: …             # another datacenter: what penstock plan prfaas --print-config prints
`

// advisorConfig is the operator's description of the cluster.
type advisorConfig struct {
	PrefillNodes int     `yaml:"prefill_nodes"`
	DecodeNodes  int     `yaml:"decode_nodes"`
	GPUs         int     `yaml:"gpus"`
	StorageGbps  float64 `yaml:"storage_gbps"`
	ComputeGbps  float64 `yaml:"compute_gbps"`
	MemoryGbps   float64 `yaml:"memory_gbps"`
	Reads        string  `yaml:"reads"`
	Agents       int     `yaml:"agents"`
	MaxTokens    int     `yaml:"max_tokens"`
	Profile      string  `yaml:"profile"`
	Model        struct {
		KVBytes          int64   `yaml:"kv_bytes_per_token"`
		Linear           float64 `yaml:"linear_gflop_per_token"`
		AttentionFixed   float64 `yaml:"attention_gflop_per_token"`
		AttentionContext float64 `yaml:"attention_mflop_per_context_token"`
		TFLOPS           float64 `yaml:"tflops"`
		StepMs           float64 `yaml:"step_ms"`
		StepPerMs        float64 `yaml:"step_per_request_ms"`
		DecodeHBM        int     `yaml:"decode_hbm_tokens"`
		PrefillHBM       int     `yaml:"prefill_hbm_tokens"`
	} `yaml:"model"`
	PrfaaS prfaas.Config `yaml:"prfaas"`
}

// advice is the output of `penstock plan advise`.
type advice struct {
	Trace      string   `json:"trace"`
	Agents     int      `json:"agents"`
	Rounds     int      `json:"rounds"`
	HitPercent float64  `json:"hit_percent"`
	Predicted  outcome  `json:"predicted"`
	Simulated  *outcome `json:"simulated"`
	// ErrorPercent is the deviation of the predicted time from the simulated time, in percent.
	ErrorPercent *float64      `json:"error_percent"`
	Binds        string        `json:"binds"`
	Uses         []resourceUse `json:"uses"`
	Safe         safeRegion    `json:"safe_region"`
	Divisions    []division    `json:"divisions"`
	Best         division      `json:"best"`
	PrfaaS       *prfaasPlan   `json:"prfaas,omitempty"`
}

// outcome is the result of a job.
type outcome struct {
	Seconds      float64 `json:"seconds"`
	Throughput   float64 `json:"rounds_per_second"`
	PrefillReads float64 `json:"prefill_side_reads"`
	TTFT         float64 `json:"ttft_mean_seconds"`
	TPOT         float64 `json:"tpot_mean_seconds"`
}

type resourceUse struct {
	Resource string  `json:"resource"`
	Used     float64 `json:"used"`
}

// safeRegion is the range of P/D (prefill nodes per decode node) in which the storage NICs are the
// first bottleneck.
type safeRegion struct {
	Low   float64 `json:"low"`
	High  float64 `json:"high"`
	Here  float64 `json:"here"`
	Safe  bool    `json:"safe"`
	Next  string  `json:"next_to_bind"`
	Share float64 `json:"reachable_storage_share"`
}

type division struct {
	Prefill int     `json:"prefill_nodes"`
	Decode  int     `json:"decode_nodes"`
	Seconds float64 `json:"seconds"`
	Binds   string  `json:"binds"`
	Safe    bool    `json:"safe"`
}

func newPlanAdvise(w world) *cobra.Command {
	var tracePath, clusterPath string
	var sample, predictOnly bool
	var seed uint64
	cmd := &cobra.Command{
		Use:   "advise --trace FILE --cluster FILE.yaml",
		Short: "Predict the time of a cluster for a trace's agents, its bottleneck and its best division",
		Long: `Predict a job: the agents of a trace (the dualpath or the agentic format) begin at once on
the cluster in FILE.yaml. The command prints the duration of the job, the used share of
each resource (the first is the bottleneck), the share of the cached tokens that the
prefill side reads, the range of prefill over decode nodes in which compute NICs and
memory do not limit the storage NICs, and the result of every other division of the nodes.

The prediction is a fluid model (package dualpath/advise). The command then simulates the
job request by request with the production planner and prints the error of the
prediction; --predict omits the simulation. With a section prfaas in FILE.yaml it also
prints the length from which prompts are prefilled in the other datacenter.`,
		Example: `  penstock plan advise --print-config > cluster.yaml
  penstock plan advise --trace dualpath_agentic_64k.jsonl.gz --cluster cluster.yaml`,
		Args: args(cobra.NoArgs),
	}
	cmd.Flags().StringVar(&tracePath, "trace", "", "file with the agents, plain or gzip")
	cmd.Flags().StringVar(&clusterPath, "cluster", "", "file with the cluster (YAML; - reads standard input)")
	cmd.Flags().BoolVar(&sample, "print-config", false, "print an example: DualPath's 2P4D")
	cmd.Flags().BoolVar(&predictOnly, "predict", false, "predict only, do not simulate")
	cmd.Flags().Uint64Var(&seed, "seed", 1, "seed of the agents beyond the trace's, and of the simulation")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if sample {
			_, err := fmt.Fprint(cmd.OutOrStdout(), advisorYAML)
			return err
		}
		if tracePath == "" || clusterPath == "" {
			return usagef("give a trace with --trace and a cluster with --cluster; --print-config prints an example")
		}
		a, err := readAdvisor(cmd, clusterPath)
		if err != nil {
			return err
		}
		if err := a.load(tracePath, seed); err != nil {
			return err
		}
		out, err := a.advise()
		if err != nil {
			return err
		}
		if !predictOnly {
			if err := a.simulate(cmd.Context(), w, seed, &out); err != nil {
				return err
			}
		}
		return outputOf(cmd).emit(out, func(t *table) { printAdvice(t, out) })
	}
	return cmd
}

// advisor has the inputs of one run: the cluster, the model and the agents.
type advisor struct {
	c      advisorConfig
	model  agentic.Model
	prfaas *prfaas.System
	trace  string
	agents []workload.Trajectory
	rounds int
	hit    float64
}

// readAdvisor reads the cluster's file.
func readAdvisor(cmd *cobra.Command, name string) (*advisor, error) {
	raw, err := readNamed(cmd.InOrStdin(), name)
	if err != nil {
		return nil, err
	}
	if name == "-" {
		name = "standard input"
	}
	f, err := yamlfile.Parse(name, raw)
	if err != nil {
		return nil, err
	}
	a := &advisor{c: advisorConfig{GPUs: 8, Reads: "both", MaxTokens: 65536}}
	if err := f.Decode(&a.c); err != nil {
		return nil, err
	}
	if err := a.c.check(f); err != nil {
		return nil, err
	}
	if a.model, err = a.c.model(f); err != nil {
		return nil, err
	}
	if f.Has("prfaas") {
		s, err := a.c.PrfaaS.System(f, "prfaas.", prfaasFiles())
		if err != nil {
			return nil, err
		}
		a.prfaas = &s
	}
	return a, nil
}

// check returns an error for impossible values.
func (c *advisorConfig) check(f *yamlfile.File) error {
	for _, v := range []struct {
		key   string
		value float64
		what  string
	}{
		{"prefill_nodes", float64(c.PrefillNodes), "nodes"}, {"decode_nodes", float64(c.DecodeNodes), "nodes"}, {"gpus", float64(c.GPUs), "GPUs of a node"},
		{"storage_gbps", c.StorageGbps, "bandwidth of a node's storage NIC"}, {"compute_gbps", c.ComputeGbps, "bandwidth of a GPU's compute NIC"},
		{"memory_gbps", c.MemoryGbps, "bandwidth of a node's memory"}, {"agents", float64(c.Agents), "agents at once"}, {"max_tokens", float64(c.MaxTokens), "tokens"},
	} {
		if !(v.value > 0) {
			return f.Errorf(v.key, "is %v; give the %s, above 0", v.value, v.what)
		}
	}
	if nodes := c.PrefillNodes + c.DecodeNodes; nodes > 1024 {
		return f.Errorf("prefill_nodes", "with decode_nodes makes %d nodes; at most 1024", nodes)
	}
	if c.Agents > 1<<17 {
		return f.Errorf("agents", "is %d; at most %d", c.Agents, 1<<17)
	}
	if c.Reads != "both" && c.Reads != "prefill" {
		return f.Errorf("reads", "is %q; it must be both or prefill", c.Reads)
	}
	return nil
}

// model returns the model that the file's profile names, with the values that the file overrides.
func (c *advisorConfig) model(f *yamlfile.File) (agentic.Model, error) {
	var m agentic.Model
	switch c.Profile {
	case "ds-660b":
		m = agentic.DeepSeek660B()
	case "ds-27b":
		m = agentic.DeepSeek27B()
	case "":
		m.Name = "model"
	default:
		return m, f.Errorf("profile", "is %q; there are ds-660b and ds-27b; leave it out and give all of model", c.Profile)
	}
	o := &c.Model
	given := func(key string, set func()) {
		if f.Has("model." + key) {
			set()
		}
	}
	ms := func(v float64) time.Duration { return time.Duration(v * float64(time.Millisecond)) }
	given("kv_bytes_per_token", func() { m.KVBytes = o.KVBytes })
	given("linear_gflop_per_token", func() { m.Linear = o.Linear * 1e9 })
	given("attention_gflop_per_token", func() { m.AttentionFixed = o.AttentionFixed * 1e9 })
	given("attention_mflop_per_context_token", func() { m.AttentionPerContext = o.AttentionContext * 1e6 })
	given("tflops", func() { m.FLOPS = o.TFLOPS * 1e12 })
	given("step_ms", func() { m.StepBase = ms(o.StepMs) })
	given("step_per_request_ms", func() { m.StepPer = ms(o.StepPerMs) })
	given("decode_hbm_tokens", func() { m.DecodeHBM = o.DecodeHBM })
	given("prefill_hbm_tokens", func() { m.PrefillHBM = o.PrefillHBM })
	if m.PrefillHBM == 0 {
		m.PrefillHBM = m.DecodeHBM
	}
	if err := m.Validate(); err != nil {
		return m, f.Errorf("model", "%s; give a profile, or all of model", strings.TrimPrefix(err.Error(), "agentic: "))
	}
	return m, nil
}

// load reads the agents' trajectories, cut at the maximum context length.
func (a *advisor) load(path string, seed uint64) error {
	set, err := workload.ReadTrajectories(path)
	if err != nil {
		return err
	}
	var some []workload.Trajectory
	for _, t := range (workload.Scale{MaxLen: a.c.MaxTokens}).Apply(set) {
		if len(t.Rounds) > 0 {
			some = append(some, t)
		}
	}
	if len(some) == 0 {
		return fmt.Errorf("%s: every first prompt is longer than max_tokens, %d", path, a.c.MaxTokens)
	}
	a.trace, a.agents = path, workload.Agents(some, a.c.Agents, a.c.MaxTokens, seed)
	return nil
}

// advisorBlock is the number of tokens of a cached block.
const advisorBlock = 64

// demands converts the agents' rounds for package advise.
func (a *advisor) demands() [][]advise.Round {
	out := make([][]advise.Round, len(a.agents))
	hits, prompts := 0.0, 0.0
	for i := range a.agents {
		t := &a.agents[i]
		t.Turns(func(j int, u workload.Turn) bool {
			linear := a.model.Linear * float64(u.Append)
			r := advise.Round{
				Hit: float64(u.Hit(advisorBlock)), Append: float64(u.Append), Gen: float64(t.Rounds[j].Gen),
				Linear: linear, Attention: a.model.Work(u.Context, u.Append) - linear,
			}
			hits, prompts = hits+r.Hit, prompts+float64(u.Prompt())
			out[i] = append(out[i], r)
			return true
		})
		a.rounds += len(t.Rounds)
	}
	a.hit = hits / prompts
	return out
}

// predicted converts cluster and model for package advise. Quota and step overhead have the
// defaults of the simulation (section A.4 of the DualPath paper).
func (a *advisor) predicted() (advise.Cluster, advise.Model) {
	gbit := 1e9 / 8.0
	return advise.Cluster{
			PrefillNodes: a.c.PrefillNodes, DecodeNodes: a.c.DecodeNodes, GPUs: a.c.GPUs,
			Storage: a.c.StorageGbps * gbit, Compute: a.c.ComputeGbps * gbit, DRAM: a.c.MemoryGbps * gbit, PrefillOnly: a.c.Reads == "prefill",
		}, advise.Model{
			KVBytes: float64(a.model.KVBytes), FLOPS: a.model.FLOPS, Step: a.model.StepBase.Seconds(), StepPerRequest: a.model.StepPer.Seconds(),
			DecodeHBM: float64(a.model.DecodeHBM), Quota: 0.300, Overhead: 0.030,
		}
}

// advise computes the prediction.
func (a *advisor) advise() (advice, error) {
	demands := a.demands()
	cluster, model := a.predicted()
	p, err := advise.Predict(cluster, model, demands)
	if err != nil {
		return advice{}, err
	}
	all, err := advise.Divide(cluster, model, demands)
	if err != nil {
		return advice{}, err
	}
	an := p.Analysis
	ratio := float64(a.c.PrefillNodes) / float64(a.c.DecodeNodes)
	out := advice{
		Trace: a.trace, Agents: len(a.agents), Rounds: a.rounds, HitPercent: 100 * a.hit,
		Predicted: outcome{p.Seconds, p.Throughput, p.PrefillReads, p.TTFT, p.TPOT},
		Binds:     p.Uses[0].Name,
		Safe:      safeRegion{an.Safe.Low, an.Safe.High, ratio, an.Safe.Holds(ratio), an.First.Name, an.Saturation},
	}
	for _, u := range p.Uses {
		out.Uses = append(out.Uses, resourceUse{u.Name, u.Used})
	}
	for _, d := range all {
		out.Divisions = append(out.Divisions, division{d.PrefillNodes, d.DecodeNodes, d.Prediction.Seconds, d.Prediction.Uses[0].Name, d.Safe})
	}
	out.Best = out.Divisions[advise.Best(all)]
	if a.prfaas != nil {
		best, err := prfaas.Optimize(*a.prfaas, a.c.PrfaaS.Steps)
		if err != nil {
			return advice{}, err
		}
		plan := prfaasPlanOf("best", *a.prfaas, best)
		out.PrfaaS = &plan
	}
	return out, nil
}

// simulate runs the job with the production planner.
func (a *advisor) simulate(ctx context.Context, w world, seed uint64, out *advice) error {
	cluster, _ := a.predicted()
	bar := newProgress(w, "simulate", unitRequests)
	defer bar.finish()
	system := agentic.DualPathSplit
	if cluster.PrefillOnly {
		system = agentic.Layerwise
	}
	c, err := agentic.New(agentic.Options{
		System: system, Model: a.model, PrefillNodes: cluster.PrefillNodes, DecodeNodes: cluster.DecodeNodes, GPUs: cluster.GPUs,
		SNIC: cluster.Storage, CNIC: cluster.Compute, Agents: a.agents, BlockTokens: advisorBlock, Seed: seed,
		Progress: func(rounds int, now time.Duration) {
			bar.note(int64(rounds), int64(a.rounds), fmt.Sprintf("rounds, %v of the job", now.Round(time.Second)))
		},
	})
	if err != nil {
		return err
	}
	r, err := c.Run(ctx)
	if err != nil {
		return err
	}
	var prefill, all int64
	for i, n := range r.Read {
		if all += n; i < cluster.PrefillNodes {
			prefill += n
		}
	}
	s := outcome{Seconds: r.JCT.Seconds(), Throughput: float64(r.Rounds) / r.JCT.Seconds(), TTFT: r.Latency.MeanTTFT(), TPOT: r.Latency.MeanTPOT()}
	if all > 0 {
		s.PrefillReads = float64(prefill) / float64(all)
	}
	if math.IsNaN(s.TPOT) {
		s.TPOT = 0 // no round generates a second token
	}
	e := 100 * (out.Predicted.Seconds/s.Seconds - 1)
	out.Simulated, out.ErrorPercent = &s, &e
	return nil
}

func printAdvice(t *table, a advice) {
	t.row("", "predicted", "simulated")
	pair := func(name, format string, get func(*outcome) float64) {
		cells := []any{name, fmt.Sprintf(format, get(&a.Predicted)), "-"}
		if a.Simulated != nil {
			cells[2] = fmt.Sprintf(format, get(a.Simulated))
		}
		t.row(cells...)
	}
	pair("job of "+count(a.Agents)+" agents, "+count(a.Rounds)+" rounds", "%.0f s", func(o *outcome) float64 { return o.Seconds })
	pair("throughput", "%.1f rounds/s", func(o *outcome) float64 { return o.Throughput })
	pair("TTFT, mean", "%.2f s", func(o *outcome) float64 { return o.TTFT })
	pair("TPOT, mean", "%.4f s", func(o *outcome) float64 { return o.TPOT })
	pair("read by the prefill side", "%.0f %%", func(o *outcome) float64 { return 100 * o.PrefillReads })
	if a.ErrorPercent != nil {
		t.row("prediction's error", fmt.Sprintf("%+.1f %%", *a.ErrorPercent))
	}
	t.row("cached", fmt.Sprintf("%.1f %% of the prompts", a.HitPercent))
	for i, u := range a.Uses {
		name := "used"
		if i == 0 {
			name = "binds"
		}
		t.row(name, fmt.Sprintf("%s, %.0f %%", u.Resource, 100*u.Used))
	}
	safe := "inside"
	if !a.Safe.Safe {
		safe = "OUTSIDE"
	}
	t.row("safe prefill/decode", fmt.Sprintf("%.2f to %.2f; here %.2f, %s", a.Safe.Low, a.Safe.High, a.Safe.Here, safe))
	t.row("beside storage, first", fmt.Sprintf("%s; %.0f %% of the storage bandwidth can be reached", a.Safe.Next, 100*a.Safe.Share))
	t.row("best division", fmt.Sprintf("%dP%dD, %.0f s", a.Best.Prefill, a.Best.Decode, a.Best.Seconds))
	for _, d := range a.Divisions {
		note := ""
		if !d.Safe {
			note = ", outside the safe range"
		}
		t.row(fmt.Sprintf("%dP%dD", d.Prefill, d.Decode), fmt.Sprintf("%.0f s", d.Seconds), d.Binds+note)
	}
	if p := a.PrfaaS; p != nil {
		threshold := "-"
		if p.Threshold != nil {
			threshold = count(int64(math.Round(*p.Threshold))) + " tokens"
		}
		t.row("routing threshold", threshold, fmt.Sprintf("%.2f requests/s, %s binds", p.Throughput, p.Binds))
	}
}
