package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// eventLine is one event in JSON.
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
	// Volume is set only for volume_state.
	Volume *volumeLine `json:"volume,omitempty"`
}

// volumeLine is a change of a volume's state in JSON.
type volumeLine struct {
	Volume uint32 `json:"volume"`
	Path   string `json:"path"`
	Was    string `json:"was"`
	State  string `json:"state"`
}

func newEventsCommand(w world) *cobra.Command {
	var after uint64
	var namespace string
	var maxEvents int
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Follow the events of a node: blocks stored and removed, changes of volume states",
		Long: `Print the events of a node, one per line, until interrupted. Events are stored and
removed blocks, for routers, and changes of volume states, for operators. A gap means
that events are missing: the node no longer keeps them, or they are from before its last
start. The exit code is 1 if --timeout ends the command.

With --zmq, the command publishes the events in the form of vLLM's KV-cache events, for
routers that follow vLLM engines, and does not print them. It sends BlockStored,
BlockRemoved and AllBlocksCleared as MessagePack on a ZeroMQ PUB socket, with sequence
numbers. A ROUTER socket (--zmq-replay) sends missed messages again. --server may list
several nodes. The blocks that the nodes hold are published at the start, again when a
subscriber joins or loses messages, and again when events of a node were lost. The
sockets have no authentication: any process that can connect can read the ids of blocks.`,
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
	cmd.Flags().IntVar(&maxEvents, "count", 0, "stop after this many events; 0: never")
	z := addZMQFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if z.endpoint != "" || z.given(cmd) != "" {
			return c.publish(cmd, z, namespace)
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			req := &pb.EventsRequest{After: after, Namespace: namespace}
			n, err := follow(ctx, pb.NewCacheClient(a.conn), req, maxEvents, outputOf(cmd))
			switch {
			case errors.Is(err, io.EOF):
				return fmt.Errorf("the node ended the stream after %d events, because it is stopping", n)
			case cmd.Context().Err() != nil:
				return cmd.Context().Err()
			case err != nil && outOfTime(ctx, err):
				return fmt.Errorf("--timeout %v ended the command after %d events", c.timeout, n)
			}
			return err
		})
	}
	return cmd
}

// follow prints events until ctx ends or maxEvents events have been printed (0: no limit), and
// returns the number of printed events.
func follow(ctx context.Context, cache pb.CacheClient, req *pb.EventsRequest, maxEvents int, o output) (int, error) {
	stream, err := cache.Events(ctx, req)
	if err != nil {
		return 0, err
	}
	for n := 0; ; n++ {
		if maxEvents > 0 && n == maxEvents {
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
	_, err := fmt.Fprintf(o.w, "%d %s %s%s\n", line.Sequence, line.Time, line.Kind, line.details())
	return err
}

// details returns, as text, the volume of an event, or its namespace, blocks and reason. It returns
// "" for an event without them, such as a gap.
func (l eventLine) details() string {
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
