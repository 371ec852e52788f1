package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// Words of VolumeStatus.duty.
const (
	dutyDraining = "draining"
	dutyRemoved  = "removed"
)

// drainPoll is how often drain --wait asks how far the node is.
const drainPoll = 200 * time.Millisecond

func newVolumeCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "volume",
		Short: "Show the volumes of a node, empty one, and take it out, while the node serves",
		Long: `A volume is one directory of --data. To take a disk out of a node: drain its volume,
which moves the blocks to the other volumes, then remove it, unmount it, and take it
out of the list of directories before the next start. A VOLUME is named by its index
or its directory, as volume list shows them.`,
	}
	c := addConnectionFlags(cmd, w)
	return noun(cmd, newVolumeList(c), newVolumeDrain(w, c), newVolumeRemove(c))
}

func newVolumeList(c *connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the volumes, and how far those are that are draining",
		Args:  args(cobra.NoArgs),
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			resp, err := a.ListVolumes(ctx, &pb.ListVolumesRequest{})
			if err != nil {
				return err
			}
			return outputOf(cmd).emit(resp, func(t *table) { printVolumes(t, resp.GetVolumes()) })
		})
	}
	return cmd
}

func printVolumes(t *table, volumes []*pb.VolumeStatus) {
	t.row("INDEX", "STATE", "CAPACITY", "USED", "BLOCKS", "LEFT TO MOVE", "RATE", "TIME LEFT", "VOLUME")
	for _, v := range volumes {
		left, rate, eta := "", "", ""
		if v.GetDuty() == dutyDraining {
			left = size(v.GetUsedBytes())
			if r := v.GetMoveBytesPerSecond(); r > 0 && v.GetUsedBytes() > 0 && v.GetMoveStalled() == "" {
				rate = size(r) + "/s"
				eta = (time.Duration(v.GetUsedBytes()/r+1) * time.Second).String()
			}
		}
		t.row(v.GetIndex(), v.GetState(), size(v.GetCapacityBytes()), size(v.GetUsedBytes()), count(v.GetBlocks()), left, rate, eta, v.GetPath())
	}
	// A line without columns ends the alignment of those above it.
	for _, v := range volumes {
		if why := v.GetStateReason(); why != "" {
			t.row("  " + v.GetPath() + ": " + because(v.GetState(), why))
		}
		switch {
		case v.GetDuty() != dutyDraining:
		case v.GetUsedBytes() == 0:
			t.row("  " + v.GetPath() + ": drained; it can be removed")
		case v.GetMoveStalled() != "":
			t.row("  " + v.GetPath() + ": blocks are left: " + v.GetMoveStalled())
		}
	}
}

// drained is what volume drain prints.
type drained struct {
	Volume string `json:"volume"`
	// Blocks and Bytes are on the volume, to be moved.
	Blocks    int64 `json:"blocks"`
	Bytes     int64 `json:"bytes"`
	DryRun    bool  `json:"dry_run"`
	Cancelled bool  `json:"cancelled"`
	// Drained: nothing is on the volume any more.
	Drained bool `json:"drained"`
}

func newVolumeDrain(w world, c *connection) *cobra.Command {
	var wait, dryRun, cancel bool
	cmd := &cobra.Command{
		Use:   "drain VOLUME",
		Short: "Move the blocks of a volume to the others",
		Long: `Move the blocks of a volume to the others, in the background, while the node serves.
New blocks are put on the other volumes from now on, also after a restart. Leases stay,
and nothing is evicted: a block for which the other volumes have no room stays on the
volume and can be read, and is tried again; volume list says so. With --wait, show how
far it is and return when the volume is empty.`,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeVolumes,
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "return when nothing is left on the volume; no --timeout unless it is given")
	cmd.Flags().BoolVar(&cancel, "cancel", false, "let the volume take new blocks again; what was moved stays where it is")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "say what would be moved and change nothing")
	cmd.MarkFlagsMutuallyExclusive("wait", "cancel")
	cmd.MarkFlagsMutuallyExclusive("wait", "dry-run")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		if wait && !cmd.Flags().Changed("timeout") {
			c.timeout = 0
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			resp, err := a.DrainVolume(ctx, &pb.DrainVolumeRequest{Volume: names[0], Cancel: cancel, DryRun: dryRun})
			if err != nil {
				return err
			}
			d := drained{Volume: names[0], Blocks: resp.GetBlocks(), Bytes: resp.GetBytes(), DryRun: dryRun, Cancelled: cancel && !dryRun}
			if wait {
				if err := untilDrained(ctx, w, a, names[0]); err != nil {
					return err
				}
				d.Drained = true
			}
			return outputOf(cmd).emit(d, func(t *table) { fmt.Fprintln(t, d.words()) })
		})
	}
	return cmd
}

