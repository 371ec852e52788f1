package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/internal/chart"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/sim/workload"
)

func newDemoCommand(w world) *cobra.Command {
	d := demoFlags{shape: "1P2D", agents: agentFlags{set: "64K", agents: 32, rounds: 18, divide: 8, seed: 1}, modes: demoModes, rate: 200, picture: "penstock-demo.png"}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run a cluster on this machine and show what dual path gains",
		Long: `Run a whole inference cluster on this machine and replay agents on it, with real KV
bytes over real TCP: a storage node, a planner, prefill and decode engines and a
gateway, each a process in a network namespace of its own, with a storage NIC and a
compute NIC whose rates are set. The agents have the statistics of DualPath's Table 2,
with divided lengths; compute takes no time, so that storage is the limit.

  basic     prefill's storage NICs read all cached KV
  dualpath  the storage NICs of both sides do
  oracle    next to no loads and transfers: blocks of one byte a token and layer, NICs
            without a limit

Every byte that reaches an engine's device memory is compared with the expected byte.
Network namespaces need root; without root, NICs are rate-limited connections on
loopback, and the result reports that. At the end only the picture is left.

The exit code is 1 if a byte is wrong or a turn fails.`,
		Example: `  penstock demo
  penstock demo --shape 2P4D --modes basic,dualpath --picture ""
  penstock demo --format json
  penstock demo node`,
		Args: args(cobra.NoArgs),
	}
	f := cmd.Flags()
	f.StringVar(&d.shape, "shape", d.shape, "prefill and decode nodes, as 2P4D")
	d.agents.add(cmd)
	f.IntVar(&d.rate, "rate", d.rate, "rate of a storage NIC, Mbit/s; a compute NIC has 8 times that")
	f.StringSliceVar(&d.modes, "modes", d.modes, "modes to run, in this order")
	completeList(cmd, "modes", demoModes...)
	f.StringVar(&d.dir, "dir", "", "directory for the storage node's temporary directory (default: the system's)")
	f.StringVar(&d.picture, "picture", d.picture, "PNG file for a picture of the storage NICs' rates; empty: no picture")
	annotate(cmd, "picture", emptyAllowed)
	f.BoolVar(&d.loopback, "loopback", false, "use rate-limited connections on loopback even if namespaces are available")
	cmd.AddCommand(newDemoNodeCommand(w), newClusterNodeCommand(w))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		r, err := d.run(cmd, w)
		if r != nil && len(r.Runs) > 0 {
			err = errors.Join(err, outputOf(cmd).emit(r, r.print))
		}
		if err == nil && r.failed() {
			err = errReported
		}
		return err
	}
	return cmd
}

// The modes of a demo.
const (
	modeBasic  = "basic"
	modeDual   = "dualpath"
	modeOracle = "oracle"
)

var demoModes = []string{modeBasic, modeDual, modeOracle}

// demoFlags are the flags of a demo.
type demoFlags struct {
	shape        string
	agents       agentFlags
	rate         int
	modes        []string
	dir, picture string
	loopback     bool
}

// clusterReport is the output of a demo.
type clusterReport struct {
	Shape   string `json:"shape"`
	Agents  string `json:"agents"`
	Network string `json:"network"`
	// Bound is the maximum speedup of dual path if storage is the bottleneck: (P+D)/P, for P
	// prefill and D decode nodes.
	Bound   float64      `json:"bound"`
	Runs    []clusterRun `json:"runs"`
	Picture string       `json:"picture,omitempty"`
}

// clusterRun is the result of the agents' replay on a cluster in one mode, such as basic or
// dualpath.
type clusterRun struct {
	Mode string `json:"mode"`
	// Speedup is relative to the mode basic, in which only prefill nodes read KV from storage. It
	// is 0 if basic was not run.
	Speedup float64 `json:"speedup,omitempty"`
	*cluster.Result
}

// failed reports whether a run had wrong blocks or failed turns.
func (r *clusterReport) failed() bool {
	return slices.ContainsFunc(r.Runs, func(c clusterRun) bool { return c.WrongBlocks > 0 || c.Failed > 0 })
}

