package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/membership"
)

// rebalanced is the output of cluster rebalance. Plan is set by a dry run.
type rebalanced struct {
	Nodes []string       `json:"nodes"`
	Done  bool           `json:"done"`
	Plan  []nodeTransfer `json:"plan,omitempty"`
}

// nodeTransfer is the part of a node in a rebalance.
type nodeTransfer struct {
	Node      string `json:"node"`
	OutBlocks int64  `json:"out_blocks"`
	OutBytes  int64  `json:"out_bytes"`
	InBlocks  int64  `json:"in_blocks"`
	InBytes   int64  `json:"in_bytes"`
}

func newClusterRebalance(w world, c *connection) *cobra.Command {
	var wait, dryRun, stop bool
	var rate int64
	cmd := &cobra.Command{
		Use:   "rebalance [NODE...]",
		Short: "Copy to nodes that have joined the sequences whose homes they are",
		Long: `Copy to nodes that have joined the cluster the sequences whose homes they are, in the background.
Without it these sequences are misses until engines store them again. Meanwhile clients
find them at the old and at the new node.

Without names, the command chooses each serving node whose fill is below 0.8 times the fill of all
serving nodes together, as is the fill of a node that has joined, and each node to which an order
copies already. With names, it takes the named nodes.

Each other node copies the hottest sequences first, each from its first block on. The copies are
verified, and limited by --rate for each node. Blocks that the new nodes have already are not
sent: a node that is restarted meanwhile continues, and so does a repeated rebalance. The
copies wait for a node that is down, until it is up again or removed. The old nodes keep their
blocks, and evict them before all others. penstock cluster members shows the progress.

With --wait, the exit code is 5 if another command ends the copies or gives them other nodes.`,
		Args:              args(cobra.ArbitraryArgs),
		ValidArgsFunction: c.completeMembers,
	}
	f := cmd.Flags()
	f.BoolVar(&wait, "wait", false, "return when the nodes have all sequences; without --timeout, wait for ever")
	f.BoolVar(&dryRun, "dry-run", false, "print what each node would send and receive, and change nothing")
	f.BoolVar(&stop, "stop", false, "end the copies; copied blocks stay where they are")
	f.Var(sizeFlag{&rate}, "rate", "maximum bytes per second of the copies of each node; 0: the setting cluster.move_rate of the node")
	cmd.MarkFlagsMutuallyExclusive("wait", "dry-run", "stop")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		if stop && len(names) > 0 {
			return usagef("give nodes or --stop, and not both")
		}
		if wait && !cmd.Flags().Changed("timeout") {
			c.timeout = 0
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			out := rebalanced{Nodes: names}
			if !stop && len(names) == 0 {
				list, err := a.ListMembers(ctx, &pb.ListMembersRequest{})
				if err != nil {
					return err
				}
				if names = emptier(list.GetMembers()); len(names) == 0 {
					out.Nodes = []string{}
					return outputOf(cmd).emit(out, func(t *table) {
						fmt.Fprintf(t, "nothing to copy: each serving node has at least %v times the fill of all of them together\n", emptierBelow)
					})
				}
				out.Nodes = names
			}
			if dryRun {
				plan, err := c.rebalancePlan(ctx, a, names)
				if err != nil {
					return err
				}
				out.Plan = plan
				return outputOf(cmd).emit(out, func(t *table) {
					t.row("NODE", "OUT", "BLOCKS OUT", "IN", "BLOCKS IN")
					for _, x := range plan {
						t.row(x.Node, size(x.OutBytes), count(x.OutBlocks), size(x.InBytes), count(x.InBlocks))
					}
				})
			}
			order, err := a.FillMembers(ctx, &pb.FillMembersRequest{Names: names, BytesPerSecond: rate})
			if err != nil {
				return err
			}
			if wait {
				if err := untilFilled(ctx, w, a, names, order.GetRevision()); err != nil {
					return err
				}
				out.Done = true
			}
			return outputOf(cmd).emit(out, func(t *table) { fmt.Fprintln(t, out.words()) })
		})
	}
	return cmd
}

func (r rebalanced) words() string {
	switch {
	case len(r.Nodes) == 0:
		return "the copies end"
	case r.Done:
		return "rebalanced to " + strings.Join(r.Nodes, ", ") + ": the nodes have their sequences"
	}
	return "sequences are copied to " + strings.Join(r.Nodes, ", ") + "; penstock cluster members shows the progress"
}

// emptierBelow is the part of the fill of all nodes together below which a node is rebalanced to. It is the
// inverse of the factor by which the fill of a node may exceed that of all nodes before new sequences pass it over.
const emptierBelow = 0.8

// emptier returns the serving nodes to which an order copies already, or whose fill is below emptierBelow times the fill of
// all serving nodes together.
func emptier(members []*pb.Member) (names []string) {
	serving := slices.DeleteFunc(slices.Clone(members), func(m *pb.Member) bool { return m.GetState() != string(membership.Serving) })
	var used, capacity float64
	for _, m := range serving {
		used, capacity = used+float64(m.GetUsedBytes()), capacity+float64(m.GetCapacityBytes())
	}
	for _, m := range serving {
		if m.GetFilling() || float64(m.GetUsedBytes())*capacity < emptierBelow*used*float64(m.GetCapacityBytes()) {
			names = append(names, m.GetName())
		}
	}
	return names
}

