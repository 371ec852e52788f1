package reproduce

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/dualpath/prfaas"
	"github.com/penstock-kv/penstock/internal/chart"
	"github.com/penstock-kv/penstock/sim/datacenters"
)

// PrfaaS returns the suite of the paper that package prfaas implements.
func PrfaaS() Suite {
	return Suite{Name: "prfaas", Paper: "Prefill-as-a-Service: KVCache of Next-Generation Models Could Go Cross-Datacenter", Drives: prfaasDrives, Run: func(ctx context.Context, r *Report) error {
		return prfaaS(ctx, r, prfaasSeeds)
	}}
}

// egressNote explains the difference between the printed 13 Gbps and the computed value.
const egressNote = `"approximately 13 Gbps" in the paper; 1.61 req/s times the 916 MiB of the mean long prompt are 12.3`

// prfaasDrives is the suite's Drives.
const prfaasDrives = "the model, the router and the two controllers of `dualpath/prfaas`. `penstock plan prfaas` computes plans with the model. `penstock plan roles` proposes by the long-term controller which group should change its role. `penstock gateway --offload-url` routes by the router with a threshold that the operator gives (`server/offload`). No server imports the short-term controller, which changes the threshold, or sends prefixes to PrfaaS clusters."

const prfaasCommand = "penstock sim reproduce prfaas"

// prfaaS reports every table, the simulated ones over the given number of seeds.
func prfaaS(ctx context.Context, r *Report, seeds int) error {
	s, err := prfaas.CaseStudy()
	if err != nil {
		return err
	}
	c := prfaasCase{System: s, printed: prfaas.Plan{Threshold: 19400, Prefill: 3, Decode: 5}}
	if c.best, err = prfaas.Optimize(s, prfaas.StepsDefault); err != nil {
		return err
	}
	if c.homogeneous, err = prfaas.Homogeneous(s, 12); err != nil {
		return err
	}
	if c.naive, err = prfaas.Naive(s); err != nil {
		return err
	}
	if err := c.throughputs(r); err != nil {
		return err
	}
	c.lengths(r)
	c.configurations(r)
	c.search(r)
	if r.Quick() {
		seeds = 1
		r.LeftOut("all seeds but the first", "each simulated number is of one run")
	}
	if err := c.simulated(ctx, r, seeds); err != nil {
		return err
	}
	return c.steered(ctx, r, seeds)
}

// prfaasCase is the case study of section 4, with its three deployments.
type prfaasCase struct {
	prfaas.System
	// printed is the plan in the PrfaaS column of Table 6. best is the throughput of the best plan
	// of the search; homogeneous and naive are the throughputs of the two other deployments.
	printed                  prfaas.Plan
	best, homogeneous, naive prfaas.Throughput
}

