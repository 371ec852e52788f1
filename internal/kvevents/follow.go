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

// Node is a storage node that is followed.
type Node struct {
	// Server is its address, for reports.
	Server string
	Cache  pb.CacheClient
	Admin  pb.AdminClient
}

// Options of Follow. Nodes and Publisher are required.
type Options struct {
	Nodes []Node
	// Namespace to publish; empty: all, those to come too.
	Namespace string
	Topic     Topic
	Wire      Wire
	Publisher *Publisher
	// Resync is the least time between two announcements of all that a node holds for
	// the sake of subscribers that have joined or lost messages. 0: none is made for
	// them.
	Resync time.Duration
	// Heartbeat is how often a message without events is published on each topic, by
	// which a subscriber notices that it has missed the last ones. 0: never.
	Heartbeat time.Duration
	// Report is called with what a person may want to know, by several goroutines.
	Report func(Report)
}

// Report is something that happened to a follower.
type Report struct {
	// Server is the address of the node, Node its name.
	Server string `json:"server"`
	Node   string `json:"node,omitempty"`
	// What is announced (all that the node holds has been published: Namespaces and
	// Blocks), gap, down or back; Reason says why.
	What       string `json:"what"`
	Namespaces int    `json:"namespaces"`
	Blocks     int    `json:"blocks"`
	Reason     string `json:"reason,omitempty"`
}

// Follower publishes what nodes hold.
type Follower struct {
	opts    Options
	sources []*source

	mu sync.Mutex
	// names maps the name of each node to its address: topics tell nodes apart by
	// name.
	names map[string]string
}

// NewFollower checks the options and returns a Follower, to be Run.
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

// Missed asks for an announcement of all that there is, for a subscriber that has
// joined or lost messages: PublisherOptions.Missed. It does not wait.
func (f *Follower) Missed(net.Addr, uint64) {
	for _, s := range f.sources {
		select {
		case s.wake <- struct{}{}:
		default: // it was asked for already
		}
	}
}

// Run follows the nodes until ctx ends, or one of them refuses. It then returns ctx's
// error, or why. A node that is away is waited for.
func (f *Follower) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, s := range f.sources {
		group.Go(func() error { return s.run(ctx) })
	}
	return group.Wait()
}

// claim refuses a node that has the name of another.
func (f *Follower) claim(name, server string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if other, ok := f.names[name]; ok && other != server {
		return fmt.Errorf("kvevents: the nodes at %s and %s are both named %q, so that their topics are the same: give each a name of its own (penstock serve --node)", other, server, name)
	}
	f.names[name] = server
	return nil
}

// source follows one node. Only its run uses it, but for wake.
type source struct {
	Node
	f    *Follower
	opts *Options
	// wake asks for an announcement.
	wake chan struct{}

	// name and start are the node's name and the run of it that after belongs to.
	name  string
	start int64
	// after is the last event seen.
	after uint64
	// down is why the node was last reported to be down; empty: it is not.
	down string
	// announced is when all was last announced; zero: not since the start, or since
	// events were lost.
	announced time.Time
	spaces    map[string]*space
}

// space is a namespace whose blocks are published.
type space struct {
	topic       string
	blockTokens int
	// flat: blocks are keys without parents.
	flat bool
	// epoch is that of the blocks that subscribers know.
	epoch kv.Epoch
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

// refusal is an error of ours that stays the same however often one tries.
type refusal struct{ error }

func (r refusal) Unwrap() error { return r.error }

// refused reports whether an error stays the same however often one tries.
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

// unknown is a number that no event of a node has. Asked for what follows it, the
// node answers with a gap and all that it still has.
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
		after = unknown // 0 means from now on, which is later than the status
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
		for range events { // until receive has ended
		}
	}()
	// gRPC connects again by itself. If the node is still the one of the first
	// status, the stream, which was opened in between, is of that run too.
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
	return s.pump(ctx, events, ended)
}

// receive passes on what a stream has, and closes events at its end.
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

