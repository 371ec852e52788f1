package reproduce

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/internal/chart"
	"github.com/penstock-kv/penstock/sim"
	"github.com/penstock-kv/penstock/sim/agentic"
	"github.com/penstock-kv/penstock/sim/flow"
	"github.com/penstock-kv/penstock/sim/workload"
)

// dpIntensity reports Table 1: KV bytes read per computed operation. It checks the simulator's
// compute model.
func dpIntensity(r *Report) {
	table := Table{
		Title: "KV bytes per computation", Kind: Derived, Source: "DualPath, Table 1", Command: dualPathCommand,
		Text: "GB read for each PFLOP computed, 429 tokens appended to a cached context: kv ctx / (429 (lin + att ctx)).",
	}
	const appended = 429
	for _, m := range []struct {
		name         string
		kv, lin, att float64
		at16, at64   float64
		tolerance    float64
		note         string
	}{
		{"Qwen2.5-32B", 262_144, 65e9, 4 * 40 * 128 * 64, 117, 267, 0.03, ""},
		{"GPT-OSS-120B", 2 * 8 * 64 * 18, 10.2e9, 4 * 64 * 64 * 18, 47, 95, 0.03, ""},
		{"Qwen3-235B", 2 * 4 * 128 * 94, 44e9, 4 * 64 * 128 * 94, 39, 60, 0.03, ""},
		{"DeepSeek-V3.2", 61 * 704, 74e9 + 2*61*128*1088*2048, 2 * 61 * 64 * 128, 13, 36, 0.08, "which sparse kernels were counted is not printed"},
		{"DeepSeek-V3", 61 * 656, 74e9, 2 * 61 * 128 * 1088, 4.8, 5.8, 0.15, "which attention kernel was counted is not printed"},
	} {
		for _, c := range []struct{ context, paper float64 }{{16 << 10, m.at16}, {64 << 10, m.at64}} {
			ours := m.kv * c.context / (appended * (m.lin + m.att*c.context)) * 1e6
			cell := Near("DP-6", fmt.Sprintf("%s at %.0fK", m.name, c.context/1024), "GB/PFLOP", c.paper, ours, m.tolerance)
			cell.Note = m.note
			table.Cells = append(table.Cells, cell)
		}
	}
	r.Table(table)
}

// dpBottleneckFree reports the bottleneck-free P/D ratios of section 4.2, in closed form and from
// the flow simulator.
func dpBottleneckFree(ctx context.Context, r *Report) error {
	table := Table{
		Title: "Bottleneck-free ratios", Kind: Derived, Source: "DualPath, section 4.2", Command: dualPathCommand,
		Text: "8 GPUs a node, compute and storage NICs of 50 GB/s. The shares are measured in the flow simulator, all paths of all pairs of engines at saturation.",
	}
	cluster := func(p, d int, dram float64) dualpath.Cluster {
		return dualpath.Cluster{PrefillNodes: p, DecodeNodes: d, GPUs: 8, CNIC: 50, SNICs: 1, DRAM: dram}
	}
	a, err := dualpath.Analyze(cluster(2, 4, 500))
	if err != nil {
		return err
	}
	table.Cells = append(table.Cells,
		Near("DP-1", "lowest P/D", "", 1./7, a.Safe.Low, 1e-9), Near("DP-1", "highest P/D", "", 7./2, a.Safe.High, 1e-9))
	for i, want := range []float64{12.5, 18.75, 15.625, 12.5, 100, 200} {
		table.Cells = append(table.Cells, Within("DP-2", "2P4D: "+a.Resources[i].Name, "GB/s", math.NaN(), a.Resources[i].Load, want*(1-1e-9), want*(1+1e-9)))
	}
	for _, c := range []struct {
		p, d       int
		dram, want float64
	}{{1, 7, 500, 1}, {7, 2, 500, 1}, {1, 8, 500, 8. / 9}, {4, 1, 500, 8. / 9}, {7, 2, 400, 0.8}} {
		share, err := dpReachable(ctx, c.p, c.d, c.dram)
		if err != nil {
			return err
		}
		closed, err := dualpath.Analyze(cluster(c.p, c.d, c.dram))
		if err != nil {
			return err
		}
		name := fmt.Sprintf("storage bandwidth reached, %dP%dD, %v GB/s of memory", c.p, c.d, c.dram)
		table.Cells = append(table.Cells,
			Within("DP-3", name, "", math.NaN(), share, c.want*0.99, c.want*1.01).As(Predicted),
			Within("DP-3", name+", closed form", "", math.NaN(), closed.Saturation, c.want*(1-1e-9), c.want*(1+1e-9)))
	}
	r.Table(table)
	return nil
}

