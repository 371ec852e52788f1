package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/lab/testplanner"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/server/planner"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// geo has blocks of 16 tokens and 4 KiB.
var geo = kv.SingleGroup(2, 16, 128)

// host is a planner, a storage node, and a group of one engine for each role.
type host struct {
	*testing.T
	*testplanner.Planner
	ctx    context.Context
	store  *client.Store
	ns     kv.Namespace
	p, d   *engine
	memory *client.Memory
	node   *testnode.Node
	// stop ends the decode engine.
	stop func()
}

// cacheBlocks is the size of the prefix caches of decode engines.
const cacheBlocks = 60

// newHost starts a host. Engines have room for 100 blocks. network is nil, or the planner's.
func newHost(t *testing.T, network ...dualpath.Network) *host {
	t.Helper()
	opts := dualpath.Options{BlockTokens: geo.BlockTokens, MinPart: 16, Patience: time.Hour, GroupTimeout: time.Hour}
	for _, n := range network {
		opts.Network = n
	}
	testkit.VerifyNone(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	h := &host{T: t, ctx: ctx}
	h.Planner = testplanner.Start(t, testplanner.Options{Planner: planner.Options{TickEvery: time.Millisecond, Planner: opts}})
	node := testnode.Start(t, testnode.Options{})
	node.Namespace(t, "m", geo)
	h.node = node
	transfer, err := tcp.New(ctx, tcp.Options{})
	h.must(err)
	t.Cleanup(func() { h.must(transfer.Close()) })
	h.store, err = client.Open(ctx, client.Options{Engine: transfer, Servers: []string{node.Addr}, DialTimeout: time.Minute})
	h.must(err)
	t.Cleanup(func() { h.must(h.store.Close()) })
	h.memory, err = h.store.Register(make([]byte, 16*geo.BlockBytes()))
	h.must(err)
	h.ns, err = h.store.Namespace(ctx, "m")
	h.must(err)
	h.p, _ = h.lead(leader.Prefill, "prefill", 0)
	h.d, h.stop = h.lead(leader.Decode, "decode", cacheBlocks)
	h.groups(2)
	return h
}

func (h *host) must(err error) {
	h.Helper()
	if err != nil {
		h.Fatal(err)
	}
}

// engine is an engine without KV. The test ends its requests.
type engine struct {
	host   *host
	starts chan *leader.Request
	// ended receives the requests that were aborted.
	ended chan *leader.Request
}

func (e *engine) Start(ctx context.Context, r *leader.Request) {
	context.AfterFunc(ctx, func() {
		r.Done(ctx.Err())
		e.ended <- r
	})
	e.starts <- r
}
func (e *engine) Read(string, traffic.Part)      {}
func (e *engine) Cut(string)                     {}
func (e *engine) Recompute(string, traffic.Part) {}

// started returns the next request that was started.
func (e *engine) started() *leader.Request {
	e.host.Helper()
	return e.next(e.starts)
}

func (e *engine) next(c chan *leader.Request) *leader.Request {
	e.host.Helper()
	select {
	case r := <-c:
		return r
	case <-e.host.ctx.Done():
		e.host.Fatal("no request")
		return nil
	}
}

// lead runs a group of one engine with a prefix cache of some blocks, until stop is called or the
// test ends.
func (h *host) lead(role leader.Role, group string, cache int) (e *engine, stop func()) {
	h.Helper()
	e = &engine{h, make(chan *leader.Request, 16), make(chan *leader.Request, 16)}
	l, err := leader.New(leader.Options{
		Group: group, Node: "node for " + group, Role: role, Geometry: geo, Planner: h.Conn, FetchEvery: time.Millisecond,
		Members: []leader.Member{{Name: "engine for " + group, Engine: e, DeviceBlocks: 100, PrefixCacheBlocks: cache}},
	})
	h.must(err)
	ctx, cancel := context.WithCancel(h.ctx)
	var wg sync.WaitGroup
	wg.Go(func() { l.Run(ctx) })
	stop = func() {
		cancel()
		wg.Wait()
	}
	h.Cleanup(stop)
	return e, stop
}

// gateway returns a gateway, with the options' epoch.
func (h *host) gateway(epoch kv.Epoch) *Gateway {
	h.Helper()
	g, err := New(Options{Namespace: h.ns, Store: h.store, Planner: h.Conn, Epoch: epoch})
	h.must(err)
	return g
}

// write stores the first blocks of a prompt under the newest epoch.
func (h *host) write(prompt []kv.Token, blocks int) {
	h.Helper()
	ns, err := h.store.Namespace(h.ctx, "m")
	h.must(err)
	w, err := h.store.Write(h.ctx, client.WriteRequest{Namespace: ns, Tokens: prompt[:blocks*geo.BlockTokens], From: h.memory})
	h.must(err)
	if w.Blocks != blocks {
		h.Fatalf("stored %+v; want %d blocks", w, blocks)
	}
}

// tokens returns a prompt of n tokens.
func tokens(n int) []kv.Token {
	out := make([]kv.Token, n)
	for i := range out {
		out[i] = kv.Token(i + 7)
	}
	return out
}

// served is a request that runs in a goroutine.
type served struct {
	host   *host
	events chan Event
	err    error // once events is closed
}

// serve serves a request. At an event of kind leave the loop ends.
func (h *host) serve(ctx context.Context, g *Gateway, r Request, leave Kind) *served {
	s := &served{host: h, events: make(chan Event, 64)}
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(s.events)
		for ev, err := range g.Serve(ctx, r) {
			if s.err = err; err != nil {
				return
			}
			s.events <- ev
			if ev.Kind == leave {
				break
			}
		}
	})
	h.Cleanup(wg.Wait)
	return s
}

