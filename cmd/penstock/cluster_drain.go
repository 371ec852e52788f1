package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/membership"
)

// nodeDrained is the output of cluster drain.
type nodeDrained struct {
	Node string `json:"node"`
	// Drained is set if the command waited until the other nodes had all blocks. Move is the progress at
	// the end of the command; it is nil unless the command waited.
	Drained bool           `json:"drained"`
	Move    *pb.MoveStatus `json:"move,omitempty"`
}

func newClusterDrain(w world, c *connection) *cobra.Command {
	var wait bool
	var rate int64
	cmd := &cobra.Command{
		Use:   "drain NODE",
		Short: "Copy the blocks of a node to the other nodes, and place new sequences there",
		Long: `Copy the blocks of a node to the other nodes of the cluster, in the background, so that
the node can be taken out of it. Clients that follow the list of members place new
sequences on the other nodes at once. They read the sequences of the node from the node
or from their new node, whichever has more of them, so nothing is a miss meanwhile.

The hottest sequences are copied first, each from its first block on. The copies are
verified, and limited by --rate. Blocks that the other nodes have already are not sent:
a node that is restarted meanwhile continues, and so does a repeated drain. The node
keeps its blocks. The draining ends with penstock cluster undrain.

The other nodes may evict blocks while others are copied. At the end they are asked for all
blocks, and the output has the number of blocks that they have then.

With --wait, show the progress and return when all blocks were copied. Ctrl-C
then ends the command and not the draining. The exit code is 5 if another command ends
the draining.`,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeMembers,
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "return when all blocks were copied; without --timeout, wait for ever")
	cmd.Flags().Var(sizeFlag{&rate}, "rate", "maximum bytes per second of the copies; 0: the setting cluster.move_rate of the node")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		if wait && !cmd.Flags().Changed("timeout") {
			c.timeout = 0
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			if _, err := a.DrainMember(ctx, &pb.DrainMemberRequest{Name: names[0], BytesPerSecond: rate}); err != nil {
				return err
			}
			d := nodeDrained{Node: names[0]}
			if wait {
				move, err := untilNodeDrained(ctx, w, a, names[0])
				if err != nil {
					return err
				}
				d.Drained, d.Move = true, move
			}
			return outputOf(cmd).emit(d, func(t *table) { fmt.Fprintln(t, d.words()) })
		})
	}
	return cmd
}

func (d nodeDrained) words() string {
	if d.Drained {
		if evicted := evictedWords(d.Move); evicted != "" {
			return fmt.Sprintf("drained: other nodes have %s of the %s blocks of node %s%s", count(d.Move.GetCopiedBlocks()), count(d.Move.GetBlocks()), d.Node, evicted)
		}
		return fmt.Sprintf("drained: other nodes have all %s blocks, %s, of node %s%s", count(d.Move.GetBlocks()), size(d.Move.GetBytes()), d.Node, checkedWords(d.Move))
	}
	return fmt.Sprintf("draining: node %s gets no new sequences, and its blocks are copied to other nodes; penstock cluster members shows the progress", d.Node)
}

// checkedWords returns the time at which the other nodes were asked for the blocks.
func checkedWords(m *pb.MoveStatus) string {
	if m.GetCheckedUnixMs() == 0 {
		return ""
	}
	return ", checked at " + utc(m.GetCheckedUnixMs())
}

// evictedWords describes the blocks that other nodes had and do not have any more when the copies end; empty: there are none.
func evictedWords(m *pb.MoveStatus) string {
	evicted := m.GetBlocks() - m.GetCopiedBlocks()
	if evicted <= 0 || m.GetPhase() != string(membership.MoveDone) {
		return ""
	}
	return fmt.Sprintf("%s; the other nodes have evicted or lost %s blocks that were copied, which a repeated drain copies again", checkedWords(m), count(evicted))
}

