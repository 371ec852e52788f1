package server_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

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
