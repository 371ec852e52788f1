package kvevents

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// Node is a storage node to follow.
type Node struct {
	// Server is the node's address, for reports.
	Server string
	Cache  pb.CacheClient
	Admin  pb.AdminClient
}

// Options are the options of a Follower. Nodes and Publisher are required.
type Options struct {
	Nodes []Node
	// Namespace is the name of the namespace to publish. If it is empty, all namespaces are
	// published, also those created later.
	Namespace string
	Topic     Topic
	Wire      Wire
	Publisher *Publisher
	// Resync is the minimum time between two announcements of all blocks that are made because a
	// subscriber joined or lost messages. 0 means that no such announcements are made.
	Resync time.Duration
	// Heartbeat is the interval of messages without events on each topic. From the sequence number
	// of a heartbeat a subscriber detects that it has missed earlier messages. 0 means no
	// heartbeats.
	Heartbeat time.Duration
	// Report is called with reports for operators. Several goroutines may call it at the same time.
	Report func(Report)
}

// Report is an event of a follower, for operators.
type Report struct {
	// Server is the address of the node. Node is its name.
	Server string `json:"server"`
	Node   string `json:"node,omitempty"`
	// What has the kind of the report: announced, gap, down or back. announced means that all blocks
	// of the node are published; Namespaces and Blocks are their numbers. Reason is the cause of a
	// gap, or the reason why the node is down.
	What       string `json:"what"`
	Namespaces int    `json:"namespaces"`
	Blocks     int    `json:"blocks"`
	Reason     string `json:"reason,omitempty"`
}

// Follower publishes the blocks of nodes.
type Follower struct {
	opts    Options
	sources []*source

	mu sync.Mutex
	// names maps the name of each node to the node's address. Names must be unique, because they
	// are part of topics.
	names map[string]string
}

// NewFollower validates the options and returns a Follower. Call Run to follow the nodes.
func NewFollower(o Options) (*Follower, error) {
	if err := o.Topic.Check(len(o.Nodes), o.Namespace); err != nil {
		return nil, err
	}
	f := &Follower{opts: o, names: make(map[string]string)}
	for _, n := range o.Nodes {
		f.sources = append(f.sources, &source{Node: n, f: f, opts: &f.opts, wake: make(chan struct{}, 1), spaces: make(map[string]*space)})
	}
	return f, nil
}

// Missed requests an announcement of all blocks, for a subscriber that joined or lost messages. It
// does not wait. It has the type of PublisherOptions.Missed.
func (f *Follower) Missed(net.Addr, uint64) {
	for _, s := range f.sources {
		s.request()
	}
}

// Run follows the nodes until ctx ends or a node refuses a call, and returns the error of
// ctx or of that call. It waits for nodes that are not reachable.
func (f *Follower) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, s := range f.sources {
		group.Go(func() error { return s.run(ctx) })
	}
	return group.Wait()
}

// claim records the name of a node. It returns an error if another node has the same name.
func (f *Follower) claim(name, server string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if other, ok := f.names[name]; ok && other != server {
		return fmt.Errorf("kvevents: the nodes at %s and %s are both named %q, so their topics would be equal: give each node a name of its own (penstock serve --node)", other, server, name)
	}
	f.names[name] = server
	return nil
}

// source follows one node. Only the goroutine of run uses the fields of source, except wake.
type source struct {
	Node
	f    *Follower
	opts *Options
	// wake has an element if an announcement was requested.
	wake chan struct{}

	// name is the node's name. start is the time at which the node was started, in Unix
	// milliseconds. The sequence numbers of its events, such as after, are valid for that run of
	// the node only.
	name  string
	start int64
	// after is the sequence number of the last event that the source has received.
	after uint64
	// down is the reason why the node is down, as last reported; empty if the node is not down.
	down string
	// announced is the time of the last complete announcement. It is zero if there was none since
	// the start or since events were lost.
	announced time.Time
	spaces    map[string]*space
}

// space is a namespace whose blocks are published.
type space struct {
	topic       string
	blockTokens int
	// flat is set if blocks have no parents.
	flat bool
	// live are the epochs whose blocks are published. Events contain no epoch: a block is stored as
	// long as one of these epochs has it.
	live []kv.Epoch
}

