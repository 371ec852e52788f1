package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/internal/cluster"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/sim/workload"
)

func newDemoCommand(w world) *cobra.Command {
	d := demoFlags{shape: "1P2D", set: "64K", agents: 24, rounds: 12, tokens: 8, modes: []string{modeBasic, modeDual, modeOracle}, rate: 200}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run a cluster on this machine and show what dual path gains",
		Long: `Run a whole inference cluster on this machine, each node a process in a network
namespace of its own with a storage NIC and a compute NIC of set rates, and replay
agents with the statistics of DualPath's Table 2 on it, with real KV bytes: first with
prefill's storage NICs alone, then with those of both sides, then without loads.
Every byte that reaches an engine's device memory is compared with what it must be.
It needs root for the namespaces.

The exit code is 1 if a byte is wrong or a turn fails.`,
		Example: `  penstock demo
  penstock demo --shape 2P4D --modes basic,dualpath --picture nics.png
  penstock demo node`,
		Args: args(cobra.NoArgs),
	}
	f := cmd.Flags()
	f.StringVar(&d.shape, "shape", d.shape, "prefill and decode nodes")
	f.StringVar(&d.set, "set", d.set, "agents: 32K, 48K or 64K of DualPath's Table 2")
	f.IntVar(&d.agents, "agents", d.agents, "how many agents work at a time")
	f.IntVar(&d.rounds, "rounds", d.rounds, "turns of each agent that are replayed")
	f.IntVar(&d.tokens, "tokens", d.tokens, "lengths in tokens are divided by this")
	f.IntVar(&d.rate, "rate", d.rate, "rate of a storage NIC in Mbit/s; a compute NIC has 8 times that")
	f.StringSliceVar(&d.modes, "modes", d.modes, "what is run, in this order")
	f.StringVar(&d.dir, "dir", "", "make the temporary directory of the storage node in this one (default: the system's)")
	cmd.AddCommand(newDemoNodeCommand(w), newClusterNodeCommand(w))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return d.run(cmd, w) }
	return cmd
}

// The modes of a demo.
const (
	modeBasic  = "basic"
	modeDual   = "dualpath"
	modeOracle = "oracle"
)

// demoFlags are what a demo can be told.
type demoFlags struct {
	shape, set             string
	agents, rounds, tokens int
	rate                   int
	modes                  []string
	dir                    string
}

func (d *demoFlags) run(cmd *cobra.Command, w world) error {
	set, err := workload.Table2Set(d.set)
	if err != nil {
		return usageError{err}
	}
	agents := workload.Scale{Rounds: d.rounds, Tokens: 1 / float64(d.tokens)}.Apply(set.Generate(d.agents, 1))
	spec := cluster.Spec{SNICBits: uint64(d.rate) * 1e6, Env: withoutSettings(w.environ)}
	if _, err := fmt.Sscanf(d.shape, "%dP%dD", &spec.Prefill, &spec.Decode); err != nil {
		return usageError{fmt.Errorf("--shape %q: it must be like 1P2D: %w", d.shape, err)}
	}
	for _, mode := range d.modes {
		s := spec
		switch mode {
		case modeBasic:
			s.Policy = dualpath.PrefillOnly
		case modeOracle:
			s.Oracle = true
		}
		if s.Dir, err = os.MkdirTemp(d.dir, "penstock-demo-"); err != nil {
			return err
		}
		r, err := cluster.Run(cmd.Context(), s, cluster.Workload{Agents: cluster.Sessions(mode, agents), Parallel: d.agents})
		if err2 := os.RemoveAll(s.Dir); err == nil {
			err = err2
		}
		if err != nil {
			return err
		}
		fmt.Fprintf(w.out, "%s %s: %v, %d turns, %d failed %v, hit %d of %d tokens, P %d D %d, replans %d, balance %.3f, TTFT %v %v, checked %s wrong %d caught %d, cpu %v\n", r.Shape, mode, r.Completion.Round(time.Millisecond), r.Turns, r.Failed, r.Failures,
			r.HitTokens, r.PromptTokens, r.PrefillTokens, r.DecodeTokens, r.Replans, r.SNICBalance, r.FirstTokenP50, r.FirstTokenP99, size(int64(r.CheckedBytes)), r.WrongBlocks, r.CaughtBlocks, r.CPU)
		for i, n := range r.NICs {
			fmt.Fprintf(w.out, "  %v rx %s tx %s\n", n, size(int64(r.ReceivedBytes[i])), size(int64(r.SentBytes[i])))
		}
	}
	return nil
}

// newClusterNodeCommand is what a demo's engines and gateway run.
func newClusterNodeCommand(w world) *cobra.Command {
	return &cobra.Command{
		Use: cluster.NodeArgs[1], Short: "An engine or a gateway of a demo", Hidden: true, Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cluster.Node(cmd.Context(), w.in, w.out, newLogger(w.err, config.Log{Level: "info", Format: "json"}))
		},
	}
}

var _ = slices.Contains[[]string]
var _ = strings.Join