// throughputs reports Table 5 and the bandwidths of section 2.3.
func (c prfaasCase) throughputs(r *Report) error {
	table := Table{
		Title: "KV throughput of the 1T hybrid", Kind: Derived, Source: "PrfaaS, Table 5", Command: prfaasCommand,
		Text: "S over T; sizes in MiB, K = 1000 tokens. The parabola that stands for T_prefill between the points is a least-squares fit.",
	}
	printed := []struct{ tokens, seconds, gbps float64 }{{1000, 0.44, 3.61}, {8000, 0.72, 3.59}, {32000, 1.84, 3.19}, {128000, 7.40, 2.62}}
	for _, p := range printed {
		name := fmt.Sprintf("%.0fK", p.tokens/1000)
		table.Cells = append(table.Cells,
			Near("PF-1", "KV throughput at "+name, "Gbps", p.gbps, prfaas.Gbps(c.KVBytes.At(p.tokens)/p.seconds), 0.012),
			Near("", "prefill time at "+name, "s", p.seconds, c.RemotePrefill.At(p.tokens), 0.025).As(Fitted))
	}
	r.Table(table)

	table = Table{
		Title: "Egress of whole prefill clusters", Kind: Derived, Source: "PrfaaS, section 2.3", Command: prfaasCommand,
		Text: "N/P times the measured KV throughput of one 8-GPU instance (equation 2, Table 3).",
	}
	figure := chart.Chart{Title: "KV throughput of one 8 x H200 instance", XLabel: "prompt, tokens", YLabel: "Gbps", LogX: true, LogY: true}
	for _, x := range []struct {
		profile    string
		gpus       int
		tokens     float64
		paper, tol float64
		note       string
	}{
		{"minimax-m2.5", 512, 32000, 3800, 0.03, ""}, {"qwen3-235b", 512, 32000, 2100, 0.03, ""}, {"ring-2.5-1t", 512, 32000, 170, 0.03, ""},
		{"ring-2.5-1t", 10000, 128000, 1800, 0.03, ""},
	} {
		p, err := prfaas.BuiltIn(x.profile)
		if err != nil {
			return err
		}
		phi, ok := p.KVThroughput("h200", x.tokens)
		if !ok {
			return fmt.Errorf("reproduce: profile %s has no KV throughput on h200", x.profile)
		}
		cell := Near("PF-8", fmt.Sprintf("%s, %d GPUs, %.0fK tokens", x.profile, x.gpus, x.tokens/1000), "Gbps", x.paper,
			prfaas.ClusterEgress(x.gpus, p.GPUsPerInstance, prfaas.Gbps(phi)), x.tol)
		cell.Note = x.note
		table.Cells = append(table.Cells, cell)
	}
	ring, err := prfaas.BuiltIn("ring-2.5-1t")
	if err != nil {
		return err
	}
	phi, _ := ring.KVThroughput("h200", 128000)
	table.Cells = append(table.Cells, Within("PF-8", "ring-2.5-1t, 512 GPUs, 128K tokens", "Gbps", math.NaN(), prfaas.ClusterEgress(512, 8, prfaas.Gbps(phi)), 0, 100).As(Predicted).
		Noted(`"below 100 Gbps" in the paper`))
	r.Table(table)

	for _, name := range prfaas.ProfileNames() {
		p, err := prfaas.BuiltIn(name)
		if err != nil {
			return err
		}
		s := chart.Series{Name: name, Points: true, Dashed: name == "minimax-m2.5" || name == "qwen3-235b"}
		for _, tokens := range []float64{1000, 8000, 32000, 128000} {
			if phi, ok := p.KVThroughput("h200", tokens); ok {
				s.X, s.Y = append(s.X, tokens), append(s.Y, prfaas.Gbps(phi))
			}
		}
		figure.Series = append(figure.Series, s)
	}
	r.Figure(Figure{Name: "prfaas-kv-throughput", Title: "KV throughput by prompt length (Table 3, Figure 2; dashed: dense models)", Chart: figure})
	return nil
}

// lengths reports the traffic of section 4.1.
func (c prfaasCase) lengths(r *Report) {
	least, greatest := c.Lengths.Bounds()
	t := c.printed.Threshold
	r.Table(Table{
		Title: "The traffic", Kind: Derived, Source: "PrfaaS, sections 4.1 and 4.3.1", Command: prfaasCommand,
		Text: "Closed moments of the truncated log-normal; the paper rounds, and its means are printed to the thousand.",
		Cells: []Cell{
			Near("PF-2", "mean length", "tokens", 27000, prfaas.Mean(c.Lengths, least, greatest), 0.025),
			Near("PF-2", "share above 19.4K", "", 0.496, prfaas.Share(c.Lengths, t, greatest), 0.025),
			Near("PF-2", "mean length above 19.4K", "tokens", 44000, prfaas.Mean(c.Lengths, t, greatest), 0.025),
		},
	})
}