// want receives the next event and checks its kind.
func (s *served) want(k Kind) Event {
	s.host.Helper()
	select {
	case ev, ok := <-s.events:
		if !ok {
			s.host.Fatalf("ended with %v; want %v", s.err, k)
		}
		if ev.Kind != k {
			s.host.Fatalf("event %+v; want %v", ev, k)
		}
		return ev
	case <-s.host.ctx.Done():
		s.host.Fatalf("no event; want %v", k)
	}
	return Event{}
}

// end waits for the end of the events and returns the error.
func (s *served) end() error {
	s.host.Helper()
	select {
	case ev, ok := <-s.events:
		if ok {
			s.host.Fatalf("event %+v after the end", ev)
		}
	case <-s.host.ctx.Done():
		s.host.Fatal("no end")
	}
	return s.err
}

// readAll reports that all parts were read.
func readAll(r *leader.Request) {
	for _, p := range r.Parts {
		r.Progress(traffic.Progress{Part: p, Upto: p.To, Bytes: int64(p.Len()) * geo.PieceBytes(0)})
	}
}

// TestServe: five of six blocks of the prompt are stored. Both engines get the lengths, the
// ids and the extra data of the gateway, and the gateway gets each event.
func TestServe(t *testing.T) {
	h := newHost(t)
	prompt := tokens(6*16 + 5)
	h.write(prompt, 5)
	s := h.serve(h.ctx, h.gateway(0), Request{ID: "r", Tokens: prompt, Output: 40, Extra: json.RawMessage(`{"temperature":0}`)}, 0)
	if ev := s.want(Matched); ev.Hit != 5*16 || ev.Epoch != h.ns.Epoch {
		t.Errorf("%+v", ev)
	}
	s.want(Accepted)
	ev := s.want(Started)
	if ev.Prefill != "engine for prefill" || ev.Decode != "engine for decode" || ev.ReadByPrefill+ev.ReadByDecode != 5*16 {
		t.Errorf("%+v", ev)
	}
	chain, err := h.ns.Chain()
	h.must(err)
	ids, _ := chain.Append(nil, prompt)
	p, d := h.p.started(), h.d.started()
	for _, r := range []*leader.Request{p, d} {
		load, err := ParsePayload(r.Payload)
		h.must(err)
		if r.Prompt != len(prompt) || r.Hit != 5 || r.Output != 40 || r.Epoch != h.ns.Epoch || !slices.Equal(load.IDs, ids) || string(load.Extra) != `{"temperature":0}` {
			t.Errorf("%+v with %+v", r, load)
		}
		if r.Name != ev.Attempt || r.Epoch != ev.Epoch {
			t.Errorf("attempt %q of epoch %d; the gateway has %+v", r.Name, r.Epoch, ev)
		}
		readAll(r)
	}
	p.Done(nil)
	s.want(Prefilled)
	d.Done(nil)
	s.want(Done)
	h.must(s.end())
}

