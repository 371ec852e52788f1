package main

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/planners"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/server/config"
)

func newPlanCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Show the planner's decisions and state, change weights and roles, and predict clusters",
	}
	return noun(cmd, newPlanExplain(w), newPlanTop(w), newPlanStatus(w), newPlanBump(w), newPlanRoles(w), newPlanAnalyze(), newPlanPrfaaS(), newPlanRedistribute(), newPlanAdvise(w), newPlanNetwork(w))
}

// addPlannerFlags adds the flags of a client of a planner to cmd.
func addPlannerFlags(cmd *cobra.Command, w world) *connection {
	return addEndpointFlags(cmd, w, endpoint{flag: "planner", variable: "PENSTOCK_PLANNER", def: config.DefaultPlanner().Listen, usage: "gRPC address of the planner, host:port; of several planners that elect a leader all addresses, commas between", command: "penstock planner"})
}

func newPlanExplain(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "explain REQUEST",
		Short: "Explain the decisions about one request: the engines, the reads, the reasons",
		Long: `Print the decisions about one request in their order, each with its inputs. REQUEST is
the id that the gateway submitted; the planner keeps the last requests (schedule.explain).`,
		Args: args(cobra.ExactArgs(1)),
	}
	c := addPlannerFlags(cmd, w)
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		return c.planner(cmd, func(ctx context.Context, conn *planners.Conn) error {
			r, err := pb.NewPlannerClient(conn).Explain(ctx, &pb.ExplainRequest{Request: names[0]})
			if err != nil {
				return err
			}
			return outputOf(cmd).emit(r, func(t *table) {
				for _, l := range r.Lines {
					t.row(fmt.Sprintf("%.3f s", float64(l.Microseconds)/1e6), l.Text)
				}
				if r.Lost > 0 {
					t.row("", fmt.Sprintf("and %d more", r.Lost))
				}
				if r.Serving {
					t.row("", "it is being served")
				}
			})
		})
	}
	return cmd
}

func newPlanTop(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the groups, engines, storage and compute NICs and waiting requests of the planner",
		Long: `Print the work of every engine and the reads of every storage NIC: the last report of the
leader, plus later assignments. Then print the bytes of every compute NIC since the start of
its engine, and their rates between the last two reports: the NICs with the highest rates
first, at most --limit. Then print the requests that wait, by tenant and priority,
with their work in tokens; at most 32 lines. With --every the output is repeated until
interrupted.`,
		Example: `  penstock plan top --every 1s`,
		Args:    args(cobra.NoArgs),
	}
	c := addPlannerFlags(cmd, w)
	limit := cmd.Flags().Int("limit", topNICs, "print at most this many compute NICs, the ones with the highest rates; 0: all")
	every := cmd.Flags().Duration("every", 0, "interval of repeated output; 0: print once")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *limit < 0 {
			return usagef("--limit %d: give the number of compute NICs, or 0 for all", *limit)
		}
		if *every > 0 {
			c.waitForever(cmd)
		}
		return c.planner(cmd, func(ctx context.Context, conn *planners.Conn) error {
			planner, out := pb.NewPlannerClient(conn), outputOf(cmd)
			for {
				r, err := planner.Top(ctx, &pb.TopRequest{})
				if err != nil {
					return err
				}
				if *every <= 0 {
					return out.emit(r, func(t *table) { printTop(t, r, *limit) })
				}
				if out.json {
					err = out.emitLine(r)
				} else {
					err = out.emit(r, func(t *table) { printTop(t, r, *limit) })
				}
				if err != nil {
					return err
				}
				select {
				case <-time.After(*every):
				case <-ctx.Done():
					return nil
				}
			}
		})
	}
	return cmd
}

// topNICs is the number of compute NICs that plan top prints by default.
const topNICs = 32

