package planner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// host is a planner node in this process and a client of it.
type host struct {
	*testing.T
	ctx     context.Context
	service *Service
	client  pb.PlannerClient
	close   func()
}

// newHost starts a host. Groups time out after an hour by default, so that no test depends on the
// clock.
func newHost(t *testing.T, opts Options, server ...grpc.ServerOption) *host {
	t.Helper()
	if opts.Planner.GroupTimeout == 0 {
		opts.Planner.GroupTimeout = time.Hour
	}
	s, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	l := bufconn.Listen(1 << 20)
	g := grpc.NewServer(server...)
	pb.RegisterPlannerServer(g, s)
	served := make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	conn, err := grpc.NewClient("passthrough:planner", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	h := &host{T: t, ctx: ctx, service: s, client: pb.NewPlannerClient(conn)}
	closed := false
	h.close = func() {
		if closed {
			return
		}
		closed = true
		s.Close()
		s.Close() // a second call is no error
		g.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Errorf("serve: %v", err)
		}
		_ = conn.Close()
		cancel()
	}
	t.Cleanup(h.close)
	return h
}

// leading is a leader of a test.
type leading struct {
	*host
	stream grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction]
	end    context.CancelFunc
	// seq is the number of calls of nics.
	seq uint64
}

// lead registers a group of two engines, NAME/0 and NAME/1, on a node of their own.
func (h *host) lead(group string, role pb.Side, holding ...*pb.HeldRequest) *leading {
	h.Helper()
	r := &pb.RegisterGroup{Group: group, Role: role, Holding: holding}
	return h.leadEngines(r, group+"/0", group+"/1")
}

// leadEngines registers the group r with the named engines.
func (h *host) leadEngines(r *pb.RegisterGroup, engines ...string) *leading {
	h.Helper()
	ctx, cancel := context.WithCancel(h.ctx)
	stream, err := h.client.Lead(ctx)
	h.must(err)
	l := &leading{host: h, stream: stream, end: cancel}
	h.Cleanup(cancel)
	for _, name := range engines {
		e := &pb.EngineSpec{Engine: name, Node: "node-" + r.Group, Address: []byte("addr " + r.Group)}
		if r.Role == pb.Side_SIDE_DECODE {
			e.HbmTokens = 100_000
		}
		r.Engines = append(r.Engines, e)
	}
	l.send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Register{Register: r}})
	if a := l.next(); a.Kind != pb.LeaderAction_KIND_REGISTERED {
		h.Fatalf("group %s: %v before registered", r.Group, a)
	}
	return l
}

func (h *host) must(err error) {
	h.Helper()
	if err != nil {
		h.Fatal(err)
	}
}

func (l *leading) send(m *pb.LeaderMessage) {
	l.Helper()
	l.must(l.stream.Send(m))
}

// fetch reports idle engines.
func (l *leading) fetch(seen uint64) {
	l.Helper()
	l.send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Fetch{Fetch: &pb.FetchWork{Seen: seen}}})
}

func (l *leading) next() *pb.LeaderAction {
	l.Helper()
	a, err := l.stream.Recv()
	l.must(err)
	return a
}

// want receives the next action and checks it.
func (l *leading) want(kind pb.LeaderAction_Kind, request, engine string) *pb.LeaderAction {
	l.Helper()
	a := l.next()
	if a.Kind != kind || a.Request != request || a.Engine != engine {
		l.Fatalf("got %v, want %v of %q for %s", a, kind, request, engine)
	}
	return a
}

// startOn starts a request on the first engines of two groups and returns the number of the
// attempt.
func (h *host) startOn(pe, de *leading, gw *asking, id string) uint64 {
	h.Helper()
	de.fetch(0)
	pe.fetch(0)
	pe.want(pb.LeaderAction_KIND_ASSIGN, id, "P/0")
	pe.want(pb.LeaderAction_KIND_START, id, "P/0")
	de.want(pb.LeaderAction_KIND_ASSIGN, id, "D/0")
	seq := de.want(pb.LeaderAction_KIND_START, id, "D/0").Seq
	gw.want(pb.RequestUpdate_KIND_STARTED)
	return seq
}

// asking is a gateway's stream.
type asking struct {
	*host
	stream grpc.ServerStreamingClient[pb.RequestUpdate]
	end    context.CancelFunc
}

