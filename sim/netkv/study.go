package netkv

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/sim/workload"
)

// PaperWorkloads returns the three workloads of §VI-A on the conversation trace, whose inputs are
// longer than those of the paper's trace. The paper's tables determine the mean input, because the
// TTFT without the transfer is the duration of the prefill. For retrieval (rag) the trace's inputs
// are scaled by 0.455, to a mean of about 11 000 tokens. For chat they are not scaled; their mean
// is 3 300 tokens. The capacity of retrieval is half of the paper's goodput at 200 % load divided
// by its SLO attainment. The paper has no values for the other capacities; they are set to the same
// number of tokens per second.
func PaperWorkloads() []Workload {
	out := make([]Workload, 0, 3)
	for _, p := range workload.Profiles() {
		w := Workload{Profile: p, Scale: 1}
		switch p.Name {
		case "rag":
			w.Scale, w.Capacity = 0.455, 6.1
		case "chatbot":
			w.Capacity = 19.7
		default:
			w.Capacity, w.Weights = 2, netcost.Weights{Cache: 1.5, Load: 0.7}
		}
		out = append(out, w)
	}
	return out
}

// PaperWorkload returns the workload with that name.
func PaperWorkload(name string) (Workload, error) {
	for _, w := range PaperWorkloads() {
		if w.Name == name {
			return w, nil
		}
	}
	_, err := workload.ProfileNamed(name)
	return Workload{}, err
}

// Windows returns the times in the trace at which the windows of a study begin: the paper's time,
// 60 s, and five others, because one window has only 90 requests.
func Windows() []time.Duration {
	out := []time.Duration{60 * time.Second}
	for s := 600; s <= 3000; s += 600 {
		out = append(out, time.Duration(s)*time.Second)
	}
	return out
}

// Study is one cell of a results table: a scheduler under a workload, over several windows and
// seeds.
type Study struct {
	Workload Workload
	Policy   netcost.Policy
	// Load is the request rate divided by the workload's capacity.
	Load float64
	// Windows are the times in the trace at which the windows begin. Each window is run with the
	// seeds 1 to Seeds.
	Windows []time.Duration
	Seeds   int
	// Edit, if not nil, changes the options of the cluster. Input is the prompt length of every
	// request, in tokens; 0 keeps the lengths of the trace.
	Edit  func(*Options)
	Input int
}

// Summary has the measurements of a study, as means over its runs. P50, P95 and P99 are percentiles
// of the TTFT over the requests of all runs.
type Summary struct {
	TTFT, Transfer, TBT, P50, P95, P99 time.Duration
	// TTFTStd is the standard deviation, over the seeds, of the mean TTFT.
	TTFTStd time.Duration
	// ByWindow has the mean TTFT of each window.
	ByWindow           []time.Duration
	SLO, Goodput, Rate float64
	Tiers              [netcost.Tiers]float64
	Hit                float64
}

// Rest returns the TTFT without the transfer.
func (s *Summary) Rest() time.Duration { return s.TTFT - s.Transfer }

// Run simulates the study on a trace.
func (s Study) Run(ctx context.Context, trace []workload.Arrival) (*Summary, error) {
	if len(s.Windows) == 0 || s.Seeds < 1 {
		return nil, fmt.Errorf("netkv: a study of %d windows and %d seeds; at least one of each", len(s.Windows), s.Seeds)
	}
	sum := &Summary{ByWindow: make([]time.Duration, len(s.Windows))}
	bySeed := make([]float64, s.Seeds)
	var all []time.Duration
	n := float64(len(s.Windows) * s.Seeds)
	for w, from := range s.Windows {
		arrivals, err := s.Workload.Take(trace, from, s.Load)
		if err != nil {
			return nil, err
		}
		for i := range arrivals {
			if s.Input > 0 {
				arrivals[i].Input = s.Input
			}
		}
		for seed := range s.Seeds {
			r, err := Run(ctx, s.options(), arrivals, uint64(seed)+1)
			if err != nil {
				return nil, fmt.Errorf("%s at %v of capacity, window %v, seed %d: %w", s.Workload.Name, s.Load, from, seed+1, err)
			}
			sum.add(r, n)
			all = append(all, r.Times...)
			sum.ByWindow[w] += r.TTFT / time.Duration(s.Seeds)
			bySeed[seed] += r.TTFT.Seconds() / float64(len(s.Windows))
		}
	}
	slices.Sort(all)
	sum.P50, sum.P95, sum.P99 = percentile(all, 0.50), percentile(all, 0.95), percentile(all, 0.99)
	sum.TTFTStd = time.Duration(deviation(bySeed) * float64(time.Second))
	return sum, nil
}

// options returns the options of the study's cluster.
func (s Study) options() Options {
	o := Paper()
	o.Policy, o.Weights = s.Policy, s.Workload.Weights
	o.Share, o.SLO = s.Workload.Share, s.Workload.SLO
	_, o.Warmup = s.Workload.Requests()
	if s.Edit != nil {
		s.Edit(&o)
	}
	return o
}

// add adds the measurements of one run to the means over n runs. All runs have the same number of
// requests.
func (s *Summary) add(r *Result, n float64) {
	mean := func(d time.Duration) time.Duration { return time.Duration(float64(d) / n) }
	s.TTFT += mean(r.TTFT)
	s.Transfer += mean(r.Transfer)
	s.TBT += mean(r.TBT)
	s.SLO += r.SLO / n
	s.Goodput += r.Goodput / n
	s.Rate += r.Rate / n
	s.Hit += r.Hit / n
	for t := range s.Tiers {
		s.Tiers[t] += r.Tiers[t] / n
	}
}

// deviation returns the sample standard deviation; 0 for a single value.
func deviation(v []float64) float64 {
	if len(v) < 2 {
		return 0
	}
	mean, sum := 0.0, 0.0
	for _, x := range v {
		mean += x / float64(len(v))
	}
	for _, x := range v {
		sum += (x - mean) * (x - mean)
	}
	return math.Sqrt(sum / float64(len(v)-1))
}
