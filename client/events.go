package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

// EventKind is the kind of an Event.
type EventKind uint8

const (
	// BlockStored: the blocks can be matched from now on. Parent is the block before the first of
	// them.
	BlockStored EventKind = iota + 1
	// BlockRemoved: the blocks can no longer be matched.
	BlockRemoved
	// AllBlocksCleared: no block of the namespace's epoch can be matched any more. The epoch was
	// retired, by a call or because a new epoch began, or the namespace was deleted.
	AllBlocksCleared
	// Gap: events were lost, or the node restarted. Resynchronise.
	Gap
	// VolumeChanged: a volume of the node changed its state.
	VolumeChanged
)

// String returns stored, removed, cleared, gap or volume.
func (k EventKind) String() string {
	switch k {
	case BlockStored:
		return "stored"
	case BlockRemoved:
		return "removed"
	case AllBlocksCleared:
		return "cleared"
	case Gap:
		return "gap"
	case VolumeChanged:
		return "volume"
	}
	return fmt.Sprintf("EventKind(%d)", uint8(k))
}

// Event is one change of a node's blocks, or of the state of one of its volumes.
type Event struct {
	// Server is the node's address, as in Options.Servers. Sequence counts the node's events since
	// its start.
	Server    string
	Sequence  uint64
	Kind      EventKind
	Namespace string
	Epoch     kv.Epoch
	IDs       []kv.BlockID
	Parent    kv.BlockID
	// Reason is why blocks were removed: evicted, deleted, corrupt or delivered. For a
	// volume it is a sentence that explains the state, empty if the volume is ok.
	Reason string
	Time   time.Time
	// Volume is set for VolumeChanged only.
	Volume VolumeState
}

// VolumeState is a change of the state of a volume.
type VolumeState struct {
	// Volume is the volume's number on the node, from 0. Path is its directory there.
	Volume int
	Path   string
	// Was and Is are the states before and after: ok, suspect (new blocks go
	// elsewhere where possible), failed (no writes), draining, or removed.
	Was, Is string
}

// EventsRequest selects events.
type EventsRequest struct {
	// Namespace selects the events of one namespace. Empty selects all namespaces and
	// the volumes.
	Namespace string
	// After has, by server, the sequence number of the last event that the caller has seen. From a
	// server without an entry, only future events are reported.
	After map[string]uint64
}

// lostPlace is a sequence number that no run of a node reaches. A node that is asked for the events
// after this number sends a Gap and all the events that it still has.
const lostPlace = math.MaxUint64

// Events calls fn for each change on each node until ctx ends or fn fails, and returns the error of
// ctx or fn. fn is called by one goroutine at a time, in the order of each node's events. A broken
// connection is opened again, and a Gap is reported for the events that may have been missed. Other
// errors: ErrAuth, ErrRequest, ErrClosed.
func (s *Store) Events(ctx context.Context, req EventsRequest, fn func(Event) error) error {
	var mu sync.Mutex
	serial := func(e Event) error {
		mu.Lock()
		defer mu.Unlock()
		return fn(e)
	}
	group, ctx := errgroup.WithContext(ctx)
	follow := func(ctx context.Context, n *node, after uint64) {
		f := follower{node: n, namespace: req.Namespace, after: after, fn: serial}
		group.Go(func() error { return f.run(ctx) })
	}
	if s.opts.Discover {
		group.Go(func() error { return s.followMembers(ctx, req, follow) })
		return group.Wait()
	}
	for _, n := range s.all() {
		follow(ctx, n, req.After[n.target])
	}
	return group.Wait()
}