// pump publishes events as they come, heartbeats, and announcements when they are
// asked for and due.
func (s *source) pump(ctx context.Context, events <-chan *pb.Event, ended <-chan error) error {
	var beat <-chan time.Time
	if s.opts.Heartbeat > 0 {
		t := time.NewTicker(s.opts.Heartbeat)
		defer t.Stop()
		beat = t.C
	}
	var due <-chan time.Time
	for {
		select {
		case e, ok := <-events:
			if !ok {
				return <-ended
			}
			if err := s.event(ctx, e); err != nil {
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

// event publishes what one event of the node means to subscribers.
func (s *source) event(ctx context.Context, e *pb.Event) error {
	lost := e.GetKind() == pb.Event_KIND_GAP && e.GetSequence() > s.after
	s.after = e.GetSequence()
	switch e.GetKind() {
	case pb.Event_KIND_GAP:
		if !lost {
			return nil
		}
		s.report(Report{What: "gap", Reason: fmt.Sprintf("the node no longer has the events up to %d", e.GetSequence())})
		s.announced = time.Time{} // until the announcement is whole
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
		} else if epoch < sp.epoch {
			return nil
		}
		sp.epoch = epoch + 1
		return s.clear(ctx, sp, at)
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
		s.publishBlocks(sp, at, Change{Kind: Removed, IDs: ids})
		return nil
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

// spaceAt returns the namespace that an event of an epoch is about, or nil if what
// the event is about has ended: the epoch, or the whole namespace. At the first event
// of an epoch the namespace is cleared.
func (s *source) spaceAt(ctx context.Context, name string, epoch kv.Epoch, at time.Time) (*space, error) {
	sp := s.spaces[name]
	if sp != nil && epoch == sp.epoch {
		return sp, nil
	}
	if sp != nil && epoch < sp.epoch {
		return nil, nil
	}
	ns, err := s.Admin.GetNamespace(ctx, &pb.GetNamespaceRequest{Name: name})
	if status.Code(err) == codes.NotFound {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if sp == nil {
		sp = s.add(ns)
	}
	// A greater epoch than the namespace has is that of an earlier one of its name.
	if now := kv.Epoch(ns.GetEpoch()); epoch < sp.epoch || epoch > now {
		return nil, nil
	}
	if epoch == sp.epoch {
		return sp, nil
	}
	sp.epoch = epoch
	return sp, s.clear(ctx, sp, at)
}

func (s *source) add(ns *pb.Namespace) *space {
	sp := &space{
		topic:       s.opts.Topic.of(s.name, ns.GetName()),
		blockTokens: int(ns.GetGeometry().GetBlockTokens()),
		flat:        ns.GetIndex() == pb.IndexKind_INDEX_KIND_FLAT,
		epoch:       kv.Epoch(ns.GetEpoch()),
	}
	s.spaces[ns.GetName()] = sp
	return sp
}

// clear publishes that a namespace is empty. The others of the same pod are
// announced again: consumers have forgotten them too.
func (s *source) clear(ctx context.Context, sp *space, at time.Time) error {
	s.publish(sp, at, Change{Kind: Cleared})
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

// announce publishes all that the node holds: an AllBlocksCleared on every topic, and
// then the blocks.
func (s *source) announce(ctx context.Context) error {
	select {
	case <-s.wake: // who has asked until now gets this one
	default:
	}
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

// listPage is how many pieces one call lists.
const listPage = 4096

// list publishes the blocks of a namespace and returns how many there are. Blocks of
// a newer epoch than subscribers know are left out: their events are still to come.
func (s *source) list(ctx context.Context, name string, sp *space) (blocks int, err error) {
	var cursor []byte
	for {
		resp, err := s.Admin.ListBlocks(ctx, &pb.ListBlocksRequest{Namespace: name, Cursor: cursor, Limit: listPage})
		if status.Code(err) == codes.NotFound {
			return blocks, nil // deleted meanwhile: its event follows
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

// chains makes Changes of listed blocks: of a flat namespace one, of others one for
// each chain, which is as long as the list allows.
func (sp *space) chains(listed []*pb.Block) ([]Change, error) {
	type block struct {
		id, parent kv.BlockID
		child      int // 1 + the index of the child that continues the chain; 0: none
		continues  bool
	}
	var blocks []block
	at := make(map[kv.BlockID]int, len(listed))
	for _, l := range listed {
		if l.GetGroup() != 0 || kv.Epoch(l.GetEpoch()) != sp.epoch {
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

// batchBlocks and batchChanges bound one message: some tens of KiB.
const (
	batchBlocks  = 1024
	batchChanges = 512
)

// publishBlocks publishes changes about blocks, in as many messages as they need.
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