// dpReachable simulates all of the paper's transfer paths at saturation and returns the used share
// of the storage NICs' bandwidth.
func dpReachable(ctx context.Context, p, d int, dram float64) (float64, error) {
	k := sim.New(1)
	n := flow.New(k)
	s := flow.Nodes{Prefill: p, Decode: d, GPUs: 8, SNIC: 50e9, CNIC: 50e9, DRAM: dram * 1e9}
	net, err := s.Build(n)
	if err != nil {
		return 0, err
	}
	pe0, de0, end := s.Engines()
	for pe := pe0; pe < de0; pe++ {
		for de := de0; de < end; de++ {
			for _, f := range []flow.Spec{
				{Path: net.PrefillPath(pe, de), Bytes: math.Inf(1), Weight: 1 / float64(d)},
				{Path: net.DecodePath(pe, de), Bytes: math.Inf(1), Weight: 1 / float64(p)},
			} {
				if _, err := n.Start(f); err != nil {
					return 0, err
				}
			}
		}
	}
	if err := k.RunUntil(ctx, time.Second); err != nil {
		return 0, err
	}
	sum := 0.0
	for _, nic := range net.SNIC {
		sum += n.Carried(nic)
	}
	return sum / (float64(p+d) * 50e9), nil
}

// dpTrajectories reports Table 2.
func dpTrajectories(r *Report, d *dpRuns) {
	table := Table{
		Title: "Trajectories", Kind: Fitted, Source: "DualPath, Table 2", Command: dualPathCommand,
		Text: "500 generated trajectories a set. Append and gen are means of each trajectory's own mean: pooled over rounds the table would contradict itself. The generator was fitted to this table.",
	}
	for _, s := range d.specs {
		set, _ := d.set(s.Name, 1)
		m := workload.Measure(set)
		table.Cells = append(table.Cells,
			Near("", s.Name+" turns", "", s.Turns, m.Turns, 0.05), Near("", s.Name+" append", "tokens", s.Append, m.Append, 0.05),
			Near("", s.Name+" gen", "tokens", s.Gen, m.Gen, 0.06), Near("", s.Name+" total", "tokens", s.Total, m.Total, 0.05),
			Near("", s.Name+" context", "tokens", s.Context, m.Context, 0.05),
			Within("", s.Name+" longest", "tokens", math.NaN(), float64(m.Longest), 0, float64(s.MaxLen)),
			Within("", s.Name+" context, pooled over rounds", "tokens", math.NaN(), m.ContextPooled, 0, float64(s.MaxLen)),
			Within("", s.Name+" hit, pooled over rounds", "", math.NaN(), m.HitPooled, 0.95, 1))
	}
	r.Table(table)
}

// noted adds a note to a cell that needs one.
func noted(c Cell, note string) Cell {
	if c.NeedsNote() {
		c.Note = note
	}
	return c
}

// offline reports Figure 7: job completion times by number of agents and longest context.
func (d *dpRuns) offline(r *Report) {
	table := Table{
		Title: "Offline, DS 660B 2P4D: job completion time", Kind: Fitted, Source: "DualPath, Figure 7", Command: dualPathCommand,
		Text: "One model of hardware for all cells of this page: 50 GB/s a storage NIC, 78 080 bytes of KV a token, 163 TFLOP/s a GPU, 30 ms a prefill step, 18 ms + 0.7 ms a request a decode step (see sim/agentic). Rates and step times were fitted to this figure and to Figures 8, 10 and 12.",
	}
	printed := map[string]float64{
		"512 basic": 2900, "512 dualpath": 2100, "512 oracle": 2000, "1024 basic": 5400, "1024 dualpath": 3000,
		"2048 basic": 10100, "2048 dualpath": 5400, "2048 oracle": 4800, "4096 basic": 19500, "4096 dualpath": 10400, "4096 oracle": 9400,
	}
	systems := []agentic.System{agentic.Basic, agentic.DualPath, agentic.Oracle}
	for _, n := range d.sizes()["64K"] {
		for _, s := range systems {
			key := fmt.Sprintf("%d %v", n, s)
			ours := d.jct(dp660(s, "64K", n))
			name := fmt.Sprintf("64K, %d agents, %v", n, s)
			if paper, ok := printed[key]; ok {
				note := dpFigureNote
				if n == 512 {
					note = "so few agents leave the engines idle, and the longest agents' decode decides: our step is shorter than the paper's (TPOT, in the online table)"
				}
				table.Cells = append(table.Cells, noted(Near("", name, "s", paper, ours, 0.25), note))
			} else {
				table.Cells = append(table.Cells, Within("", name, "s", math.NaN(), ours, 0, math.Inf(1)))
			}
		}
	}
	speedup := func(set string, n int) float64 {
		return d.jct(dp660(agentic.Basic, set, n)) / d.jct(dp660(agentic.DualPath, set, n))
	}
	best, grows, last := 0.0, true, 0.0
	for _, n := range d.sizes()["64K"] {
		s := speedup("64K", n)
		table.Cells = append(table.Cells, Within("DP-A10", fmt.Sprintf("speedup over basic, 64K, %d agents", n), "", math.NaN(), s, 1, 3.06))
		// Beyond saturation the speedup stays constant, up to noise.
		grows = grows && s > last*0.99
		best, last = max(best, s), s
	}
	for _, set := range []string{"32K", "48K"} {
		table.Cells = append(table.Cells, Within("DP-A10", fmt.Sprintf("speedup over basic, %s, 1024 agents", set), "", math.NaN(), speedup(set, 1024), 1, 3.06))
	}
	table.Cells = append(table.Cells,
		Within("", "best speedup", "", 1.87, best, 1.6, 2.3).Noted("the paper's Basic is some 10 %% faster than ours at 2048 agents and more; the bound by storage alone is 3"),
		Holds("DP-A10", "the speedup grows with the agents", grows),
		Holds("DP-A10", "the speedup grows with MaxLen", speedup("32K", 1024) < speedup("48K", 1024) && speedup("48K", 1024) < speedup("64K", 1024)))
	for _, n := range []int{1024, 2048} {
		table.Cells = append(table.Cells, Within("DP-A3", fmt.Sprintf("DualPath over oracle, 64K, %d agents", n), "", math.NaN(), d.jct(dp660(agentic.DualPath, "64K", n))/d.jct(dp660(agentic.Oracle, "64K", n)), 1, 1.15))
	}
	r.Table(table)

	fig := chart.Chart{Title: "DS 660B, 2P4D: job completion time", XLabel: "agents", YLabel: "s"}
	for _, set := range []string{"32K", "48K", "64K"} {
		for _, s := range systems {
			line := chart.Series{Name: fmt.Sprintf("%s, %v", set, s), Points: true}
			for _, n := range d.sizes()[set] {
				line.X, line.Y = append(line.X, float64(n)), append(line.Y, d.jct(dp660(s, set, n)))
			}
			fig.Series = append(fig.Series, line)
		}
	}
	r.Figure(Figure{Name: "dualpath-fig7", Title: "Figure 7: job completion time by agents and MaxLen", Chart: fig})
}

