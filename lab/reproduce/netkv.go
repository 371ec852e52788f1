package reproduce

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/sim/netkv"
	"github.com/penstock-kv/penstock/sim/workload"
)

// NetKV returns the suite of the paper that package netcost implements, on the cluster of package
// sim/netkv.
func NetKV() Suite {
	return Suite{Name: "netkv", Paper: "NetKV: Network-Aware Decode Instance Selection for Disaggregated LLM Inference (arXiv 2606.03910)", Drives: netkvDrives, Run: func(ctx context.Context, r *Report) error {
		return netKV(ctx, r, netkv.Windows(), netkvSeeds)
	}}
}

// netkvDrives is the suite's Drives.
const netkvDrives = "the chooser and the oracle of `dualpath/netcost`. A planner node that is given the network chooses each decode engine by the same chooser (`netcost.Planner`); prefill engines, reads and queues are decided by DualPath's planner there and are not part of this suite."

const (
	netkvTrace   = "mooncake_conversation_trace.jsonl.gz"
	netkvCommand = "penstock sim reproduce netkv"
	netkvSeeds   = 5
)

// netkvLoads are the loads of Table II.
var netkvLoads = []float64{1, 2, 2.5}

// The parts of notes and texts that occur several times.
const (
	otherTrace     = "another trace"
	otherTraceText = "The paper's trace of 23 608 requests is not to be had: ours is Mooncake's conversation trace, for retrieval at 0.455 of its lengths, so that its longest input has 57K tokens."
	ownCount       = "eq. 4 divides a tier among all transfers of one source, which have an uplink for each NIC and rarely share one"
)

// netkvStudies runs studies and returns their results by key.
type netkvStudies struct {
	trace   []workload.Arrival
	windows []time.Duration
	seeds   int
	keys    []string
	studies []netkv.Study
	results map[string]*netkv.Summary
}

// want adds a study under a key. It does nothing if the key has a study.
func (n *netkvStudies) want(key string, s netkv.Study) {
	if slices.Contains(n.keys, key) {
		return
	}
	s.Seeds = n.seeds
	if s.Windows == nil {
		s.Windows = n.windows
	}
	n.keys, n.studies = append(n.keys, key), append(n.studies, s)
}

// run runs the added studies.
func (n *netkvStudies) run(ctx context.Context, r *Report) error {
	out := make([]*netkv.Summary, len(n.studies))
	err := r.Each(ctx, "NetKV clusters", len(n.studies), func(ctx context.Context, i int) error {
		s, err := n.studies[i].Run(ctx, n.trace)
		out[i] = s
		return err
	})
	for i, k := range n.keys {
		n.results[k] = out[i]
	}
	return err
}

// of returns the result of a study.
func (n *netkvStudies) of(format string, args ...any) *netkv.Summary {
	s := n.results[fmt.Sprintf(format, args...)]
	if s == nil {
		panic("reproduce: no study " + fmt.Sprintf(format, args...)) // a table uses a study that was not added
	}
	return s
}

// gain compares a with than: it returns by how many percent the TTFT of a is lower.
func gain(a, than *netkv.Summary) float64 {
	return 100 * (1 - a.TTFT.Seconds()/than.TTFT.Seconds())
}

// millis returns a duration in ms.
func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// The values of the parameters that the experiments vary.
var (
	netkvLengths = []int{1024, 4096, 8192, 16384, 32768, 65536}
	netkvRatios  = []float64{1, 2, 4, 8}
	netkvBacks   = []float64{0, 0.05, 0.1, 0.2, 0.4}
	netkvFresh   = []time.Duration{100 * time.Millisecond, time.Second, 10 * time.Second, 60 * time.Second}
	netkvShares  = []float64{0, 0.3, 0.5, 0.7, 0.9}
	netkvPods    = []int{2, 4, 8, 16, 32}
	netkvPorts   = []float64{50e9, 25e9, 18.75e9, 12.5e9}
)

