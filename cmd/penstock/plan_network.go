package main

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/netoracle"
)

// networkView is the output of `penstock plan network`.
type networkView struct {
	Sources  []networkSource `json:"sources"`
	Tiers    []networkTier   `json:"tiers"`
	Machines int             `json:"machines"`
	Pods     int             `json:"pods"`
	Racks    int             `json:"racks"`
	Transfer *transferView   `json:"transfer,omitempty"`
}

type networkSource struct {
	Name  string `json:"name"`
	Error string `json:"error,omitempty"`
}

type networkTier struct {
	Tier       int     `json:"tier"`
	Name       string  `json:"name"`
	Gbps       float64 `json:"gbps"`
	LatencyUs  float64 `json:"latency_us"`
	Congestion float64 `json:"congestion"`
}

// transferView is the cost of one transfer if Penstock has no other transfer on the network.
type transferView struct {
	From    string  `json:"from"`
	To      string  `json:"to"`
	Tier    int     `json:"tier"`
	Tokens  int     `json:"tokens"`
	Seconds float64 `json:"seconds"`
}

func newPlanNetwork(w world) *cobra.Command {
	cfg := config.DefaultPlanner()
	var file, from, to string
	var tokens int
	cmd := &cobra.Command{
		Use:   "network --network-file FILE",
		Short: "Poll the sources of the network's cost, and show the resulting network",
		Long: `Poll each source of the planner's section network once (docs/network.md) and print the
result: bandwidth, latency and congestion of each tier, and the number of machines with a
place. With --from and --to it also prints the tier between two machines, and the transfer
time of a prompt's KV. The exit code is 1 if a source fails: run the command before the
planner gets its configuration.`,
		Example: `  penstock plan network --config planner.yaml
  penstock plan network --network-file network.yaml --network-bytes-per-token 327680 --from node-a --to node-b --tokens 16384`,
		Args: args(cobra.NoArgs),
	}
	f := cmd.Flags()
	f.StringVar(&file, "config", "", "the planner's configuration file (YAML)")
	f.StringVar(&from, "from", "", "machine that holds the KV")
	f.StringVar(&to, "to", "", "machine that receives the KV")
	f.IntVar(&tokens, "tokens", 8192, "length of the prompt")
	addConfigFlags(f, networkKeys(&cfg))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg := config.DefaultPlanner()
		if err := config.LoadInto(&cfg, file, w.environ); err != nil {
			return err
		}
		if err := setFromFlags(networkKeys(&cfg), cmd.Flags()); err != nil {
			return err
		}
		if !cfg.Network.On() {
			return usagef("there is no source of the network; give one with --network-file or --config")
		}
		if err := cfg.Validate(); err != nil {
			return err
		}
		if (from == "") != (to == "") {
			return usagef("give both --from and --to")
		}
		return viewNetwork(cmd, cfg.Network, from, to, tokens)
	}
	return cmd
}

// networkKeys returns the keys of the section network.
func networkKeys(c *config.Planner) []config.Key {
	return slices.DeleteFunc(c.Keys(), func(k config.Key) bool { return !strings.HasPrefix(k.Path, "network.") })
}

// viewNetwork polls the configured sources of network data once and prints the result.
func viewNetwork(cmd *cobra.Command, c config.Network, from, to string, tokens int) error {
	sources, err := networkSources(c)
	if err != nil {
		return fmt.Errorf("config: network: %w: %w", err, config.ErrConfig)
	}
	oracle, err := netoracle.New(netoracle.Options{Sources: sources, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	state := oracle.State()
	oracle.Close()
	v, failed := networkViewOf(state)
	if from != "" && state.Known {
		if v.Transfer, err = transferOf(state, c, from, to, tokens); err != nil {
			return err
		}
	}
	if err := outputOf(cmd).emit(v, func(t *table) { printNetwork(t, v) }); err != nil {
		return err
	}
	if failed {
		return errReported
	}
	return nil
}

// networkViewOf converts a state of the network for output, and reports whether a source failed.
func networkViewOf(s netoracle.State) (v networkView, failed bool) {
	for _, src := range s.Sources {
		shown := networkSource{Name: src.Name}
		if src.Err != nil {
			shown.Error, failed = src.Err.Error(), true
		}
		v.Sources = append(v.Sources, shown)
	}
	for t := range netcost.Tier(netcost.Tiers) {
		if s.Known {
			v.Tiers = append(v.Tiers, networkTier{int(t), t.String(), s.Fabric.Bandwidth[t] / netcost.Gbit, float64(s.Fabric.Latency[t]) / float64(time.Microsecond), s.Congestion[t]})
		}
	}
	pods, racks := map[string]bool{}, map[[2]string]bool{}
	for _, p := range s.Places {
		pods[p.Pod], racks[[2]string{p.Pod, p.Rack}] = true, true
	}
	v.Machines, v.Pods, v.Racks = len(s.Places), len(pods), len(racks)
	return v, failed
}

// transferOf returns the cost of one transfer as package netcost computes it.
func transferOf(s netoracle.State, c config.Network, from, to string, tokens int) (*transferView, error) {
	for _, name := range []string{from, to} {
		if _, ok := s.Places[name]; !ok {
			return nil, fmt.Errorf("machine %q has no place in any source; it would be far from all others", name)
		}
	}
	o, err := netcost.NewOracle(netcost.Model{MaxBatch: c.MaxBatch}, netcost.Snapshot[string]{Fabric: s.Fabric, Congestion: s.Congestion, Places: s.Places})
	if err != nil {
		return nil, err
	}
	r := netcost.Request[string]{From: from, Tokens: tokens, Bytes: int64(tokens) * int64(c.BytesPerToken)}
	if err := r.Validate(); err != nil {
		return nil, usagef("--tokens %d: it must be at least 1", tokens)
	}
	cost := o.Cost(&r, &netcost.Candidate[string]{ID: to})
	return &transferView{from, to, int(cost.Tier), tokens, cost.Transfer}, nil
}

func printNetwork(t *table, v networkView) {
	for _, s := range v.Sources {
		state := "answers"
		if s.Error != "" {
			state = "FAILS: " + s.Error
		}
		t.row("source "+s.Name, state)
	}
	t.row("machines", fmt.Sprintf("%s in %s pods, %s racks", count(v.Machines), count(v.Pods), count(v.Racks)))
	for _, tier := range v.Tiers {
		t.row(fmt.Sprintf("tier %d, %s", tier.Tier, tier.Name), fmt.Sprintf("%.4g Gbit/s, %.4g us, %.0f %% used by others", tier.Gbps, tier.LatencyUs, 100*tier.Congestion))
	}
	if x := v.Transfer; x != nil {
		t.row(x.From+" to "+x.To, fmt.Sprintf("tier %d; KV of %s tokens: %.3g s", x.Tier, count(x.Tokens), x.Seconds))
	}
}
