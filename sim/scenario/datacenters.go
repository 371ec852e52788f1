package scenario

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/penstock-kv/penstock/dualpath/prfaas"
	"github.com/penstock-kv/penstock/sim/datacenters"
	"github.com/penstock-kv/penstock/sim/workload"
)

// datacentersFile is the YAML section "datacenters": a run of package datacenters.
type datacentersFile struct {
	System prfaas.Config `yaml:"system"`
	// Plan is the initial plan; nil means the best plan for the system.
	Plan *struct {
		Threshold float64 `yaml:"threshold"`
		Prefill   int     `yaml:"prefill"`
	} `yaml:"plan"`
	Rate        float64       `yaml:"rate"`
	Concurrency int           `yaml:"concurrency"`
	Duration    time.Duration `yaml:"duration"`
	Warmup      time.Duration `yaml:"warmup"`
	Layers      int           `yaml:"layers"`
	Transfers   int           `yaml:"transfers_max"`
	QueueMax    int           `yaml:"queue_max"`
	Turns       float64       `yaml:"turns"`
	Think       time.Duration `yaml:"think"`
	BlockTokens int           `yaml:"block_tokens"`
	Abundant    bool          `yaml:"abundant"`
	SwitchTime  time.Duration `yaml:"switch_time"`
	SLO         time.Duration `yaml:"slo"`
	ShortTerm   *struct {
		High      float64       `yaml:"high"`
		Low       float64       `yaml:"low"`
		QueueHigh int           `yaml:"queue_high"`
		Backoff   float64       `yaml:"backoff"`
		Hold      time.Duration `yaml:"hold"`
		Observe   time.Duration `yaml:"observe"`
	} `yaml:"short_term"`
	LongTerm *struct {
		Period   time.Duration `yaml:"period"`
		MinGain  float64       `yaml:"min_gain"`
		MaxMoves int           `yaml:"max_moves"`
	} `yaml:"long_term"`
	Changes []struct {
		At           time.Duration `yaml:"at"`
		EgressFactor float64       `yaml:"egress_factor"`
		Rate         float64       `yaml:"rate"`
		Mu           float64       `yaml:"mu"`
		Sigma        float64       `yaml:"sigma"`
	} `yaml:"changes"`
}

func (d *datacentersFile) runner(at source) (func(context.Context, uint64) (run, error), error) {
	const section = "datacenters"
	sys, err := d.System.System(at.f, section+".system.", prfaas.Files{
		Profile: func(name string) ([]byte, error) {
			if !filepath.IsAbs(name) {
				name = filepath.Join(at.dir, name)
			}
			return os.ReadFile(name)
		},
		Prompts: func(name string) ([]float64, error) { return at.prompts(section+".system.lengths.trace", name) },
	})
	if err != nil {
		return nil, err
	}
	inf := math.Inf(1)
	if err := at.check(
		bound{section + ".rate", d.Rate, 0, 1e6}, bound{section + ".concurrency", float64(d.Concurrency), 0, 1 << 20},
		bound{section + ".duration", d.Duration.Seconds(), 1e-3, 1e8}, bound{section + ".warmup", d.Warmup.Seconds(), 0, inf},
		bound{section + ".layers", float64(d.Layers), 0, 1 << 12}, bound{section + ".transfers_max", float64(d.Transfers), 0, 1 << 20},
		bound{section + ".queue_max", float64(d.QueueMax), 0, 1 << 24}, bound{section + ".turns", d.Turns, 0, 1e6},
		bound{section + ".think", d.Think.Seconds(), 0, inf}, bound{section + ".block_tokens", float64(d.BlockTokens), 0, 1 << 16},
		bound{section + ".switch_time", d.SwitchTime.Seconds(), 0, inf}, bound{section + ".slo", d.SLO.Seconds(), 0, inf},
	); err != nil {
		return nil, err
	}
	o := datacenters.Options{
		System: sys, Rate: d.Rate, Concurrency: d.Concurrency, Duration: d.Duration, Warmup: d.Warmup, Layers: d.Layers, TransfersMax: d.Transfers,
		QueueMax: d.QueueMax, Turns: d.Turns, Think: d.Think, BlockTokens: d.BlockTokens, Abundant: d.Abundant, SwitchTime: d.SwitchTime, SLO: d.SLO,
	}
	if d.Plan != nil {
		if err := at.check(bound{section + ".plan.threshold", d.Plan.Threshold, 0, inf}, bound{section + ".plan.prefill", float64(d.Plan.Prefill), 0, float64(sys.LocalInstances - 1)}); err != nil {
			return nil, err
		}
		o.Plan = prfaas.Plan{Threshold: d.Plan.Threshold, Prefill: d.Plan.Prefill, Decode: sys.LocalInstances - d.Plan.Prefill}
	} else {
		best, err := prfaas.Optimize(sys, d.System.Steps)
		if err != nil {
			return nil, at.refuse(section+".system", err)
		}
		o.Plan = best.Plan
	}
	if s := d.ShortTerm; s != nil {
		o.Short, o.Observe = &prfaas.ShortOptions{High: s.High, Low: s.Low, QueueHigh: s.QueueHigh, Backoff: s.Backoff, Hold: s.Hold}, s.Observe
		if _, err := prfaas.NewShort(sys, o.Plan, *o.Short); err != nil {
			return nil, at.refuse(section+".short_term", err)
		}
	}
	if l := d.LongTerm; l != nil {
		o.Long = &prfaas.LongOptions{Period: l.Period, MinGain: l.MinGain, MaxMoves: l.MaxMoves}
		if _, err := prfaas.NewLong(sys, o.Plan, *o.Long); err != nil {
			return nil, at.refuse(section+".long_term", err)
		}
	}
	if o.Changes, err = d.changes(at, sys.Lengths); err != nil {
		return nil, err
	}
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, at.refuse(section, err)
	}
	return func(ctx context.Context, seed uint64) (run, error) {
		r, err := datacenters.Run(ctx, o, seed)
		if err != nil {
			return run{}, err
		}
		return run{metrics: datacentersMetrics(o, r), digest: r.Digest}, nil
	}, nil
}