func (d *demoFlags) run(cmd *cobra.Command, w world) (*clusterReport, error) {
	spec, err := parseShape(d.shape)
	if err != nil {
		return nil, err
	}
	for _, m := range d.modes {
		if !slices.Contains(demoModes, m) {
			return nil, usageError{fmt.Errorf("--modes %q: a mode is one of %s", m, strings.Join(demoModes, ", "))}
		}
	}
	if d.rate < 1 {
		return nil, usageError{fmt.Errorf("--rate %d: it must be at least 1 Mbit/s", d.rate)}
	}
	set, err := d.agents.trajectories()
	if err != nil {
		return nil, err
	}
	spec.SNICBits, spec.Env, spec.Loopback = uint64(d.rate)*1e6, withoutSettings(w.environ), d.loopback
	// EnsureDefaults derives defaults from the rate, so it comes after the rate has been set.
	spec.EnsureDefaults()
	if err := spec.Validate(); err != nil {
		return nil, usageError{err}
	}
	if err := haveSpace(d.dir, demoBytes(spec, set), "fewer --agents or --rounds, or a larger --divide"); err != nil {
		return nil, err
	}
	r := &clusterReport{Shape: spec.Shape(), Agents: d.agents.String(), Bound: float64(spec.Prefill+spec.Decode) / float64(spec.Prefill)}
	if r.Network, _, err = spec.Network(); err != nil {
		return nil, err
	}
	for _, mode := range d.modes {
		run, err := runMode(cmd, w, spec, mode, d.dir, cluster.Workload{Agents: cluster.Sessions(mode, set), Parallel: d.agents.agents})
		if err != nil {
			return r, fmt.Errorf("%s: %w", mode, err)
		}
		r.Runs = append(r.Runs, *run)
	}
	for i := range r.Runs {
		if base := r.of(modeBasic); base != nil {
			r.Runs[i].Speedup = base.Completion.Seconds() / r.Runs[i].Completion.Seconds()
		}
	}
	if d.picture != "" {
		if err := r.draw(d.picture); err != nil {
			return r, err
		}
	}
	return r, nil
}

// demoBytes returns the maximum disk space, in bytes, of the run of one mode: the KV of every token
// of every agent, once, and the space that the store allocates in advance.
func demoBytes(spec cluster.Spec, set []workload.Trajectory) int64 {
	var tokens int64
	for _, t := range set {
		tokens += int64(t.Total())
	}
	return min(tokens*int64(spec.Layers*spec.TokenBytes), spec.CapacityBytes) + 2*demoSpare
}

// runMode runs one mode in a new directory below dir and shows the rates of the NICs during the
// run.
func runMode(cmd *cobra.Command, w world, spec cluster.Spec, mode, dir string, load cluster.Workload) (_ *clusterRun, err error) {
	switch mode {
	case modeBasic:
		spec.Policy = dualpath.PrefillOnly
	case modeOracle:
		spec.Oracle = true
	}
	if spec.Dir, err = os.MkdirTemp(dir, "penstock-demo-"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(spec.Dir)) }()
	turns := 0
	for _, a := range load.Agents {
		turns += len(a.Turns)
	}
	view := newNICView(w, spec, mode, turns)
	load.Watch = view.show
	res, err := cluster.Run(cmd.Context(), spec, load)
	view.finish()
	if err != nil {
		return nil, err
	}
	return &clusterRun{Mode: mode, Result: res}, nil
}

// shapes matches shapes like 2P4D.
var shapes = regexp.MustCompile(`^([0-9]{1,3})[pP]([0-9]{1,3})[dD]$`)

// parseShape returns the cluster of a shape.
func parseShape(s string) (spec cluster.Spec, err error) {
	m := shapes.FindStringSubmatch(s)
	if m == nil {
		return spec, usageError{fmt.Errorf("--shape %q: it must be like 2P4D: two prefill and four decode nodes", s)}
	}
	spec.Prefill, _ = strconv.Atoi(m[1]) // the expression matches only digits
	spec.Decode, _ = strconv.Atoi(m[2])
	if spec.Prefill == 0 || spec.Decode == 0 {
		return spec, usageError{fmt.Errorf("--shape %q: at least one node of each kind is needed", s)}
	}
	return spec, nil
}

// agentFlags are the flags that select the replayed agents.
type agentFlags struct {
	set                    string
	agents, rounds, divide int
	seed                   uint64
}

// add adds the flags to a command.
func (a *agentFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&a.set, "set", a.set, "agents to replay: 32K, 48K or 64K of DualPath's Table 2")
	var sets []string
	for _, s := range workload.Table2() {
		sets = append(sets, s.Name)
	}
	completeValues(cmd, "set", sets...)
	f.IntVar(&a.agents, "agents", a.agents, "number of concurrent agents")
	f.IntVar(&a.rounds, "rounds", a.rounds, "turns of each agent that are replayed, from its first")
	f.IntVar(&a.divide, "divide", a.divide, "divide all lengths in tokens by this")
	f.Uint64Var(&a.seed, "seed", a.seed, "seed of the agents")
}

func (a *agentFlags) String() string {
	return fmt.Sprintf("%d agents of DualPath's %s set, the first %d turns, lengths divided by %d (seed %d)", a.agents, a.set, a.rounds, a.divide, a.seed)
}

// agentsMax is the maximum number of agents. It is limited because one gateway replays all agents.
const agentsMax = 4096

// trajectories generates the agents' trajectories.
func (a *agentFlags) trajectories() ([]workload.Trajectory, error) {
	set, err := workload.Table2Set(a.set)
	if err != nil {
		return nil, usageError{fmt.Errorf("--set: %w", err)}
	}
	if a.agents < 1 || a.agents > agentsMax || a.rounds < 1 || a.divide < 1 {
		return nil, usageError{fmt.Errorf("--agents %d --rounds %d --divide %d: --agents must be 1 to %d, and the others at least 1", a.agents, a.rounds, a.divide, agentsMax)}
	}
	return workload.Scale{Rounds: a.rounds, Tokens: 1 / float64(a.divide)}.Apply(set.Generate(a.agents, a.seed)), nil
}

