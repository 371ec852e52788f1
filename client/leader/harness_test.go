package leader

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testplanner"
	"github.com/penstock-kv/penstock/server/planner"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// geo has blocks of 16 tokens.
var geo = kv.SingleGroup(2, 16, 64)

// host is a planner in this process, behind gRPC, which can be restarted.
type host struct {
	*testing.T
	*testplanner.Planner
	ctx     context.Context
	planner pb.PlannerClient

	// gate, while it is locked, keeps the planner from receiving messages of leaders.
	gate sync.RWMutex
	// sending, if set, is called with each message of a leader before it is sent, receiving
	// before the planner gets it, and action with each action before the leader gets it.
	sending, receiving func(*pb.LeaderMessage)
	action             func(*pb.LeaderAction)
	// breakers break sessions of leaders, or kill the planner.
	breakers []*breaker
	// life is the life of the running planner. restarts has the goroutines that replace it.
	life     atomic.Pointer[life]
	restarts sync.WaitGroup
}

// life is the time of one planner. When it is over, no message of that planner or to it arrives.
type life struct{ over atomic.Bool }

// newHost starts a planner. Without another value in opts, groups time out after an hour.
func newHost(t *testing.T, opts dualpath.Options) *host {
	t.Helper()
	testkit.VerifyNone(t)
	opts.BlockTokens = geo.BlockTokens
	if opts.GroupTimeout == 0 {
		opts.GroupTimeout = time.Hour
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	h := &host{T: t, ctx: ctx}
	h.life.Store(&life{})
	h.Planner = testplanner.Start(t, testplanner.Options{
		Planner: planner.Options{Planner: opts, TickEvery: time.Millisecond},
		Server: []grpc.ServerOption{grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			return handler(srv, &gatedStream{ServerStream: s, h: h, life: h.life.Load()})
		})},
		Dial: []grpc.DialOption{grpc.WithStreamInterceptor(h.intercept)},
	})
	h.planner = pb.NewPlannerClient(h.Conn)
	t.Cleanup(h.restarts.Wait)
	return h
}

// kills reports whether a breaker kills the planner.
func (h *host) kills() bool {
	return slices.ContainsFunc(h.breakers, func(b *breaker) bool { return b.kills })
}

func (h *host) killed() bool { return h.kills() && slices.ContainsFunc(h.breakers, (*breaker).fired) }

// kill ends a planner's life and starts a planner without state.
func (h *host) kill(l *life) {
	l.over.Store(true)
	h.restarts.Go(func() {
		h.Stop()
		h.life.Store(&life{})
		h.Start()
	})
}

// gatedStream receives while the gate is open, and until the breaker breaks it.
type gatedStream struct {
	grpc.ServerStream
	h    *host
	life *life
	// role is the group's. broken: the breaker has broken the stream.
	role   pb.Side
	broken atomic.Bool
}

func (s *gatedStream) RecvMsg(m any) error {
	s.h.gate.RLock()
	defer s.h.gate.RUnlock()
	if s.broken.Load() {
		return errBroken
	}
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	if s.life.over.Load() {
		return errBroken
	}
	lm, ok := m.(*pb.LeaderMessage)
	if ok && s.h.receiving != nil {
		s.h.receiving(lm)
	}
	if !ok || lm.GetFetch() != nil {
		return nil
	}
	if r := lm.GetRegister(); r != nil {
		s.role = r.Role
	}
	b := s.h.breaks(lm, s.role, true, false)
	if s.h.breaks(lm, s.role, true, true) != nil {
		s.h.kill(s.life)
		return errBroken
	}
	if b == nil {
		return nil
	}
	s.broken.Store(true)
	if b.lose {
		return errBroken
	}
	return nil // the planner handles the message before it receives again
}

func (s *gatedStream) SendMsg(m any) error {
	var b *breaker
	if _, ok := m.(*pb.LeaderAction); ok {
		b = s.h.breaks(m, s.role, false, false)
	}
	if b == nil || !b.lose {
		if err := s.ServerStream.SendMsg(m); err != nil {
			return err
		}
	}
	if b != nil {
		return errBroken
	}
	return nil
}

var errBroken = status.Error(codes.Unavailable, "the test has broken the stream")

// breaker breaks the stream of the leader of one group at the k-th message in one direction,
// once. Fetches do not count. The message is lost, or it is the last one that arrives.
type breaker struct {
	role      pb.Side
	toPlanner bool
	lose      bool
	// kills: the breaker kills the planner. A message to the planner is then lost.
	kills bool
	// counts, if set, returns whether a message counts.
	counts func(message any) bool
	k      int

	mu sync.Mutex
	n  int
}

// breaks counts a message with every breaker of a kind and returns one that acts at it.
func (h *host) breaks(m any, role pb.Side, toPlanner, kills bool) (at *breaker) {
	for _, b := range h.breakers {
		if b.kills == kills && (b.counts == nil || b.counts(m)) && b.count(role, toPlanner) {
			at = b
		}
	}
	return at
}

