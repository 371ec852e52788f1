package emulate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

// Payload is what a gateway hands to the engines through the planner: enough to
// name every block of the prompt and of the output.
type Payload struct {
	IDs    []byte `json:"ids"` // 16 bytes each: the full blocks of prompt and output
	Epoch  uint64 `json:"epoch"`
	Prompt int    `json:"prompt"`
	Output int    `json:"output"`
	Hit    int    `json:"hit"` // blocks
}

// address is how the engine on the other side reaches one.
type address struct {
	Addr  []byte `json:"addr"` // rdma.Addr
	Token []byte `json:"token"`
}

// Member is one engine of a leader's group.
type Member struct {
	Engine *Engine
	// Addr and Token are the compute NIC's.
	Addr  rdma.Addr
	Token rdma.Token
}

// LeaderOptions make a Leader.
type LeaderOptions struct {
	Group, Node string
	Role        pb.Side
	Members     []Member
	Planner     grpc.ClientConnInterface
	// FetchEvery is how often work is fetched. Default 5 ms.
	FetchEvery time.Duration
	// ReadRate, if set, is what the storage NIC is known to deliver, in tokens a
	// second; otherwise it is measured while there is a queue.
	ReadRate float64
	Logger   *slog.Logger
}

// Leader is the leader engine of a group: it alone talks to the planner.
type Leader struct {
	opts   LeaderOptions
	log    *slog.Logger
	byName map[string]Member

	mu   sync.Mutex
	seen uint64
	held map[string]*held
	// queue is read_q in tokens: asked of storage by this node's engines and not
	// read yet.
	queue int
	out   chan *pb.LeaderMessage
	meter meter
}

// held is a request that was assigned to this group.
type held struct {
	submit  *pb.SubmitRequest
	load    Payload
	member  Member
	cancel  context.CancelFunc
	attempt uint64
	// name is the request's with the attempt: what engines and traffic managers
	// know it by, so that the end of one attempt is never taken for another's.
	name string
	// unread are the tokens of the parts that count in the queue. arrived are those of
	// the parts being read that do not count any more.
	unread  int
	arrived map[traffic.Part]int
	// progress is what the planner is to be told at the next fetch; nil: nothing new.
	progress *pb.ReadProgress
	// buffer is what the request takes of its engine's buffer, bytes; 0 before its
	// start, and when its KV has passed.
	buffer int64
}

// meter measures what the storage NIC delivers while it has something to do.
type meter struct {
	since time.Time // of the present busy time; zero: idle
	busy  time.Duration
	read  float64
}

// rate is in tokens a second, over at least window of busy time; 0: not known.
func (m *meter) rate(now time.Time) float64 {
	busy := m.busy
	if !m.since.IsZero() {
		busy += now.Sub(m.since)
	}
	const window = 200 * time.Millisecond
	if busy < window {
		return 0
	}
	return m.read / busy.Seconds()
}

// NewLeader makes a leader; Run leads.
func NewLeader(opts LeaderOptions) *Leader {
	if opts.FetchEvery == 0 {
		opts.FetchEvery = 5 * time.Millisecond
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	l := &Leader{opts: opts, log: opts.Logger, byName: make(map[string]Member), held: make(map[string]*held)}
	for _, m := range opts.Members {
		l.byName[m.Engine.opts.Name] = m
	}
	return l
}

// Run leads the group until ctx ends, over as many sessions as it takes: after a
// planner's restart it says what its engines hold.
func (l *Leader) Run(ctx context.Context) error {
	for {
		err := l.session(ctx)
		if ctx.Err() != nil {
			return nil
		}
		l.log.Warn("session with the planner ended; trying again", "group", l.opts.Group, "err", err)
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return nil
		}
	}
}