// printTop prints the planner's view of groups and engines as a table, with at most limit compute NICs; 0: all.
func printTop(t *table, r *pb.TopResponse, limit int) {
	t.row("group", "role", "engine", "node", "tokens", "requests", "hbm free", "read queue", "read tokens/s")
	for _, g := range r.Groups {
		nodes := make(map[string]*pb.TopResponse_Node)
		for _, n := range g.Nodes {
			nodes[n.Node] = n
		}
		role := "prefill"
		if g.Role == pb.Side_SIDE_DECODE {
			role = fmt.Sprintf("decode, %d queued", g.Queued)
		}
		for _, e := range g.Engines {
			free := ""
			if g.Role == pb.Side_SIDE_DECODE {
				free = count(e.HbmFreeTokens)
			}
			n := nodes[e.Node]
			t.row(g.Group, role, e.Engine, e.Node, count(e.Tokens), count(e.Requests), free, count(n.GetReadQueueTokens()), count(int64(n.GetReadTokensPerSecond())))
		}
	}
	printComputeNICs(t, r, limit)
	if len(r.Tenants) > 0 {
		t.row()
		t.row("tenant", "priority", "weight", "waiting", "tokens")
		for _, v := range r.Tenants {
			t.row(strconv.Quote(v.Tenant), v.Priority, v.Weight, count(v.Waiting), count(v.Tokens))
		}
		if r.MoreTenants > 0 {
			t.row(count(r.MoreTenants) + " more")
		}
	}
	t.row()
	t.row("serving", count(r.Serving), "waiting", count(r.Waiting), "loading", count(r.Loading))
	t.row("submitted", count(r.Submitted), "finished", count(r.Finished), "rejected", count(r.Rejected), "planned again", count(r.Replanned))
	t.row("prefill side", count(r.PrefillSideTokens), "decode side", count(r.DecodeSideTokens), "splits", count(r.Splits))
	t.row("first token late", count(r.Late), "prefill tokens/s", count(int64(r.PrefillTokensPerSecond)))
	t.row("cuts", count(r.Cuts), "hedges", count(r.Hedges), "recomputed", count(r.Recomputes))
}

// printComputeNICs prints the compute NICs, if the leaders report any: the highest rates first, at most limit (0:
// all), the sums of the bytes of all, and the highest rates over the mean.
func printComputeNICs(t *table, r *pb.TopResponse, limit int) {
	rate := func(v *float64) string {
		if v == nil {
			return "unknown"
		}
		return count(int64(*v))
	}
	over := func(v float64) string {
		if v == 0 {
			return "idle"
		}
		return fmt.Sprintf("%.1f", v)
	}
	type nic struct {
		engine *pb.TopResponse_Engine
		*pb.TopResponse_NIC
	}
	var all []nic
	var sent, received uint64
	for _, g := range r.Groups {
		for _, e := range g.Engines {
			for _, n := range e.ComputeNics {
				all = append(all, nic{e, n})
				sent, received = sent+n.Counters.GetBytesOut(), received+n.Counters.GetBytesIn()
			}
		}
	}
	if len(all) == 0 {
		return
	}
	slices.SortStableFunc(all, func(a, b nic) int {
		return cmp.Compare(b.GetOutBytesPerSecond()+b.GetInBytesPerSecond(), a.GetOutBytesPerSecond()+a.GetInBytesPerSecond())
	})
	shown := all
	if limit > 0 {
		shown = all[:min(limit, len(all))]
	}
	t.row()
	t.row("engine", "node", "compute nic", "sent bytes/s", "received bytes/s", "sent", "received")
	for _, n := range shown {
		c := n.Counters
		t.row(n.engine.Engine, n.engine.Node, c.GetNic(), rate(n.OutBytesPerSecond), rate(n.InBytesPerSecond), count(c.GetBytesOut()), count(c.GetBytesIn()))
	}
	if more := len(all) - len(shown); more > 0 {
		t.row(count(int64(more)) + " more")
	}
	t.row("all", "", "", "", "", count(sent), count(received))
	t.row("highest over mean", "", "", over(r.ComputeOutMostOverMean), over(r.ComputeInMostOverMean))
}

// planAnalysis is the output of `penstock plan analyze`.
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
		Short: "Compute the range of P/D in which the storage NICs are the bottleneck",
		Long: `Compute the load of each compute NIC and of each node's memory when all storage NICs of a
cluster of P prefill and D decode nodes are saturated. The ratio P/D is safe if no load
exceeds its capacity; then dual path reads with (P+D)/P times the storage bandwidth of
prefill alone. Otherwise the first bottleneck sets the share of the storage bandwidth that
can be reached (DualPath, section 4.2).

The load is assumed to be balanced over the nodes and over the GPUs of a node. Tokens that
missed the cache are not counted.`,
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
	_ = cmd.MarkFlagRequired("prefill") // the flags were defined above
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

// planAnalysisOf converts an analysis for output. JSON has no infinity, so a range without a
// solution is [-1, -1].
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

// print writes the analysis as a table.
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