// followMembers follows the nodes that are members, until ctx ends. A node that becomes a member
// later begins with a Gap.
func (s *Store) followMembers(ctx context.Context, req EventsRequest, follow func(context.Context, *node, uint64)) error {
	tick := time.NewTicker(s.opts.MembersEvery)
	defer tick.Stop()
	followed := make(map[*node]context.CancelFunc)
	defer func() {
		for _, cancel := range followed {
			cancel()
		}
	}()
	for first := true; ; first = false {
		nodes := s.all()
		for _, n := range nodes {
			if followed[n] != nil {
				continue
			}
			after, given := req.After[n.target]
			if !first && !given {
				after = lostPlace
			}
			leaves, cancel := context.WithCancelCause(ctx)
			followed[n] = func() { cancel(errLeft) }
			follow(leaves, n, after)
		}
		for n, cancel := range followed {
			if !slices.Contains(nodes, n) {
				cancel()
				delete(followed, n)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("client: events: %w", ctx.Err())
		}
	}
}

// errLeft ends the follower of a node that is no longer a member.
var errLeft = errors.New("the node has left the cluster")

// follower reads the events of one node.
type follower struct {
	node      *node
	namespace string
	fn        func(Event) error
	// engine identifies the run of the node, because each start of a node makes a new data-plane
	// engine; zero: not connected yet. after is the sequence number of the last event seen from
	// this run.
	after  uint64
	engine rdma.EngineID
}

// run follows the node until ctx ends, fn fails, or the node refuses the call.
func (f *follower) run(ctx context.Context) error {
	for failures := 0; ; failures++ {
		seen := f.after
		err := f.follow(ctx)
		if errors.Is(context.Cause(ctx), errLeft) {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("client: events: %w", ctx.Err())
		}
		if !errors.Is(err, errDown) && !errors.Is(err, errBusy) {
			return err
		}
		if f.after != seen {
			failures = 0
		}
		if err := backOff(ctx, failures+1); err != nil && !errors.Is(context.Cause(ctx), errLeft) {
			return fmt.Errorf("client: events: %w", err)
		}
	}
}

// follow reads one stream to its end.
func (f *follower) follow(ctx context.Context) error {
	sess, err := f.node.use(ctx)
	if err != nil {
		return err
	}
	if !f.engine.IsZero() && (f.engine != sess.engine || f.after == 0) {
		f.after = lostPlace
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := sess.cache.Events(ctx, &pb.EventsRequest{After: f.after, Namespace: f.namespace})
	if err != nil {
		return f.node.failed(sess, callError(ctx, "events", f.node.target, err))
	}
	// gRPC reconnects by itself, so the stream may be to another run of the node than the session.
	// If the session's run of the node is still alive after the stream was opened, the stream is
	// from that run.
	if err := f.sameRun(ctx, sess); err != nil {
		return err
	}
	f.engine = sess.engine
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("client: events: %s: %w: the stream ended", f.node.target, errDown)
		}
		if err != nil {
			return f.node.failed(sess, callError(ctx, "events", f.node.target, err))
		}
		e, err := f.event(m)
		if err != nil {
			return err
		}
		f.after = e.Sequence
		if err := f.fn(e); err != nil {
			return err
		}
	}
}

func (f *follower) sameRun(ctx context.Context, sess *session) error {
	d, err := sess.cache.Describe(ctx, &pb.DescribeRequest{})
	if err != nil {
		return f.node.failed(sess, callError(ctx, "describe", f.node.target, err))
	}
	var addr rdma.Addr
	if err := addr.UnmarshalBinary(d.GetDataAddress()); err == nil && addr.Engine == sess.engine {
		return nil
	}
	return f.node.failed(sess, fmt.Errorf("client: events: %s: %w: it was restarted", f.node.target, errDown))
}

func (f *follower) event(m *pb.Event) (Event, error) {
	e := Event{
		Server:    f.node.target,
		Sequence:  m.GetSequence(),
		Kind:      EventKind(m.GetKind()),
		Namespace: m.GetNamespace(),
		Epoch:     kv.Epoch(m.GetEpoch()),
		Reason:    m.GetReason(),
		Time:      time.UnixMilli(m.GetTimeUnixMs()),
	}
	if v := m.GetVolume(); v != nil {
		e.Volume = VolumeState{Volume: int(v.GetVolume()), Path: v.GetPath(), Was: v.GetWas(), Is: v.GetState()}
	}
	var err error
	if e.IDs, err = api.IDs(m.GetBlockIds(), math.MaxInt); err != nil {
		return Event{}, fmt.Errorf("client: events: %s: %w", f.node.target, err)
	}
	if len(m.GetParent()) > 0 {
		if e.Parent, err = kv.BlockIDFromBytes(m.GetParent()); err != nil {
			return Event{}, fmt.Errorf("client: events: %s: %w", f.node.target, err)
		}
	}
	return e, nil
}
