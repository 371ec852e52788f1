package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/suite"
)

// Values of --engines.
const (
	emulatedEngines = "emulated"
	vllmEngines     = "vllm"
)

func newBenchCluster(w world, f *benchFlags) *cobra.Command {
	a := agentFlags{agents: 96, rounds: 8, divide: 8}
	rate, skip := 200, 16
	v := suite.VLLMOptions{PromptTokens: 1024}
	kind := emulatedEngines
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Clusters on this machine: what dual path gains, and what faults cost",
		Long: `Replay agents on clusters of processes in network namespaces (root), with real KV
bytes. The comparisons are: the storage NICs of prefill against those of both sides, for
1P1D, 2P1D, 1P2D and 2P4D; real loads against no loads where compute is the limit; the
balance of the storage NICs; one long request; the parts of the design, added one after
the other; and faults during a replay: kill -9 of each kind of node, slow NICs, pulled
cables, flipped bits. All comparisons take about 25 minutes; --only chooses some.

With --engines vllm the engines are vLLM's servers on the CPU, with a model of random
weights, and the storage NIC of prefill is compared with those of both sides for 1P1D and
1P2D. The defaults are then 24 agents and 20 Mbit/s, and --turns, --skip and --divide do
not apply. --python is as in bench engines. The comparisons named "loads" have one engine
with PenstockConnector, which loads whole prompts or layer by layer. They set the rate of
its storage NIC from the time of the computation, so --rate does not apply.`,
		Example: `  penstock bench cluster --only "storage is the limit"
  penstock bench cluster --only faults --contenders "none|flipped" --rate 100
  penstock bench cluster --engines vllm --python "$(.ci/python-venv engines/vllm.lock)/bin/python"
  penstock bench cluster --engines vllm --only loads --agents 6 --python "$(.ci/python-venv engines/vllm.lock)/bin/python"`,
		Args: args(cobra.NoArgs),
	}
	fl := cmd.Flags()
	fl.IntVar(&a.agents, "agents", a.agents, "number of concurrent agents")
	fl.IntVar(&a.rounds, "turns", a.rounds, "turns of each agent that are replayed")
	fl.IntVar(&skip, "skip", skip, "turns of each agent that are in storage at the start, in the comparisons that storage limits")
	fl.IntVar(&a.divide, "divide", a.divide, "divide all lengths in tokens by this")
	fl.IntVar(&rate, "rate", rate, "rate of a storage NIC, Mbit/s; a compute NIC has 8 times that")
	fl.StringVar(&kind, "engines", kind, "emulated or vllm")
	completeValues(cmd, "engines", emulatedEngines, vllmEngines)
	fl.StringArrayVar(&v.Pythons, "python", []string{"python3"}, "with --engines vllm: interpreter whose packages may be used; may be repeated")
	fl.IntVar(&v.PromptTokens, "prompt", v.PromptTokens, "with --engines vllm: tokens of the longest prompt, at most")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch kind {
		case emulatedEngines:
		case vllmEngines:
			for name, value := range map[string]string{"agents": "24", "rate": "20"} {
				if !fl.Changed(name) {
					_ = fl.Set(name, value) // it is a number
				}
			}
			v.Agents, v.RateBits, v.Traces = a.agents, uint64(max(rate, 0))*1e6, w.env("PENSTOCK_TRACES")
			if err := v.Validate(); err != nil {
				return usagef("%w", err)
			}
			return f.run(cmd, w, func(ctx context.Context, sw suite.World) (bench.Report, error) { return suite.ClusterVLLM(ctx, sw, v) })
		default:
			return usagef("--engines %q: want emulated or vllm", kind)
		}
		if a.agents < 1 || a.agents > agentsMax || a.rounds < 1 || a.divide < 1 || rate < 1 || skip < 0 {
			return usagef("--agents %d --turns %d --divide %d --rate %d --skip %d: --agents must be 1 to %d, --skip at least 0, and the others at least 1", a.agents, a.rounds, a.divide, rate, skip, agentsMax)
		}
		o := suite.ClusterOptions{Agents: a.agents, Rounds: a.rounds, Divide: a.divide, Skip: skip, RateBits: uint64(rate) * 1e6, Env: withoutSettings(w.environ)}
		return f.run(cmd, w, func(ctx context.Context, sw suite.World) (bench.Report, error) { return suite.Cluster(ctx, sw, o) })
	}
	return cmd
}