func (d drained) words() string {
	held := fmt.Sprintf("%s blocks, %s", count(d.Blocks), size(d.Bytes))
	switch {
	case d.Cancelled:
		return "volume takes new blocks again; left on it: " + held
	case d.DryRun:
		return "would be moved: " + held
	case d.Drained:
		return "drained: " + held
	}
	return "draining: " + held
}

// untilDrained shows how far a drain is until the volume is empty.
func untilDrained(ctx context.Context, w world, a admin, name string) error {
	bar := newProgress(w, "drain", unitBytes)
	defer bar.finish()
	var start int64
	for {
		resp, err := a.ListVolumes(ctx, &pb.ListVolumesRequest{})
		if err != nil {
			return err
		}
		v := volumeOf(resp.GetVolumes(), name)
		left := v.GetUsedBytes()
		start = max(start, left)
		switch {
		case v.GetDuty() != dutyDraining:
			return fmt.Errorf("volume %s is not draining any more: it is %s", name, v.GetState())
		case left == 0:
			return nil
		}
		bar.note(start-left, start, v.GetMoveStalled())
		if !pause(ctx, drainPoll) {
			why := ""
			if s := v.GetMoveStalled(); s != "" {
				why = ": " + s
			}
			return fmt.Errorf("%s are left on the volume, which goes on draining%s: %w", size(left), why, context.Cause(ctx))
		}
	}
}

// volumeOf finds a volume by its index or path.
func volumeOf(volumes []*pb.VolumeStatus, name string) *pb.VolumeStatus {
	for _, v := range volumes {
		if v.GetPath() == name || strconv.Itoa(int(v.GetIndex())) == name {
			return v
		}
	}
	return nil
}

func newVolumeRemove(c *connection) *cobra.Command {
	var force, dryRun bool
	cmd := &cobra.Command{
		Use:   "remove VOLUME",
		Short: "End the use of a drained volume, for good",
		Long: `End the use of a volume. The node closes its files, so that the disk can be unmounted,
and starts without it from now on. To use the disk again, empty the directory and set
add_volumes. A volume that holds blocks, or is not draining, is refused unless --force
is given: then the blocks on it, and those that continue them, become misses.`,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeVolumes,
	}
	cmd.Flags().BoolVar(&force, "force", false, "lose the blocks that are on the volume")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "say which blocks would be lost with --force, and change nothing")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			resp, err := a.RemoveVolume(ctx, &pb.RemoveVolumeRequest{Volume: names[0], Force: force, DryRun: dryRun})
			if err != nil {
				return err
			}
			return emitRemoved(cmd, "lost", dryRun, resp.GetBlocks(), resp.GetBytes())
		})
	}
	return cmd
}

// completeVolumes offers the directories of the node's volumes to the shell.
func (c *connection) completeVolumes(cmd *cobra.Command, given []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(given) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	err := c.admin(cmd, func(ctx context.Context, a admin) error {
		ctx, cancel := context.WithTimeout(ctx, completionWait)
		defer cancel()
		resp, err := a.ListVolumes(ctx, &pb.ListVolumesRequest{})
		for _, v := range resp.GetVolumes() {
			if v.GetDuty() != dutyRemoved {
				names = append(names, v.GetPath())
			}
		}
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