// configurations reports Table 6.
func (c prfaasCase) configurations(r *Report) {
	x := c.Evaluate(c.printed)
	h, n := c.homogeneous, c.naive
	ttft := func(p prfaas.Plan) prfaas.TTFT { return c.TTFT(p) }
	equation := "Equations 3 to 6 at the printed plans, service times at the mean lengths. TTFT is prefill and, where it is crossed, the idle link; there is no queue in it. The H20's prefill time, which the paper does not print, was read off three numbers of this table, and its decode step off three others: what depends on either is fitted. The rest follows from Table 5 and is derived."
	r.Table(Table{
		Title: "The three deployments", Kind: Fitted, Source: "PrfaaS, Table 6", Command: prfaasCommand, Text: equation,
		Cells: []Cell{
			Near("PF-3", "PrfaaS: throughput of its cluster", "req/s", 1.61, x.Remote, 0.015).As(Derived),
			Near("PF-3", "PrfaaS: throughput of PD-P", "req/s", 1.64, x.LocalPrefill, 0.015),
			Near("PF-3", "PrfaaS: throughput of PD-D", "req/s", 3.91, x.DecodeRate, 0.004).Noted("20 requests in steps of 25 ms: inferred from the three printed decode rates and the 40 tokens/s of the SLO").As(Fitted),
			Near("PF-5", "PrfaaS: throughput", "req/s", 3.24, x.Max, 0.015).As(Derived),
			Near("PF-4", "PrfaaS: mean TTFT", "s", 2.22, ttft(c.printed).Mean(), 0.015),
			Near("PF-4", "PrfaaS: P90 TTFT", "s", 3.51, ttft(c.printed).Quantile(0.9), 0.015),
			Near("PF-6", "PrfaaS: egress", "Gbps", 13, prfaas.Gbps(x.EgressBytes), 0.10).Noted(egressNote).As(Derived),
			Near("PF-7", "homogeneous: prefill instances", "", 9, float64(h.Prefill), 0),
			Near("PF-7", "homogeneous: decode instances", "", 3, float64(h.Decode), 0),
			Near("PF-3", "homogeneous: throughput of PD-P", "req/s", 2.11, h.LocalPrefill, 0.015),
			Near("PF-3", "homogeneous: throughput of PD-D", "req/s", 2.35, h.DecodeRate, 0.004),
			Near("PF-7", "homogeneous: throughput", "req/s", 2.11, h.Max, 0.01),
			Near("PF-4", "homogeneous: mean TTFT", "s", 4.44, ttft(h.Plan).Mean(), 0.015),
			Near("PF-4", "homogeneous: P90 TTFT", "s", 9.73, ttft(h.Plan).Quantile(0.9), 0.015),
			Near("PF-3", "naive: throughput of its cluster", "req/s", 2.45, n.Remote, 0.015).As(Derived),
			Near("PF-3", "naive: throughput of PD-D", "req/s", 6.25, n.DecodeRate, 0.004),
			Near("PF-4", "naive: mean TTFT", "s", 1.74, ttft(n.Plan).Mean(), 0.015).As(Derived),
			Near("PF-4", "naive: P90 TTFT", "s", 3.51, ttft(n.Plan).Quantile(0.9), 0.015).As(Derived),
			Near("PF-5", "PrfaaS over homogeneous", "", 1.54, x.Max/h.Max, 0.015),
			Near("PF-5", "PrfaaS over naive", "", 1.32, x.Max/n.Max, 0.015).As(Derived),
			Near("PF-5", "naive over homogeneous", "", 1.16, n.Max/h.Max, 0.015),
			Near("PF-4", "mean TTFT, reduction to homogeneous", "", 0.50, 1-ttft(c.printed).Mean()/ttft(h.Plan).Mean(), 0.03),
			Near("PF-4", "P90 TTFT, reduction to homogeneous", "", 0.64, 1-ttft(c.printed).Quantile(0.9)/ttft(h.Plan).Quantile(0.9), 0.03),
		},
	})
}

// search reports the grid search of section 4.2 and Figure 5.
func (c prfaasCase) search(r *Report) {
	r.Table(Table{
		Title: "The best configuration", Kind: Fitted, Source: "PrfaaS, section 4.2", Command: prfaasCommand,
		Text: fmt.Sprintf("Grid search over %d steps of the threshold and all divisions of the 8 instances.", prfaas.StepsDefault),
		Cells: []Cell{
			Near("PF-7", "threshold", "tokens", 19400, c.best.Threshold, 0.03),
			Near("PF-7", "prefill instances", "", 3, float64(c.best.Prefill), 0),
			Near("PF-7", "decode instances", "", 5, float64(c.best.Decode), 0),
			Near("PF-7", "throughput", "req/s", 3.24, c.best.Max, 0.015),
		},
	})
	categories := []string{}
	var producers, decode, system []float64
	for n := 1; n < c.LocalInstances; n++ {
		x := c.Evaluate(prfaas.Plan{Threshold: c.best.Threshold, Prefill: n, Decode: c.LocalInstances - n})
		categories = append(categories, fmt.Sprintf("%d/%d", n, c.LocalInstances-n))
		producers, decode, system = append(producers, x.Producers()), append(decode, x.DecodeRate), append(system, x.Max)
	}
	r.Figure(Figure{Name: "prfaas-fig5a", Title: "Figure 5(a): throughput over the division of the PD cluster", Chart: chart.Chart{
		Title: "Threshold 19.3K", XLabel: "prefill/decode instances", YLabel: "req/s", Kind: chart.Bars, Categories: categories,
		Series: []chart.Series{{Name: "system", Y: system}, {Name: "both prefill sides", Y: producers, Dashed: true}, {Name: "decode", Y: decode, Dashed: true}},
	}})
	lines := []chart.Series{{Name: "system"}, {Name: "PrfaaS / p", Dashed: true}, {Name: "PD-P / (1-p)", Dashed: true}}
	for t := 5000.0; t <= 60000; t += 500 {
		x := c.Evaluate(prfaas.Plan{Threshold: t, Prefill: 3, Decode: 5})
		for i, y := range []float64{x.Max, x.Remote / x.Offloaded, x.LocalPrefill / (1 - x.Offloaded)} {
			if y > 8 { // far above the system's throughput
				y = math.NaN()
			}
			lines[i].X, lines[i].Y = append(lines[i].X, t), append(lines[i].Y, y)
		}
	}
	r.Figure(Figure{Name: "prfaas-fig5b", Title: "Figure 5(b): throughput over the threshold, 3 prefill and 5 decode instances", Chart: chart.Chart{
		Title: "3 prefill, 5 decode instances", XLabel: "threshold, tokens", YLabel: "req/s", Series: lines,
	}})
}

