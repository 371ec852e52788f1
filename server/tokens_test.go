package server_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/server"
)

// tokenHost is a node with bearer tokens that the test replaces, and without roles.
type tokenHost struct {
	*host
	tokens atomic.Pointer[[]string]
	policy roles
	data   *watchedEngine
}

func newTokenHost(t *testing.T) *tokenHost {
	h := new(tokenHost)
	h.set()
	h.host = newHost(t, func(o *server.Options) {
		h.data = &watchedEngine{Engine: o.Data}
		o.Data, o.Roles = h.data, h.policy.current
		o.Tokens = func() []string { return *h.tokens.Load() }
	}, nil)
	return h
}

// set replaces the accepted tokens by those of principals (tokenOf).
func (h *tokenHost) set(principals ...string) {
	tokens := make([]string, len(principals))
	for i, p := range principals {
		tokens[i] = tokenOf(p)
	}
	h.tokens.Store(&tokens)
}

// match makes a call by message.
func (h *tokenHost) match(r *replies) codes.Code {
	code, _ := r.ask(api.MethodMatch, &pb.MatchRequest{Namespace: "m", BlockIds: make([]byte, 16)}, &pb.MatchResponse{})
	return code
}

// reconnect opens a session with a token of the data plane that a client got earlier.
func (h *tokenHost) reconnect(c *accessClient, d *pb.DescribeResponse) error {
	var addr rdma.Addr
	if err := addr.UnmarshalBinary(d.GetDataAddress()); err != nil {
		h.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(h.t.Context(), time.Minute)
	defer cancel()
	_, err := c.engine.Connect(ctx, addr, d.GetDataToken())
	return err
}

// TestRemovedTokensLoseTheirSessions: when a bearer token is removed from the token file, the sessions of its
// clients end, and none is opened with the data plane's token that one of them got before. The sessions of other
// tokens stay.
func TestRemovedTokensLoseTheirSessions(t *testing.T) {
	h := newTokenHost(t)
	h.namespace() // its client has no token
	open := h.engine
	h.set("stays", "goes")
	h.server.EndRemovedSessions()
	ended(t, open) // as calls without a token are refused
	a, b := h.client("goes"), h.client("stays")
	d, err := h.cache.Describe(a.ctx, &pb.DescribeRequest{})
	if err != nil {
		t.Fatal(err)
	}
	replies := b.replies()
	h.set("stays")
	h.server.EndRemovedSessions()
	ended(t, a.engine)
	if len(b.engine.Peers()) != 1 {
		t.Error("the session of the token that stays was ended")
	}
	if err := h.reconnect(a, d); !errors.Is(err, rdma.ErrAuth) {
		t.Errorf("the data plane's token of a removed bearer token: %v", err)
	}
	if code := h.match(replies); code != 0 {
		t.Errorf("a call of the client that stays: %v", code)
	}
	h.set() // no token is required any more
	h.server.EndRemovedSessions()
	if code := h.match(replies); code != 0 {
		t.Errorf("a call while no token is required: %v", code)
	}
	if c := h.client("unknown"); len(c.engine.Peers()) != 1 {
		t.Error("no session while no token is required")
	}
}

// TestTokenSessionDuringReload: a session whose handshake was in progress when its bearer token was removed ends
// later, and no call of it is served.
func TestTokenSessionDuringReload(t *testing.T) {
	h := newTokenHost(t)
	h.namespace()
	h.set("stays", "goes")
	a, b := h.client("goes"), h.client("stays")
	r := a.replies()
	h.set("stays")
	r.send(api.Call{Method: api.MethodMatch, ID: 43, ReplyMax: 64 << 10}, &pb.MatchRequest{Namespace: "m", BlockIds: make([]byte, 16)})
	r.connected(false)
	h.set("stays", "goes")
	if err := h.connectAs(a.ctx, a.engine); err != nil {
		t.Fatal(err)
	}
	h.set("stays")
	h.data.hide.Store(true)
	h.server.EndAgainAfter(time.Millisecond)
	h.server.EndRemovedSessions()
	ended(t, a.engine)
	if len(b.engine.Peers()) != 1 {
		t.Error("the session of the client that stays was ended")
	}
}

// TestTokenBecomesPrincipal: when roles replace the token file, the sessions of its clients end, and their tokens
// of the data plane are of no use unless the roles have the bearer token.
func TestTokenBecomesPrincipal(t *testing.T) {
	h := newTokenHost(t)
	h.namespace()
	h.set("a")
	a := h.client("a")
	d, err := h.cache.Describe(a.ctx, &pb.DescribeRequest{})
	if err != nil {
		t.Fatal(err)
	}
	h.policy.set(t, "b read m*")
	h.server.EndRemovedSessions()
	ended(t, a.engine)
	if err := h.reconnect(a, d); !errors.Is(err, rdma.ErrAuth) {
		t.Errorf("the token of a client that is no principal: %v", err)
	}
	h.policy.policy.Store(nil)
	if err := h.reconnect(a, d); err != nil {
		t.Errorf("without roles again: %v", err)
	}
}

// TestRemovedTokenEndsStreams: a stream whose bearer token was removed ends with the next event, and so does one
// of a client without a token when tokens are required. The streams of other tokens go on.
func TestRemovedTokenEndsStreams(t *testing.T) {
	h := newTokenHost(t)
	h.namespace()
	open := func(ctx context.Context) pb.Cache_EventsClient {
		t.Helper()
		s, err := h.cache.Events(ctx, &pb.EventsRequest{After: 1})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	bump := func(principal string) {
		t.Helper()
		if _, err := h.admin.BumpEpoch(as(t.Context(), principal), &pb.BumpEpochRequest{Name: "m"}); err != nil {
			t.Fatal(err)
		}
	}
	// end reads a stream to its end, or until it has had an event of the epoch.
	end := func(s pb.Cache_EventsClient, epoch uint64) codes.Code {
		for {
			e, err := s.Recv()
			if err != nil || e.GetEpoch() == epoch {
				return status.Code(err)
			}
		}
	}
	bump("")
	bump("")
	none := open(t.Context())
	if _, err := none.Recv(); err != nil {
		t.Fatal(err)
	}
	h.set("stays", "goes")
	goes, stays := open(as(t.Context(), "goes")), open(as(t.Context(), "stays"))
	for _, s := range []pb.Cache_EventsClient{goes, stays} {
		if _, err := s.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	bump("stays")
	if code := end(none, 0); code != codes.Unauthenticated {
		t.Errorf("a stream without a token ends with %v", code)
	}
	h.set("stays")
	bump("stays")
	bump("stays")
	if code := end(goes, 0); code != codes.Unauthenticated {
		t.Errorf("a stream of a removed token ends with %v", code)
	}
	if code := end(stays, 5); code != codes.OK {
		t.Errorf("a stream of the token that stays ends with %v", code)
	}
}

// TestRemovedTokenEndsLead: the session of an engine group with a planner ends with its next message when its token was
// removed, so that the planner takes no reports of it and gives it no further requests.
func TestRemovedTokenEndsLead(t *testing.T) {
	var tokens atomic.Pointer[[]string]
	tokens.Store(&[]string{tokenOf("stays"), tokenOf("goes")})
	conn, _ := plannerHost(t, func() []string { return *tokens.Load() }, nil, slog.New(slog.DiscardHandler))
	lead := func(principal string) pb.Planner_LeadClient {
		t.Helper()
		s, err := pb.NewPlannerClient(conn).Lead(as(t.Context(), principal))
		if err != nil {
			t.Fatal(err)
		}
		engine := &pb.EngineSpec{Engine: "engine of " + principal, Node: principal, HbmTokens: 1 << 20}
		if err := s.Send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{Group: principal, Role: pb.Side_SIDE_DECODE, Engines: []*pb.EngineSpec{engine}}}}); err != nil {
			t.Fatal(err)
		}
		if a, err := s.Recv(); err != nil || a.GetKind() != pb.LeaderAction_KIND_REGISTERED {
			t.Fatalf("%v, %v", a, err)
		}
		return s
	}
	fetch := func(s pb.Planner_LeadClient) error {
		return s.Send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Fetch{Fetch: &pb.FetchWork{}}})
	}
	goes, stays := lead("goes"), lead("stays")
	tokens.Store(&[]string{tokenOf("stays")})
	if err := errors.Join(fetch(goes), fetch(stays)); err != nil {
		t.Fatal(err)
	}
	if _, err := goes.Recv(); status.Code(err) != codes.Unauthenticated {
		t.Errorf("the session of a removed token ends with %v", err)
	}
	if err := fetch(stays); err != nil {
		t.Errorf("the session of the token that stays: %v", err)
	}
}
