package reproduce

import (
	"context"
	"fmt"
	"math"

	"github.com/penstock-kv/penstock/dualpath/prfaas"
	"github.com/penstock-kv/penstock/internal/chart"
)

// PrfaaS is the paper that package prfaas follows.
func PrfaaS() Suite {
	return Suite{Name: "prfaas", Paper: "Prefill-as-a-Service: KVCache of Next-Generation Models Could Go Cross-Datacenter", Run: prfaaS}
}

const prfaasCommand = "penstock sim reproduce prfaas"

func prfaaS(ctx context.Context, r *Report) error {
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
	return nil
}

// prfaasCase is the case study of section 4, with its three deployments.
type prfaasCase struct {
	prfaas.System
	// printed is Table 6's PrfaaS column as it is printed, best what our search
	// finds.
	printed                  prfaas.Plan
	best, homogeneous, naive prfaas.Throughput
}

// throughputs is Table 5 and the bandwidths of section 2.3.
func (c prfaasCase) throughputs(r *Report) error {
	table := Table{
		Title: "KV throughput of the 1T hybrid", Source: "PrfaaS, Table 5", Command: prfaasCommand,
		Text: "S over T; sizes in MiB, K = 1000 tokens. The parabola that stands for T_prefill between the points is a least-squares fit.",
	}
	printed := []struct{ tokens, seconds, gbps float64 }{{1000, 0.44, 3.61}, {8000, 0.72, 3.59}, {32000, 1.84, 3.19}, {128000, 7.40, 2.62}}
	for _, p := range printed {
		name := fmt.Sprintf("%.0fK", p.tokens/1000)
		table.Cells = append(table.Cells,
			Near("PF-1", "KV throughput at "+name, "Gbps", p.gbps, prfaas.Gbps(c.KVBytes.At(p.tokens)/p.seconds), 0.012),
			Near("", "prefill time at "+name+", fitted", "s", p.seconds, c.RemotePrefill.At(p.tokens), 0.025))
	}
	r.Table(table)

	table = Table{
		Title: "Egress of whole prefill clusters", Source: "PrfaaS, section 2.3", Command: prfaasCommand,
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
	table.Cells = append(table.Cells, Within("PF-8", "ring-2.5-1t, 512 GPUs, 128K tokens", "Gbps", math.NaN(), prfaas.ClusterEgress(512, 8, prfaas.Gbps(phi)), 0, 100).
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

// lengths is the traffic of section 4.1.
func (c prfaasCase) lengths(r *Report) {
	least, greatest := c.Lengths.Bounds()
	t := c.printed.Threshold
	r.Table(Table{
		Title: "The traffic", Source: "PrfaaS, sections 4.1 and 4.3.1", Command: prfaasCommand,
		Text: "Closed moments of the truncated log-normal; the paper rounds, and its means are printed to the thousand.",
		Cells: []Cell{
			Near("PF-2", "mean length", "tokens", 27000, prfaas.Mean(c.Lengths, least, greatest), 0.025),
			Near("PF-2", "share above 19.4K", "", 0.496, prfaas.Share(c.Lengths, t, greatest), 0.025),
			Near("PF-2", "mean length above 19.4K", "tokens", 44000, prfaas.Mean(c.Lengths, t, greatest), 0.025),
		},
	})
}

// configurations is Table 6.
func (c prfaasCase) configurations(r *Report) {
	x := c.Evaluate(c.printed)
	h, n := c.homogeneous, c.naive
	ttft := func(p prfaas.Plan) prfaas.TTFT { return c.TTFT(p) }
	// What the paper does not print of the H20 had to be read off three numbers; these do not test anything.
	const source = "the H20's prefill time, which the paper does not print, was read off this number; it is no test of ours"
	equation := "Equations 3 to 6 at the printed plans, service times at the mean lengths. TTFT is prefill and, where it is crossed, the idle link; there is no queue in it."
	r.Table(Table{
		Title: "The three deployments", Source: "PrfaaS, Table 6", Command: prfaasCommand, Text: equation,
		Cells: []Cell{
			Near("PF-3", "PrfaaS: throughput of its cluster", "req/s", 1.61, x.Remote, 0.015),
			Near("PF-3", "PrfaaS: throughput of PD-P", "req/s", 1.64, x.LocalPrefill, 0.015).Noted(source),
			Near("PF-3", "PrfaaS: throughput of PD-D", "req/s", 3.91, x.DecodeRate, 0.004).Noted("20 requests in steps of 25 ms: inferred from the three printed decode rates and the 40 tokens/s of the SLO"),
			Near("PF-5", "PrfaaS: throughput", "req/s", 3.24, x.Max, 0.015),
			Near("PF-4", "PrfaaS: mean TTFT", "s", 2.22, ttft(c.printed).Mean(), 0.015),
			Near("PF-4", "PrfaaS: P90 TTFT", "s", 3.51, ttft(c.printed).Quantile(0.9), 0.015),
			Near("PF-6", "PrfaaS: egress", "Gbps", 13, prfaas.Gbps(x.EgressBytes), 0.10).
				Noted(`"approximately 13 Gbps"; 1.61 req/s times the 916 MiB of the mean long prompt`),
			Near("PF-7", "homogeneous: prefill instances", "", 9, float64(h.Prefill), 0),
			Near("PF-7", "homogeneous: decode instances", "", 3, float64(h.Decode), 0),
			Near("PF-3", "homogeneous: throughput of PD-P", "req/s", 2.11, h.LocalPrefill, 0.015).Noted(source),
			Near("PF-3", "homogeneous: throughput of PD-D", "req/s", 2.35, h.DecodeRate, 0.004),
			Near("PF-7", "homogeneous: throughput", "req/s", 2.11, h.Max, 0.01),
			Near("PF-4", "homogeneous: mean TTFT", "s", 4.44, ttft(h.Plan).Mean(), 0.015),
			Near("PF-4", "homogeneous: P90 TTFT", "s", 9.73, ttft(h.Plan).Quantile(0.9), 0.015).Noted(source),
			Near("PF-3", "naive: throughput of its cluster", "req/s", 2.45, n.Remote, 0.015),
			Near("PF-3", "naive: throughput of PD-D", "req/s", 6.25, n.DecodeRate, 0.004),
			Near("PF-4", "naive: mean TTFT", "s", 1.74, ttft(n.Plan).Mean(), 0.015),
			Near("PF-4", "naive: P90 TTFT", "s", 3.51, ttft(n.Plan).Quantile(0.9), 0.015),
			Near("PF-5", "PrfaaS over homogeneous", "", 1.54, x.Max/h.Max, 0.015),
			Near("PF-5", "PrfaaS over naive", "", 1.32, x.Max/n.Max, 0.015),
			Near("PF-5", "naive over homogeneous", "", 1.16, n.Max/h.Max, 0.015),
			Near("PF-4", "mean TTFT, reduction to homogeneous", "", 0.50, 1-ttft(c.printed).Mean()/ttft(h.Plan).Mean(), 0.03),
			Near("PF-4", "P90 TTFT, reduction to homogeneous", "", 0.64, 1-ttft(c.printed).Quantile(0.9)/ttft(h.Plan).Quantile(0.9), 0.03),
		},
	})
}

// search is the grid search of section 4.2 and Figure 5.
func (c prfaasCase) search(r *Report) {
	r.Table(Table{
		Title: "The best configuration", Source: "PrfaaS, section 4.2", Command: prfaasCommand,
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
			lines[i].X, lines[i].Y = append(lines[i].X, t), append(lines[i].Y, min(y, 8))
		}
	}
	r.Figure(Figure{Name: "prfaas-fig5b", Title: "Figure 5(b): throughput over the threshold, 3 prefill and 5 decode instances", Chart: chart.Chart{
		Title: "3 prefill, 5 decode instances", XLabel: "threshold, tokens", YLabel: "req/s", Series: lines,
	}})
}