// request requests an announcement of all blocks. It does not wait.
func (s *source) request() {
	select {
	case s.wake <- struct{}{}:
	default: // the announcement is requested already
	}
}

const (
	retryMin = 100 * time.Millisecond
	retryMax = 5 * time.Second
)

func (s *source) run(ctx context.Context) error {
	pause := retryMin
	for {
		before := s.after
		err := s.follow(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if refused(err) {
			return fmt.Errorf("kvevents: %s: %w", s.Server, err)
		}
		if s.after != before {
			pause = retryMin
		}
		if why := err.Error(); why != s.down {
			s.down = why
			s.report(Report{What: "down", Reason: why})
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		pause = min(2*pause, retryMax)
	}
}

// refusal is an error of this package that a retry cannot change.
type refusal struct{ error }

func (r refusal) Unwrap() error { return r.error }

// refused reports whether a retry cannot change err.
func refused(err error) bool {
	if errors.As(err, &refusal{}) {
		return true
	}
	switch status.Code(err) {
	case codes.Unauthenticated, codes.PermissionDenied, codes.InvalidArgument, codes.Unimplemented:
		return true
	}
	return false
}

func (s *source) report(r Report) {
	if s.opts.Report != nil {
		r.Server, r.Node = s.Server, s.name
		s.opts.Report(r)
	}
}

// unknown is a sequence number that no event has. To a request for the events after unknown, the
// node returns a gap and all events that it still has.
const unknown = math.MaxUint64

// follow reads one stream of events to its end.
func (s *source) follow(ctx context.Context) error {
	st, err := s.Admin.Status(ctx, &pb.StatusRequest{})
	if err != nil {
		return err
	}
	if err := s.f.claim(st.GetNode(), s.Server); err != nil {
		return refusal{err}
	}
	if st.GetNode() != s.name || st.GetStartUnixMs() != s.start {
		s.name, s.start, s.after, s.announced = st.GetNode(), st.GetStartUnixMs(), st.GetLastEvent(), time.Time{}
	}
	ctx, cancel := context.WithCancel(ctx)
	after := s.after
	if after == 0 {
		after = unknown // after 0, the node would skip the events between the status and the call
	}
	stream, err := s.Cache.Events(ctx, &pb.EventsRequest{After: after})
	if err != nil {
		cancel()
		return err
	}
	events := make(chan *pb.Event)
	ended := make(chan error, 1)
	go func() { ended <- receive(ctx, stream, events) }()
	defer func() {
		cancel()
		for range events { // receive closes events at its end
		}
	}()
	// The node may have been restarted since the first status, and gRPC connected again. The stream
	// was opened between two status calls. If both are of the same run of the node, so is the
	// stream.
	if again, err := s.Admin.Status(ctx, &pb.StatusRequest{}); err != nil {
		return err
	} else if again.GetStartUnixMs() != s.start {
		return errors.New("the node was restarted")
	}
	if s.announced.IsZero() {
		if err := s.announce(ctx); err != nil {
			return err
		}
	}
	if s.down != "" {
		s.down = ""
		s.report(Report{What: "back"})
	}
	err = s.pump(ctx, events, ended)
	if status.Code(err) == codes.Unauthenticated {
		// The token that opened the stream was removed. The next attempt has the present one.
		return fmt.Errorf("the node ended the stream of events: %s", status.Convert(err).Message())
	}
	return err
}

// receive sends the events of a stream to events, and closes events at the end.
func receive(ctx context.Context, stream pb.Cache_EventsClient, events chan<- *pb.Event) error {
	defer close(events)
	for {
		e, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return errors.New("the node ended the stream of events")
		}
		if err != nil {
			return err
		}
		select {
		case events <- e:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// pump publishes events and heartbeats, and makes requested announcements when they are due.
func (s *source) pump(ctx context.Context, events <-chan *pb.Event, ended <-chan error) error {
	var beat <-chan time.Time
	if s.opts.Heartbeat > 0 {
		t := time.NewTicker(s.opts.Heartbeat)
		defer t.Stop()
		beat = t.C
	}
	var due <-chan time.Time
	defer func() {
		if due != nil { // the next stream makes the announcement
			s.request()
		}
	}()
	for {
		select {
		case e, ok := <-events:
			if !ok {
				return <-ended
			}
			if err := s.event(ctx, e); err != nil {
				s.announced = time.Time{} // perhaps only a part of the event was published, and the node does not send it again
				return err
			}
		case <-beat:
			for _, sp := range s.spaces {
				s.publish(sp, time.Now())
			}
		case <-s.wake:
			if s.opts.Resync > 0 && due == nil {
				due = time.After(time.Until(s.announced.Add(s.opts.Resync)))
			}
		case <-due:
			due = nil
			if err := s.announce(ctx); err != nil {
				return err
			}
		}
	}
}

// event publishes the changes of one event of the node.
func (s *source) event(ctx context.Context, e *pb.Event) error {
	lost := e.GetKind() == pb.Event_KIND_GAP && e.GetSequence() > s.after
	s.after = e.GetSequence()
	switch e.GetKind() {
	case pb.Event_KIND_GAP:
		if !lost {
			return nil
		}
		s.report(Report{What: "gap", Reason: fmt.Sprintf("the node no longer has the events up to %d", e.GetSequence())})
		return s.announce(ctx)
	case pb.Event_KIND_BLOCK_STORED, pb.Event_KIND_BLOCK_REMOVED, pb.Event_KIND_ALL_BLOCKS_CLEARED:
	default:
		return nil
	}
	if s.opts.Namespace != "" && e.GetNamespace() != s.opts.Namespace {
		return nil
	}
	at := time.UnixMilli(e.GetTimeUnixMs())
	epoch := kv.Epoch(e.GetEpoch())
	if e.GetKind() == pb.Event_KIND_ALL_BLOCKS_CLEARED {
		sp := s.spaces[e.GetNamespace()]
		if sp == nil {
			return nil
		}
		if e.GetReason() == "deleted" {
			delete(s.spaces, e.GetNamespace())
			sp.live = nil
			return s.clear(ctx, e.GetNamespace(), sp, at)
		}
		return s.retire(ctx, e.GetNamespace(), sp, at, func(live kv.Epoch) bool { return live == epoch })
	}
	sp, err := s.spaceAt(ctx, e.GetNamespace(), epoch, at)
	if sp == nil || err != nil {
		return err
	}
	ids, err := api.IDs(e.GetBlockIds(), math.MaxInt)
	if err != nil {
		return err
	}
	if e.GetKind() == pb.Event_KIND_BLOCK_REMOVED {
		if ids, err = s.absent(ctx, e.GetNamespace(), sp, epoch, ids); err == nil {
			s.publishBlocks(sp, at, Change{Kind: Removed, IDs: ids})
		}
		return err
	}
	c := Change{Kind: Stored, IDs: ids, BlockTokens: sp.blockTokens}
	if len(e.GetParent()) > 0 {
		if c.Parent, err = kv.BlockIDFromBytes(e.GetParent()); err != nil {
			return err
		}
	}
	s.publishBlocks(sp, at, c)
	return nil
}

// spaceAt returns the namespace of an event with the given epoch, or nil if the epoch has ended or
// the namespace was deleted. If the epoch is later than all known live epochs, spaceAt first
// requests the list of live epochs from the node.
func (s *source) spaceAt(ctx context.Context, name string, epoch kv.Epoch, at time.Time) (*space, error) {
	sp := s.spaces[name]
	if sp != nil && (slices.Contains(sp.live, epoch) || len(sp.live) > 0 && epoch < sp.live[0]) {
		return sp.at(epoch), nil
	}
	ns, err := s.Admin.GetNamespace(ctx, &pb.GetNamespaceRequest{Name: name})
	if status.Code(err) == codes.NotFound {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if sp == nil {
		return s.add(ns).at(epoch), nil
	}
	live := liveEpochs(ns)
	// An event whose epoch is greater than the newest epoch of the namespace is of a deleted
	// namespace of the same name.
	if epoch > live[0] {
		return nil, nil
	}
	if err := s.retire(ctx, name, sp, at, func(e kv.Epoch) bool { return !slices.Contains(live, e) }); err != nil {
		return nil, err
	}
	sp.live = live
	return sp.at(epoch), nil
}

// at returns sp if the epoch is live, and nil otherwise.
func (sp *space) at(epoch kv.Epoch) *space {
	if !slices.Contains(sp.live, epoch) {
		return nil
	}
	return sp
}

// existsBlocks is the maximum number of blocks in one Exists call. Nodes are expected to allow more
// than that (the setting limits.chain_blocks).
const existsBlocks = 256

// absent is called for the blocks ids that were removed from epoch. It returns the blocks that no
// other live epoch has.
func (s *source) absent(ctx context.Context, name string, sp *space, epoch kv.Epoch, ids []kv.BlockID) ([]kv.BlockID, error) {
	for _, e := range sp.live {
		if e == epoch {
			continue
		}
		var absent []kv.BlockID
		for part := range slices.Chunk(ids, existsBlocks) {
			r, err := s.Cache.Exists(ctx, &pb.ExistsRequest{Namespace: name, Epoch: uint64(e), BlockIds: api.AppendIDs(nil, part)})
			if status.Code(err) == codes.NotFound {
				return ids, nil // the namespace was deleted meanwhile, and its event follows
			}
			if err != nil {
				return nil, err
			}
			if len(r.GetPresent()) != len(part) {
				return nil, fmt.Errorf("the node answered for %d of %d blocks", len(r.GetPresent()), len(part))
			}
			for i, present := range r.GetPresent() {
				if present == 0 {
					absent = append(absent, part[i])
				}
			}
		}
		ids = absent
	}
	return ids, nil
}

func (s *source) add(ns *pb.Namespace) *space {
	sp := &space{
		topic:       s.opts.Topic.of(s.name, ns.GetName()),
		blockTokens: int(ns.GetGeometry().GetBlockTokens()),
		flat:        ns.GetIndex() == pb.IndexKind_INDEX_KIND_FLAT,
		live:        liveEpochs(ns),
	}
	s.spaces[ns.GetName()] = sp
	return sp
}

// liveEpochs returns the live epochs of a namespace, the newest first. A node that does not list
// its live epochs has only one.
func liveEpochs(ns *pb.Namespace) []kv.Epoch {
	if len(ns.GetLive()) == 0 {
		return []kv.Epoch{kv.Epoch(ns.GetEpoch())}
	}
	live := make([]kv.Epoch, len(ns.GetLive()))
	for i, e := range ns.GetLive() {
		live[i] = kv.Epoch(e.GetEpoch())
	}
	return live
}

// retire publishes that a namespace has no block of the epochs for which gone returns true. Events
// contain no epoch, so retire clears the namespace and announces the blocks of its other epochs
// again.
func (s *source) retire(ctx context.Context, name string, sp *space, at time.Time, gone func(kv.Epoch) bool) error {
	n := len(sp.live)
	if sp.live = slices.DeleteFunc(sp.live, gone); len(sp.live) == n {
		return nil
	}
	return s.clear(ctx, name, sp, at)
}

// clear publishes that a namespace is empty, and then the blocks of the epochs in sp.live. It also
// announces the other namespaces of the same pod (a part of the topic) again, because consumers
// drop the blocks of the whole pod.
func (s *source) clear(ctx context.Context, name string, sp *space, at time.Time) error {
	s.publish(sp, at, Change{Kind: Cleared})
	if len(sp.live) > 0 {
		if _, err := s.list(ctx, name, sp); err != nil {
			return err
		}
	}
	if !s.opts.Topic.shared() {
		return nil
	}
	for name, other := range s.spaces {
		if other == sp {
			continue
		}
		if _, err := s.list(ctx, name, other); err != nil {
			return err
		}
	}
	return nil
}

// announce publishes an AllBlocksCleared on every topic, and then all blocks of the node.
func (s *source) announce(ctx context.Context) error {
	select {
	case <-s.wake: // this announcement serves all requests up to now
	default:
	}
	s.announced = time.Time{} // until this announcement is complete
	resp, err := s.Admin.ListNamespaces(ctx, &pb.ListNamespacesRequest{})
	if err != nil {
		return err
	}
	now := time.Now()
	gone := s.spaces
	s.spaces = make(map[string]*space)
	for _, ns := range resp.GetNamespaces() {
		if s.opts.Namespace == "" || ns.GetName() == s.opts.Namespace {
			s.publish(s.add(ns), now, Change{Kind: Cleared})
		}
	}
	for name, sp := range gone {
		if s.spaces[name] == nil {
			s.publish(sp, now, Change{Kind: Cleared})
		}
	}
	r := Report{What: "announced", Namespaces: len(s.spaces)}
	for name, sp := range s.spaces {
		n, err := s.list(ctx, name, sp)
		if err != nil {
			return err
		}
		r.Blocks += n
	}
	s.announced = now
	s.report(r)
	return nil
}

// listPage is the number of pieces in one call of ListBlocks.
const listPage = 4096

// list publishes the blocks of a namespace and returns their number. It omits blocks of epochs that
// are not in sp.live, because events of these epochs will follow.
func (s *source) list(ctx context.Context, name string, sp *space) (blocks int, err error) {
	var cursor []byte
	for {
		resp, err := s.Admin.ListBlocks(ctx, &pb.ListBlocksRequest{Namespace: name, Cursor: cursor, Limit: listPage})
		if status.Code(err) == codes.NotFound {
			return blocks, nil // the namespace was deleted meanwhile; its event follows
		}
		if err != nil {
			return blocks, err
		}
		changes, err := sp.chains(resp.GetBlocks())
		if err != nil {
			return blocks, err
		}
		s.publishBlocks(sp, time.Now(), changes...)
		for _, c := range changes {
			blocks += len(c.IDs)
		}
		if cursor = resp.GetCursor(); len(cursor) == 0 {
			return blocks, nil
		}
	}
}

// chains converts a list of blocks to Changes. For a flat namespace it returns one Change.
// Otherwise it divides the blocks into chains that are as long as possible, and returns one Change
// for each chain.
func (sp *space) chains(listed []*pb.Block) ([]Change, error) {
	type block struct {
		id, parent kv.BlockID
		child      int // 1 + the index of the child that continues the chain; 0: none
		continues  bool
	}
	var blocks []block
	at := make(map[kv.BlockID]int, len(listed))
	for _, l := range listed {
		if l.GetGroup() != 0 || !slices.Contains(sp.live, kv.Epoch(l.GetEpoch())) {
			continue
		}
		var b block
		var err error
		if b.id, err = kv.BlockIDFromBytes(l.GetId()); err != nil {
			return nil, err
		}
		if len(l.GetParent()) > 0 {
			if b.parent, err = kv.BlockIDFromBytes(l.GetParent()); err != nil {
				return nil, err
			}
		}
		if _, listed := at[b.id]; listed {
			continue // the block is listed in two epochs
		}
		at[b.id] = len(blocks)
		blocks = append(blocks, b)
	}
	if sp.flat && len(blocks) > 0 {
		c := Change{Kind: Stored, BlockTokens: sp.blockTokens}
		for _, b := range blocks {
			c.IDs = append(c.IDs, b.id)
		}
		return []Change{c}, nil
	}
	for i := range blocks {
		if p, ok := at[blocks[i].parent]; ok && blocks[p].child == 0 {
			blocks[p].child, blocks[i].continues = i+1, true
		}
	}
	var changes []Change
	for i, b := range blocks {
		if b.continues {
			continue
		}
		c := Change{Kind: Stored, Parent: b.parent, BlockTokens: sp.blockTokens}
		for ; ; i = blocks[i].child - 1 {
			c.IDs = append(c.IDs, blocks[i].id)
			if blocks[i].child == 0 {
				break
			}
		}
		changes = append(changes, c)
	}
	return changes, nil
}

// batchBlocks and batchChanges are the maximum numbers of blocks and changes in one message. They
// limit a message to some tens of KiB.
const (
	batchBlocks  = 1024
	batchChanges = 512
)

// publishBlocks publishes changes, in several messages if they exceed the limits of one message.
func (s *source) publishBlocks(sp *space, at time.Time, changes ...Change) {
	var batch []Change
	var blocks int
	send := func() {
		if len(batch) > 0 {
			s.publish(sp, at, batch...)
		}
		batch, blocks = batch[:0], 0
	}
	for _, c := range changes {
		for part := range slices.Chunk(c.IDs, batchBlocks) {
			if blocks+len(part) > batchBlocks || len(batch) == batchChanges {
				send()
			}
			p := c
			p.IDs = part
			batch = append(batch, p)
			blocks += len(part)
			if !sp.flat {
				c.Parent = part[len(part)-1]
			}
		}
	}
	send()
}

// publish publishes one message.
func (s *source) publish(sp *space, at time.Time, changes ...Change) {
	s.opts.Publisher.Publish(sp.topic, s.opts.Wire.AppendBatch(nil, at, changes...))
}
