package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// nodeRemoved is the output of cluster remove.
type nodeRemoved struct {
	Node   string `json:"node"`
	DryRun bool   `json:"dry_run"`
	// Up is set if the node was up.
	Up bool `json:"up"`
	// Lost are the blocks that no other node is known to have, and Leases the leases and pins of the node.
	LostBlocks int64 `json:"lost_blocks"`
	LostBytes  int64 `json:"lost_bytes"`
	Leases     int64 `json:"lost_leases"`
}

func newClusterRemove(c *connection) *cobra.Command {
	var force, dryRun bool
	cmd := &cobra.Command{
		Use:   "remove NODE",
		Short: "Take a node out of the cluster for good",
		Long: `Take a node out of the cluster for good: drain it, stop its process, and remove it. Clients
forget it at their next reading of the list of members. They do not wait, as they do for a
node that is down, for its return. A process with its volumes serves nothing until they are
deleted or the node is admitted again by penstock cluster readmit.

The command is refused if the node is up or not drained, unless --force is given, and if no
other node serves. A node that is up stops to serve then. The output has the blocks
that no other node is known to have, and the leases and pins that end, as of the last record of
the node in etcd.`,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeMembers,
	}
	cmd.Flags().BoolVar(&force, "force", false, "remove the node also if it is up, or has blocks that no other node has")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print the losses and change nothing")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			resp, err := a.RemoveMember(ctx, &pb.RemoveMemberRequest{Name: names[0], Force: force, DryRun: dryRun})
			if err != nil {
				return err
			}
			out := nodeRemoved{Node: names[0], DryRun: dryRun, Up: resp.GetUp(), LostBlocks: resp.GetLostBlocks(), LostBytes: resp.GetLostBytes(), Leases: resp.GetLeases()}
			return outputOf(cmd).emit(out, func(t *table) { fmt.Fprint(t, out.words()) })
		})
	}
	return cmd
}

func (r nodeRemoved) words() string {
	done := "removed: node %s. Delete its volumes, or admit it again: penstock cluster readmit %s\n"
	if r.DryRun {
		done = "node %s would be removed; penstock cluster readmit %s would admit it again\n"
	}
	return fmt.Sprintf("lost: %s blocks, %s, and %s leases and pins\n"+done, count(r.LostBlocks), size(r.LostBytes), count(r.Leases), r.Node, r.Node)
}

func newClusterReadmit(c *connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "readmit NODE",
		Short: "Admit a node that was removed from the cluster",
		Long: `Admit a node that was removed from the cluster, with its blocks: its process joins again within
seconds, or at its next start. Blocks of epochs that have ended meanwhile are dropped.`,
		Args: args(cobra.ExactArgs(1)),
	}
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			if _, err := a.RemoveMember(ctx, &pb.RemoveMemberRequest{Name: names[0], Cancel: true}); err != nil {
				return err
			}
			out := struct {
				Node string `json:"node"`
			}{names[0]}
			return outputOf(cmd).emit(out, func(t *table) { fmt.Fprintf(t, "node %s may join again\n", names[0]) })
		})
	}
	return cmd
}
