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
1 if --timeout ends the command.

With --zmq the events are published instead, in the form of vLLM's KV-cache events, for
routers that follow vLLM engines: BlockStored, BlockRemoved and AllBlocksCleared as
MessagePack over a ZeroMQ PUB socket, with sequence numbers, and a ROUTER socket that
resends what a subscriber has missed. --server may then list several nodes. The blocks
that the nodes hold are published at the start, again for subscribers that join or lose
messages, and whenever events of a node were lost. The sockets have no authentication:
whoever reaches them can read the ids of blocks.`,
		Example: `  penstock events --namespace llama --count 10
  penstock events --zmq tcp://*:5557 --zmq-replay tcp://*:5558
  penstock events --zmq tcp://*:5557 --namespace llama --zmq-topic kv@node-1@Qwen/Qwen3-8B --zmq-form maps`,
		Args: args(cobra.NoArgs),
	}
	c := addConnectionFlags(cmd, w)
	c.waitForever(cmd)
	cmd.Flags().Uint64Var(&after, "after", 0, "start after this sequence number; 0: from now on")
	cmd.Flags().StringVar(&namespace, "namespace", "", "only the events of this namespace")
	c.completeNamespaceFlag(cmd)
	cmd.Flags().IntVar(&most, "count", 0, "stop after this many events; 0: never")
	z := addZMQFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if z.endpoint != "" || z.given(cmd) != "" {
			return c.publish(cmd, z, namespace)
		}
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
