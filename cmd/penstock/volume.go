package main

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// Values of VolumeStatus.duty.
const (
	dutyDraining = "draining"
	dutyRemoved  = "removed"
)

// drainPoll is the interval at which drain --wait reads the state of the volume.
const drainPoll = 200 * time.Millisecond

func newVolumeCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "volume",
		Short: "List, drain, remove and adopt volumes while the node serves",
		Long: `A volume is one directory of --data. To take a disk out of a node, drain its volume,
which moves the blocks to the other volumes; remove the volume; unmount the disk; and
delete its directory from the list of directories before the next start. VOLUME is the
index or the directory that volume list shows.`,
	}
	c := addConnectionFlags(cmd, w)
	return noun(cmd, newVolumeList(c), newVolumeDrain(w, c), newVolumeRemove(c), newVolumeAdopt(c))
}

func newVolumeList(c *connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the volumes, with the progress of their drains",
		Long: `List the volumes, with the progress of their drains, and the adopted nodes. A
volume that may still have secrets of ended epochs has a line with their namespaces.`,
		Args: args(cobra.NoArgs),
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			resp, err := a.ListVolumes(ctx, &pb.ListVolumesRequest{})
			if err != nil {
				return err
			}
			return outputOf(cmd).emit(resp, func(t *table) {
				printVolumes(t, resp.GetVolumes())
				printAdopted(t, resp.GetAdopted())
				pending := resp.GetPending()
				for _, a := range resp.GetAdopted() {
					pending = append(pending, a.GetPending()...)
				}
				for _, line := range erasureLines(pending) {
					t.row("  " + line)
				}
			})
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
	// A line without columns ends the table, so these lines do not widen the table's columns.
	encrypts := slices.ContainsFunc(volumes, func(v *pb.VolumeStatus) bool { return v.GetKey() != "" })
	for _, v := range volumes {
		switch key := v.GetKey(); {
		case key != "":
			t.row(fmt.Sprintf("  %s: new blocks are encrypted with key %s", v.GetPath(), key))
		case encrypts:
			t.row("  " + v.GetPath() + ": new blocks are not encrypted")
		}
		if f := v.GetFence(); f != 0 {
			t.row(fmt.Sprintf("  %s: shared, fence %d", v.GetPath(), f))
		}
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

// printAdopted prints a line for each adopted node.
func printAdopted(t *table, all []*pb.AdoptedNode) {
	for _, a := range all {
		t.row(fmt.Sprintf("  adopted: node %s at %s, %s blocks, %s, fence %d, since %s: %s", a.GetNode(), a.GetAddr(), count(a.GetBlocks()), size(a.GetUsedBytes()),
			a.GetFence(), time.UnixMilli(a.GetSinceUnixMs()).UTC().Format(time.RFC3339), commaList(a.GetPaths())))
	}
}

func newVolumeAdopt(c *connection) *cobra.Command {
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "adopt DIR",
		Short: "Serve the shared volumes of a node that is down",
		Long: `Serve the shared volumes of a node that is down, in the process of this node. DIR is one
of the volumes, as it is mounted on this node's host; all volumes of the node must be
mounted at the paths that they have on their own node. The adopted node keeps its name in
the list of members, so clients find its blocks again, and has ports of its own. It is
refused while a process owns the volumes: the lease of a node that died ends
cluster.lease_ttl later. When the volumes' own node starts again, this node gives them
back. With cluster.adopt a node does this by itself.`,
		Args: args(cobra.ExactArgs(1)),
	}
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print the owner, its lease and the size of the volumes, and change nothing")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			resp, err := a.AdoptVolume(ctx, &pb.AdoptVolumeRequest{Path: names[0], DryRun: dryRun})
			if err != nil {
				return err
			}
			return outputOf(cmd).emit(resp, func(t *table) {
				t.pair("node", resp.GetNode())
				t.pair("store", resp.GetStore())
				t.pair("volumes", commaList(resp.GetPaths()))
				t.pair("segments", fmt.Sprintf("%s, %s", count(resp.GetSegments()), size(resp.GetSegmentBytes())))
				t.pair("fence", resp.GetFence())
				owner := "none: the volumes can be adopted"
				if resp.GetOwner() != "" {
					owner = fmt.Sprintf("%s (%s), lease ends in %v unless it is renewed", resp.GetOwner(), resp.GetOwnerProcess(), time.Duration(resp.GetOwnerLeaseMs())*time.Millisecond)
				}
				if g := resp.GetAdopted(); g != nil {
					owner = fmt.Sprintf("this node, at %s, with %s blocks, after %v", g.GetAddr(), count(g.GetBlocks()), time.Duration(g.GetTookMs())*time.Millisecond)
				}
				t.pair("owner", owner)
			})
		})
	}
	return cmd
}