// submit submits a request of 4096 cached tokens and waits until it is accepted.
func (h *host) submit(id string) *asking {
	h.Helper()
	a := h.ask(&pb.SubmitRequest{Id: id, Namespace: "m", PromptTokens: 4200, HitTokens: 4096, OutputTokens: 100, Payload: []byte("prompt of " + id)})
	a.want(pb.RequestUpdate_KIND_ACCEPTED)
	return a
}

func (h *host) ask(r *pb.SubmitRequest) *asking {
	h.Helper()
	ctx, cancel := context.WithCancel(h.ctx)
	h.Cleanup(cancel)
	stream, err := h.client.Submit(ctx, r)
	h.must(err)
	return &asking{h, stream, cancel}
}

func (a *asking) want(kind pb.RequestUpdate_Kind) *pb.RequestUpdate {
	a.Helper()
	u, err := a.stream.Recv()
	a.must(err)
	if u.Kind != kind {
		a.Fatalf("update %v, want %v", u, kind)
	}
	return u
}

// wantCode reads a stream to its end and checks the error.
func wantCode(t *testing.T, recv func() error, code codes.Code, text string) {
	t.Helper()
	var err error
	for err == nil {
		err = recv()
	}
	if status.Code(err) != code || !strings.Contains(err.Error(), text) {
		t.Errorf("ended with %v; want %v, %q", err, code, text)
	}
}

func finished(request string, role pb.Side) *pb.LeaderMessage {
	return &pb.LeaderMessage{Message: &pb.LeaderMessage_Finished{Finished: &pb.RequestFinished{Request: request, Role: role}}}
}

// TestRequest follows one request from submission to its end.
func TestRequest(t *testing.T) {
	h := newHost(t, Options{})
	pe, de := h.lead("P", pb.Side_SIDE_PREFILL), h.lead("D", pb.Side_SIDE_DECODE)
	gw := h.submit("r1")
	de.fetch(0)
	pe.fetch(0)
	if a := de.want(pb.LeaderAction_KIND_ASSIGN, "r1", "D/0"); string(a.Submitted.Payload) != "prompt of r1" {
		t.Errorf("assigned %v", a)
	}
	pe.want(pb.LeaderAction_KIND_ASSIGN, "r1", "P/0")
	a := pe.want(pb.LeaderAction_KIND_START, "r1", "P/0")
	if a.PeerEngine != "D/0" || string(a.PeerAddress) != "addr D" || len(a.Parts) != 2 {
		t.Errorf("started %v", a)
	}
	if b := de.want(pb.LeaderAction_KIND_START, "r1", "D/0"); b.PeerEngine != "P/0" || b.Seq != a.Seq || string(b.PeerAddress) != "addr P" {
		t.Errorf("started %v", b)
	}
	if u := gw.want(pb.RequestUpdate_KIND_STARTED); u.PrefillEngine != "P/0" || u.DecodeEngine != "D/0" || u.Parts[0].To != 2048 {
		t.Errorf("update %v", u)
	}
	pe.send(finished("r1", pb.Side_SIDE_PREFILL))
	gw.want(pb.RequestUpdate_KIND_PREFILLED)
	top, err := h.client.Top(h.ctx, &pb.TopRequest{})
	h.must(err)
	if len(top.Groups) != 2 || top.Serving != 1 || top.Splits != 1 || top.Groups[0].Engines[0].Tokens != 4200 || top.Groups[1].Nodes[0].AssignedTokens != 2048 {
		t.Errorf("top: %v", top)
	}
	de.send(finished("r1", pb.Side_SIDE_DECODE))
	gw.want(pb.RequestUpdate_KIND_FINISHED)
	wantCode(t, func() error { _, err := gw.stream.Recv(); return err }, codes.Unknown, "EOF")

	x, err := h.client.Explain(h.ctx, &pb.ExplainRequest{Request: "r1"})
	h.must(err)
	text := ""
	for _, l := range x.Lines {
		text += l.Text + "\n"
	}
	for _, want := range []string{"prefill engine 1: least tokens", "prefill side reads 2048 of 4096", "decode done"} {
		if !strings.Contains(text, want) {
			t.Errorf("explained without %q:\n%s", want, text)
		}
	}
	_, err = h.client.Explain(h.ctx, &pb.ExplainRequest{Request: "r2"})
	if status.Code(err) != codes.NotFound {
		t.Errorf("explain r2: %v", err)
	}
}

