package gateway

import (
	"fmt"
	"slices"
	"testing"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/kv"
)

// newNetwork returns a network on which the transfer of a prompt takes far longer than a decode step.
func newNetwork(t *testing.T) *netcost.Planner {
	n, err := netcost.NewPlanner(netcost.PlannerOptions{Fabric: netcost.FatTree(), BytesPerToken: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// session is a conversation, whose prompts grow.
type session struct {
	first kv.Token
	turns int
}

// prompt returns the prompt of the last turn: its full blocks, and one token.
func (s *session) prompt() []kv.Token {
	out := make([]kv.Token, 4*16*s.turns+1)
	for i := range out {
		out[i] = s.first + kv.Token(i)
	}
	return out
}

// turn serves the next turn, whose prompt has four blocks more. It returns the decode engine, and end,
// which ends the request.
func (h *host) turn(g *Gateway, s *session, engines map[string]*engine) (decode string, end func()) {
	h.Helper()
	s.turns++
	r := h.serve(h.ctx, g, Request{ID: fmt.Sprint(s.first, " ", s.turns), Tokens: s.prompt()}, 0)
	r.want(Matched)
	r.want(Accepted)
	ev := r.want(Started)
	h.p.started().Done(nil)
	r.want(Prefilled)
	d := engines[ev.Decode].started()
	return ev.Decode, func() {
		d.Done(nil)
		r.want(Done)
		h.must(r.end())
	}
}

// TestPrefixCaches: the next turn of each of two conversations goes to the decode engine that has its
// prefix, although no engine has another request.
func TestPrefixCaches(t *testing.T) {
	h := newHost(t, newNetwork(t))
	engines := map[string]*engine{"engine for decode": h.d}
	engines["engine for other"], _ = h.lead(leader.Decode, "other", cacheBlocks)
	h.groups(3)
	g := h.gateway(0)

	// The second conversation begins while the first one is decoded, so on the other engine.
	a, b := &session{first: 7}, &session{first: 100_007}
	atA, endA := h.turn(g, a, engines)
	atB, endB := h.turn(g, b, engines)
	if atA == atB {
		t.Fatalf("both conversations begin on %s", atA)
	}
	endA()
	endB()
	for range 3 {
		for _, turn := range []struct {
			*session
			want string
		}{{a, atA}, {b, atB}} {
			at, end := h.turn(g, turn.session, engines)
			if at != turn.want {
				t.Errorf("turn %d went to %s; want %s, which has its prefix", turn.turns, at, turn.want)
			}
			end()
		}
	}
	if got := g.resident(h.ns.Epoch, h.ids(a.prompt())); len(got) != 1 || got[0] != (Resident{atA, 4 * 16 * a.turns}) {
		t.Errorf("resident %v; want all blocks on %s", got, atA)
	}
}

// ids returns the ids of a prompt's full blocks.
func (h *host) ids(prompt []kv.Token) []kv.BlockID {
	h.Helper()
	chain, err := h.ns.Chain()
	h.must(err)
	ids, _ := chain.Append(nil, prompt)
	return ids
}

// TestRestartedEngine: the gateway begins with an empty set when an engine was started again.
func TestRestartedEngine(t *testing.T) {
	h := newHost(t)
	engines := map[string]*engine{"engine for decode": h.d}
	g := h.gateway(0)
	a, b := &session{first: 7}, &session{first: 100_007}
	serve := func(s *session) {
		t.Helper()
		_, end := h.turn(g, s, engines)
		end()
	}
	has := func(s *session, want bool) {
		t.Helper()
		if got := g.resident(h.ns.Epoch, h.ids(s.prompt())); (len(got) > 0) != want {
			t.Errorf("resident %v of the conversation from token %d; want some: %v", got, s.first, want)
		}
	}
	serve(a)
	serve(b)
	has(a, true)
	has(b, true)
	h.stop()
	h.groups(1)
	engines["engine for decode"], _ = h.lead(leader.Decode, "decode", cacheBlocks)
	h.groups(2)
	serve(b)
	has(a, false)
	has(b, true)
}

// TestCachesBounds: the sets have bounds in blocks and in engines, and contain blocks of one version of
// the weights.
func TestCachesBounds(t *testing.T) {
	ids := func(first, n int) []kv.BlockID {
		out := make([]kv.BlockID, n)
		for i := range out {
			out[i] = kv.BlockID{byte(first), byte(i), byte(i >> 8), byte(i >> 16)}
		}
		return out
	}
	var x caches
	blocks := func(engine string, epoch kv.Epoch, chain []kv.BlockID) int {
		found := x.find(epoch, chain, 16)
		i := slices.IndexFunc(found, func(r Resident) bool { return r.Engine == engine })
		if i < 0 {
			return 0
		}
		return found[i].Tokens / 16
	}
	small, large := &pb.PrefixCache{Tokens: 10*16 + 1, Number: 1}, &pb.PrefixCache{Tokens: 1 << 40, Number: 2}
	x.sent("small", small, 1, ids(0, 8), 16)
	x.sent("small", small, 1, ids(1, 8), 16)
	if a, b := blocks("small", 1, ids(0, 8)), blocks("small", 1, ids(1, 8)); a != 2 || b != 8 {
		t.Errorf("%d and %d blocks in a cache of 10; want 2 of the earlier prompt and 8 of the later", a, b)
	}
	x.sent("large", large, 1, ids(0, maxCacheBlocks+5), 16)
	if n := blocks("large", 1, ids(0, maxCacheBlocks+5)); n != maxCacheBlocks {
		t.Errorf("%d blocks; want the bound of %d", n, maxCacheBlocks)
	}
	x.sent("small", small, 2, ids(2, 3), 16)
	x.sent("small", small, 1, ids(1, 8), 16)
	if old, now := blocks("small", 1, ids(1, 8)), blocks("small", 2, ids(2, 3)); old != 0 || now != 3 {
		t.Errorf("%d blocks of the earlier weights and %d of the new ones; want 0 and 3", old, now)
	}
	x.sent("large", nil, 1, ids(0, 1), 16)
	if n := blocks("large", 1, ids(0, 1)); n != 0 {
		t.Errorf("%d blocks of an engine without a cache", n)
	}
	for i := range maxCaches + 3 {
		x.sent(fmt.Sprint("engine ", i), small, 1, ids(3, 1), 16)
		if i == 3 {
			x.sent("small", small, 2, ids(2, 3), 16)
		}
	}
	if found := x.find(1, ids(3, 1), 16); len(x.engines) != maxCaches || blocks("small", 2, ids(2, 3)) != 3 || blocks("engine 3", 1, ids(3, 1)) != 0 {
		t.Errorf("%d engines, of which %d have the prompt; want %d with the last engines", len(x.engines), len(found), maxCaches)
	}
}
