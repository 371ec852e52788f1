package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

func newEvictCommand(w world) *cobra.Command {
	var bytes int64
	var namespace string
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "evict --bytes SIZE",
		Short: "Free storage in the eviction policy's order",
		Long: `Free at least --bytes, in the order of the eviction policy, leaf first. Blocks that are
pinned, leased or being read stay. --dry-run prints an upper bound.`,
		Args: args(cobra.NoArgs),
	}
	c := addConnectionFlags(cmd, w)
	cmd.Flags().Var(sizeFlag{&bytes}, "bytes", "how much to free, e.g. 10GiB")
	cmd.Flags().StringVar(&namespace, "namespace", "", "take it from this namespace only")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print what would be evicted, and change nothing")
	_ = cmd.MarkFlagRequired("bytes") // the flag was defined above
	c.completeNamespaceFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if bytes <= 0 {
			return usagef("--bytes must be more than 0")
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			resp, err := a.Evict(ctx, &pb.EvictRequest{Bytes: bytes, Namespace: namespace, DryRun: dryRun})
			if err != nil {
				return err
			}
			return emitRemoved(cmd, "evicted", dryRun, resp.GetBlocks(), resp.GetBytes())
		})
	}
	return cmd
}

func newScrubCommand(w world) *cobra.Command {
	var rate int64
	cmd := &cobra.Command{
		Use:   "scrub",
		Short: "Read every block from the disks now and verify its checksums",
		Long: `Read every block from the disks once and verify header and layers, beside the
background scrubber. A broken block is dropped: it becomes a miss. The exit code is 1
if there was one.`,
		Args: args(cobra.NoArgs),
	}
	c := addConnectionFlags(cmd, w)
	c.waitForever(cmd) // the duration of a pass depends on the size of the disks
	cmd.Flags().Var(sizeFlag{&rate}, "rate", "maximum bytes per second; 0: no limit")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			stream, err := a.Scrub(ctx, &pb.ScrubRequest{BytesPerSecond: rate})
			if err != nil {
				return err
			}
			last, err := followScrub(w, stream.Recv)
			if err != nil {
				return err
			}
			if err := outputOf(cmd).emit(last, func(t *table) {
				fmt.Fprintf(t, "verified: %s blocks, %s; corrupt: %s\n", count(last.GetVerifiedBlocks()), size(last.GetVerifiedBytes()), count(last.GetCorruptBlocks()))
			}); err != nil {
				return err
			}
			if last.GetCorruptBlocks() > 0 {
				return fmt.Errorf("%d blocks were corrupt and have been dropped; look at the disk", last.GetCorruptBlocks())
			}
			return nil
		})
	}
	return cmd
}

// followScrub shows the progress of a pass and returns its last report.
func followScrub(w world, recv func() (*pb.ScrubProgress, error)) (*pb.ScrubProgress, error) {
	bar := newProgress(w, "scrub", unitBlocks)
	defer bar.finish()
	last := &pb.ScrubProgress{}
	for {
		p, err := recv()
		if errors.Is(err, io.EOF) {
			return last, nil
		}
		if err != nil {
			return nil, err
		}
		last = p
		bar.set(p.GetVerifiedBlocks(), p.GetTotalBlocks())
	}
}
