package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "say what would be evicted and change nothing")
	_ = cmd.MarkFlagRequired("bytes") // it was defined above
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
	c.waitForever(cmd) // a pass takes as long as the disks are large
	cmd.Flags().Var(sizeFlag{&rate}, "rate", "bytes to read in a second, at most; 0: no limit")
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

// followScrub shows a pass and returns its last report.
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

// eventLine is one event as JSON.
type eventLine struct {
	Sequence  uint64   `json:"sequence"`
	Time      string   `json:"time"`
	Kind      string   `json:"kind"`
	Namespace string   `json:"namespace"`
	Epoch     uint64   `json:"epoch"`
	BlockIDs  []string `json:"block_ids"`
	Parent    string   `json:"parent,omitempty"`
	Medium    string   `json:"medium,omitempty"`
	Reason    string   `json:"reason,omitempty"`
	// Volume is set for volume_state only.
	Volume *volumeLine `json:"volume,omitempty"`
}

// volumeLine is a change of a volume's state as JSON.
type volumeLine struct {
	Volume uint32 `json:"volume"`
	Path   string `json:"path"`
	Was    string `json:"was"`
	State  string `json:"state"`
}

func newEventsCommand(w world) *cobra.Command {
	var after uint64
	var namespace string
	var most int
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Follow the events of a node: blocks stored and removed, changes of volume states",
		Long: `Print the events of a node, one per line, until interrupted: stored and removed blocks,
as routers read them, and changes of volume states. A gap means that events are missing:
the node no longer keeps them, or they are from before its last start. The exit code is
1 if --timeout ends the command.`,
		Args: args(cobra.NoArgs),
	}
	c := addConnectionFlags(cmd, w)
	c.waitForever(cmd)
	cmd.Flags().Uint64Var(&after, "after", 0, "start after this sequence number; 0: from now on")
	cmd.Flags().StringVar(&namespace, "namespace", "", "only the events of this namespace")
	c.completeNamespaceFlag(cmd)
	cmd.Flags().IntVar(&most, "count", 0, "stop after this many events; 0: never")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			req := &pb.EventsRequest{After: after, Namespace: namespace}
			n, err := follow(ctx, pb.NewCacheClient(a.conn), req, most, outputOf(cmd))
			switch {
			case errors.Is(err, io.EOF):
				return fmt.Errorf("the node ended the stream after %d events: it stops", n)
			case cmd.Context().Err() != nil:
				return cmd.Context().Err()
			case err != nil && (ctx.Err() != nil || status.Code(err) == codes.DeadlineExceeded): // the node may time out first
				return fmt.Errorf("%d events within --timeout %v", n, c.timeout)
			}
			return err
		})
	}
	return cmd
}

// follow prints events until there were most of them, 0 being no limit, and returns
// how many there were.
func follow(ctx context.Context, cache pb.CacheClient, req *pb.EventsRequest, most int, o output) (int, error) {
	stream, err := cache.Events(ctx, req)
	if err != nil {
		return 0, err
	}
	for n := 0; ; n++ {
		if most > 0 && n == most {
			return n, nil
		}
		e, err := stream.Recv()
		if err != nil {
			return n, err
		}
		if err := emitEvent(o, e); err != nil {
			return n, err
		}
	}
}

func emitEvent(o output, e *pb.Event) error {
	line := eventLine{
		Sequence:  e.GetSequence(),
		Time:      time.UnixMilli(e.GetTimeUnixMs()).UTC().Format("2006-01-02T15:04:05.000Z"),
		Kind:      enumWord(e.GetKind().Descriptor(), e.GetKind().Number()),
		Namespace: e.GetNamespace(),
		Epoch:     e.GetEpoch(),
		BlockIDs:  splitIDs(e.GetBlockIds()),
		Medium:    e.GetMedium(),
		Reason:    e.GetReason(),
	}
	if len(e.GetParent()) > 0 {
		line.Parent = splitIDs(e.GetParent())[0]
	}
	if v := e.GetVolume(); v != nil {
		line.Volume = &volumeLine{Volume: v.GetVolume(), Path: v.GetPath(), Was: v.GetWas(), State: v.GetState()}
	}
	if o.json {
		return o.emitLine(line)
	}
	_, err := fmt.Fprintf(o.w, "%d %s %s%s\n", line.Sequence, line.Time, line.Kind, line.what())
	return err
}

// what says of whom the event is, of how much and why, where it is of anyone.
func (l eventLine) what() string {
	if v := l.Volume; v != nil {
		return fmt.Sprintf(" %s: %s, was %s", v.Path, because(v.State, l.Reason), v.Was)
	}
	if l.Namespace == "" {
		return ""
	}
	s := fmt.Sprintf(" %s epoch %d", l.Namespace, l.Epoch)
	if n := len(l.BlockIDs); n > 0 {
		s += fmt.Sprintf(": %d blocks from %s", n, l.BlockIDs[0])
	}
	if l.Reason != "" {
		s += " (" + l.Reason + ")"
	}
	return s
}