// session is one stream.
func (l *Leader) session(ctx context.Context) error {
	// The stream outlives ctx for a word of good-bye.
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stream, err := pb.NewPlannerClient(l.opts.Planner).Lead(life)
	if err != nil {
		return err
	}
	out := make(chan *pb.LeaderMessage, 1024)
	register, err := l.registration(out)
	if err != nil {
		return err
	}
	if err := stream.Send(register); err != nil {
		return err
	}
	received := make(chan error, 1)
	go func() { received <- l.receive(ctx, stream) }()
	t := time.NewTicker(l.opts.FetchEvery)
	defer t.Stop()
	for {
		var m *pb.LeaderMessage
		select {
		case m = <-out:
		case <-t.C:
			for _, p := range l.progress() {
				if err := stream.Send(p); err != nil {
					return errors.Join(err, <-received)
				}
			}
			m = l.fetch()
		case err := <-received:
			return err
		case <-ctx.Done():
			// What the group has is planned anew at once, not after a timeout.
			_ = stream.CloseSend()
			select {
			case <-received:
			case <-time.After(time.Second):
			}
			return ctx.Err()
		}
		if err := stream.Send(m); err != nil {
			return errors.Join(err, <-received)
		}
	}
}

// registration returns the registration of the group, with the requests that it holds. From
// this call on, messages about these requests are sent to out. In the previous session they
// would be lost, and the planner would wait for ever for a request that has ended.
func (l *Leader) registration(out chan *pb.LeaderMessage) (*pb.LeaderMessage, error) {
	r := &pb.RegisterGroup{Group: l.opts.Group, Role: l.opts.Role}
	for _, m := range l.opts.Members {
		addr, err := m.Addr.MarshalBinary()
		if err != nil {
			return nil, err
		}
		raw, err := json.Marshal(address{addr, m.Token})
		if err != nil {
			return nil, err
		}
		f := m.Engine.manager.Footprint()
		r.Engines = append(r.Engines, &pb.EngineSpec{
			Engine: m.Engine.opts.Name, Node: l.opts.Node, Address: raw,
			HbmTokens: uint64(m.Engine.tokensOf(m.Engine.blocks)), PromptTokens: uint64(m.Engine.tokensOf(traffic.MaxBlocks)),
			Buffer: &pb.EngineBuffer{Bytes: uint64(f.Buffer), BlockBytes: uint64(f.Block), SumsBytes: uint64(f.Sums), RequestBytes: uint64(f.Request)},
		})
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen, l.out = 0, out
	for _, h := range l.held {
		r.Holding = append(r.Holding, &pb.HeldRequest{Request: h.submit, Engine: h.member.Engine.opts.Name, Attempt: h.attempt})
	}
	return &pb.LeaderMessage{Message: &pb.LeaderMessage_Register{Register: r}}, nil
}

// fetch reports every engine and the storage NIC.
func (l *Leader) fetch() *pb.LeaderMessage {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := &pb.FetchWork{Seen: l.seen}
	type load struct {
		tokens, requests, blocks int
		buffer                   int64
	}
	loads := make(map[*Engine]*load, len(l.opts.Members))
	for _, m := range l.opts.Members {
		loads[m.Engine] = &load{}
	}
	for _, h := range l.held {
		of, tokens := loads[h.member.Engine], h.load.Prompt
		if l.opts.Role == pb.Side_SIDE_DECODE {
			tokens += h.load.Output
		}
		of.tokens, of.requests, of.blocks, of.buffer = of.tokens+tokens, of.requests+1, of.blocks+h.member.Engine.blocksOf(tokens), of.buffer+h.buffer
	}
	for _, m := range l.opts.Members {
		of := loads[m.Engine]
		f.Engines = append(f.Engines, &pb.EngineState{
			Engine: m.Engine.opts.Name, Tokens: uint64(of.tokens), Requests: uint32(of.requests),
			HbmFreeTokens:   uint64(max(0, m.Engine.tokensOf(m.Engine.blocks-of.blocks))),
			BufferFreeBytes: uint64(max(0, m.Engine.manager.Footprint().Buffer-of.buffer)),
		})
	}
	rate := l.opts.ReadRate
	if rate == 0 {
		rate = l.meter.rate(time.Now())
	}
	f.Nodes = []*pb.NodeState{{Node: l.opts.Node, ReadQueueTokens: uint64(max(l.queue, 0)), ReadTokensPerSecond: rate}}
	return &pb.LeaderMessage{Message: &pb.LeaderMessage_Fetch{Fetch: f}}
}

// receive takes the planner's actions.
func (l *Leader) receive(ctx context.Context, stream grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction]) error {
	for {
		a, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return errors.New("the planner ended the session")
		}
		if err != nil {
			return err
		}
		if err := l.act(ctx, a); err != nil {
			l.log.Error("an action that cannot be taken", "group", l.opts.Group, "action", a.Kind.String(), "request", a.Request, "err", err)
		}
		// From now on a report contains what the action has assigned.
		l.mu.Lock()
		l.seen = max(l.seen, a.Seq)
		l.mu.Unlock()
	}
}

