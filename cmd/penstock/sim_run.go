package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/lab/reproduce"
	"github.com/penstock-kv/penstock/sim/scenario"
)

func newSimList() *cobra.Command {
	var source string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "The scenarios that are built in",
		Long: `Print the built-in scenarios, or with --print the file of one of them, as a start for a
scenario of your own.`,
		Example: `  penstock sim list
  penstock sim list --print prfaas-case-study > mine.yaml`,
		Args: args(cobra.NoArgs),
	}
	cmd.Flags().StringVar(&source, "print", "", "print the file of this scenario")
	completeValues(cmd, "print", scenario.Names()...)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if source != "" {
			raw, err := scenario.Source(source)
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(raw)
			return err
		}
		heads, err := scenario.Heads()
		if err != nil {
			return err
		}
		type head struct {
			Name      string `json:"name"`
			Simulator string `json:"simulator"`
			About     string `json:"about"`
		}
		var out []head
		for _, h := range heads {
			out = append(out, head{h.Name, h.Simulator, h.About})
		}
		return outputOf(cmd).emit(out, func(t *table) {
			t.row("scenario", "simulator", "about")
			for _, h := range out {
				t.row(h.Name, h.Simulator, h.About)
			}
		})
	}
	return cmd
}

func completeScenarios(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return scenario.Names(), cobra.ShellCompDirectiveDefault
}

// scenarioFlags are the flags of the commands that run scenarios.
type scenarioFlags struct {
	seeds   int
	workers int
}

func (f *scenarioFlags) add(cmd *cobra.Command) {
	cmd.Flags().IntVar(&f.seeds, "seeds", 0, "number of runs, each with its own seed; 0: the scenario's number")
	cmd.Flags().IntVar(&f.workers, "workers", runtime.GOMAXPROCS(0), "concurrent runs")
	cmd.Flag("workers").DefValue = "one a core"
	cmd.ValidArgsFunction = completeScenarios
}

func (f *scenarioFlags) check() error {
	if f.seeds < 0 || f.workers < 1 {
		return usagef("--seeds %d, --workers %d: seeds are 0 or more, workers at least 1", f.seeds, f.workers)
	}
	return nil
}

// run loads a scenario and runs it with a progress bar.
func (f *scenarioFlags) run(ctx context.Context, w world, name string) (*scenario.Result, error) {
	s, err := scenario.Find(name, scenario.Options{Traces: traceDirs(w.env("PENSTOCK_TRACES"))})
	if err != nil {
		return nil, err
	}
	if f.seeds > 0 {
		s.SetSeeds(f.seeds)
	}
	bar := newProgress(w, s.Name, unitRuns)
	defer bar.finish()
	bar.set(0, int64(len(s.Seeds)))
	return s.Run(ctx, scenario.RunOptions{Workers: f.workers, Progress: func(done, total int) { bar.set(int64(done), int64(total)) }})
}

func newSimRun(w world) *cobra.Command {
	var f scenarioFlags
	cmd := &cobra.Command{
		Use:   "run SCENARIO",
		Short: "Run a scenario in virtual time",
		Long: `Run a scenario, built in (penstock sim list) or a YAML file, once for each of its seeds, and
print the measurements: means and standard deviations over the seeds. The scenario uses
the planner, the router and the controllers of production. One seed gives the same
numbers on any machine; with --format json the digest of each run is printed too.

Traces are looked for as they are named, beside the file, then in $PENSTOCK_TRACES or
shared/traces in or beside this directory.`,
		Example: `  penstock sim run prfaas-case-study
  penstock sim run mine.yaml --seeds 1 --format json`,
		Args: args(cobra.ExactArgs(1)),
	}
	f.add(cmd)
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		if err := f.check(); err != nil {
			return err
		}
		r, err := f.run(cmd.Context(), w, names[0])
		if err != nil {
			return err
		}
		return outputOf(cmd).emit(r, func(t *table) {
			t.row(fmt.Sprintf("%s, %d runs", r.Scenario, len(r.Seeds)), "mean", "± std", "")
			for _, m := range r.Metrics {
				t.row(m.Name, reproduce.Number(m.Mean), spread(m), m.Unit)
			}
		})
	}
	return cmd
}