// TestWholePromptCached: at least one token is computed.
func TestWholePromptCached(t *testing.T) {
	h := newHost(t)
	prompt := tokens(3 * 16)
	h.write(prompt, 3)
	s := h.serve(h.ctx, h.gateway(0), Request{ID: "r", Tokens: prompt}, Matched)
	if ev := s.want(Matched); ev.Hit != 2*16 {
		t.Errorf("%+v; want a hit of two blocks", ev)
	}
	h.must(s.end())
}

// TestWholePromptCachedWithState: a prompt whose blocks are all stored has the state at its end, and at the end of its
// first block. The state that the second block lacks cannot be loaded.
func TestWholePromptCachedWithState(t *testing.T) {
	h := newHost(t)
	h.node.Namespace(t, "state", kv.Geometry{BlockTokens: geo.BlockTokens, Groups: []kv.Group{
		{Kind: kv.Full, Layers: 1, TokenBytes: 128}, {Kind: kv.State, Layers: 1, TokenBytes: 512},
	}})
	ns, err := h.store.Namespace(h.ctx, "state")
	h.must(err)
	prompt := tokens(3 * geo.BlockTokens)
	pieces := []client.Piece{{Block: 0}, {Block: 0, Group: 1}, {Block: 1}, {Block: 2}, {Block: 2, Group: 1}}
	for i := range pieces {
		pieces[i].Offset = int64(i) * 4096
	}
	w, err := h.store.Write(h.ctx, client.WriteRequest{Namespace: ns, Tokens: prompt, From: h.memory, Pieces: pieces})
	h.must(err)
	if len(w.Refused) > 0 {
		t.Fatalf("stored %+v; want all pieces", w)
	}
	h.ns = ns
	s := h.serve(h.ctx, h.gateway(0), Request{ID: "r", Tokens: prompt}, Matched)
	if ev := s.want(Matched); ev.Hit != geo.BlockTokens {
		t.Errorf("%+v; want a hit of one block", ev)
	}
	h.must(s.end())
}

// TestPlannerAway: there is no planner when the request arrives, and the planner is killed while
// the request is decoded. The request is submitted again and continues without another start.
func TestPlannerAway(t *testing.T) {
	h := newHost(t)
	h.Stop()
	s := h.serve(h.ctx, h.gateway(0), Request{ID: "r", Tokens: tokens(20)}, 0)
	s.want(Matched)
	if ev := s.want(Waiting); ev.Reason == "" {
		t.Errorf("%+v without a reason", ev)
	}
	h.Start()
	s.want(Accepted)
	s.want(Started)
	p, d := h.p.started(), h.d.started()
	p.Done(nil)
	s.want(Prefilled)
	h.Stop()
	s.want(Waiting)
	h.Start()
	s.want(Accepted)
	h.serving(1)
	d.Done(nil)
	s.want(Done)
	h.must(s.end())
	if len(h.p.starts)+len(h.d.starts) > 0 {
		t.Error("the request was started twice")
	}
}

// groups waits until the planner has n groups.
func (h *host) groups(n int) {
	h.Helper()
	h.until(fmt.Sprintf("%d groups", n), func(top *pb.TopResponse) bool { return len(top.Groups) == n })
}

// serving waits until the planner has both groups and n requests have engines.
func (h *host) serving(n uint32) {
	h.Helper()
	h.until(fmt.Sprintf("%d requests with engines", n), func(top *pb.TopResponse) bool { return len(top.Groups) == 2 && top.Serving == n })
}