// prfaasSeeds is the number of seeds with which each simulated system is run.
const prfaasSeeds = 5

// prfaasRun is one system simulated with every seed.
type prfaasRun struct {
	name    string
	opts    datacenters.Options
	results []*datacenters.Result
}

// simulate runs every system with every seed, concurrently on the pool of workers.
func simulate(ctx context.Context, r *Report, what string, runs []*prfaasRun, seeds int) error {
	for _, x := range runs {
		x.results = make([]*datacenters.Result, seeds)
	}
	return r.Each(ctx, what, len(runs)*seeds, func(ctx context.Context, i int) error {
		x, seed := runs[i/seeds], i%seeds
		result, err := datacenters.Run(ctx, x.opts, uint64(seed)+1)
		x.results[seed] = result
		return err
	})
}

// over returns the mean and the standard deviation of value over the seeds.
func (x *prfaasRun) over(value func(*datacenters.Result) float64) (mean, std float64) {
	for _, r := range x.results {
		mean += value(r) / float64(len(x.results))
	}
	for _, r := range x.results {
		std += (value(r) - mean) * (value(r) - mean) / float64(max(len(x.results)-1, 1))
	}
	return mean, math.Sqrt(std)
}

// cell returns a cell that compares the mean of a simulated value with the expected value
// (against), within a relative tolerance.
func (x *prfaasRun) cell(name, unit string, against, tolerance float64, value func(*datacenters.Result) float64) Cell {
	mean, std := x.over(value)
	c := Near("", name, unit, against, mean, tolerance)
	c.Std = std
	return c
}

func throughput(r *datacenters.Result) float64 { return r.Throughput }