// ratios reports Figure 8 (P/D ratios), and the speedup bound if only storage is a bottleneck.
func (d *dpRuns) ratios(r *Report) {
	table := Table{Title: "P/D ratios, DS 27B", Kind: Fitted, Source: "DualPath, Figure 8", Command: dualPathCommand, Text: "64K, 2048 agents, 36 480 bytes of KV a token, 62 TFLOP/s a GPU."}
	jct := func(s agentic.System, p, dn int) float64 { return d.jct(dp27(s, p, dn)) }
	table.Cells = append(table.Cells,
		noted(Near("", "1P2D, basic", "s", 8300, jct(agentic.Basic, 1, 2), 0.1), dpFigureNote),
		noted(Near("", "1P2D, DualPath", "s", 3400, jct(agentic.DualPath, 1, 2), 0.1), dpFigureNote))
	mean := 0.0
	for _, c := range []struct {
		p, d          int
		paper, lo, hi float64
		note          string
	}{
		{1, 1, 1.78, 1.6, 2.0, ""}, {2, 1, math.NaN(), 1.3, 1.6, ""},
		{1, 2, 2.46, 2.1, 2.9, "the paper's best of all ratios, at a number of agents that is not printed"},
	} {
		s := jct(agentic.Basic, c.p, c.d) / jct(agentic.DualPath, c.p, c.d)
		mean += s / 3
		table.Cells = append(table.Cells, noted(Within("DP-A5", fmt.Sprintf("speedup over basic, %dP%dD", c.p, c.d), "", c.paper, s, c.lo, c.hi), c.note))
	}
	table.Cells = append(table.Cells,
		noted(Within("", "mean speedup", "", 1.64, mean, 1.4, 2.1), "the paper's mean is over numbers of agents that are not printed; ours is at saturation"),
		Within("DP-A3", "DualPath over oracle, 1P1D", "", math.NaN(), jct(agentic.DualPath, 1, 1)/jct(agentic.Oracle, 1, 1), 1.05, 2.0),
		Within("DP-A5", "basic, 1P1D over 1P2D", "", 1, jct(agentic.Basic, 1, 1)/jct(agentic.Basic, 1, 2), 0.97, 1.03),
		noted(Within("DP-A5", "DualPath 1P1D over basic 2P1D", "", 1, jct(agentic.DualPath, 1, 1)/jct(agentic.Basic, 2, 1), 0.88, 1.12), "the same storage bandwidth, but half the GPUs"),
		noted(Within("DP-A5", "DualPath 2P1D over 1P2D", "", 1, jct(agentic.DualPath, 2, 1)/jct(agentic.DualPath, 1, 2), 0.75, 1.25), "the same storage bandwidth, but twice the prefill GPUs"))
	r.Table(table)

	table = Table{
		Title: "The bound by storage alone", Kind: Predicted, Source: "DualPath, section 4.2", Command: dualPathCommand,
		Text: "Job time of +layerwise over that of DualPath, which can be at most (P+D)/P: with compute and the compute NICs out of the way (DS 660B, 64K, 1024 agents), and with each model's own.",
	}
	for _, pd := range dpBounds() {
		bound := float64(pd[0]+pd[1]) / float64(pd[0])
		for _, s := range []agentic.System{agentic.DualPath, agentic.DualPathSplit} {
			gain := d.jct(dpBoundCase(agentic.Layerwise, pd)) / d.jct(dpBoundCase(s, pd))
			table.Cells = append(table.Cells, Within("DP-A4", fmt.Sprintf("%v, %dP%dD, of the bound %v", s, pd[0], pd[1], bound), "", math.NaN(), gain/bound, 0.93, 1.02))
		}
	}
	for _, pd := range [][2]int{{1, 1}, {2, 1}, {1, 2}} {
		bound := float64(pd[0]+pd[1]) / float64(pd[0])
		table.Cells = append(table.Cells, Within("DP-4", fmt.Sprintf("DS 27B, %dP%dD, of the bound %v", pd[0], pd[1], bound), "", math.NaN(), jct(agentic.Layerwise, pd[0], pd[1])/jct(agentic.DualPath, pd[0], pd[1])/bound, 0.7, 1.02))
	}
	table.Cells = append(table.Cells, Within("DP-4", "DS 660B, 2P4D, of the bound 3", "", math.NaN(), d.jct(dp660(agentic.Layerwise, "64K", 2048))/d.jct(dp660(agentic.DualPath, "64K", 2048))/3, 0.4, 1.02))
	r.Table(table)
}