// until waits for a state of the planner.
func (h *host) until(state string, reached func(top *pb.TopResponse) bool) {
	h.Helper()
	t := time.NewTicker(time.Millisecond)
	defer t.Stop()
	for {
		top, err := pb.NewPlannerClient(h.Conn).Top(h.ctx, &pb.TopRequest{})
		if err == nil && reached(top) {
			return
		}
		select {
		case <-t.C:
		case <-h.ctx.Done():
			h.Fatalf("the planner has %v, %v; want %s", top, err, state)
		}
	}
}

// TestRefused: the error for a request that no engine can serve has the planner's reason. The error
// for a second request with the same id has the status of the planner's call.
func TestRefused(t *testing.T) {
	h := newHost(t)
	g := h.gateway(0)
	s := h.serve(h.ctx, g, Request{ID: "long", Tokens: tokens(101 * 16)}, 0)
	s.want(Matched)
	s.want(Accepted)
	var refused *RefusedError
	if err := s.end(); !errors.As(err, &refused) || refused.Refusal != TooLong || !strings.Contains(refused.Reason, "longer than any decode engine's HBM: 1616 tokens") || !strings.Contains(err.Error(), `request "long"`) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(h.ctx)
	first := h.serve(ctx, g, Request{ID: "r", Tokens: tokens(20)}, 0)
	first.want(Matched)
	first.want(Accepted)
	first.want(Started)
	second := h.serve(h.ctx, g, Request{ID: "r", Tokens: tokens(20)}, 0)
	second.want(Matched)
	if err := second.end(); err == nil || !strings.Contains(err.Error(), "is in progress") {
		t.Errorf("%v", err)
	}
	cancel()
	if err := first.end(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestCancel: the caller leaves the loop, or its context ends, while both engines serve the
// request. Both engines end it.
func TestCancel(t *testing.T) {
	for name, leave := range map[string]Kind{"loop left": Started, "context ended": 0} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			why := errors.New("the client went away")
			ctx, cancel := context.WithCancelCause(h.ctx)
			defer cancel(nil)
			s := h.serve(ctx, h.gateway(0), Request{ID: "r", Tokens: tokens(20)}, leave)
			s.want(Matched)
			s.want(Accepted)
			s.want(Started)
			if leave == 0 {
				cancel(why)
				if err := s.end(); !errors.Is(err, why) {
					t.Errorf("%v; want %v", err, why)
				}
			} else {
				h.must(s.end())
			}
			h.p.next(h.p.ended)
			h.d.next(h.d.ended)
		})
	}
	t.Run("planner away", func(t *testing.T) {
		h := newHost(t)
		h.Stop()
		ctx, cancel := context.WithCancel(h.ctx)
		s := h.serve(ctx, h.gateway(0), Request{ID: "r", Tokens: tokens(20)}, 0)
		s.want(Matched)
		s.want(Waiting)
		cancel()
		if err := s.end(); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	})
}

// TestReplanned: an engine fails the request. The gateway gets the reason and the next start and,
// after every attempt has failed, the refusal.
func TestReplanned(t *testing.T) {
	h := newHost(t)
	s := h.serve(h.ctx, h.gateway(0), Request{ID: "r", Tokens: tokens(20)}, 0)
	s.want(Matched)
	s.want(Accepted)
	for range 3 {
		ev := s.want(Started)
		p, d := h.p.started(), h.d.started()
		if p.Name != ev.Attempt || d.Name != ev.Attempt {
			t.Errorf("attempts %q and %q; the gateway has %+v", p.Name, d.Name, ev)
		}
		d.Done(errors.New("the device is lost"))
		if ev := s.want(Replanned); !strings.Contains(ev.Reason, "an engine could not do its part") {
			t.Errorf("%+v", ev)
		}
	}
	s.want(Started)
	h.d.started().Done(errors.New("the device is lost"))
	var refused *RefusedError
	if err := s.end(); !errors.As(err, &refused) || refused.Refusal != OtherRefusal {
		t.Errorf("%v; want a refusal of no class", err)
	}
}