// of returns the run of a mode, or nil.
func (r *clusterReport) of(mode string) *clusterRun {
	for i := range r.Runs {
		if r.Runs[i].Mode == mode {
			return &r.Runs[i]
		}
	}
	return nil
}

func (r *clusterReport) print(t *table) {
	t.pair("cluster", fmt.Sprintf("%s, %s", r.Shape, r.Network))
	t.pair("agents", r.Agents)
	t.row()
	t.row("mode", "completion", "", "x basic", "turns", "failed", "hit", "prefill side", "decode side", "SNIC max/avg", "first token p50", "p99", "checked", "wrong")
	longest := time.Duration(0)
	for _, c := range r.Runs {
		longest = max(longest, c.Completion)
	}
	for _, c := range r.Runs {
		speedup, balance := "-", "-"
		if c.Speedup > 0 {
			speedup = fmt.Sprintf("%.2f", c.Speedup)
		}
		if c.SNICBalance > 0 && c.Mode != modeOracle {
			balance = fmt.Sprintf("%.2f", c.SNICBalance)
		}
		read := max(c.PrefillTokens+c.DecodeTokens, 1)
		t.row(c.Mode, c.Completion.Round(10*time.Millisecond), bar(c.Completion.Seconds()/longest.Seconds(), 24), speedup, count(c.Turns), count(c.Failed), percent(c.HitTokens, c.PromptTokens),
			percent(c.PrefillTokens, read), percent(c.DecodeTokens, read), balance, c.FirstTokenP50.Round(time.Millisecond), c.FirstTokenP99.Round(time.Millisecond), size(int64(c.CheckedBytes)), count(c.WrongBlocks))
	}
	t.row("", "bound (P+D)/P", "", fmt.Sprintf("%.2f", r.Bound))
	t.row()
	head := []any{"received by"}
	for _, c := range r.Runs {
		head = append(head, c.Mode)
	}
	t.row(head...)
	for i, n := range r.Runs[0].NICs {
		line := []any{n.String()}
		for _, c := range r.Runs {
			line = append(line, size(int64(c.ReceivedBytes[i])))
		}
		t.row(line...)
	}
	for _, c := range r.Runs {
		for _, f := range c.Failures {
			t.pair("failed in "+c.Mode, f)
		}
	}
	if r.Picture != "" {
		t.row()
		t.pair("picture", r.Picture)
	}
}

// percent returns a share as text.
func percent(part, whole int64) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100*float64(part)/float64(whole))
}

// bar returns a share in [0, 1] as a bar of width characters.
func bar(share float64, width int) string {
	eighths := int(min(max(share, 0), 1)*float64(8*width) + 0.5)
	s := strings.Repeat("█", eighths/8)
	if rest := eighths % 8; rest > 0 {
		s += string([]rune("▏▎▍▌▋▊▉")[rest-1])
	}
	return s
}

// draw writes the picture: the rates at which the storage NICs of prefill and of decode nodes read,
// over time.
func (r *clusterReport) draw(file string) error {
	c := chart.Chart{Title: r.Shape + ": what storage NICs read", XLabel: "seconds", YLabel: "MB/s", Kind: chart.Lines}
	for _, run := range r.Runs {
		if run.Mode == modeOracle {
			continue
		}
		for _, side := range []struct{ name, prefix string }{{"prefill", "P"}, {"decode", "D"}} {
			s := chart.Series{Name: run.Mode + ", " + side.name + " side"}
			var last cluster.Sample
			samples := run.Samples
			if len(samples) == 0 { // the run ended before the first sample
				samples = []cluster.Sample{{At: run.Completion, Received: run.ReceivedBytes}}
			}
			for _, sample := range samples {
				sum := 0.0
				for i, n := range run.NICs {
					if n.Storage && strings.HasPrefix(n.Node, side.prefix) {
						sum += float64(sample.Received[i])
						if len(last.Received) > 0 {
							sum -= float64(last.Received[i])
						}
					}
				}
				rate := sum / 1e6 / (sample.At - last.At).Seconds()
				if len(s.X) == 0 { // the first rate holds from the start to the first sample
					s.X, s.Y = append(s.X, 0), append(s.Y, rate)
				}
				s.X, s.Y = append(s.X, sample.At.Seconds()), append(s.Y, rate)
				last = sample
			}
			c.Series = append(c.Series, s)
		}
	}
	if len(c.Series) == 0 { // only the oracle ran
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	if err := errors.Join(c.Write(f, chart.PNG), f.Close()); err != nil {
		return err
	}
	r.Picture = file
	return nil
}

// newClusterNodeCommand returns the command that a demo's engines and gateway run.
func newClusterNodeCommand(w world) *cobra.Command {
	return &cobra.Command{
		Use: cluster.NodeArgs[1], Short: "An engine or a gateway of a demo", Hidden: true, Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cluster.Node(cmd.Context(), w.in, w.out, newLogger(w.err, "json", slog.LevelInfo))
		},
	}
}