// TestRestart: a new planner gets its state from the leaders, and a gateway gets its request back
// by the id, but no request of another namespace.
func TestRestart(t *testing.T) {
	h := newHost(t, Options{})
	held := &pb.HeldRequest{Request: &pb.SubmitRequest{Id: "r1", Namespace: "m", PromptTokens: 100}, Engine: "P/1", Attempt: 7}
	h.lead("P", pb.Side_SIDE_PREFILL, held)
	de := h.lead("D", pb.Side_SIDE_DECODE, &pb.HeldRequest{Request: held.Request, Engine: "D/0", Attempt: 7})
	other := h.ask(&pb.SubmitRequest{Id: "r1", Namespace: "of another tenant", PromptTokens: 100})
	wantCode(t, func() error { _, err := other.stream.Recv(); return err }, codes.AlreadyExists, "in another namespace")
	gw := h.submit("r1")
	second := h.ask(held.Request)
	wantCode(t, func() error { _, err := second.stream.Recv(); return err }, codes.AlreadyExists, "on another stream")
	de.send(finished("r1", pb.Side_SIDE_DECODE))
	gw.want(pb.RequestUpdate_KIND_FINISHED)
}

// TestGatewayLost: the gateway of a request ended while the planner was down. The request does not
// stay on its engines, and a gateway may submit it again.
func TestGatewayLost(t *testing.T) {
	h := newHost(t, Options{GatewayWait: time.Millisecond})
	q := &pb.SubmitRequest{Id: "r1", Namespace: "m", PromptTokens: 100}
	pe := h.lead("P", pb.Side_SIDE_PREFILL, &pb.HeldRequest{Request: q, Engine: "P/1", Attempt: 7})
	pe.want(pb.LeaderAction_KIND_ABORT, "r1", "P/1")
	de := h.lead("D", pb.Side_SIDE_DECODE)
	h.startOn(pe, de, h.submit("r1"), "r1")
}

// TestGroupLost: a leader that closes its stream removes its group. A leader whose connection
// breaks may return with its requests, and no gateway gets an update.
func TestGroupLost(t *testing.T) {
	h := newHost(t, Options{})
	pe, de := h.lead("P", pb.Side_SIDE_PREFILL), h.lead("D", pb.Side_SIDE_DECODE)
	gw := h.submit("r1")
	attempt := h.startOn(pe, de, gw, "r1")

	de.end() // the connection breaks
	de = h.lead("D", pb.Side_SIDE_DECODE, &pb.HeldRequest{Request: &pb.SubmitRequest{Id: "r1", Namespace: "m", PromptTokens: 4200}, Engine: "D/0", Attempt: attempt})

	de.must(de.stream.CloseSend()) // an orderly end
	pe.want(pb.LeaderAction_KIND_ABORT, "r1", "P/0")
	gw.want(pb.RequestUpdate_KIND_REPLANNED)

	other := h.lead("E", pb.Side_SIDE_DECODE)
	other.fetch(0)
	pe.fetch(0)
	pe.want(pb.LeaderAction_KIND_ASSIGN, "r1", "P/1") // P/0 is still loaded according to its old report
	other.want(pb.LeaderAction_KIND_ASSIGN, "r1", "E/0")
	gw.want(pb.RequestUpdate_KIND_STARTED)
}

// TestReplannedOnce: both engines of a request are aborted, and its gateway gets one REPLANNED.
func TestReplannedOnce(t *testing.T) {
	h := newHost(t, Options{})
	pe, de := h.lead("P", pb.Side_SIDE_PREFILL), h.lead("D", pb.Side_SIDE_DECODE)
	gw := h.submit("r1")
	first := h.startOn(pe, de, gw, "r1")
	de.end()
	// The group returns with the request and without its start.
	de = h.lead("D", pb.Side_SIDE_DECODE, &pb.HeldRequest{Request: &pb.SubmitRequest{Id: "r1", Namespace: "m", PromptTokens: 4200}, Engine: "D/0"})
	pe.want(pb.LeaderAction_KIND_ABORT, "r1", "P/0")
	de.want(pb.LeaderAction_KIND_ABORT, "r1", "D/0")
	gw.want(pb.RequestUpdate_KIND_REPLANNED)
	de.fetch(0)
	pe.fetch(0)
	gw.want(pb.RequestUpdate_KIND_STARTED)

	// The end of the previous attempt is reported late. The request continues.
	for _, l := range []*leading{pe, de} {
		end := finished("r1", pb.Side_SIDE_PREFILL)
		if l == de {
			end = finished("r1", pb.Side_SIDE_DECODE)
		}
		end.GetFinished().Attempt = first
		l.send(end)
	}
	de.send(finished("r1", pb.Side_SIDE_PREFILL))
	gw.want(pb.RequestUpdate_KIND_PREFILLED)
	de.send(finished("r1", pb.Side_SIDE_DECODE))
	gw.want(pb.RequestUpdate_KIND_FINISHED)
}

