package scenario

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/sim/netkv"
	"github.com/penstock-kv/penstock/sim/workload"
)

// netkvFile is the YAML section "netkv": a run of package netkv. A value that is 0 or missing means
// the value of the NetKV paper.
type netkvFile struct {
	Workload string `yaml:"workload"`
	Policy   string `yaml:"policy"`
	// Load is the request rate divided by the workload's capacity.
	Load float64 `yaml:"load"`
	// Trace is the file with the requests. Windows are times in the trace; a run from each of them
	// takes the requests that follow.
	Trace   string          `yaml:"trace"`
	Windows []time.Duration `yaml:"windows"`
	// Input is the length of all prompts, in tokens; 0 keeps the lengths of the trace.
	Input            int           `yaml:"input"`
	Pods             int           `yaml:"pods"`
	Oversubscription float64       `yaml:"oversubscription"`
	NICs             int           `yaml:"nics"`
	Background       float64       `yaml:"background"`
	Swing            time.Duration `yaml:"swing"`
	Refresh          time.Duration `yaml:"refresh"`
	Share            float64       `yaml:"share"`
	Groups           int           `yaml:"groups"`
	MemoryGB         float64       `yaml:"memory_gb"`
	SLO              time.Duration `yaml:"slo"`
}

// podsMax is the maximum number of pods: 65,536 instances.
const podsMax = 1 << 13

func (n *netkvFile) runner(at source) (func(context.Context, uint64) (run, error), error) {
	const section = "netkv"
	w, err := netkv.PaperWorkload(n.Workload)
	if err != nil {
		return nil, at.refuse(section+".workload", err)
	}
	policy, err := netcost.ParsePolicy(n.Policy)
	if err != nil {
		return nil, at.refuse(section+".policy", err)
	}
	if !at.f.Has(section + ".load") {
		n.Load = 1
	}
	inf := math.Inf(1)
	if err := at.check(
		bound{section + ".load", n.Load, 1e-3, 1e3}, bound{section + ".input", float64(n.Input), 0, 1 << 24}, bound{section + ".background", n.Background, 0, 0.499},
		bound{section + ".share", n.Share, 0, 1}, bound{section + ".memory_gb", n.MemoryGB, 0, 1e9}, bound{section + ".swing", n.Swing.Seconds(), 0, inf},
		bound{section + ".refresh", n.Refresh.Seconds(), 0, inf}, bound{section + ".slo", n.SLO.Seconds(), 0, inf},
	); err != nil {
		return nil, err
	}
	o := n.options(at, w)
	o.Policy = policy
	if o.Pods%2 != 0 || o.Pods < 2 || o.Pods > podsMax {
		return nil, at.f.Errorf(section+".pods", "is %d; every second pod has prefill instances, so give an even number from 2 to %d", o.Pods, podsMax)
	}
	if err := at.check(
		bound{section + ".oversubscription", o.Oversubscription, 1, 1e3}, bound{section + ".nics", float64(o.NICs), 2, 1024},
		bound{section + ".groups", float64(o.Groups), 1, 1 << 20},
	); err != nil {
		return nil, err
	}
	if err := o.Validate(); err != nil {
		return nil, at.refuse(section, err)
	}
	arrivals, err := n.arrivals(at, w)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, seed uint64) (run, error) { return netkvRun(ctx, o, arrivals, seed) }, nil
}

// options returns the paper's options with the changes of the file.
func (n *netkvFile) options(at source, w netkv.Workload) netkv.Options {
	o := netkv.Paper()
	o.Weights, o.Share, o.SLO = w.Weights, w.Share, w.SLO
	_, o.Warmup = w.Requests()
	given := func(key string) bool { return at.f.Has("netkv." + key) }
	if given("pods") {
		o.Pods = n.Pods
	}
	if given("oversubscription") {
		o.Oversubscription = n.Oversubscription
	}
	if given("nics") {
		o.NICs = n.NICs
	}
	o.Background, o.Swing = n.Background, n.Swing
	if n.Refresh > 0 {
		o.Refresh = n.Refresh
	}
	if given("share") {
		o.Share = n.Share
	}
	if given("groups") {
		o.Groups = n.Groups
	}
	if n.MemoryGB > 0 {
		o.Memory = int64(n.MemoryGB * 1e9)
	}
	if n.SLO > 0 {
		o.SLO = n.SLO
	}
	return o
}

// arrivals returns the requests of each window.
func (n *netkvFile) arrivals(at source, w netkv.Workload) ([][]workload.Arrival, error) {
	path, err := at.trace("netkv.trace", n.Trace)
	if err != nil {
		return nil, err
	}
	all, err := workload.ReadArrivals(path)
	if err != nil {
		return nil, at.refuse("netkv.trace", err)
	}
	if len(n.Windows) == 0 {
		n.Windows = netkv.Windows()
	}
	var out [][]workload.Arrival
	for i, from := range n.Windows {
		key := "netkv.windows." + itoa(i)
		if from < 0 {
			return nil, at.f.Errorf(key, "is %v; windows begin at 0 or later", from)
		}
		taken, err := w.Take(all, from, n.Load)
		if err != nil {
			return nil, at.refuse(key, err)
		}
		if n.Input > 0 {
			for i := range taken {
				taken[i].Input = n.Input
			}
		}
		out = append(out, taken)
	}
	return out, nil
}

// netkvRun simulates every window and returns the means of its metrics over the windows.
func netkvRun(ctx context.Context, o netkv.Options, windows [][]workload.Arrival, seed uint64) (run, error) {
	var out run
	for i, arrivals := range windows {
		r, err := netkv.Run(ctx, o, arrivals, seed)
		if err != nil {
			return run{}, fmt.Errorf("window %d: %w", i, err)
		}
		metrics := []Metric{
			value("TTFT, mean", "s", r.TTFT.Seconds()), value("TTFT, P50", "s", r.P50.Seconds()), value("TTFT, P95", "s", r.P95.Seconds()), value("TTFT, P99", "s", r.P99.Seconds()),
			value("transfer, mean", "s", r.Transfer.Seconds()), value("TBT, mean", "s", r.TBT.Seconds()),
			value("within the objective", "share", r.SLO), value("goodput", "req/s", r.Goodput), value("arrivals", "req/s", r.Rate), value("input cached", "share", r.Hit),
		}
		for tier, share := range r.Tiers {
			metrics = append(metrics, value(fmt.Sprintf("transfers over tier %d", tier), "share", share))
		}
		for j := range metrics {
			metrics[j].Mean /= float64(len(windows))
			if out.metrics != nil {
				metrics[j].Mean += out.metrics[j].Mean
			}
		}
		out.metrics = metrics
		out.digest = out.digest*1099511628211 ^ r.Digest // FNV's prime: the order affects the digest
	}
	return out, nil
}