// count counts a message and reports whether the stream breaks at it.
func (b *breaker) count(role pb.Side, toPlanner bool) bool {
	if role != b.role || toPlanner != b.toPlanner {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.n++
	return b.n == b.k
}

// fired reports whether the stream was broken.
func (b *breaker) fired() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.n >= b.k
}

// intercept gives the test the messages that leaders send and receive.
func (h *host) intercept(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	l := h.life.Load()
	s, err := streamer(ctx, desc, cc, method, opts...)
	return &watchedStream{ClientStream: s, h: h, life: l}, err
}

// watchedStream receives the messages of one planner.
type watchedStream struct {
	grpc.ClientStream
	h    *host
	life *life
	role atomic.Int32 // pb.Side of the group
}

func (s *watchedStream) SendMsg(m any) error {
	if lm, ok := m.(*pb.LeaderMessage); ok {
		if r := lm.GetRegister(); r != nil {
			s.role.Store(int32(r.Role))
		}
		if s.h.sending != nil {
			s.h.sending(lm)
		}
	}
	return s.ClientStream.SendMsg(m)
}

func (s *watchedStream) RecvMsg(m any) error {
	if err := s.ClientStream.RecvMsg(m); err != nil {
		return err
	}
	if s.life.over.Load() {
		return errBroken
	}
	a, ok := m.(*pb.LeaderAction)
	if !ok {
		return nil
	}
	if b := s.h.breaks(a, pb.Side(s.role.Load()), false, true); b != nil {
		s.h.kill(s.life)
		if b.lose {
			return errBroken
		}
	}
	if s.h.action != nil {
		s.h.action(a)
	}
	return nil
}

func (h *host) must(err error) {
	h.Helper()
	if err != nil {
		h.Fatal(err)
	}
}

// await waits until a condition of the planner holds.
func (h *host) await(what string, ok func(*pb.TopResponse) bool) {
	h.Helper()
	t := time.NewTicker(time.Millisecond)
	defer t.Stop()
	for {
		top, err := h.planner.Top(h.ctx, &pb.TopRequest{}, grpc.WaitForReady(true))
		if err == nil && ok(top) {
			return
		}
		select {
		case <-t.C:
		case <-h.ctx.Done():
			h.Fatalf("not reached: %s; the planner has %v, %v", what, top, err)
		}
	}
}

// groups is the condition that n groups are registered.
func groups(n int) func(*pb.TopResponse) bool {
	return func(top *pb.TopResponse) bool { return len(top.Groups) == n }
}

// engine is an engine without KV. The test makes its reports.
type engine struct {
	*testing.T
	ctx    context.Context
	starts chan *work
	orders chan order
}

// work is a started request.
type work struct {
	*Request
	ctx context.Context
}

// order is a call of Engine.
type order struct {
	what, request string
	part          traffic.Part
}

func (h *host) newEngine() *engine {
	return &engine{h.T, h.ctx, make(chan *work, 64), make(chan order, 64)}
}

func (e *engine) Start(ctx context.Context, r *Request) { e.starts <- &work{r, ctx} }
func (e *engine) Read(request string, p traffic.Part)   { e.orders <- order{"read", request, p} }
func (e *engine) Cut(request string)                    { e.orders <- order{"cut", request, traffic.Part{}} }
func (e *engine) Recompute(request string, part traffic.Part) {
	e.orders <- order{"recompute", request, part}
}

// started returns the next request that was started.
func (e *engine) started() *work {
	e.Helper()
	return next(e.T, e.ctx, e.starts)
}

// next returns the next element of a channel.
func next[V any](t *testing.T, ctx context.Context, c <-chan V) (v V) {
	t.Helper()
	select {
	case v = <-c:
	case <-ctx.Done():
		t.Fatal("nothing came")
	}
	return v
}

// none fails the test if the engine was started or received an order.
func (e *engine) none() {
	e.Helper()
	select {
	case w := <-e.starts:
		e.Errorf("request %s was started", w.Name)
	case o := <-e.orders:
		e.Errorf("%s of %s was ordered", o.what, o.request)
	default:
	}
}

// readAll reports that all parts were read.
func (w *work) readAll() {
	for _, p := range w.Parts {
		w.Progress(traffic.Progress{Part: p, Upto: p.To, Bytes: int64(p.Len()) * geo.PieceBytes(0)})
	}
}

// member returns an engine as a member of a group.
func member(name string, e Engine) Member {
	return Member{Name: name, Engine: e, DeviceBlocks: 1000}
}

// lead runs the leader of a role's group until the test ends.
func (h *host) lead(role Role, members ...Member) (l *Leader, stop func()) {
	h.Helper()
	return h.leadOptions(Options{Group: role.String(), Node: "node of " + role.String(), Role: role, Members: members})
}