// TestSilent: a leader whose group has timed out gets the error to register again. Otherwise its
// reports would be ignored forever.
func TestSilent(t *testing.T) {
	h := newHost(t, Options{Planner: dualpath.Options{GroupTimeout: time.Millisecond}, TickEvery: time.Millisecond})
	pe := h.lead("P", pb.Side_SIDE_PREFILL)
	for known := true; known; {
		top, err := h.client.Top(h.ctx, &pb.TopRequest{})
		h.must(err)
		known = len(top.Groups) > 0
	}
	pe.fetch(0)
	wantCode(t, func() error { _, err := pe.stream.Recv(); return err }, codes.Aborted, "register again")
}

// TestStandstill: a planner that stood still (suspended, or without a CPU) does not time out its
// groups, whose messages wait meanwhile.
func TestStandstill(t *testing.T) {
	h := newHost(t, Options{Planner: dualpath.Options{GroupTimeout: 5 * time.Second}})
	pe, de := h.lead("P", pb.Side_SIDE_PREFILL), h.lead("D", pb.Side_SIDE_DECODE)
	s := h.service
	s.mu.Lock()
	s.start = s.start.Add(-time.Hour)
	s.stepLocked(dualpath.Tick{At: s.now()})
	s.mu.Unlock()
	h.submit("r")
	pe.fetch(0)
	pe.want(pb.LeaderAction_KIND_ASSIGN, "r", "P/0")
	de.fetch(0)
	de.want(pb.LeaderAction_KIND_ASSIGN, "r", "D/0")
}

// TestGatewayGone: both engines abort the request.
func TestGatewayGone(t *testing.T) {
	h := newHost(t, Options{})
	pe, de := h.lead("P", pb.Side_SIDE_PREFILL), h.lead("D", pb.Side_SIDE_DECODE)
	gw := h.submit("r1")
	de.fetch(0)
	pe.fetch(0)
	de.want(pb.LeaderAction_KIND_ASSIGN, "r1", "D/0")
	pe.want(pb.LeaderAction_KIND_ASSIGN, "r1", "P/0")
	pe.want(pb.LeaderAction_KIND_START, "r1", "P/0")
	gw.end()
	pe.want(pb.LeaderAction_KIND_ABORT, "r1", "P/0")
	de.want(pb.LeaderAction_KIND_START, "r1", "D/0")
	de.want(pb.LeaderAction_KIND_ABORT, "r1", "D/0")
}

// TestReplaced: a group has one session.
func TestReplaced(t *testing.T) {
	h := newHost(t, Options{})
	old := h.lead("P", pb.Side_SIDE_PREFILL)
	h.lead("P", pb.Side_SIDE_PREFILL)
	wantCode(t, func() error { _, err := old.stream.Recv(); return err }, codes.Aborted, "another session")
}

// TestEngineOfAnotherGroup: a registration with an engine of a group whose leader is connected is refused, and that group
// keeps its requests. When its leader is gone, the engine may be in another group.
func TestEngineOfAnotherGroup(t *testing.T) {
	h := newHost(t, Options{})
	pe, de := h.lead("P", pb.Side_SIDE_PREFILL), h.lead("D", pb.Side_SIDE_DECODE)
	gw := h.submit("r1")
	h.startOn(pe, de, gw, "r1")

	stream, err := h.client.Lead(h.ctx)
	h.must(err)
	twin := &pb.RegisterGroup{Group: "Q", Role: pb.Side_SIDE_PREFILL, Engines: []*pb.EngineSpec{{Engine: "Q/0", Node: "n"}, {Engine: "P/1", Node: "n"}}}
	h.must(stream.Send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Register{Register: twin}}))
	wantCode(t, func() error { _, err := stream.Recv(); return err }, codes.AlreadyExists, `engine "P/1" is in group "P"`)
	pe.send(finished("r1", pb.Side_SIDE_PREFILL))
	gw.want(pb.RequestUpdate_KIND_PREFILLED)
	de.send(finished("r1", pb.Side_SIDE_DECODE))
	gw.want(pb.RequestUpdate_KIND_FINISHED)

	h.lead("P", pb.Side_SIDE_PREFILL) // an engine of the same group
	top, err := h.client.Top(h.ctx, &pb.TopRequest{})
	h.must(err)
	if len(top.Groups) != 2 {
		t.Errorf("%d groups; want P and D", len(top.Groups))
	}
	de.must(de.stream.CloseSend())
	if _, err := de.stream.Recv(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	h.leadEngines(&pb.RegisterGroup{Group: "E", Role: pb.Side_SIDE_DECODE}, "D/0")
}

