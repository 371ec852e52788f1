package offload

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/relay"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/prfaas"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/content"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/lab/testplanner"
	"github.com/penstock-kv/penstock/server/planner"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// geo has blocks of 16 tokens and 4 KiB in two layers.
var geo = kv.SingleGroup(2, 16, 128)

// site is the storage of one datacenter, with memory for the test's reads and writes.
type site struct {
	t      *testing.T
	node   *testnode.Node
	store  *client.Store
	ns     kv.Namespace // m, the first shard
	shards []kv.Namespace
	memory *arena.Arena
	mem    *client.Memory
}

// newSite starts a node with the namespace m for the first shard, and m1, m2 and so on for the others.
func newSite(t *testing.T, g kv.Geometry, shards int) *site {
	t.Helper()
	s := &site{t: t, node: testnode.Start(t, testnode.Options{})}
	s.node.Namespace(t, "m", g)
	s.store, s.ns = s.node.Open(t, "m")
	s.shards = []kv.Namespace{s.ns}
	var err error
	for i := 1; i < shards; i++ {
		name := fmt.Sprintf("m%d", i)
		s.node.Namespace(t, name, g)
		ns, err := s.store.Namespace(t.Context(), name)
		s.must(err)
		s.shards = append(s.shards, ns)
	}
	s.memory, err = arena.New(arena.Options{SizeBytes: 4 << 20})
	s.must(err)
	t.Cleanup(func() { s.must(s.memory.Close()) })
	s.mem, err = s.store.Register(s.memory.Bytes())
	s.must(err)
	t.Cleanup(func() { s.must(s.mem.Close(context.Background())) })
	return s
}

func (s *site) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// chain returns the ids of a prompt's full blocks.
func (s *site) chain(tokens []kv.Token) []kv.BlockID {
	c, err := s.ns.Chain()
	s.must(err)
	ids, _ := c.Append(nil, tokens)
	return ids
}

// put computes the KV of a prompt's full blocks and stores it, in all shards. It must not be called
// concurrently.
func (s *site) put(tokens []kv.Token) error {
	var errs []error
	for shard := range s.shards {
		errs = append(errs, s.putShard(shard, tokens))
	}
	return errors.Join(errs...)
}

// eachPiece calls do with the bytes of each piece of some blocks in memory, and with the content that the piece has.
func (s *site) eachPiece(shard int, ids []kv.BlockID, do func(p client.Piece, at []byte, c content.Content)) {
	g := s.ns.Geometry
	for b, id := range ids {
		for group := range g.Groups {
			p := client.Piece{Block: b, Group: group, Offset: g.PieceOffset(b, group)}
			do(p, s.memory.Bytes()[p.Offset:p.Offset+g.PieceBytes(group)], content.Of(id, kv.Epoch(10*shard+group)))
		}
	}
}

func (s *site) putShard(shard int, tokens []kv.Token) error {
	ids := s.chain(tokens)
	var pieces []client.Piece
	s.eachPiece(shard, ids, func(p client.Piece, at []byte, c content.Content) {
		c.Fill(at)
		pieces = append(pieces, p)
	})
	w, err := s.store.Write(context.Background(), client.WriteRequest{Namespace: s.shards[shard], IDs: ids, From: s.mem, Pieces: pieces})
	if err == nil && w.Blocks != len(ids) {
		err = fmt.Errorf("%d of %d blocks were stored", w.Blocks, len(ids))
	}
	return err
}

// check compares the first blocks of a prompt in storage with the computed KV, in all shards.
func (s *site) check(tokens []kv.Token, blocks int) {
	s.t.Helper()
	ids := s.chain(tokens)[:blocks]
	for shard, ns := range s.shards {
		clear(s.memory.Bytes())
		r, err := s.store.Read(s.t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: s.mem})
		s.must(err)
		if r.Blocks != blocks {
			s.t.Errorf("%d of %d blocks are stored in shard %d", r.Blocks, blocks, shard)
		}
		s.eachPiece(shard, ids[:r.Blocks], func(p client.Piece, at []byte, c content.Content) {
			want := make([]byte, len(at))
			c.Fill(want)
			if p.Block >= ns.Geometry.FirstNeeded(p.Group, blocks) && !bytes.Equal(want, at) {
				s.t.Errorf("shard %d, block %d, group %d has other bytes", shard, p.Block, p.Group)
			}
		})
	}
}