// untilNodeDrained shows the progress of a drain, and returns when other nodes have all blocks.
func untilNodeDrained(ctx context.Context, w world, a admin, name string) (*pb.MoveStatus, error) {
	bar := newProgress(w, "drain", unitBytes)
	defer bar.finish()
	var last *pb.MoveStatus
	for {
		resp, err := a.ListMembers(ctx, &pb.ListMembersRequest{})
		if err != nil {
			return nil, err
		}
		why := "node " + name + " is down"
		for _, m := range resp.GetMembers() {
			if m.GetName() != name {
				continue
			}
			switch m.GetState() {
			case string(membership.Draining):
				why, last = m.GetMove().GetReason(), m.GetMove()
			case string(membership.Joining):
				why = "node " + name + " joins the cluster again"
			default:
				return nil, fmt.Errorf("node %s does not drain, and its state is %s: %w", name, m.GetState(), errEnded)
			}
		}
		if slices.Contains(resp.GetRemoved(), name) {
			return nil, fmt.Errorf("node %s was removed from the cluster: %w", name, errEnded)
		}
		if last.GetPhase() == string(membership.MoveDone) && why == "" {
			return last, nil
		}
		bar.note(last.GetCopiedBytes(), last.GetBytes(), moveNote(last, why))
		if !pause(ctx, drainPoll) {
			if why != "" {
				why = " (" + why + ")"
			}
			return nil, fmt.Errorf("other nodes have %s of the %s of node %s, and the draining continues%s: %w", size(last.GetCopiedBytes()), size(last.GetBytes()), name, why, context.Cause(ctx))
		}
	}
}

// moveNote returns the rate and the remaining time of copies, or the reason why they do not advance.
func moveNote(m *pb.MoveStatus, why string) string {
	if why != "" {
		return why
	}
	if m.GetBytesPerSecond() == 0 {
		return ""
	}
	note := size(m.GetBytesPerSecond()) + "/s"
	if s := m.GetSecondsLeft(); s > 0 {
		note += ", " + (time.Duration(s) * time.Second).String() + " left"
	}
	return note
}

// moveLine describes the progress of a node that drains or fills others.
func moveLine(node *pb.Member) string {
	m := node.GetMove()
	line := fmt.Sprintf("other nodes have %s of %s blocks, %s of %s", count(m.GetCopiedBlocks()), count(m.GetBlocks()), size(m.GetCopiedBytes()), size(m.GetBytes()))
	switch note := moveNote(m, ""); {
	case m.GetPhase() == string(membership.MoveDone):
		if node.GetState() == string(membership.Draining) {
			return line + cmp.Or(evictedWords(m), checkedWords(m)) + "; drained"
		}
		return line + cmp.Or(evictedWords(m), checkedWords(m)) + "; copied"
	case m.GetReason() != "" && m.GetLeftBlocks() == 0:
		return "nothing is copied at the moment, and it is tried again: " + m.GetReason()
	case m.GetReason() != "":
		return fmt.Sprintf("%s; %s blocks could not be copied, and are tried again: %s", line, count(m.GetLeftBlocks()), m.GetReason())
	case note != "":
		return line + "; " + note
	}
	return line
}

func newClusterUndrain(c *connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "undrain NODE",
		Short: "End the draining of a node",
		Long: `End the draining of a node: it gets new sequences again, and the copies stop. Copied
blocks stay on the other nodes too, until they are evicted there.`,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeMembers,
	}
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			if _, err := a.DrainMember(ctx, &pb.DrainMemberRequest{Name: names[0], Cancel: true}); err != nil {
				return err
			}
			out := struct {
				Node     string `json:"node"`
				Draining bool   `json:"draining"`
			}{Node: names[0]}
			return outputOf(cmd).emit(out, func(t *table) { fmt.Fprintf(t, "node %s gets new sequences again\n", names[0]) })
		})
	}
	return cmd
}

// completeMembers completes an argument to the names of the nodes of the cluster.
func (c *connection) completeMembers(cmd *cobra.Command, given []string, _ string) ([]string, cobra.ShellCompDirective) {
	return c.completeNames(cmd, given, func(ctx context.Context, a admin) (names []string, err error) {
		resp, err := a.ListMembers(ctx, &pb.ListMembersRequest{})
		for _, m := range resp.GetMembers() {
			names = append(names, m.GetName())
		}
		return names, err
	})
}