// overSeeds returns the mean and the standard deviation of f over the seeds.
func (d *dpRuns) overSeeds(f func(seed uint64) float64) (mean, std float64) {
	x := make([]float64, d.seeds)
	for i := range x {
		x[i] = f(uint64(i) + 1)
		mean += x[i] / float64(len(x))
	}
	for _, v := range x {
		std += (v - mean) * (v - mean) / float64(max(1, len(x)-1))
	}
	return mean, math.Sqrt(std)
}

// seeded returns a cell whose value is a mean over the seeds.
func (d *dpRuns) seeded(c Cell, f func(seed uint64) float64) Cell {
	c.Ours, c.Std = d.overSeeds(f)
	return c
}

// ablation reports the left part of Figure 12.
func (d *dpRuns) ablation(r *Report) {
	table := Table{
		Title: "Ablation, DS 660B 2P4D, 64K", Kind: Fitted, Source: "DualPath, section 7.5 and Figure 12", Command: dualPathCommand,
		Text: "Five seeds, each with its own trajectories. Every system but Basic has the compute quota (section A.4); they differ in who reads.",
	}
	printed := map[int]map[agentic.System]float64{
		1024: {agentic.Basic: 5400, agentic.Layerwise: 4250, agentic.RoundRobin: 3200, agentic.DualPath: 3000},
		2048: {agentic.Basic: 10100, agentic.Layerwise: 8750, agentic.RoundRobin: 6500, agentic.DualPath: 5450, agentic.Oracle: 4800},
	}
	fig := chart.Chart{Title: "Ablation: job completion time", YLabel: "s", Kind: chart.Bars, Categories: []string{"1024 agents", "2048 agents", "1024, paper", "2048, paper"}}
	for s := agentic.Basic; s <= agentic.Oracle; s++ {
		bars := chart.Series{Name: s.String()}
		var theirs []float64
		for _, n := range []int{1024, 2048} {
			paper, ok := printed[n][s]
			cell := Cell{Name: fmt.Sprintf("%d agents, %v", n, s), Unit: "s", Paper: paper, Low: 0.75 * paper, High: 1.25 * paper}
			if !ok {
				cell.Paper, cell.Low, cell.High = math.NaN(), 0, math.Inf(1)
			}
			cell = d.seeded(cell, func(seed uint64) float64 { return d.jct(dp660(s, "64K", n).with(seed)) })
			table.Cells = append(table.Cells, noted(cell, dpFigureNote))
			bars.Y, theirs = append(bars.Y, cell.Ours), append(theirs, cell.Paper)
		}
		bars.Y = append(bars.Y, theirs...)
		fig.Series = append(fig.Series, bars)
	}
	reduction := func(s agentic.System) func(uint64) float64 {
		return func(seed uint64) float64 {
			sum := 0.0
			for _, n := range []int{1024, 2048} {
				sum += 1 - d.jct(dp660(s, "64K", n).with(seed))/d.jct(dp660(agentic.Basic, "64K", n).with(seed))
			}
			return 100 * sum / 2
		}
	}
	note := "how much Basic loses to its HBM, which this is relative to, rests on 260 000 free tokens; the paper does not say how many there were"
	table.Cells = append(table.Cells,
		noted(d.seeded(Cell{ID: "DP-A2", Name: "reduction by layerwise prefill", Unit: "%", Paper: 17.21, Low: 8, High: 25}, reduction(agentic.Layerwise)), note),
		noted(d.seeded(Cell{ID: "DP-A2", Name: "and by both paths, in turn", Unit: "%", Paper: 38.19, Low: 30, High: 48}, reduction(agentic.RoundRobin)), note),
		noted(d.seeded(Cell{ID: "DP-A2", Name: "and by the scheduler", Unit: "%", Paper: 45.62, Low: 40, High: 55}, reduction(agentic.DualPath)), note),
		d.seeded(Cell{Name: "with one request read by both sides", Unit: "%", Paper: math.NaN(), Low: 40, High: 55}, reduction(agentic.DualPathSplit)))
	ordered := true
	for _, n := range []int{1024, 2048} {
		for seed := range uint64(d.seeds) {
			at := func(s agentic.System) float64 { return d.jct(dp660(s, "64K", n).with(seed + 1)) }
			ordered = ordered && at(agentic.Basic) > at(agentic.Layerwise) && at(agentic.Layerwise) > at(agentic.RoundRobin) &&
				at(agentic.RoundRobin) > at(agentic.DualPath) && at(agentic.DualPath) >= at(agentic.Oracle)
		}
	}
	table.Cells = append(table.Cells, Holds("DP-A1", "basic > layerwise > round robin > scheduler >= oracle, for every seed", ordered), d.conserved())
	r.Table(table)
	r.Figure(Figure{Name: "dualpath-fig12", Title: "Figure 12: what each technique brings", Chart: fig})
}