// act takes one action.
func (l *Leader) act(ctx context.Context, a *pb.LeaderAction) error {
	switch a.Kind {
	case pb.LeaderAction_KIND_ASSIGN:
		return l.assign(a)
	case pb.LeaderAction_KIND_START:
		return l.start(ctx, a)
	case pb.LeaderAction_KIND_READ:
		return l.read(a)
	case pb.LeaderAction_KIND_RECOMPUTE:
		return l.onHeld(a, func(h *held) {
			for _, p := range a.Parts {
				h.member.Engine.Recompute(h.name, l.blocks(h, p))
			}
		})
	case pb.LeaderAction_KIND_CUT, pb.LeaderAction_KIND_DROP:
		// What a dropped read reports when it stops, the planner ignores.
		return l.onHeld(a, func(h *held) { h.member.Engine.Cut(h.name) })
	case pb.LeaderAction_KIND_ABORT:
		l.mu.Lock()
		h := l.held[a.Request]
		l.mu.Unlock()
		if h == nil {
			return nil
		}
		if h.cancel != nil {
			h.cancel()
			return nil // its end drops it
		}
		l.drop(a.Request, h)
	}
	return nil
}

// onHeld calls f with a request of this group.
func (l *Leader) onHeld(a *pb.LeaderAction, f func(h *held)) error {
	l.mu.Lock()
	h := l.held[a.Request]
	l.mu.Unlock()
	if h == nil {
		return nil // it has ended meanwhile
	}
	f(h)
	return nil
}

// assign remembers a request for its Start.
func (l *Leader) assign(a *pb.LeaderAction) error {
	m, ok := l.byName[a.Engine]
	if !ok {
		return fmt.Errorf("emulate: engine %q is not in group %q", a.Engine, l.opts.Group)
	}
	h := &held{submit: a.Submitted, member: m, arrived: make(map[traffic.Part]int)}
	if err := json.Unmarshal(a.Submitted.GetPayload(), &h.load); err != nil {
		return fmt.Errorf("emulate: payload: %w", err)
	}
	l.mu.Lock()
	old := l.held[a.Request]
	l.held[a.Request] = h
	l.mu.Unlock()
	if old != nil && old.cancel != nil {
		old.cancel() // an attempt that the planner gave up without our hearing of it
	}
	return nil
}

// blocks translates a part from tokens to blocks.
func (l *Leader) blocks(h *held, p *pb.Part) traffic.Part {
	bt := h.member.Engine.opts.Namespace.Geometry.BlockTokens
	return traffic.Part{From: int(p.From) / bt, To: (int(p.To) + bt - 1) / bt}
}