// TestEpochs: a gateway without an epoch option begins with the nodes' newest epoch. With the
// option it uses that epoch as long as the epoch is live.
func TestEpochs(t *testing.T) {
	h := newHost(t)
	prompt := tokens(3*16 + 1)
	h.write(prompt, 3)
	newest, pinned := h.gateway(0), h.gateway(h.ns.Epoch)
	matched := func(g *Gateway, hit int, epoch kv.Epoch) {
		t.Helper()
		s := h.serve(h.ctx, g, Request{ID: fmt.Sprintf("%p at %d", g, epoch), Tokens: prompt}, Matched)
		if ev := s.want(Matched); ev.Hit != hit || ev.Epoch != epoch {
			t.Errorf("%+v; want a hit of %d tokens of epoch %d", ev, hit, epoch)
		}
		h.must(s.end())
	}
	matched(newest, 48, h.ns.Epoch)
	next, err := h.store.BumpEpoch(h.ctx, "m", 0, kv.MaxLive)
	h.must(err)
	matched(pinned, 48, h.ns.Epoch)
	_, err = h.store.BumpEpoch(h.ctx, "m", 0, 0)
	h.must(err)
	matched(newest, 0, next+1)
	h.write(prompt, 2)
	matched(newest, 32, next+1)
}

// TestRequests: the error for a request that cannot be submitted names the fault.
func TestRequests(t *testing.T) {
	h := newHost(t)
	g := h.gateway(0)
	for want, r := range map[string]Request{
		"whose ID has 0 bytes":       {Tokens: tokens(1)},
		"a prompt of 0 tokens":       {ID: "r"},
		"an output of -1":            {ID: "r", Tokens: tokens(1), Output: -1},
		"1 ids for the 2 full":       {ID: "r", Prompt: 33, IDs: make([]kv.BlockID, 1)},
		"give one or the other":      {ID: "r", Tokens: tokens(1), Prompt: 1},
		"a deadline of -1ns":         {ID: "r", Tokens: tokens(1), Deadline: -1},
		"holds 2 tokens of a prompt": {ID: "r", Tokens: tokens(1), Resident: []Resident{{"d", 2}}},
		"salts and no tokens":        {ID: "r", Prompt: 1, Salts: []Salt{{}}},
		"must ascend":                {ID: "r", Tokens: tokens(1), Salts: []Salt{{Block: 1}, {Block: 1}}},
		"of block -1":                {ID: "r", Tokens: tokens(1), Salts: []Salt{{Block: -1}}},
		"the planner takes 3145728":  {ID: "r", Prompt: 1, IDs: make([]kv.BlockID, 200000)},
		"400 bytes of Extra":         {ID: "r", Prompt: 1, IDs: make([]kv.BlockID, 147440), Extra: json.RawMessage("\"" + strings.Repeat("x", 398) + "\"")},
		"a name that is not UTF-8":   {ID: "r\xff", Tokens: tokens(1)},
		`tenant "t\xff": a name`:     {ID: "r", Tenant: "t\xff", Tokens: tokens(1)},
		`engine "e\xff" is not`:      {ID: "r", Resident: []Resident{{Engine: "e\xff"}}, Tokens: tokens(1)},
		"JSON in UTF-8":              {ID: "r", Tokens: tokens(1), Extra: json.RawMessage("\"\xff\"")},
		"Extra is not JSON":          {ID: "r", Tokens: tokens(1), Extra: json.RawMessage("{")},
		"whose ID has 257 bytes":     {ID: strings.Repeat("r", 257), Tokens: tokens(1)},
	} {
		var last error
		for _, err := range g.Serve(h.ctx, r) {
			last = err
		}
		if !errors.Is(last, client.ErrRequest) || !strings.Contains(last.Error(), want) {
			t.Errorf("%v; want ErrRequest with %q", last, want)
		}
	}
	if _, err := New(Options{Namespace: h.ns, Store: h.store}); err == nil || !strings.Contains(err.Error(), "Planner") {
		t.Errorf("a gateway without a planner: %v", err)
	}
}