// TestClosing: streams end with a code that makes the peer reconnect.
func TestClosing(t *testing.T) {
	h := newHost(t, Options{})
	pe := h.lead("P", pb.Side_SIDE_PREFILL)
	gw := h.submit("r1")
	h.service.Close()
	wantCode(t, func() error { _, err := pe.stream.Recv(); return err }, codes.Unavailable, "shutting down")
	wantCode(t, func() error { _, err := gw.stream.Recv(); return err }, codes.Unavailable, "submit again")
	late := h.ask(&pb.SubmitRequest{Id: "r2", Namespace: "m", PromptTokens: 1})
	wantCode(t, func() error { _, err := late.stream.Recv(); return err }, codes.Unavailable, "shutting down")
}

// TestBadInput: each invalid message is refused with the reason.
func TestBadInput(t *testing.T) {
	h := newHost(t, Options{PayloadBytes: 100})
	for _, tc := range []struct {
		r    *pb.SubmitRequest
		code codes.Code
		text string
	}{
		{&pb.SubmitRequest{}, codes.InvalidArgument, "id has 0 bytes"},
		{&pb.SubmitRequest{Id: strings.Repeat("x", 257)}, codes.InvalidArgument, "257 bytes"},
		{&pb.SubmitRequest{Id: "a", Namespace: ""}, codes.InvalidArgument, "namespaces"},
		{&pb.SubmitRequest{Id: "a", Namespace: "m", Payload: make([]byte, 3<<20+1)}, codes.InvalidArgument, "payload has 3145729"},
		{&pb.SubmitRequest{Id: "a", Namespace: "m", Payload: make([]byte, 101)}, codes.ResourceExhausted, "0 of 100 bytes"},
		{&pb.SubmitRequest{Id: "a", Namespace: "m", PromptTokens: 1 << 29}, codes.InvalidArgument, "536870912 prompt"},
	} {
		a := h.ask(tc.r)
		wantCode(t, func() error { _, err := a.stream.Recv(); return err }, tc.code, tc.text)
	}
	for text, r := range map[string]*pb.SubmitRequest{
		"inconsistent": {Id: "b", Namespace: "m", PromptTokens: 10, HitTokens: 11},
	} {
		a := h.ask(r)
		a.want(pb.RequestUpdate_KIND_ACCEPTED)
		if u := a.want(pb.RequestUpdate_KIND_REJECTED); !strings.Contains(u.Reason, text) || u.Refusal != pb.Refusal_REFUSAL_INVALID {
			t.Errorf("%v: %q, %v", r, u.Reason, u.Refusal)
		}
	}
	engine := func(name string) []*pb.EngineSpec { return []*pb.EngineSpec{{Engine: name, Node: "n"}} }
	for text, m := range map[string]*pb.LeaderMessage{
		"must register":          {Message: &pb.LeaderMessage_Fetch{Fetch: &pb.FetchWork{}}},
		"0 engines":              {Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{Group: "g", Role: pb.Side_SIDE_PREFILL}}},
		"must be SIDE_PREFILL":   {Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{Group: "g", Engines: engine("e")}}},
		"hbm_tokens is 0":        {Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{Group: "g", Role: pb.Side_SIDE_DECODE, Engines: engine("e")}}},
		"among the groups":       {Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{Role: pb.Side_SIDE_PREFILL, Engines: engine("e")}}},
		"among the engines":      {Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{Group: "g", Role: pb.Side_SIDE_PREFILL, Engines: engine("")}}},
		"listed twice":           {Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{Group: "g", Role: pb.Side_SIDE_PREFILL, Engines: append(engine("e"), engine("e")...)}}},
		"which is not in the gr": {Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{Group: "g", Role: pb.Side_SIDE_PREFILL, Engines: engine("e"), Holding: []*pb.HeldRequest{{Engine: "f", Request: &pb.SubmitRequest{Id: "x", Namespace: "m", PromptTokens: 1}}}}}},
		"register it as it was ": {Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{Group: "g", Role: pb.Side_SIDE_PREFILL, Engines: engine("e"), Holding: []*pb.HeldRequest{{Engine: "e", Request: &pb.SubmitRequest{Id: "x", Namespace: "m", PromptTokens: 10, HitTokens: 11}}}}}},
		"has seen action 1397":   {Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{Group: "g", Role: pb.Side_SIDE_PREFILL, Engines: engine("e"), Seen: 97 << 57}}},
		"\"x\" with action 1397": {Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{Group: "g", Role: pb.Side_SIDE_PREFILL, Engines: engine("e"), Holding: []*pb.HeldRequest{{Engine: "e", Order: 97 << 57, Request: &pb.SubmitRequest{Id: "x", Namespace: "m", PromptTokens: 1}}}}}},
		"holding has no request": {Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{Group: "g", Role: pb.Side_SIDE_PREFILL, Engines: engine("e"), Holding: []*pb.HeldRequest{{Engine: "e"}}}}},
	} {
		ctx, cancel := context.WithCancel(h.ctx)
		s, err := h.client.Lead(ctx)
		h.must(err)
		h.must(s.Send(m))
		wantCode(t, func() error { _, err := s.Recv(); return err }, codes.InvalidArgument, text)
		cancel()
	}
	if _, err := New(Options{TickEvery: time.Microsecond}); err == nil {
		t.Error("a tick every microsecond was accepted")
	}
	if _, err := New(Options{Planner: dualpath.Options{ZFactor: 0.5}}); err == nil {
		t.Error("a Z below the mean was accepted")
	}
}