// start begins a request whose both engines are known.
func (l *Leader) start(ctx context.Context, a *pb.LeaderAction) error {
	l.mu.Lock()
	h := l.held[a.Request]
	l.mu.Unlock()
	if h == nil {
		return fmt.Errorf("emulate: request %q was not assigned to group %q", a.Request, l.opts.Group)
	}
	var peer address
	if err := json.Unmarshal(a.PeerAddress, &peer); err != nil {
		return fmt.Errorf("emulate: address of %s: %w", a.PeerEngine, err)
	}
	var addr rdma.Addr
	if err := addr.UnmarshalBinary(peer.Addr); err != nil {
		return fmt.Errorf("emulate: address of %s: %w", a.PeerEngine, err)
	}
	name := fmt.Sprintf("%s#%d", a.Request, a.Seq)
	w := Work{Request: name, Epoch: kv.Epoch(a.Epoch), Prompt: h.load.Prompt, Output: h.load.Output, Hit: h.load.Hit, Peer: traffic.Peer{Addr: addr, Token: peer.Token}}
	for raw := h.load.IDs; len(raw) >= kv.BlockIDSize; raw = raw[kv.BlockIDSize:] {
		w.IDs = append(w.IDs, kv.BlockID(raw[:kv.BlockIDSize]))
	}
	for _, p := range a.Parts {
		if p.Side == l.opts.Role {
			w.Parts = append(w.Parts, l.blocks(h, p))
		}
	}
	l.expect(h, w.Parts)
	reads := h.member.Engine.blocksOf(h.load.Prompt) // all of the prompt passes through a decode engine's buffer
	if l.opts.Role == pb.Side_SIDE_PREFILL {
		reads = 0
		for _, p := range w.Parts {
			reads += p.Len()
		}
	}
	l.passes(h, h.member.Engine.manager.Footprint().Of(h.member.Engine.blocksOf(h.load.Prompt), reads))
	w.Progress = func(p traffic.Progress) { l.came(a.Request, h, p) }
	w.Stopped = func(s traffic.Stop) { l.stopped(a.Request, h, s) }
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	l.mu.Lock()
	before := h.cancel
	h.cancel, h.attempt, h.name = cancel, a.Seq, name
	l.mu.Unlock()
	if before != nil {
		before()
	}
	done := func(err error) {
		cancel()
		l.done(a.Request, h, err)
	}
	if l.opts.Role == pb.Side_SIDE_PREFILL {
		h.member.Engine.Prefill(work, w, done)
	} else {
		h.member.Engine.Decode(work, w, func() { l.passes(h, -1) }, done)
	}
	return nil
}

// read has a request's engine read another part.
func (l *Leader) read(a *pb.LeaderAction) error {
	return l.onHeld(a, func(h *held) {
		for _, p := range a.Parts {
			part := l.blocks(h, p)
			l.expect(h, []traffic.Part{part})
			if l.opts.Role == pb.Side_SIDE_PREFILL {
				l.passes(h, int64(part.Len())*h.member.Engine.manager.Footprint().Block)
			}
			h.member.Engine.Read(h.name, part)
		}
	})
}

// passes counts bytes more of an engine's buffer as a request's; less than 0: its KV
// has passed.
func (l *Leader) passes(h *held, bytes int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if bytes < 0 {
		h.buffer = 0
		return
	}
	h.buffer += bytes
}

// expect counts parts in the node's reading queue.
func (l *Leader) expect(h *held, parts []traffic.Part) {
	bt := h.member.Engine.opts.Namespace.Geometry.BlockTokens
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range parts {
		n := p.Len() * bt
		h.unread += n
		h.arrived[p] = 0
		l.queueLocked(n)
	}
}

// queueLocked changes the reading queue by n tokens.
func (l *Leader) queueLocked(n int) {
	now := time.Now()
	if n > 0 && l.queue == 0 {
		l.meter.since = now
	}
	l.queue += n
	if n < 0 && l.queue == 0 && !l.meter.since.IsZero() {
		l.meter.busy += now.Sub(l.meter.since)
		l.meter.since = time.Time{}
	}
}