// simulated compares the closed-form model with a simulation of the system. It compares the highest
// throughput of PrfaaS, of the homogeneous and the naive deployment, and of PrfaaS over a narrow
// link. It also compares the times to first token at several loads.
func (c prfaasCase) simulated(ctx context.Context, r *Report, seeds int) error {
	saturated := func(name string, p prfaas.Plan, change func(*datacenters.Options)) *prfaasRun {
		o := datacenters.Options{System: c.System, Plan: p, Concurrency: 150, Duration: 3 * time.Hour, Warmup: 30 * time.Minute, Layers: 61}
		if change != nil {
			change(&o)
		}
		return &prfaasRun{name: name, opts: o}
	}
	runs := []*prfaasRun{
		saturated("PrfaaS", c.printed, nil),
		saturated("homogeneous", c.homogeneous.Plan, func(o *datacenters.Options) { o.System.RemoteInstances, o.System.LocalInstances = 0, 12 }),
		saturated("naive", c.naive.Plan, nil),
		saturated("PrfaaS over 5 Gbps", c.printed, func(o *datacenters.Options) { o.System.EgressBytes = prfaas.FromGbps(5) }),
	}
	loads := []float64{0.05, 0.5, 0.8, 0.9}
	for _, load := range loads {
		x := saturated(fmt.Sprintf("%.0f %% load", 100*load), c.printed, nil)
		x.opts.Concurrency, x.opts.Rate, x.opts.Layers = 0, load*c.Evaluate(c.printed).Max, 1
		x.opts.Duration = time.Duration(float64(6*time.Hour) / math.Sqrt(load))
		runs = append(runs, x)
	}
	if err := simulate(ctx, r, "PrfaaS systems", runs, seeds); err != nil {
		return err
	}
	table := Table{
		Title: "The model against the simulation", Kind: Predicted, Source: "PrfaaS, equations 3 to 6; sim/datacenters", Command: prfaasCommand,
		Text: fmt.Sprintf("150 requests always in the system for three hours of virtual time, %d seeds", seeds) + `. The paper's equations have the service time at the mean length; a queue serves the mean time, E[T(L)], which is longer, and the simulation must come to that within 1 %.`,
	}
	for _, x := range runs[:4] {
		atMean := x.opts.System.Evaluate(x.opts.Plan)
		x.opts.System.Service = prfaas.Expected
		expected := x.opts.System.Evaluate(x.opts.Plan)
		mean, std := x.over(throughput)
		table.Cells = append(table.Cells,
			Cell{Name: x.name + ": throughput", Unit: "req/s", Paper: math.NaN(), Ours: mean, Std: std, Low: expected.Max * 0.99, High: expected.Max * 1.01}.
				Noted("%v binds; by mean service times %.3f, by service times at the mean length %.3f", expected.Binds, expected.Max, atMean.Max))
	}
	prfaaS, _ := runs[0].over(throughput)
	homogeneous, _ := runs[1].over(throughput)
	naive, _ := runs[2].over(throughput)
	table.Cells = append(table.Cells,
		Near("PF-5", "PrfaaS over homogeneous, simulated", "", 1.54, prfaaS/homogeneous, 0.03).As(Fitted),
		Near("PF-5", "PrfaaS over naive, simulated", "", 1.32, prfaaS/naive, 0.03),
		runs[0].cell("PrfaaS: egress, simulated", "Gbps", 13, 0.10, func(r *datacenters.Result) float64 { return prfaas.Gbps(r.EgressBytes) }).Noted(egressNote))
	r.Table(table)

	table = Table{
		Title: "Time to first token by load", Kind: Fitted, Source: "PrfaaS, Table 6; sim/datacenters", Command: prfaasCommand,
		Text: "Poisson arrivals at a share of the predicted throughput; KV crosses the link when its prefill has ended. Table 6 has no queue in it: the simulation meets it at a low load and says what waiting adds above.",
	}
	means, tails := chart.Series{Name: "mean", Points: true}, chart.Series{Name: "P90", Points: true}
	for i, load := range loads {
		x := runs[4+i]
		mean := x.cell(x.name+": mean", "s", 2.22, 0.03, func(r *datacenters.Result) float64 { return r.TTFTMean.Seconds() })
		p90 := x.cell(x.name+": P90", "s", 3.51, 0.03, func(r *datacenters.Result) float64 { return r.TTFTP90.Seconds() })
		if load > 0.1 {
			mean.Low, mean.High = mean.Paper, 10*mean.Paper
			p90.Low, p90.High = p90.Paper, 12*p90.Paper
			mean.Paper, p90.Paper = math.NaN(), math.NaN() // Table 6 has no queue
			mean, p90 = mean.As(Predicted), p90.As(Predicted)
		}
		table.Cells = append(table.Cells, mean, p90)
		means.X, means.Y = append(means.X, 100*load), append(means.Y, mean.Ours)
		tails.X, tails.Y = append(tails.X, 100*load), append(tails.Y, p90.Ours)
	}
	table.Cells = append(table.Cells, Holds("", "waiting grows with load", slices.IsSorted(means.Y) && slices.IsSorted(tails.Y)).As(Predicted))
	r.Table(table)
	r.Figure(Figure{Name: "prfaas-ttft", Title: "Time to first token by load, simulated", Chart: chart.Chart{
		Title: "PrfaaS 4/3/5, threshold 19.4K", XLabel: "load, % of the predicted throughput", YLabel: "s", Series: []chart.Series{means, tails},
	}})
	return nil
}