// leadOptions runs a leader of the test's planner until the test ends.
func (h *host) leadOptions(o Options) (l *Leader, stop func()) {
	h.Helper()
	o.Geometry, o.Planner, o.FetchEvery = geo, h.Conn, time.Millisecond
	l, err := New(o)
	h.must(err)
	ctx, cancel := context.WithCancel(h.ctx)
	var wg sync.WaitGroup
	wg.Go(func() { l.Run(ctx) })
	stop = func() {
		cancel()
		wg.Wait()
	}
	h.Cleanup(stop)
	return l, stop
}

// pair leads a group of one engine for each role.
func (h *host) pair() (pe, de *engine) {
	h.Helper()
	pe, de = h.newEngine(), h.newEngine()
	h.lead(Prefill, member("P", pe))
	h.lead(Decode, member("D", de))
	h.await("two groups", groups(2))
	return pe, de
}

// request is a gateway's stream.
type request struct {
	h      *host
	id     string
	stream grpc.ServerStreamingClient[pb.RequestUpdate]
	cancel context.CancelFunc
}

// submit submits a request with hit tokens of cached prefix.
func (h *host) submit(id string, hit int) *request {
	h.Helper()
	ctx, cancel := context.WithCancel(h.ctx)
	h.Cleanup(cancel)
	for {
		s, err := h.planner.Submit(ctx, submission(id, hit), grpc.WaitForReady(true))
		h.must(err)
		u, err := s.Recv()
		if status.Code(err) == codes.Unavailable {
			continue // the connection to a planner that was stopped
		}
		h.must(err)
		if u.Kind != pb.RequestUpdate_KIND_ACCEPTED {
			h.Fatalf("request %s: %v; want accepted", id, u)
		}
		return &request{h, id, s, cancel}
	}
}

// served is a request whose gateway submits it again when the planner was killed.
type served struct {
	cancel context.CancelFunc
	end    chan error // nil: finished
}

// serve submits a request with hit tokens of cached prefix until it has ended.
func (h *host) serve(id string, hit int) *served {
	ctx, cancel := context.WithCancel(h.ctx)
	s := &served{cancel, make(chan error, 1)}
	var wg sync.WaitGroup
	wg.Go(func() {
		t := time.NewTicker(time.Millisecond)
		defer t.Stop()
		for {
			err := h.follow(ctx, id, hit)
			if code := status.Code(err); ctx.Err() != nil || (code != codes.Unavailable && code != codes.AlreadyExists) {
				s.end <- err
				return
			}
			<-t.C
		}
	})
	h.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return s
}

// follow submits a request and reads its updates until it has finished.
func (h *host) follow(ctx context.Context, id string, hit int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := h.planner.Submit(ctx, submission(id, hit), grpc.WaitForReady(true))
	for err == nil {
		var u *pb.RequestUpdate
		u, err = stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return errors.New("it ended without finished")
		case u.GetKind() == pb.RequestUpdate_KIND_FINISHED:
			return nil
		case u.GetKind() == pb.RequestUpdate_KIND_REJECTED:
			return errors.New("it was rejected: " + u.Reason)
		}
	}
	return err
}

// submission is a request of 10 blocks of prompt and hit tokens of cached prefix.
func submission(id string, hit int) *pb.SubmitRequest {
	return &pb.SubmitRequest{
		Id: id, Namespace: "m", Epoch: 3, PromptTokens: uint32(10*geo.BlockTokens + 1), HitTokens: uint32(hit), OutputTokens: 5, Payload: []byte("of " + id),
	}
}

// want receives the next update and checks its kind.
func (r *request) want(kind pb.RequestUpdate_Kind) *pb.RequestUpdate {
	r.h.Helper()
	u, err := r.stream.Recv()
	if err != nil {
		r.h.Fatalf("request %s: %v; want %v", r.id, err, kind)
	}
	if u.Kind != kind {
		r.h.Fatalf("request %s: %v; want %v", r.id, u, kind)
	}
	return u
}

// finished receives the updates of a request whose engines have both completed their parts.
func (r *request) finished() {
	r.h.Helper()
	for {
		u, err := r.stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			r.h.Fatalf("request %s ended without finished", r.id)
		case err != nil:
			r.h.Fatalf("request %s: %v", r.id, err)
		case u.Kind == pb.RequestUpdate_KIND_FINISHED:
			return
		case u.Kind == pb.RequestUpdate_KIND_REJECTED:
			r.h.Fatalf("request %s was rejected: %s", r.id, u.Reason)
		}
	}
}

func (w *work) String() string {
	return fmt.Sprintf("%s as %v: epoch %d, prompt %d, output %d, hit %d, parts %v, peer %s %s, payload %q", w.Name, w.Role, w.Epoch, w.Prompt, w.Output, w.Hit, w.Parts, w.PeerEngine, w.Peer.Token, w.Payload)
}