// spread returns a standard deviation as text, or "" if there is none.
func spread(m scenario.Metric) string {
	if m.Std == 0 {
		return ""
	}
	return "± " + reproduce.Number(m.Std)
}

// comparison is one metric of two scenarios.
type comparison struct {
	Name  string   `json:"name"`
	Unit  string   `json:"unit,omitempty"`
	A     float64  `json:"a"`
	AStd  float64  `json:"a_std"`
	B     float64  `json:"b"`
	BStd  float64  `json:"b_std"`
	Ratio *float64 `json:"b_over_a"`
}

func newSimCompare(w world) *cobra.Command {
	var f scenarioFlags
	cmd := &cobra.Command{
		Use:   "compare A B",
		Short: "Two scenarios side by side",
		Long: `Run two scenarios of one simulator and print their metrics side by side, with B over A.
Each of them is a scenario as for penstock sim run, or a file ".json" that
penstock sim run --format json printed, which is not run again.`,
		Example: `  penstock sim compare netkv-rag-cache-load netkv-rag
  penstock sim compare before.json mine.yaml`,
		Args: args(cobra.ExactArgs(2)),
	}
	f.add(cmd)
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		if err := f.check(); err != nil {
			return err
		}
		var results [2]*scenario.Result
		for i, name := range names {
			var err error
			if strings.HasSuffix(name, ".json") {
				results[i], err = readResult(name)
			} else {
				results[i], err = f.run(cmd.Context(), w, name)
			}
			if err != nil {
				return err
			}
		}
		a, b := results[0], results[1]
		rows, err := compare(a, b)
		if err != nil {
			return err
		}
		return outputOf(cmd).emit(rows, func(t *table) {
			t.row("", a.Scenario, "", b.Scenario, "", "B over A", "")
			for _, c := range rows {
				ratio := ""
				if c.Ratio != nil {
					ratio = fmt.Sprintf("%.3f", *c.Ratio)
				}
				t.row(c.Name, reproduce.Number(c.A), spread(scenario.Metric{Std: c.AStd}), reproduce.Number(c.B), spread(scenario.Metric{Std: c.BStd}), ratio, c.Unit)
			}
		})
	}
	return cmd
}

// resultMax bounds a saved result, in bytes.
const resultMax = 64 << 20

func readResult(name string) (*scenario.Result, error) {
	in, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	var r scenario.Result
	if err := json.NewDecoder(io.LimitReader(in, resultMax)).Decode(&r); err != nil {
		return nil, fmt.Errorf("%s: %w; it must be the output of penstock sim run --format json", name, err)
	}
	if r.Scenario == "" || len(r.Metrics) == 0 {
		return nil, fmt.Errorf("%s holds no result; it must be the output of penstock sim run --format json", name)
	}
	return &r, nil
}

// compare returns the metrics that both results have, in the order of a.
func compare(a, b *scenario.Result) ([]comparison, error) {
	if a.Simulator != b.Simulator {
		return nil, fmt.Errorf("%s is of the simulator %s and %s of %s, so they have different metrics", a.Scenario, a.Simulator, b.Scenario, b.Simulator)
	}
	other := make(map[string]scenario.Metric)
	for _, m := range b.Metrics {
		other[m.Name] = m
	}
	var out []comparison
	for _, m := range a.Metrics {
		o, ok := other[m.Name]
		if !ok {
			continue
		}
		c := comparison{Name: m.Name, Unit: m.Unit, A: m.Mean, AStd: m.Std, B: o.Mean, BStd: o.Std}
		if ratio := o.Mean / m.Mean; !math.IsNaN(ratio) && !math.IsInf(ratio, 0) {
			c.Ratio = &ratio
		}
		out = append(out, c)
	}
	return out, nil
}