// TestRefusedGroup: a refused registration leaves no state. The request that it contained can be
// submitted.
func TestRefusedGroup(t *testing.T) {
	h := newHost(t, Options{PayloadBytes: 100})
	stream, err := h.client.Lead(h.ctx)
	h.must(err)
	whole := &pb.SubmitRequest{Id: "r1", Namespace: "m", PromptTokens: 10, Payload: make([]byte, 100)}
	h.must(stream.Send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{
		Group: "P", Role: pb.Side_SIDE_PREFILL, Engines: []*pb.EngineSpec{{Engine: "P/0", Node: "n"}},
		Holding: []*pb.HeldRequest{{Engine: "P/0", Request: whole}, {Engine: "Q/0", Request: &pb.SubmitRequest{Id: "r2", Namespace: "m", PromptTokens: 10}}},
	}}}))
	wantCode(t, func() error { _, err := stream.Recv(); return err }, codes.InvalidArgument, "not in the group")
	h.lead("P", pb.Side_SIDE_PREFILL).fetch(0)
	h.ask(whole).want(pb.RequestUpdate_KIND_ACCEPTED)
	top, err := h.client.Top(h.ctx, &pb.TopRequest{})
	h.must(err)
	if top.Submitted != 1 {
		t.Errorf("%d requests reached the planner; r1 was submitted", top.Submitted)
	}
}

// TestSlow: a peer that reads too slowly loses its stream, and the planner does not wait for it.
func TestSlow(t *testing.T) {
	h := newHost(t, Options{})
	s := h.service
	s.mu.Lock()
	l := &leader{group: 1, out: make(chan *pb.LeaderAction, 1)}
	l.gone, l.end = context.WithCancelCause(h.ctx)
	s.leaders[1] = l
	s.sendLocked(1, &pb.LeaderAction{})
	s.sendLocked(1, &pb.LeaderAction{})
	if !errors.Is(context.Cause(l.gone), errSlowLeader) || s.leaders[1] != nil {
		t.Errorf("the leader's session continues: %v", context.Cause(l.gone))
	}
	s.mu.Unlock()
	if err := s.message(l, &pb.LeaderMessage{}); !errors.Is(err, errSlowLeader) {
		t.Errorf("its next message was answered %v", err)
	}
	s.mu.Lock()
	j := s.jobLocked(&pb.SubmitRequest{Id: "x"})
	lost := make(chan struct{})
	j.updates, j.lost = make(chan *pb.RequestUpdate, 1), lost
	s.updateLocked(j, &pb.RequestUpdate{})
	s.updateLocked(j, &pb.RequestUpdate{})
	select {
	case <-lost:
	default:
		t.Error("the gateway's stream continues")
	}
	s.forgetLocked(j)
	s.mu.Unlock()
}