// TestSalts: the ids of a prompt depend on its salts from the salts' blocks on.
func TestSalts(t *testing.T) {
	h := newHost(t)
	prompt := tokens(4*16 + 5)
	chain, err := h.ns.Chain()
	h.must(err)
	want, _ := chain.Append(nil, prompt[:16])
	chain = chain.Salt([]byte("a"))
	want, _ = chain.Append(want, prompt[16:48])
	chain = chain.Salt([]byte("b"))
	want, _ = chain.Append(want, prompt[48:])
	r, err := h.gateway(0).Prepare(Request{ID: "r", Tokens: prompt, Salts: []Salt{{1, []byte("a")}, {3, []byte("b")}, {4, []byte("c")}, {9, []byte("d")}}})
	if err != nil || !slices.Equal(r.IDs, want) || r.Prompt != len(prompt) || r.Tokens != nil || r.Salts != nil {
		t.Errorf("%+v, %v; want the ids %x", r, err, want)
	}
}

// TestDeadline: no engine takes the request before its deadline.
func TestDeadline(t *testing.T) {
	h := newHost(t)
	full := h.serve(h.ctx, h.gateway(0), Request{ID: "full", Tokens: tokens(100 * 16 / 2)}, 0)
	full.want(Matched)
	full.want(Accepted)
	full.want(Started)
	s := h.serve(h.ctx, h.gateway(0), Request{ID: "late", Tokens: tokens(100 * 16 * 3 / 4), Deadline: time.Millisecond}, 0)
	s.want(Matched)
	s.want(Accepted)
	var refused *RefusedError
	if err := s.end(); !errors.As(err, &refused) || refused.Refusal != Busy || refused.Reason != "past its deadline" {
		t.Errorf("%v", err)
	}
	h.p.started().Done(nil)
	full.want(Prefilled)
	h.d.started().Done(nil)
	full.want(Done)
}

// TestPayload: bytes that are not a payload are refused.
func TestPayload(t *testing.T) {
	for raw, want := range map[string]string{"": "unexpected end", `{"ids":"AAAA"}`: "ids of 3 bytes", `{"ids":7}`: "cannot unmarshal"} {
		if _, err := ParsePayload([]byte(raw)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %q", raw, err, want)
		}
	}
	b, err := Payload{}.Encode()
	if p, perr := ParsePayload(b); err != nil || perr != nil || len(p.IDs) != 0 || p.Extra != nil {
		t.Errorf("%s, %v: %+v, %v", b, err, p, perr)
	}
}

// TestFirstToken: a request whose first token would be late is refused with that class, and its
// tenant and priority reach the planner.
func TestFirstToken(t *testing.T) {
	h := newHost(t)
	full := h.serve(h.ctx, h.gateway(0), Request{ID: "full", Tokens: tokens(100 * 16 / 2)}, 0)
	full.want(Matched)
	full.want(Accepted)
	full.want(Started)
	waits := Request{ID: "waits", Tokens: tokens(100 * 16 * 3 / 4), Tenant: "a", Priority: -3, FirstToken: time.Hour}
	ctx, cancel := context.WithCancel(h.ctx)
	s := h.serve(ctx, h.gateway(0), waits, 0)
	s.want(Matched)
	s.want(Accepted)
	top, err := pb.NewPlannerClient(h.Conn).Top(h.ctx, &pb.TopRequest{})
	h.must(err)
	if len(top.Tenants) != 1 || top.Tenants[0].Tenant != "a" || top.Tenants[0].Priority != -3 || top.Tenants[0].Waiting != 1 {
		t.Errorf("the planner has %v", top.Tenants)
	}
	late := waits
	late.ID, late.FirstToken = "late", time.Millisecond
	l := h.serve(h.ctx, h.gateway(0), late, 0)
	l.want(Matched)
	l.want(Accepted)
	var refused *RefusedError
	if err := l.end(); !errors.As(err, &refused) || refused.Refusal != Late || !strings.Contains(refused.Reason, "the first token cannot come by its deadline") {
		t.Errorf("%v", err)
	}
	cancel()
	_ = s.end()
	h.p.started().Done(nil)
	full.want(Prefilled)
	h.d.started().Done(nil)
	full.want(Done)
}
