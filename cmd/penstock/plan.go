package main

import (
	"fmt"
	"math"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/dualpath"
)

func newPlanCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Answer what a cluster of prefill and decode nodes can do",
	}
	return noun(cmd, newPlanAnalyze())
}

// planAnalysis is what `penstock plan analyze` prints.
type planAnalysis struct {
	Ratio      float64        `json:"ratio"`
	SafeLow    float64        `json:"safe_low"`
	SafeHigh   float64        `json:"safe_high"`
	Safe       bool           `json:"safe"`
	First      string         `json:"binds_first"`
	Saturation float64        `json:"storage_saturation"`
	Bound      float64        `json:"bound_over_prefill_only"`
	Resources  []planResource `json:"resources"`
}

type planResource struct {
	Name        string  `json:"name"`
	Load        float64 `json:"load_gb_per_second"`
	Limit       float64 `json:"limit_gb_per_second"`
	Utilization float64 `json:"utilization"`
}

func newPlanAnalyze() *cobra.Command {
	c := dualpath.Cluster{}
	cmd := &cobra.Command{
		Use:   "analyze --prefill P --decode D",
		Short: "The range of P/D in which nothing binds before the storage NICs, and what binds first",
		Long: `With every storage NIC of a cluster of P prefill and D decode nodes saturated, on both
sides, how much does each compute NIC and each node's memory carry? The ratio P/D is
safe while none of them carries more than it can; then dual path reads with (P+D)/P
times the storage bandwidth of prefill alone. Outside, what binds first sets the share
of the storage bandwidth that can be reached (DualPath, section 4.2).

Load is assumed to be balanced over the nodes and over the GPUs of a node; tokens that
missed the cache are left out.`,
		Example: `  penstock plan analyze --prefill 2 --decode 4
  penstock plan analyze --prefill 7 --decode 2 --gpus 8 --cnic 50 --storage-nics 1 --dram 400`,
		Args: args(cobra.NoArgs),
	}
	f := cmd.Flags()
	f.IntVar(&c.PrefillNodes, "prefill", 0, "prefill nodes, P")
	f.IntVar(&c.DecodeNodes, "decode", 0, "decode nodes, D")
	f.IntVar(&c.GPUs, "gpus", 8, "GPUs of a node, each with one compute NIC")
	f.Float64Var(&c.CNIC, "cnic", 50, "bandwidth of one compute NIC, GB/s")
	f.Float64Var(&c.SNICs, "storage-nics", 1, "storage bandwidth of a node in multiples of a compute NIC's")
	f.Float64Var(&c.DRAM, "dram", 500, "memory bandwidth of a node, GB/s")
	_ = cmd.MarkFlagRequired("prefill") // they were defined above
	_ = cmd.MarkFlagRequired("decode")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		a, err := dualpath.Analyze(c)
		if err != nil {
			return usageError{err}
		}
		r := planAnalysisOf(a)
		return outputOf(cmd).emit(r, func(t *table) { r.print(t) })
	}
	return cmd
}

// planAnalysisOf makes an analysis printable. JSON has no infinity: a range
// without a solution is [-1, -1].
func planAnalysisOf(a dualpath.Analysis) planAnalysis {
	ratio := float64(a.Cluster.PrefillNodes) / float64(a.Cluster.DecodeNodes)
	r := planAnalysis{
		Ratio: ratio, SafeLow: a.Safe.Low, SafeHigh: a.Safe.High, Safe: a.Safe.Holds(ratio),
		First: a.First.Name, Saturation: a.Saturation, Bound: a.Bound,
	}
	if math.IsInf(a.Safe.Low, 1) || a.Safe.Low > a.Safe.High {
		r.SafeLow, r.SafeHigh = -1, -1
	}
	for _, x := range a.Resources {
		r.Resources = append(r.Resources, planResource{x.Name, x.Load, x.Limit, x.Utilization()})
	}
	return r
}

// print shows the analysis to a person.
func (r planAnalysis) print(t *table) {
	t.row("resource", "load GB/s", "limit GB/s", "used")
	for _, x := range r.Resources {
		t.row(x.Name, fmt.Sprintf("%.1f", x.Load), fmt.Sprintf("%.1f", x.Limit), fmt.Sprintf("%.0f %%", 100*x.Utilization))
	}
	t.row()
	if r.SafeLow < 0 {
		t.row("safe P/D", "none: the compute NICs cannot carry the storage bandwidth at any ratio")
	} else {
		t.row("safe P/D", fmt.Sprintf("%.3f to %.3f", r.SafeLow, r.SafeHigh))
	}
	verdict := "safe"
	if !r.Safe {
		verdict = "not safe"
	}
	t.row("this P/D", fmt.Sprintf("%.3f, %s", r.Ratio, verdict))
	t.row("binds first", r.First)
	t.row("storage reached", fmt.Sprintf("%.1f %% of all storage NICs", 100*r.Saturation))
	t.row("against prefill only", fmt.Sprintf("at most %.2f times the storage bandwidth", r.Bound))
}