// world has two datacenters, and a remote engine that computes KV and stores it in remote storage.
type world struct {
	*testing.T
	here, there *site
	offload     *Offload
	engine      *httptest.Server
	asked       atomic.Int64 // the number of completion requests
	// answer, if set, handles a completion instead of the engine.
	answer atomic.Pointer[http.HandlerFunc]
}

func newWorld(t *testing.T, o Options, budget float64) *world {
	t.Helper()
	return newWorldOf(t, o, budget, geo, 1)
}

// newWorldOf has blocks of several shards, each of this geometry.
func newWorldOf(t *testing.T, o Options, budget float64, g kv.Geometry, shards int) *world {
	t.Helper()
	testkit.VerifyNone(t)
	w := &world{T: t, here: newSite(t, g, shards), there: newSite(t, g, shards)}
	w.engine = httptest.NewServer(w)
	t.Cleanup(w.engine.Close)
	plan := testplanner.Start(t, testplanner.Options{Planner: planner.Options{Planner: dualpath.Options{BlockTokens: 16}}})
	var err error
	o.Gateway, err = gateway.New(gateway.Options{Namespace: w.here.ns, Store: w.here.store, Planner: plan.Conn})
	w.here.must(err)
	o.Link, err = relay.New(relay.Options{From: w.there.store, To: w.here.store, BytesPerSecond: budget, ChunkBytes: 32 << 10})
	w.here.must(err)
	t.Cleanup(func() { w.here.must(o.Link.Close(context.Background())) })
	o.Namespace, o.Shards, o.Here, o.There, o.TokenSource = w.here.ns, w.here.shards[1:], w.here.store, w.there.store, func() string { return "secret" }
	o.URL, err = url.Parse(w.engine.URL + "/there")
	w.here.must(err)
	o.Client = w.engine.Client()
	if o.Timeout == 0 {
		o.Timeout = time.Hour
	}
	w.offload, err = New(o)
	w.here.must(err)
	return w
}

// ServeHTTP is the remote engine.
func (w *world) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Authorization") != "Bearer secret" {
		w.Errorf("authorization %q", r.Header.Get("Authorization"))
	}
	switch r.Method + " " + r.URL.Path {
	case "GET /there/v1/models":
		fmt.Fprint(out, `{"data":[{"id":"tiny"},{"id":"other"}]}`)
	case "POST /there/v1/completions":
		w.asked.Add(1)
		var ask struct {
			Model     string
			Prompt    []kv.Token
			MaxTokens int `json:"max_tokens"`
			Stream    bool
		}
		if err := json.NewDecoder(r.Body).Decode(&ask); err != nil || ask.Model != "tiny" || ask.MaxTokens != 1 || ask.Stream {
			w.Errorf("a completion of %+v: %v", ask, err)
		}
		if answer := w.answer.Load(); answer != nil {
			(*answer)(out, r)
			return
		}
		fmt.Fprint(out, `{"choices":[{"text":"x"}]}`)
		if err := w.there.put(ask.Prompt); err != nil { // after the response, like engines
			w.Error(err)
		}
	default:
		w.Errorf("%s %s", r.Method, r.URL)
	}
}

// hit serves a prompt until its cached prefix is known, and returns the length of the prefix.
func (w *world) hit(tokens []kv.Token) int {
	w.Helper()
	for ev, err := range w.offload.Serve(w.Context(), gateway.Request{ID: "r", Tokens: tokens}) {
		if err != nil {
			w.Fatal(err)
		}
		if ev.Kind == gateway.Matched {
			return ev.Hit
		}
	}
	w.Fatal("the request has no event")
	return 0
}