// TestMetricsPage compares docs/metrics.md with the planner's registry, and with the metrics of an election.
func TestMetricsPage(t *testing.T) {
	registry := prometheus.NewRegistry()
	newHost(t, Options{Registry: registry})
	testkit.CheckMetricsPage(t, "penstock_planner_", func(ch chan<- *prometheus.Desc) {
		registry.Describe(ch)
		(&electionCollector{}).Describe(ch)
	})
	if _, err := registry.Gather(); err != nil {
		t.Error(err)
	}
}

// TestTenants: Top has the waiting requests by tenant and priority. The length of names is bounded.
func TestTenants(t *testing.T) {
	h := newHost(t, Options{Planner: dualpath.Options{Weights: map[string]float64{"b": 4}}})
	asked := 0
	ask := func(tenant string, priority int32) {
		asked++
		a := h.ask(&pb.SubmitRequest{Id: fmt.Sprint(asked), Namespace: "m", PromptTokens: 100, Tenant: tenant, Priority: priority})
		a.want(pb.RequestUpdate_KIND_ACCEPTED)
	}
	ask("a", 0)
	ask("b", 0)
	ask("b", 0)
	ask("c", 7)
	for i := range topTenants {
		ask(fmt.Sprint("many", i), -1)
	}
	top, err := h.client.Top(h.ctx, &pb.TopRequest{})
	h.must(err)
	var got []string
	for _, v := range top.Tenants[:4] {
		got = append(got, fmt.Sprintf("%s %d %g %d %d", v.Tenant, v.Priority, v.Weight, v.Waiting, v.Tokens))
	}
	if want := "c 7 1 1 100, b 0 4 2 200, a 0 1 1 100, many0 -1 1 1 100"; strings.Join(got, ", ") != want || len(top.Tenants) != topTenants || top.MoreTenants != 3 {
		t.Errorf("%v, %d in all and %d more; want %s, …, %d and 3", got, len(top.Tenants), top.MoreTenants, want, topTenants)
	}
	long := h.ask(&pb.SubmitRequest{Id: "long", Namespace: "m", PromptTokens: 100, Tenant: strings.Repeat("t", 257)})
	wantCode(t, func() error { _, err := long.stream.Recv(); return err }, codes.InvalidArgument, `request "long": the tenant's name has 257 bytes; the maximum is 256`)
}

// TestTenantMetrics: a series for each tenant that has a weight, and one for all others.
func TestTenantMetrics(t *testing.T) {
	registry := prometheus.NewRegistry()
	h := newHost(t, Options{Planner: dualpath.Options{Weights: map[string]float64{"b": 4, "idle": 1}}, Registry: registry})
	pe, de := h.lead("P", pb.Side_SIDE_PREFILL), h.lead("D", pb.Side_SIDE_DECODE)
	gw := h.ask(&pb.SubmitRequest{Id: "r", Namespace: "m", PromptTokens: 100, Tenant: "b"})
	gw.want(pb.RequestUpdate_KIND_ACCEPTED)
	h.startOn(pe, de, gw, "r")
	for i := range 5 {
		a := h.ask(&pb.SubmitRequest{Id: fmt.Sprint(i), Namespace: "m", PromptTokens: 100, Tenant: fmt.Sprint("other", i)})
		a.want(pb.RequestUpdate_KIND_ACCEPTED)
	}
	families, err := registry.Gather()
	h.must(err)
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			for _, l := range m.Label {
				if l.GetName() == "tenant" {
					got[strings.TrimPrefix(f.GetName(), "penstock_planner_tenant_")+" "+l.GetValue()] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
				}
			}
		}
	}
	want := map[string]float64{
		"granted_tokens_total b": 100, "granted_tokens_total idle": 0, "granted_tokens_total (others)": 0,
		"queued_requests b": 0, "queued_requests idle": 0, "queued_requests (others)": 5,
	}
	if !maps.Equal(got, want) {
		t.Errorf("got %v; want %v", got, want)
	}
}