// netKV reports every table, over the given windows of the trace and seeds.
func netKV(ctx context.Context, r *Report, windows []time.Duration, seeds int) error {
	path, err := r.Trace(netkvTrace)
	if err != nil {
		return err
	}
	trace, err := workload.ReadArrivals(path)
	if err != nil {
		return err
	}
	n := &netkvStudies{trace: trace, windows: windows, seeds: seeds, results: map[string]*netkv.Summary{}}
	if err := n.plan(); err != nil {
		return err
	}
	if err := n.run(ctx, r); err != nil {
		return err
	}
	if err := errors.Join(netkvClosed(r), netkvNetwork(r)); err != nil {
		return err
	}
	for _, table := range []func(*netkvStudies, *Report){netkvLoad, netkvOrders, netkvContext, netkvTopology, netkvStale, netkvSharing, netkvAblation, netkvPortWidth, netkvScale, netkvTiers, netkvMissing} {
		table(n, r)
	}
	return nil
}

// plan adds the study of every cluster that a table needs. The studies of a table differ only in
// the parameter that the row or column names, and in the parameters of the workload.
func (n *netkvStudies) plan() error {
	rag, err := netkv.PaperWorkload("rag")
	if err != nil {
		return err
	}
	for _, w := range netkv.PaperWorkloads() {
		for _, load := range netkvLoads {
			for _, p := range []netcost.Policy{netcost.RoundRobin, netcost.LoadAware, netcost.CacheLoad, netcost.TopoOnly, netcost.Static, netcost.Full} {
				n.want(fmt.Sprintf("%s %v %v", w.Name, load, p), netkv.Study{Workload: w, Policy: p, Load: load})
			}
		}
	}
	sweep := func(key string, policies []netcost.Policy, s netkv.Study) {
		if s.Workload.Name == "" {
			s.Workload = rag
		}
		for _, p := range policies {
			s.Policy, s.Load = p, 1
			n.want(fmt.Sprintf("%s %v", key, p), s)
		}
	}
	for _, l := range netkvLengths {
		sweep(fmt.Sprintf("length %d", l), []netcost.Policy{netcost.RoundRobin, netcost.CacheLoad, netcost.Full}, netkv.Study{Input: l})
	}
	for _, ratio := range netkvRatios {
		for _, bg := range netkvBacks {
			sweep(fmt.Sprintf("ratio %v %v", ratio, bg), []netcost.Policy{netcost.CacheLoad, netcost.Full}, netkv.Study{
				Edit: func(o *netkv.Options) { o.Oversubscription, o.Background = ratio, bg }})
		}
	}
	for _, every := range netkvFresh {
		sweep(fmt.Sprintf("refresh %v", every), []netcost.Policy{netcost.CacheLoad, netcost.Static, netcost.Full}, netkv.Study{
			Edit: func(o *netkv.Options) { o.Background, o.Swing, o.Refresh = 0.2, 2*time.Second, every }})
	}
	for _, port := range netkvPorts {
		edit := func(o *netkv.Options) { o.Port = port }
		ladder := []netcost.Policy{netcost.RoundRobin, netcost.CacheLoad, netcost.TopoOnly, netcost.Static}
		sweep(fmt.Sprintf("port %v", port), ladder, netkv.Study{Edit: edit})
		sweep(fmt.Sprintf("port %v, 32K", port), ladder, netkv.Study{Edit: edit, Input: 32768})
		for _, p := range ladder {
			n.want(fmt.Sprintf("port %v, 250 %% %v", port, p), netkv.Study{Workload: rag, Policy: p, Load: 2.5, Edit: edit})
		}
	}
	for _, share := range netkvShares {
		w := rag
		w.Share = share
		sweep(fmt.Sprintf("share %v", share), []netcost.Policy{netcost.CacheAware, netcost.CacheLoad, netcost.Full}, netkv.Study{Workload: w})
	}
	for _, pods := range netkvPods {
		w := rag
		w.Capacity *= float64(pods) / 2
		// The largest cluster takes 2000 requests of a window. The trace has only about 2000
		// requests after its first 20 min, so at most the first three windows are used.
		sweep(fmt.Sprintf("pods %d", pods), []netcost.Policy{netcost.CacheLoad, netcost.Full}, netkv.Study{
			Workload: w, Windows: n.windows[:min(3, len(n.windows))], Edit: func(o *netkv.Options) { o.Pods = pods }})
	}
	return nil
}