// outcomes returns the number of requests by outcome, without zeros.
func (w *world) outcomes(registry *prometheus.Registry) string {
	families, err := registry.Gather()
	w.here.must(err)
	var out []string
	for _, f := range families {
		if f.GetName() == "penstock_offload_requests_total" {
			for _, m := range f.Metric {
				if v := m.Counter.GetValue(); v > 0 {
					out = append(out, fmt.Sprintf("%s %v", m.Label[0].GetValue(), v))
				}
			}
		}
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

func prompt(seed, tokens int) []kv.Token {
	out := make([]kv.Token, tokens)
	for i := range out {
		out[i] = kv.Token(seed*100_000 + i)
	}
	return out
}

// TestOffload: a short prompt is not sent, and a long one is prefilled remotely. Only blocks that
// local storage lacks are copied.
func TestOffload(t *testing.T) {
	registry := prometheus.NewRegistry()
	w := newWorld(t, Options{Router: prfaas.Router{Threshold: 320}, Registry: registry}, 1<<30)
	if hit := w.hit(prompt(1, 320)); hit != 0 || w.asked.Load() != 0 {
		t.Errorf("a prompt at the threshold: a hit of %d tokens, %d requests", hit, w.asked.Load())
	}
	long := prompt(2, 640) // 40 blocks, the last of which is computed locally
	if hit := w.hit(long); hit != 624 || w.asked.Load() != 1 {
		t.Errorf("a long prompt: a hit of %d tokens, %d requests", hit, w.asked.Load())
	}
	w.here.check(long, 39)
	// The next turn has 400 tokens more.
	next := append(slices.Clone(long), prompt(3, 400)...)
	if hit := w.hit(next); hit != 1024 || w.asked.Load() != 2 {
		t.Errorf("the next turn: a hit of %d tokens, %d requests", hit, w.asked.Load())
	}
	w.here.check(next, 64)
	if s := w.offload.opts.Link.Stats(); s.CopiedBytes != (39+25)*4096 || s.WaitingBytes != 0 {
		t.Errorf("%+v", s)
	}
	// Remote storage has the prompt, so no engine is needed.
	known := prompt(4, 645)
	w.here.must(w.there.put(known))
	if hit := w.hit(known); hit != 640 || w.asked.Load() != 2 {
		t.Errorf("a prompt that storage there has: a hit of %d tokens, %d requests", hit, w.asked.Load())
	}
	if got := w.outcomes(registry); got != "local 1, remote 3" {
		t.Error(got)
	}
}

// TestShards: engines of three ranks with layers of full attention, a window and a state. All shards cross the link, and
// of each only what local storage lacks. A block that remote storage has not in all shards does not count.
func TestShards(t *testing.T) {
	registry := prometheus.NewRegistry()
	g := kv.Geometry{BlockTokens: 16, Groups: []kv.Group{
		{Kind: kv.Full, Layers: 1, TokenBytes: 64}, {Kind: kv.Window, Layers: 2, TokenBytes: 32, WindowTokens: 40}, {Kind: kv.State, Layers: 1, TokenBytes: 128},
	}}
	w := newWorldOf(t, Options{Router: prfaas.Router{Threshold: 320}, Registry: registry}, 1<<30, g, 3)
	long := prompt(2, 640) // 40 blocks, the last of which is computed locally
	if hit := w.hit(long); hit != 624 || w.asked.Load() != 1 {
		t.Errorf("a long prompt: a hit of %d tokens, %d requests", hit, w.asked.Load())
	}
	w.here.check(long, 39)
	if s := w.offload.opts.Link.Stats(); s.CopiedBytes != 3*g.NeededBytes(39) || s.WaitingBytes != 0 {
		t.Errorf("%+v, want %d bytes", s, 3*g.NeededBytes(39))
	}
	// One shard has a part of the prompt in remote storage, so the engine is asked. One shard has another part in
	// local storage.
	some := prompt(4, 645)
	w.here.must(w.there.putShard(0, some))
	w.here.must(w.there.putShard(1, some))
	w.here.must(w.there.putShard(2, some[:160]))
	w.here.must(w.here.putShard(2, some[:320]))
	before := w.offload.opts.Link.Stats().CopiedBytes
	if hit := w.hit(some); hit != 640 || w.asked.Load() != 2 {
		t.Errorf("a prompt of which one shard is not complete: a hit of %d tokens, %d requests", hit, w.asked.Load())
	}
	w.here.check(some, 40)
	if n, want := w.offload.opts.Link.Stats().CopiedBytes-before, 2*g.NeededBytes(40)+g.PartBytes(20, 40, 40); n != want {
		t.Errorf("%d bytes crossed the link, want %d", n, want)
	}
	if got := w.outcomes(registry); got != "remote 2" {
		t.Error(got)
	}
}

// TestAbundant: with spare bandwidth, the prefix in remote storage is copied. The rest is prefilled
// locally if it is within the threshold.
func TestAbundant(t *testing.T) {
	registry := prometheus.NewRegistry()
	w := newWorld(t, Options{Router: prfaas.Router{Threshold: 320, Abundant: true}, Registry: registry}, 1<<30)
	tokens := prompt(1, 960)
	w.here.must(w.there.put(tokens[:800]))
	if hit := w.hit(tokens); hit != 800 || w.asked.Load() != 0 {
		t.Errorf("a hit of %d tokens, %d requests", hit, w.asked.Load())
	}
	w.here.check(tokens, 50)
	if hit := w.hit(prompt(2, 100)); hit != 0 {
		t.Errorf("a short prompt: a hit of %d tokens", hit)
	}
	if got := w.outcomes(registry); got != "fetched 1, local 1" {
		t.Error(got)
	}
}

// TestSalted: a prompt with salts is not sent, because the remote engines would compute it without them.
func TestSalted(t *testing.T) {
	w := newWorld(t, Options{Router: prfaas.Router{Threshold: 320}}, 1<<30)
	for ev, err := range w.offload.Serve(w.Context(), gateway.Request{ID: "r", Tokens: prompt(2, 640), Salts: []gateway.Salt{{Extra: []byte("s")}}}) {
		if err != nil || ev.Kind != gateway.Matched || ev.Hit != 0 || w.asked.Load() != 0 {
			t.Errorf("%+v, %v, %d requests", ev, err, w.asked.Load())
		}
		break
	}
}

// TestFailures: after each remote failure the request continues locally, with the blocks copied so
// far.
func TestFailures(t *testing.T) {
	registry := prometheus.NewRegistry()
	w := newWorld(t, Options{Router: prfaas.Router{Threshold: 100}, DownFor: time.Hour, Registry: registry}, 1<<30)
	refuse := http.HandlerFunc(func(out http.ResponseWriter, _ *http.Request) { http.Error(out, "no room", http.StatusTooManyRequests) })
	w.answer.Store(&refuse)
	if hit := w.hit(prompt(1, 320)); hit != 0 || w.asked.Load() != 1 {
		t.Errorf("a refusal: a hit of %d tokens, %d requests", hit, w.asked.Load())
	}
	if hit := w.hit(prompt(2, 320)); hit != 0 || w.asked.Load() != 1 {
		t.Errorf("after a refusal: a hit of %d tokens, %d requests", hit, w.asked.Load())
	}
	w.offload.downUntil = time.Time{}
	w.engine.CloseClientConnections()
	cut := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	w.answer.Store(&cut)
	if hit := w.hit(prompt(3, 320)); hit != 0 {
		t.Errorf("an answer that is cut off: a hit of %d tokens", hit)
	}
	if got := w.outcomes(registry); got != "busy 1, failed 2" {
		t.Error(got)
	}
}

// TestTimeout: an engine that responds and does not store, and one that does not respond.
func TestTimeout(t *testing.T) {
	registry := prometheus.NewRegistry()
	w := newWorld(t, Options{Router: prfaas.Router{Threshold: 100}, Timeout: 300 * time.Millisecond, Registry: registry}, 1<<30)
	forget := http.HandlerFunc(func(out http.ResponseWriter, _ *http.Request) { fmt.Fprint(out, `{"choices":[]}`) })
	w.answer.Store(&forget)
	if hit := w.hit(prompt(1, 320)); hit != 0 || w.asked.Load() != 1 {
		t.Errorf("a hit of %d tokens, %d requests", hit, w.asked.Load())
	}
	w.offload.downUntil = time.Time{}
	silent := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	w.answer.Store(&silent)
	if hit := w.hit(prompt(2, 320)); hit != 0 || w.asked.Load() != 2 {
		t.Errorf("a hit of %d tokens, %d requests", hit, w.asked.Load())
	}
	if got := w.outcomes(registry); got != "failed 2" {
		t.Error(got)
	}
}

// TestMetricsPage compares docs/metrics.md with the registry.
func TestMetricsPage(t *testing.T) {
	testkit.CheckMetricsPage(t, "penstock_offload_", DescribeMetrics)
}

// TestFirstToken: the time of the remote prefill counts towards the deadline of the first token.
// The planner refuses a request whose deadline has passed.
func TestFirstToken(t *testing.T) {
	w := newWorld(t, Options{Router: prfaas.Router{Threshold: 100}, Timeout: 50 * time.Millisecond}, 1<<30)
	silent := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	w.answer.Store(&silent)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for ev, err := range w.offload.Serve(ctx, gateway.Request{ID: "r", Tokens: prompt(1, 320), FirstToken: 10 * time.Millisecond}) {
		var refused *gateway.RefusedError
		if err == nil {
			continue
		}
		if !errors.As(err, &refused) || refused.Refusal != gateway.Late {
			t.Errorf("%+v, %v", ev, err)
		}
		return
	}
	t.Error("the request has ended without a refusal")
}

// TestBusy: no request is added to a link whose waiting bytes take too long, or above the bound of
// requests. The first request's context ends in the middle of its copy.
func TestBusy(t *testing.T) {
	registry := prometheus.NewRegistry()
	w := newWorld(t, Options{Router: prfaas.Router{Threshold: 100}, BacklogMax: time.Second, Registry: registry}, 4096)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	slow := prompt(1, 640)
	w.here.must(w.there.put(slow))
	go func() {
		for _, err := range w.offload.Serve(ctx, gateway.Request{ID: "slow", Tokens: slow}) {
			ended <- err
			return
		}
	}()
	for w.offload.opts.Link.Backlog() == 0 {
		select {
		case err := <-ended:
			t.Fatalf("the copy has ended: %v", err)
		default:
		}
	}
	if hit := w.hit(prompt(2, 320)); hit != 0 || w.asked.Load() != 0 {
		t.Errorf("behind 39 s of bytes: a hit of %d tokens, %d requests", hit, w.asked.Load())
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the request ended with %v", err)
	}
	if b := w.offload.opts.Link.Backlog(); b != 0 {
		t.Errorf("after it the link has a backlog of %v", b)
	}
	for range cap(w.offload.slots) {
		w.offload.slots <- struct{}{}
	}
	if hit := w.hit(prompt(3, 320)); hit != 0 || w.asked.Load() != 0 {
		t.Errorf("beyond the bound: a hit of %d tokens, %d requests", hit, w.asked.Load())
	}
	if got := w.outcomes(registry); got != "busy 2, failed 1" {
		t.Error(got)
	}
}

// TestEpochs: KV of other weights is not copied. After both storages have the same epoch again, it
// is.
func TestEpochs(t *testing.T) {
	registry := prometheus.NewRegistry()
	w := newWorld(t, Options{Router: prfaas.Router{Threshold: 100}, Timeout: 2 * time.Second, Registry: registry}, 1<<30)
	tokens := prompt(1, 320)
	w.here.must(w.there.put(tokens))
	bump := func(s *site) {
		conn, err := client.Dial(s.node.Addr, client.DialOptions{})
		s.must(err)
		defer conn.Close()
		_, err = pb.NewAdminClient(conn).BumpEpoch(t.Context(), &pb.BumpEpochRequest{Name: "m"})
		s.must(err)
		s.ns, err = s.store.Namespace(t.Context(), "m")
		s.must(err)
		s.shards[0] = s.ns
	}
	bump(w.here)
	if hit := w.hit(tokens); hit != 0 {
		t.Errorf("with other weights there: a hit of %d tokens", hit)
	}
	bump(w.there)
	w.offload.downUntil = time.Time{}
	if hit := w.hit(tokens); hit != 304 {
		t.Errorf("with the same weights: a hit of %d tokens", hit)
	}
	if got := w.outcomes(registry); got != "failed 1, remote 1" {
		t.Error(got)
	}
}

// TestOptions: invalid options are refused, and so is an empty list of models.
func TestOptions(t *testing.T) {
	w := newWorld(t, Options{Router: prfaas.Router{Threshold: 100}}, 1<<30)
	for name, change := range map[string]func(*Options){
		"Gateway": func(o *Options) { o.Gateway = nil }, "Here": func(o *Options) { o.Here = nil }, "threshold": func(o *Options) { o.Router.Threshold = -1 }, "InFlight": func(o *Options) { o.InFlight = -1 },
	} {
		o := w.offload.opts
		o.Registry = nil
		change(&o)
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	empty := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, _ *http.Request) { fmt.Fprint(out, `{"data":[]}`) }))
	defer empty.Close()
	var err error
	w.offload.opts.URL, err = url.Parse(empty.URL)
	w.here.must(err)
	w.offload.opts.Client = empty.Client()
	if _, err := w.offload.modelName(t.Context()); err == nil || !strings.Contains(err.Error(), "lists no model") {
		t.Error(err)
	}
}