// conserved returns the cell DP-A12: in all offline runs of the ablation, the storage NICs read
// exactly the cached tokens.
func (d *dpRuns) conserved() Cell {
	exact := true
	for s := agentic.Basic; s < agentic.Oracle; s++ {
		for seed := range uint64(d.seeds) {
			res := d.of(dp660(s, "64K", 2048).with(seed + 1))
			read := int64(0)
			for _, n := range res.Read {
				read += n
			}
			exact = exact && read == res.Cached
		}
	}
	return Holds("DP-A12", "storage NICs read the cached tokens, no more and no less", exact)
}

// dpBalanceWindow is the length of a window of storage traffic. A window whose traffic is below the
// share dpBalanceFloor of the NICs' capacity is ignored.
const (
	dpBalanceWindow = 5 * time.Second
	dpBalanceFloor  = 0.3
)

// balance reports Figures 13 and 14.
func (d *dpRuns) balance(r *Report) {
	table := Table{
		Title: "Load balance", Kind: Predicted, Source: "DualPath, Figures 13 and 14", Command: dualPathCommand,
		Text: "Storage NICs: mean of max/avg over windows of 1 and of 5 s with a load above 30 %, in the first half of the job. Attention: mean of max/avg over the engines of a prefill step, in the first 5 % of the job. The paper's Figure 13 is of three machines, 1P2D, and has 1.53 in turn and 1.18 by the scheduler. Its window is not printed: ours of 5 s is compared with it.",
	}
	nic := func(c dpCase, nics int) float64 {
		res := d.of(c)
		return res.NICBalance(dpBalanceWindow, res.JCT/2, dpBalanceFloor, nics)
	}
	second := func(c dpCase, nics int) float64 {
		res := d.of(c)
		return res.NICBalance(time.Second, res.JCT/2, dpBalanceFloor, nics)
	}
	attention := func(c dpCase) float64 { res := d.of(c); return res.AttentionBalance(res.JCT / 20) }
	rr := "in turn, each prefill node of 2P4D reads a quarter of the bytes, 1.5 times the mean; the rest is which agents happen to meet"
	sched := "the paper's window is not printed, and ours depends on it: a window of 1 s holds some 20 whole prompts of a NIC"
	table.Cells = append(table.Cells,
		noted(d.seeded(Cell{ID: "DP-A6", Name: "storage NICs, round robin, DS 660B 2P4D", Paper: math.NaN(), Low: 1.45, High: 1.62}, func(seed uint64) float64 {
			return nic(dp660(agentic.RoundRobin, "64K", 1024).with(seed), 6)
		}), rr),
		noted(d.seeded(Cell{ID: "DP-A6", Name: "storage NICs, scheduler, DS 660B 2P4D", Paper: math.NaN(), Low: 1, High: 1.20}, func(seed uint64) float64 {
			return nic(dp660(agentic.DualPath, "64K", 1024).with(seed), 6)
		}), sched),
		d.seeded(Cell{Name: "storage NICs, split, DS 660B 2P4D", Paper: math.NaN(), Low: 1, High: 1.3}, func(seed uint64) float64 {
			return nic(dp660(agentic.DualPathSplit, "64K", 1024).with(seed), 6)
		}),
		noted(Within("DP-A6", "storage NICs, round robin, DS 27B 1P2D", "", 1.53, nic(dp27(agentic.RoundRobin, 1, 2), 3), 1.45, 1.62), rr),
		noted(Within("DP-A6", "storage NICs, scheduler, DS 27B 1P2D", "", 1.18, nic(dp27(agentic.DualPath, 1, 2), 3), 1, 1.20), sched),
		noted(Within("DP-A6", "storage NICs, scheduler, DS 660B 2P4D, windows of 1 s", "", math.NaN(), second(dp660(agentic.DualPath, "64K", 1024), 6), 1, 1.35), sched),
		noted(Within("DP-A6", "storage NICs, scheduler, DS 27B 1P2D, windows of 1 s", "", math.NaN(), second(dp27(agentic.DualPath, 1, 2), 3), 1, 1.35), sched),
		noted(Within("DP-A7", "attention, with the quota", "", 1.06, attention(dp660(agentic.DualPath, "64K", 1024)), 1, 1.10), "when all engines have more work than the quota allows they all reach it; a real kernel's time varies where the model's does not"),
		Within("DP-A7", "attention, without the quota", "", math.NaN(), attention(dp660(agentic.DualPath, "64K", 1024).noQuota()), 1.3, 5),
		Within("DP-A7", "attention, basic", "", math.NaN(), attention(dp660(agentic.Basic, "64K", 1024)), 1.3, 5))
	r.Table(table)

	fig := chart.Chart{Title: "Storage NICs: max/avg", XLabel: "s", YLabel: "max/avg"}
	for _, s := range []agentic.System{agentic.RoundRobin, agentic.DualPath, agentic.DualPathSplit} {
		res := d.of(dp660(s, "64K", 1024))
		at, ratio := res.BalanceSeries(15*time.Second, res.JCT/2)
		fig.Series = append(fig.Series, chart.Series{Name: s.String(), X: at, Y: ratio})
	}
	r.Figure(Figure{Name: "dualpath-fig13", Title: "Figure 13: balance of the storage NICs, windows of 15 s", Chart: fig})
}