// steered reports section 3.4.3: the reactions of the short-term and the long-term controller to a
// link that loses bandwidth and to traffic that changes.
func (c prfaasCase) steered(ctx context.Context, r *Report, seeds int) error {
	half := datacenters.Options{
		System: c.System, Plan: c.printed, Rate: 2.1, Duration: 40 * time.Minute, Warmup: 5 * time.Minute, Layers: 61,
		Changes: []datacenters.Change{{At: 10 * time.Minute, EgressFactor: 0.5}},
	}
	half.System.EgressBytes = prfaas.FromGbps(16)
	halfSteered := half
	halfSteered.Short = &prfaas.ShortOptions{}

	short := c.System
	short.Lengths = prfaas.LogNormal{Mu: 8, Sigma: 1, Min: 128, Max: 128000}
	first, err := prfaas.Optimize(short, prfaas.StepsDefault)
	if err != nil {
		return err
	}
	shift := datacenters.Options{
		System: short, Plan: first.Plan, Concurrency: 150, Duration: 2 * time.Hour, Warmup: 80 * time.Minute, Layers: 61,
		Changes: []datacenters.Change{{At: 20 * time.Minute, Lengths: c.Lengths}},
	}
	shiftSteered := shift
	shiftSteered.Long, shiftSteered.SwitchTime = &prfaas.LongOptions{}, 30*time.Second
	runs := []*prfaasRun{{opts: half}, {opts: halfSteered}, {opts: shift}, {opts: shiftSteered}}
	if err := simulate(ctx, r, "PrfaaS controllers", runs, seeds); err != nil {
		return err
	}
	p90 := func(r *datacenters.Result) float64 { return r.TTFTP90.Seconds() }
	fixed, _ := runs[0].over(p90)
	kept, _ := runs[1].over(p90)
	before, _ := runs[2].over(throughput)
	after, _ := runs[3].over(throughput)
	prefill, _ := runs[3].over(func(r *datacenters.Result) float64 { return float64(r.Series[len(r.Series)-1].Prefill) })
	r.Table(Table{
		Title: "The controllers", Kind: Predicted, Source: "PrfaaS, section 3.4.3; sim/datacenters", Command: prfaasCommand,
		Text: fmt.Sprintf("The paper describes both controllers and reports no numbers. Above: a link of 16 Gbps falls to 8 after ten minutes at 2.1 req/s. Below: prompts grow after twenty minutes (mu from 8 to 9.9), on a cluster divided %d/%d for the short ones.", first.Prefill, first.Plan.Decode),
		Cells: []Cell{
			Within("", "link at half: P90 TTFT with a fixed threshold", "s", math.NaN(), fixed, 20, math.Inf(1)),
			Within("", "link at half: P90 TTFT with the short-term controller", "s", math.NaN(), kept, 0, fixed/2),
			Within("", "longer prompts: throughput with the old division", "req/s", math.NaN(), before, 0, 0.85*after),
			Near("PF-7", "longer prompts: throughput with the long-term controller", "req/s", 3.24, after, 0.03).As(Fitted),
			Near("PF-7", "longer prompts: prefill instances in the end", "", 3, prefill, 0).As(Fitted),
		},
	})
	series := func(name string, r *datacenters.Result, value func(datacenters.Window) float64, dashed bool) chart.Series {
		s := chart.Series{Name: name, Dashed: dashed}
		for _, w := range r.Series {
			s.X, s.Y = append(s.X, w.At.Minutes()), append(s.Y, value(w))
		}
		return s
	}
	waiting := func(w datacenters.Window) float64 { return float64(w.RemoteQueue + w.LocalQueue) }
	r.Figure(Figure{Name: "prfaas-link-at-half", Title: "A link at half: requests waiting, with and without the short-term controller", Chart: chart.Chart{
		Title: "The link falls from 16 to 8 Gbps at 10 minutes", XLabel: "time, minutes", YLabel: "requests waiting for prefill or the link", Kind: chart.Steps,
		Series: []chart.Series{series("fixed threshold", runs[0].results[0], waiting, true), series("short-term controller", runs[1].results[0], waiting, false)},
	}})
	r.Figure(Figure{Name: "prfaas-traffic-shifts", Title: "Longer prompts: answers a second, with and without the long-term controller", Chart: chart.Chart{
		Title: "Prompts grow at 20 minutes", XLabel: "time, minutes", YLabel: "answers/s over 10 s", Kind: chart.Steps,
		Series: []chart.Series{
			series("fixed division", runs[2].results[0], func(w datacenters.Window) float64 { return w.Throughput }, true),
			series("long-term controller", runs[3].results[0], func(w datacenters.Window) float64 { return w.Throughput }, false),
		},
	}})
	return nil
}