// drained is the output of volume drain.
type drained struct {
	Volume string `json:"volume"`
	// Blocks and Bytes are the numbers of blocks and bytes on the volume when the command began.
	Blocks    int64 `json:"blocks"`
	Bytes     int64 `json:"bytes"`
	DryRun    bool  `json:"dry_run"`
	Cancelled bool  `json:"cancelled"`
	// Drained is set if the command waited until the volume was empty.
	Drained bool `json:"drained"`
}

func newVolumeDrain(w world, c *connection) *cobra.Command {
	var wait, dryRun, cancel bool
	cmd := &cobra.Command{
		Use:   "drain VOLUME",
		Short: "Move the blocks of a volume to the others",
		Long: `Move the blocks of a volume to the other volumes, in the background, while the node
serves. Afterwards, also after a restart, new blocks are put on the other volumes only.
Leases stay valid and nothing is evicted. If the other volumes have no room for a block,
the block stays readable on the volume, volume list shows the reason, and the node tries
again. With --wait, show the progress and return when the volume is empty.`,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeVolumes,
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "return when the volume is empty; without --timeout, wait for ever")
	cmd.Flags().BoolVar(&cancel, "cancel", false, "stop the draining and let the volume take new blocks; moved blocks stay on the other volumes")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print how much would be moved, and change nothing")
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
		return "the volume takes new blocks again; it holds " + held
	case d.DryRun:
		return "would be moved: " + held
	case d.Drained:
		return "drained: " + held
	}
	return "draining: " + held
}

// untilDrained shows the progress of a drain, and returns when the volume is empty.
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
			return fmt.Errorf("volume %s has stopped draining; its state is %s", name, v.GetState())
		case left == 0:
			return nil
		}
		bar.note(start-left, start, v.GetMoveStalled())
		if !pause(ctx, drainPoll) {
			why := ""
			if s := v.GetMoveStalled(); s != "" {
				why = ": " + s
			}
			return fmt.Errorf("%s are still on the volume, and the draining continues%s: %w", size(left), why, context.Cause(ctx))
		}
	}
}

// volumeOf returns the volume with an index or path.
func volumeOf(volumes []*pb.VolumeStatus, name string) *pb.VolumeStatus {
	for _, v := range volumes {
		if filepath.Clean(v.GetPath()) == filepath.Clean(name) || strconv.Itoa(int(v.GetIndex())) == name {
			return v
		}
	}
	return nil
}

func newVolumeRemove(c *connection) *cobra.Command {
	var force, dryRun bool
	cmd := &cobra.Command{
		Use:   "remove VOLUME",
		Short: "Remove a drained volume from the node permanently",
		Long: `Remove a volume from the node. The node closes the files of the volume, so that the disk
can be unmounted, and starts without the volume afterwards. If the volume holds the
index of the node (the directory index), the node moves the index to another volume and
serves meanwhile. If no other volume has room for the index, the volume is removed, the
index stays, and the command fails: make room and remove the volume again, or restart
the node without the directory, which rebuilds the index from the other volumes. A disk
that does not answer keeps its files open; the node logs when they are closed. To
use the disk again, empty the directory and set add_volumes. The removal is refused if
the volume holds blocks or is not draining, unless --force is given. With --force, the
blocks on the volume and all blocks that continue their prefixes become misses.`,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeVolumes,
	}
	cmd.Flags().BoolVar(&force, "force", false, "remove the volume even if the blocks on it are lost")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print how many blocks --force would lose, and change nothing")
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

// completeVolumes completes an argument to the directories of the node's volumes.
func (c *connection) completeVolumes(cmd *cobra.Command, given []string, _ string) ([]string, cobra.ShellCompDirective) {
	return c.completeNames(cmd, given, func(ctx context.Context, a admin) (names []string, err error) {
		resp, err := a.ListVolumes(ctx, &pb.ListVolumesRequest{})
		for _, v := range resp.GetVolumes() {
			if v.GetDuty() != dutyRemoved {
				names = append(names, v.GetPath())
			}
		}
		return names, err
	})
}