// rebalancePlan returns the blocks that each node would copy to the named nodes, as the node counts them.
func (c *connection) rebalancePlan(ctx context.Context, a admin, names []string) ([]nodeTransfer, error) {
	list, err := a.ListMembers(ctx, &pb.ListMembersRequest{})
	if err != nil {
		return nil, err
	}
	plan, at := make([]nodeTransfer, 0, len(list.GetMembers())), make(map[string]int)
	for i, m := range list.GetMembers() {
		plan, at[m.GetName()] = append(plan, nodeTransfer{Node: m.GetName()}), i
	}
	for _, name := range names {
		if _, ok := at[name]; !ok {
			return nil, fmt.Errorf("the cluster has no node %q that is up; penstock cluster members lists the nodes", name)
		}
	}
	for i, m := range list.GetMembers() {
		fills, err := c.planOf(ctx, m.GetAddr(), names)
		if err != nil {
			return nil, fmt.Errorf("node %s: %w", m.GetName(), err)
		}
		for _, f := range fills {
			k, ok := at[f.GetName()]
			if !ok || k == i {
				continue // the node has its own sequences
			}
			plan[i].OutBlocks += f.GetBlocks()
			plan[i].OutBytes += f.GetBytes()
			plan[k].InBlocks += f.GetBlocks()
			plan[k].InBytes += f.GetBytes()
		}
	}
	return plan, nil
}

func (c *connection) planOf(ctx context.Context, address string, names []string) ([]*pb.Fill, error) {
	conn, err := c.dial(address)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	resp, err := pb.NewAdminClient(conn).FillMembers(ctx, &pb.FillMembersRequest{Names: names, DryRun: true})
	return resp.GetFills(), err
}

// untilFilled shows the progress of the copies, and returns when the order of the revision has ended and the named nodes
// are up. It fails with errEnded if another command has ended the order, or has replaced it by one for other nodes.
func untilFilled(ctx context.Context, w world, a admin, names []string, revision int64) error {
	bar := newProgress(w, "rebalance", unitBytes)
	defer bar.finish()
	nodes := slices.Clone(names) // the named nodes, and each node that was up during the copies
	for {
		resp, err := a.ListMembers(ctx, &pb.ListMembersRequest{})
		if err != nil {
			return err
		}
		all, why := new(pb.MoveStatus), ""
		ended, filling := true, make(map[string]bool)
		up := make(map[string]bool)
		for _, m := range resp.GetMembers() {
			up[m.GetName()] = true
			if m.GetFilling() {
				ended, filling[m.GetName()] = false, true
			}
			if !slices.Contains(nodes, m.GetName()) {
				nodes = append(nodes, m.GetName())
			}
			if m.GetState() == string(membership.Draining) || m.GetMove() == nil {
				continue
			}
			all.Bytes += m.GetMove().GetBytes()
			all.CopiedBytes += m.GetMove().GetCopiedBytes()
			all.BytesPerSecond += m.GetMove().GetBytesPerSecond()
			all.SecondsLeft = max(all.SecondsLeft, m.GetMove().GetSecondsLeft())
			if r := m.GetMove().GetReason(); r != "" {
				why = m.GetName() + ": " + r
			}
		}
		for _, name := range nodes {
			named := slices.Contains(names, name)
			switch {
			case up[name]:
			case slices.Contains(resp.GetRemoved(), name):
				if named {
					return fmt.Errorf("node %q was removed from the cluster", name)
				}
			default:
				why = "node " + name + " is down"
				ended = ended && !named
			}
		}
		if ended {
			return filled(resp.GetLastFill(), names, revision)
		}
		for _, name := range names {
			if len(filling) > 0 && up[name] && !filling[name] {
				return fmt.Errorf("no sequences are copied to node %s: %w", name, errEnded)
			}
		}
		bar.note(all.CopiedBytes, all.Bytes, moveNote(all, why))
		if !pause(ctx, drainPoll) {
			if why != "" {
				why = " (" + why + ")"
			}
			return fmt.Errorf("the nodes have %s of %s of their sequences, and the copies continue%s: %w", size(all.CopiedBytes), size(all.Bytes), why, context.Cause(ctx))
		}
	}
}

// filled returns errEnded unless the end of the last order shows that an order for at least the named nodes, given at the revision
// or later, was complete. revision 0 is that of a node of an older version, which records no end.
func filled(end *pb.FillEnd, names []string, revision int64) error {
	switch {
	case revision == 0:
		return nil
	case end.GetRevision() <= revision:
		return fmt.Errorf("no end of the copies is recorded: %w", errEnded)
	case end.GetStopped():
		return fmt.Errorf("the copies were stopped before they were complete: %w", errEnded)
	}
	for _, name := range names {
		if !slices.Contains(end.GetNames(), name) {
			return fmt.Errorf("no sequences were copied to node %s: %w", name, errEnded)
		}
	}
	return nil
}