// scaling reports Figure 9: longer appends, longer generations.
func (d *dpRuns) scaling(r *Report) {
	table := Table{
		Title: "Append and generation length, DS 660B 2P4D, 64K, 1024 agents", Kind: Predicted, Source: "DualPath, Figure 9", Command: dualPathCommand,
		Text: "Each round's length is multiplied and the trajectory cut at 64K, which leaves fewer rounds. The paper prints speedups of 1.82 to 1.99 over appends, without numbers of agents, and says that " +
			"DualPath and the oracle change only slightly. Here the speedups are near those, but both take up to 1.4 times as long: trajectories that ended below 64K grow. Longer generations leave the storage NICs idle, and the systems alike.",
	}
	systems := []agentic.System{agentic.Basic, agentic.DualPath, agentic.Oracle}
	for _, kind := range []string{"append", "gen"} {
		at := func(s agentic.System, f float64) float64 {
			if kind == "append" {
				return d.jct(dp660(s, "64K", 1024).appends(f))
			}
			return d.jct(dp660(s, "64K", 1024).generates(f))
		}
		lo := 1.6 // the lowest accepted speedup: for appends a little below the published range; for generations 1, because the systems converge
		if kind == "gen" {
			lo = 1
		}
		fig := chart.Chart{Title: kind + " length: job completion time", XLabel: "factor", YLabel: "s"}
		for _, s := range systems {
			line := chart.Series{Name: s.String(), Points: true}
			for i, f := range dpFactors() {
				line.X, line.Y = append(line.X, f), append(line.Y, at(s, f))
				if s != agentic.Basic && i > 0 {
					table.Cells = append(table.Cells, Within("", fmt.Sprintf("%v, %s x%v over x1", s, kind, f), "", math.NaN(), line.Y[i]/line.Y[0], 0.6, 1.6))
				}
			}
			fig.Series = append(fig.Series, line)
		}
		for _, f := range dpFactors() {
			table.Cells = append(table.Cells, Within("", fmt.Sprintf("speedup over basic, %s x%v", kind, f), "", math.NaN(), at(agentic.Basic, f)/at(agentic.DualPath, f), lo, 2.3))
		}
		r.Figure(Figure{Name: "dualpath-fig9-" + kind, Title: "Figure 9: " + kind + " length", Chart: fig})
	}
	r.Table(table)
}

// steady returns the measurements of the last third of an online run.
func (d *dpRuns) steady(o dpOnline) agentic.Window { return d.results[o.key()].Steady(o.horizon) }