// TestFirstTokenLate: the refusal of a request has the planner's estimate, if there is one, and the
// time after which the request would meet its deadline.
func TestFirstTokenLate(t *testing.T) {
	h := newHost(t, Options{Planner: dualpath.Options{PrefillRate: 1, Beta: 1 << 20}})
	none := h.ask(&pb.SubmitRequest{Id: "none", Namespace: "m", PromptTokens: 1, FirstTokenMilliseconds: 1})
	none.want(pb.RequestUpdate_KIND_ACCEPTED)
	if u := none.want(pb.RequestUpdate_KIND_REJECTED); u.Refusal != pb.Refusal_REFUSAL_LATE || u.RetryAfterMilliseconds != 0 || u.Reason != dualpath.FirstTokenLate.String() {
		t.Errorf("%v; no prefill has ended, so there is no estimate", u)
	}
	pe, de := h.lead("P", pb.Side_SIDE_PREFILL), h.lead("D", pb.Side_SIDE_DECODE)
	seen := uint64(0)
	for i := range 8 {
		id := fmt.Sprint(i)
		gw := h.ask(&pb.SubmitRequest{Id: id, Namespace: "m", PromptTokens: 1})
		gw.want(pb.RequestUpdate_KIND_ACCEPTED)
		de.fetch(seen)
		pe.fetch(seen)
		seen = gw.want(pb.RequestUpdate_KIND_STARTED).Attempt
		pe.send(finished(id, pb.Side_SIDE_PREFILL))
		gw.want(pb.RequestUpdate_KIND_PREFILLED)
		de.send(finished(id, pb.Side_SIDE_DECODE))
		gw.want(pb.RequestUpdate_KIND_FINISHED)
	}
	top, err := h.client.Top(h.ctx, &pb.TopRequest{})
	h.must(err)
	if top.PrefillTokensPerSecond <= 0 {
		t.Fatalf("the planner has measured %v tokens a second", top.PrefillTokensPerSecond)
	}
	gw := h.ask(&pb.SubmitRequest{Id: "late", Namespace: "m", PromptTokens: 90_000, FirstTokenMilliseconds: 1})
	gw.want(pb.RequestUpdate_KIND_ACCEPTED)
	u := gw.want(pb.RequestUpdate_KIND_REJECTED)
	estimate := 90_000 / top.PrefillTokensPerSecond * 1000 // ms
	if u.Refusal != pb.Refusal_REFUSAL_LATE || math.Abs(float64(u.RetryAfterMilliseconds)-estimate+1) > 2 || !strings.Contains(u.Reason, "at the earliest, and 1ms are left") {
		t.Errorf("%v; want a retry after the estimate, %.0f ms, less 1 ms", u, estimate)
	}
}

// TestPrefixCache: the gateway gets size and number of the decode engine's prefix cache. The number stays
// when the engine's leader registers again, and changes when the engine was started again.
func TestPrefixCache(t *testing.T) {
	h := newHost(t, Options{})
	pe := h.leadEngines(&pb.RegisterGroup{Group: "P", Role: pb.Side_SIDE_PREFILL}, "P/0")
	requests := 0
	register := func(planner, tokens uint64) *pb.PrefixCache {
		t.Helper()
		requests++
		id := fmt.Sprint("r", requests)
		de := h.leadEngines(&pb.RegisterGroup{
			Group: "D", Role: pb.Side_SIDE_DECODE, Planner: planner,
			Engines: []*pb.EngineSpec{{Engine: "D/0", Node: "node-D", HbmTokens: 100_000, PrefixCacheTokens: tokens}},
		})
		gw := h.submit(id)
		de.fetch(0)
		pe.fetch(0)
		pe.want(pb.LeaderAction_KIND_ASSIGN, id, "P/0")
		pe.want(pb.LeaderAction_KIND_START, id, "P/0")
		cache := gw.want(pb.RequestUpdate_KIND_STARTED).DecodeCache
		pe.send(finished(id, pb.Side_SIDE_PREFILL))
		gw.want(pb.RequestUpdate_KIND_PREFILLED)
		de.send(finished(id, pb.Side_SIDE_DECODE))
		gw.want(pb.RequestUpdate_KIND_FINISHED)
		return cache
	}
	first := register(0, 640)
	if first.GetTokens() != 640 {
		t.Fatalf("cache %v; want one of 640 tokens", first)
	}
	if again := register(h.service.number, 640); again.GetNumber() != first.Number {
		t.Errorf("cache %v of an engine whose leader registers again; want %v", again, first)
	}
	if started := register(0, 640); started.GetNumber() == first.Number {
		t.Errorf("cache %v of an engine that was started again; want another number", started)
	}
	if none := register(0, 0); none != nil {
		t.Errorf("cache %v of an engine that has none", none)
	}
}