// progress takes what the planner is to be told of reads under way: one message a
// request, however many blocks have come.
func (l *Leader) progress() []*pb.LeaderMessage {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []*pb.LeaderMessage
	for _, h := range l.held {
		if h.progress != nil {
			out = append(out, &pb.LeaderMessage{Message: &pb.LeaderMessage_Progress{Progress: h.progress}})
			h.progress = nil
		}
	}
	return out
}

// came takes how far a part has been read. The end of a part is told at once.
func (l *Leader) came(request string, h *held, p traffic.Progress) {
	g := h.member.Engine.opts.Namespace.Geometry
	landed := min(int(p.Bytes*int64(g.BlockTokens)/g.PieceBytes(0)), p.Part.Len()*g.BlockTokens)
	complete := p.Upto == p.Part.To
	l.mu.Lock()
	if n, reading := h.arrived[p.Part]; reading {
		l.meter.read += float64(landed - n)
		l.readLocked(h, landed-n)
		h.arrived[p.Part] = landed
	}
	told := &pb.ReadProgress{Request: request, Attempt: h.attempt, Side: l.opts.Role, Upto: uint32(p.Upto * g.BlockTokens), Landed: uint32(landed)}
	h.progress = told
	if complete {
		h.progress = nil
		delete(h.arrived, p.Part)
	}
	l.mu.Unlock()
	if complete {
		l.say(&pb.LeaderMessage{Message: &pb.LeaderMessage_Progress{Progress: told}})
	}
}

// readLocked takes tokens of a request out of the queue.
func (l *Leader) readLocked(h *held, n int) {
	n = min(n, h.unread)
	h.unread -= n
	l.queueLocked(-n)
}

// stopped takes a part that ended early.
func (l *Leader) stopped(request string, h *held, s traffic.Stop) {
	bt := h.member.Engine.opts.Namespace.Geometry.BlockTokens
	l.mu.Lock()
	l.readLocked(h, s.Part.Len()*bt-h.arrived[s.Part])
	delete(h.arrived, s.Part)
	h.progress = nil
	l.mu.Unlock()
	l.say(&pb.LeaderMessage{Message: &pb.LeaderMessage_Stopped{Stopped: &pb.ReadStopped{
		Request: request, Attempt: h.attempt, Side: l.opts.Role, Upto: uint32(s.Upto * bt), Failed: !s.Gone, Gone: s.Gone,
	}}})
}

// done takes the end of a request.
func (l *Leader) done(request string, h *held, err error) {
	l.drop(request, h)
	if err == nil {
		l.say(&pb.LeaderMessage{Message: &pb.LeaderMessage_Finished{Finished: &pb.RequestFinished{Request: request, Attempt: h.attempt, Role: l.opts.Role}}})
		return
	}
	if errors.Is(err, context.Canceled) {
		return // it was aborted: the planner knows
	}
	l.log.Warn("a request failed on its engine", "group", l.opts.Group, "request", request, "err", err)
	upto := 0
	var wrong *traffic.BlockError
	if errors.As(err, &wrong) {
		upto = wrong.Block * h.member.Engine.opts.Namespace.Geometry.BlockTokens
	}
	l.say(&pb.LeaderMessage{Message: &pb.LeaderMessage_Failed{Failed: &pb.RequestFailed{Request: request, Attempt: h.attempt, Role: l.opts.Role, Upto: uint32(upto)}}})
}

// drop forgets a request.
func (l *Leader) drop(request string, h *held) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held[request] == h {
		delete(l.held, request)
	}
	l.readLocked(h, h.unread)
}

// say queues a message for the planner. When the session is gone it is lost: the
// next one says what is held.
func (l *Leader) say(m *pb.LeaderMessage) {
	l.mu.Lock()
	out := l.out
	l.mu.Unlock()
	if out == nil {
		return
	}
	select {
	case out <- m:
	default:
		l.log.Warn("the planner does not take messages; one is lost", "group", l.opts.Group)
	}
}