// online reports Figures 10 to 12: capacity, latencies, working set.
func (d *dpRuns) online(r *Report) {
	table := Table{
		Title: "Online", Kind: Fitted, Source: "DualPath, section 7.4 and Figure 10", Command: dualPathCommand,
		Text: "Capacity: the highest rate, to 0.025 agents/s, at which no window of 150 s of 90 minutes has a mean TTFT above 4 s or a mean TPOT above 50 ms. Latencies are means over the last half hour.",
	}
	systems := []agentic.System{agentic.Basic, agentic.DualPath, agentic.Oracle}
	capacity := func(c dpCase) float64 { return d.capacities[c.key()] }
	model := dpOnlineCase
	names := [2]string{"DS 660B 2P4D", "DS 27B 1P1D"}
	printed := [2][2]float64{{0.20, 0.45}, {0.3, 0.5}}
	if !d.quick {
		for m := range names {
			for i, s := range systems {
				ours := capacity(model(s, m))
				if i < 2 {
					table.Cells = append(table.Cells, noted(Within("", fmt.Sprintf("%s, %v: capacity", names[m], s), "agents/s", printed[m][i], ours, printed[m][i]*0.7, printed[m][i]*1.3), dpFigureNote))
				} else {
					table.Cells = append(table.Cells, Within("", fmt.Sprintf("%s, %v: capacity", names[m], s), "agents/s", math.NaN(), ours, 0.1, 1.2))
				}
			}
		}
		gain := func(m int) float64 {
			return capacity(model(agentic.DualPath, m)) / capacity(model(agentic.Basic, m))
		}
		table.Cells = append(table.Cells,
			noted(Within("DP-A9", "DS 660B: capacity over basic's", "", 2.25, gain(0), 1.8, 3), "a capacity is a step of 0.025 wide, 15 % of Basic's"),
			noted(Within("DP-A9", "DS 27B: capacity over basic's", "", 1.67, gain(1), 1.5, 2.2), "a capacity is a step of 0.025 wide; storage alone would allow 2"))
	}
	at := func(s agentic.System, m int, aps float64) agentic.Window {
		return d.steady(dpOnline{model(s, m), aps, agentic.DefaultHorizon})
	}
	seeds := func(f func(agentic.Window) float64) func(uint64) float64 {
		return func(seed uint64) float64 {
			return f(d.steady(dpOnline{dp660(agentic.DualPath, "64K", 0).with(seed), 0.4, agentic.DefaultHorizon}))
		}
	}
	load := "a mean at nine tenths of capacity, where it depends on the trajectories; the paper's are not known"
	table.Cells = append(table.Cells,
		noted(d.seeded(Cell{Name: "DS 660B, DualPath at 0.4: TTFT", Unit: "s", Paper: 1.739, Low: 1.2, High: 2.4, Kind: Predicted}, seeds(agentic.Window.MeanTTFT)), load),
		noted(d.seeded(Cell{Name: "DS 660B, DualPath at 0.4: first to second token", Unit: "s", Paper: 0.228, Low: 0.05, High: 0.3, Kind: Predicted}, seeds(agentic.Window.MeanTTST)),
			"the rest of the transfer, the copy into the decode engine's HBM, and one step; what else the paper's includes is not printed"),
		noted(d.seeded(Cell{Name: "DS 660B, DualPath at 0.4: TPOT", Unit: "s", Paper: 0.039, Low: 0.015, High: 0.05, Kind: Predicted}, seeds(agentic.Window.MeanTPOT)),
			"the decode step was fitted to job times, which do not depend on it much; the paper's engines have other work between steps"))
	for _, aps := range d.rates() {
		if aps > 0.4 {
			continue // at higher rates, requests queue in both systems
		}
		table.Cells = append(table.Cells, Within("DP-A9", fmt.Sprintf("DS 660B at %v: TTFT of DualPath over oracle's", aps), "", math.NaN(), at(agentic.DualPath, 0, aps).MeanTTFT()/at(agentic.Oracle, 0, aps).MeanTTFT(), 1, 1.15).As(Predicted))
	}
	if !d.quick {
		table.Cells = append(table.Cells,
			Within("", "DS 27B at 0.3: TTFT of DualPath over oracle's", "", math.NaN(), at(agentic.DualPath, 1, 0.3).MeanTTFT()/at(agentic.Oracle, 1, 0.3).MeanTTFT(), 1, 1.25).As(Predicted))
	}
	table.Cells = append(table.Cells,
		Holds("", "at 0.2, beyond Basic's capacity, its waiting grows and DualPath's does not",
			at(agentic.Basic, 0, 0.2).Queued+at(agentic.Basic, 0, 0.2).Reading > 10*(at(agentic.DualPath, 0, 0.2).Queued+at(agentic.DualPath, 0, 0.2).Reading)).As(Predicted))
	for _, w := range []struct{ aps, paper float64 }{{0.1, 69}, {0.45, 681}} {
		res := d.results[dpOnline{dp660(agentic.DualPath, "64K", 0), w.aps, agentic.DefaultHorizon}.key()]
		if res == nil {
			continue // a quick run skips this rate
		}
		kv := float64(agentic.DeepSeek660B().KVBytes)
		_, spec := d.set("64K", 1)
		set := w.aps * res.AgentTime.Seconds() / float64(res.Agents) * spec.Total / 2 * kv / 1e9
		table.Cells = append(table.Cells, noted(Within("", fmt.Sprintf("working set at %v agents/s", w.aps), "GB", w.paper, set, w.paper*0.4, w.paper*2).As(Predicted),
			"rate x agents' time x half of the total length; the paper's numbers imply 43 to 49 KB a token, its job times 78 KB"))
	}
	r.Table(table)

	for m, name := range names[:d.onlineModels()] {
		fig := chart.Chart{Title: name + ": TTFT", XLabel: "agents/s", YLabel: "s", LogY: true}
		for _, s := range systems {
			line := chart.Series{Name: s.String(), Points: true}
			for _, aps := range d.rates() {
				if res := d.results[(dpOnline{model(s, m), aps, agentic.DefaultHorizon}).key()]; res != nil {
					if ttft := res.Steady(agentic.DefaultHorizon).MeanTTFT(); ttft > 0 {
						line.X, line.Y = append(line.X, aps), append(line.Y, ttft)
					}
				}
			}
			fig.Series = append(fig.Series, line)
		}
		r.Figure(Figure{Name: fmt.Sprintf("dualpath-fig10-%d", m+1), Title: "Figure 10: mean TTFT by rate, " + name, Chart: fig})
	}
}