// changes returns the file's changes, which must be in order of time. A new length distribution
// given by mu and sigma keeps the bounds of the distribution before the change.
func (d *datacentersFile) changes(at source, lengths prfaas.Lengths) ([]datacenters.Change, error) {
	var out []datacenters.Change
	for i, c := range d.Changes {
		path := "datacenters.changes." + itoa(i)
		if err := at.check(bound{path + ".at", c.At.Seconds(), 0, math.Inf(1)}, bound{path + ".egress_factor", c.EgressFactor, 0, 1e6}, bound{path + ".rate", c.Rate, 0, 1e6}); err != nil {
			return nil, err
		}
		x := datacenters.Change{At: c.At, EgressFactor: c.EgressFactor, Rate: c.Rate}
		if at.f.Has(path+".mu") || at.f.Has(path+".sigma") {
			l := prfaas.LogNormal{Mu: c.Mu, Sigma: c.Sigma}
			l.Min, l.Max = lengths.Bounds()
			if err := l.Validate(); err != nil {
				return nil, at.refuse(path, err)
			}
			x.Lengths = l
		}
		if x.EgressFactor == 0 && x.Rate == 0 && x.Lengths == nil {
			return nil, at.f.Errorf(path, "changes nothing; give egress_factor, rate, or mu and sigma")
		}
		if i > 0 && x.At < out[i-1].At {
			return nil, at.f.Errorf(path+".at", "is %v, before the change above it; put them in order of time", x.At)
		}
		out = append(out, x)
	}
	return out, nil
}

// prompts returns the prompt lengths of a trace, in tokens.
func (s source) prompts(key, name string) ([]float64, error) {
	path, err := s.trace(key, name)
	if err != nil {
		return nil, err
	}
	all, err := workload.ReadArrivals(path)
	if err != nil {
		return nil, err
	}
	out := make([]float64, len(all))
	for i, a := range all {
		out[i] = float64(a.Input)
	}
	return out, nil
}

func datacentersMetrics(o datacenters.Options, r *datacenters.Result) []Metric {
	sys := o.System
	sys.Service = prfaas.Expected
	last := datacenters.Window{Threshold: o.Plan.Threshold, Prefill: o.Plan.Prefill}
	if n := len(r.Series); n > 0 {
		last = r.Series[n-1]
	}
	return []Metric{
		value("throughput", "req/s", r.Throughput), value("highest throughput of the plan, predicted", "req/s", sys.Evaluate(o.Plan).Max),
		value("TTFT, mean", "s", r.TTFTMean.Seconds()), value("TTFT, P50", "s", r.TTFTP50.Seconds()), value("TTFT, P90", "s", r.TTFTP90.Seconds()),
		value("TTFT, P99", "s", r.TTFTP99.Seconds()), value("within the objective", "share", r.SLOShare), value("offloaded", "share", r.Offloaded),
		value("prompt tokens cached", "share", r.Hit), value("egress", "Gbps", prfaas.Gbps(r.EgressBytes)),
		value("PrfaaS used", "share", r.RemoteUsed), value("prefill used", "share", r.PrefillUsed), value("decode used", "share", r.DecodeUsed),
		value("completed", "", float64(r.Completed)), value("rejected", "", float64(r.Rejected)), value("prefixes fetched", "", float64(r.Fetches)),
		value("adjustments", "", float64(len(r.Adjustments))), value("threshold in the end", "tokens", last.Threshold), value("prefill instances in the end", "", float64(last.Prefill)),
	}
}