// agentTime reports Figure 11, and the left part of Figure 12.
func (d *dpRuns) agentTime(r *Report) {
	table := Table{
		Title: "Time of an agent, and what a first token waits for, DS 660B 2P4D", Kind: Predicted, Source: "DualPath, Figures 11 and 12 (left)", Command: dualPathCommand,
		Text: "The mean over the agents that ended within 90 minutes, from arrival to the last token; the parts of the TTFT over the last half hour. The paper prints no values of either; it says that DualPath's parts stay as they are when the rate grows, while Basic's waiting grows.",
	}
	fig := chart.Chart{Title: "DS 660B, 2P4D: mean time of an agent", XLabel: "agents/s", YLabel: "s"}
	for _, s := range []agentic.System{agentic.Basic, agentic.DualPath, agentic.Oracle} {
		line := chart.Series{Name: s.String(), Points: true}
		for _, aps := range d.rates() {
			o := dpOnline{dp660(s, "64K", 0), aps, agentic.DefaultHorizon}
			res := d.results[o.key()]
			if res == nil || res.Agents == 0 {
				continue // this rate is far above the capacity of Basic (without dual path)
			}
			mean := res.AgentTime.Seconds() / float64(res.Agents)
			line.X, line.Y = append(line.X, aps), append(line.Y, mean)
			row, w := fmt.Sprintf("%v at %v: ", s, aps), d.steady(o)
			table.Cells = append(table.Cells, Within("", row+"time of an agent", "s", math.NaN(), mean, 100, agentic.DefaultHorizon.Seconds()))
			if w.Rounds == 0 {
				continue
			}
			for _, p := range []struct {
				name string
				sum  float64
			}{{"waiting for engines", w.Queued}, {"reading", w.Reading}, {"prefill", w.Prefill}} {
				table.Cells = append(table.Cells, Within("", row+p.name, "s", math.NaN(), p.sum/float64(w.Rounds), 0, agentic.DefaultHorizon.Seconds()))
			}
		}
		fig.Series = append(fig.Series, line)
	}
	low, high := d.steady(dpOnline{dp660(agentic.DualPath, "64K", 0), 0.1, agentic.DefaultHorizon}), d.steady(dpOnline{dp660(agentic.DualPath, "64K", 0), 0.4, agentic.DefaultHorizon})
	table.Cells = append(table.Cells, Within("", "dualpath: waiting and reading at 0.4, less that at 0.1", "s", math.NaN(),
		(high.Queued+high.Reading)/float64(high.Rounds)-(low.Queued+low.Reading)/float64(low.Rounds), -0.1, 0.5))
	r.Table(table)
	r.Figure(Figure{Name: "dualpath-fig11", Title: "Figure 11: mean time of an agent by rate", Chart: fig})
}

// large reports Table 3.
func (d *dpRuns) large(r *Report) {
	if d.quick {
		return
	}
	table := Table{
		Title: "Large clusters, DS 660B", Kind: Predicted, Source: "DualPath, Table 3", Command: dualPathCommand,
		Text: "Offline with the 48K set, which fits the printed 3 167 s best; 48P96D is 1152 engines and 49 152 agents. Online 0.4 agents/s for each 2P4D, the last third of an hour.",
	}
	c := dp660(agentic.DualPath, "48K", 2048)
	one, large := d.jct(c), d.jct(c.scaled(dpLargeOffline))
	trace := "which trajectories the paper ran is not printed: 3 167 s cannot be its 64K set, which takes 5 400 s in Figure 7"
	table.Cells = append(table.Cells,
		noted(Near("", "2P4D, 2048 agents", "s", 3167, one, 0.25), trace).As(Fitted), // the set of agents was chosen to match this value
		noted(Near("", "48P96D, 49152 agents", "s", 3201, large, 0.25), trace).As(Fitted),
		Within("DP-A8", "48P96D over 2P4D", "", 3201./3167, large/one, 0.95, 1.05).As(Fitted),
		Within("DP-A8", "8P16D over 2P4D", "", math.NaN(), d.jct(c.scaled(4))/one, 0.95, 1.05))
	at := func(k int) agentic.Window {
		return d.steady(dpOnline{dp660(agentic.DualPath, "64K", 0).scaled(k), 0.4, dpLargeHorizon}.named("an hour"))
	}
	few, many := at(1), at(dpLargeOnline)
	note := "see the online table; an hour's last third"
	table.Cells = append(table.Cells,
		Within("", "2P4D, 0.4 agents/s: TTFT", "s", math.NaN(), few.MeanTTFT(), 1.0, 2.4), // the online table has the published value
		noted(Within("", "44P88D, 8.8 agents/s: TTFT", "s", 1.847, many.MeanTTFT(), 1.0, 2.4), note),
		noted(Within("", "44P88D over 2P4D: TTFT", "", 1.847/1.739, many.MeanTTFT()/few.MeanTTFT(), 0.75, 1.25), "the arrivals of 22 clusters are smoother than those of one"))
	r.Table(table)
	fig := chart.Chart{Title: "48P96D, 49152 agents", XLabel: "s", YLabel: "thousand tokens/s"}
	line := chart.Series{Name: "generated"}
	for i, w := range d.of(c.scaled(dpLargeOffline)).Series {
		line.X = append(line.X, (float64(i)+0.5)*agentic.SeriesWindow.Seconds())
		line.Y = append(line.Y, float64(w.Tokens)/agentic.SeriesWindow.Seconds()/1000)
	}
	fig.Series = append(fig.Series, line)
	r.Figure(Figure{Name: "dualpath-large", Title: "The large offline run: tokens generated, counted when their round ends", Chart: fig})
}

// assumptions reports how the job time changes if one assumption of the simulation is reversed.
func (d *dpRuns) assumptions(r *Report) {
	table := Table{
		Title: "What is not printed, taken the other way", Kind: Predicted, Source: "DualPath, sections 6.2, 7 and A.4", Command: dualPathCommand,
		Text: "Job time of DualPath (DS 660B 2P4D, 64K, 1024 agents) over that of the tables above, with one assumption changed.",
	}
	base := d.jct(dp660(agentic.DualPath, "64K", 1024))
	for _, c := range dpAssumptions() {
		table.Cells = append(table.Cells, Within("", c.variant, "", math.NaN(), d.jct(c)/base, 0.8, 1.6))
	}
	r.Table(table)
}
