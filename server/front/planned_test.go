package front

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/lab/testplanner"
	"github.com/penstock-kv/penstock/server/planner"
)

// geo has blocks of 16 tokens and 4 KiB.
var geo = kv.SingleGroup(2, 16, 128)

// cluster is a planner, a storage node and two engines, with a front. Planner, node and leaders are
// real. The engines simulate only HTTP: they have no model, and a token is a byte of the text.
type cluster struct {
	*testing.T
	*testplanner.Planner
	*started
	store *client.Store
	ns    kv.Namespace
	p, d  *member
}

// member is an engine. The front has the name of the prefill engine, and the host and port of the
// decode engine.
type member struct {
	*fakeEngine
	t      *testing.T
	starts chan *leader.Request
	gone   chan *leader.Request // requests whose context has ended
	asked  chan string          // bodies of requests
	open   atomic.Int32         // open completion requests
	models atomic.Pointer[http.HandlerFunc]
	listed atomic.Int32 // requests for the list of models
	render atomic.Pointer[http.HandlerFunc]
	// work handles a request over HTTP. The leader has the attempt.
	work    atomic.Pointer[func(w http.ResponseWriter, r *http.Request, q *leader.Request)]
	current atomic.Pointer[leader.Request] // the last request that the leader started
}

// Start, Read, Cut and Recompute implement leader.Engine.
func (e *member) Start(ctx context.Context, r *leader.Request) {
	context.AfterFunc(ctx, func() {
		r.Done(ctx.Err())
		e.gone <- r
	})
	e.starts <- r
}
func (e *member) Read(string, traffic.Part)      {}
func (e *member) Cut(string)                     {}
func (e *member) Recompute(string, traffic.Part) {}

// newMember returns an engine that answers completions with its work.
func newMember(t *testing.T, text string) *member {
	e := &member{t: t, starts: make(chan *leader.Request, 64), gone: make(chan *leader.Request, 64), asked: make(chan string, 64)}
	refuse := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusForbidden) })
	e.render.Store(&refuse)
	e.lists(`{"data":[{"id":"m","root":"/m","parent":null},{"id":"tuned","root":"/lora","parent":"m"}]}`)
	e.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		readAll(q)
		q.Done(nil)
		fmt.Fprint(w, text)
	})
	e.fakeEngine = newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // the front has closed the request
		}
		switch r.URL.Path {
		case "/tokenize":
			tokenize(w, body)
			return
		case "/v1/models":
			e.listed.Add(1)
			(*e.models.Load())(w, r)
			return
		case renderPath:
			r.Body = io.NopCloser(bytes.NewReader(body))
			(*e.render.Load())(w, r)
			return
		}
		e.open.Add(1)
		defer e.open.Add(-1)
		var got struct {
			Params struct {
				Penstock attemptParams `json:"penstock"`
			} `json:"kv_transfer_params"`
		}
		if err := json.Unmarshal(body, &got); err != nil {
			t.Errorf("an engine got %q: %v", body, err)
		}
		e.asked <- string(body)
		q := e.current.Load()
		for q == nil || q.Name != got.Params.Penstock.Attempt { // the front or the leader may not have learned of the attempt yet
			select {
			case q = <-e.starts:
				e.current.Store(q)
			case <-r.Context().Done():
				return
			case <-t.Context().Done():
				return
			}
		}
		if uint64(q.Epoch) != got.Params.Penstock.Epoch {
			t.Errorf("epoch %d; the planner has %d", got.Params.Penstock.Epoch, q.Epoch)
		}
		(*e.work.Load())(w, r, q)
	})
	return e
}

// does sets the engine's work.
func (e *member) does(work func(w http.ResponseWriter, r *http.Request, q *leader.Request)) {
	e.work.Store(&work)
}

// lists sets the engine's list of models.
func (e *member) lists(text string) {
	handler := say(text)
	e.models.Store(&handler)
}

// tokenize responds like vLLM's POST /tokenize.
func tokenize(w http.ResponseWriter, body []byte) {
	var ask struct {
		Prompt   string
		Messages []struct{ Content json.RawMessage }
	}
	if err := json.Unmarshal(body, &ask); err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	text := ask.Prompt
	for _, m := range ask.Messages {
		text += string(m.Content)
	}
	tokens := make([]int, len(text))
	for i, b := range []byte(text) {
		tokens[i] = int(b)
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"count": len(tokens), "tokens": tokens})
}

// waitGone sends the headers of a response, and blocks the engine's handler until the front has
// closed the request.
func waitGone(w http.ResponseWriter, r *http.Request) {
	w.(http.Flusher).Flush()
	<-r.Context().Done()
}

// readAll reports that all parts were read.
func readAll(q *leader.Request) {
	for _, p := range q.Parts {
		q.Progress(traffic.Progress{Part: p, Upto: p.To, Bytes: int64(p.Len()) * geo.PieceBytes(0)})
	}
}

// newCluster starts a cluster. Engines have room for 100 blocks.
func newCluster(t *testing.T, o Options, schedule dualpath.Options) *cluster {
	t.Helper()
	testkit.VerifyNone(t)
	c := &cluster{T: t}
	schedule.BlockTokens, schedule.MinPart, schedule.Patience, schedule.GroupTimeout = geo.BlockTokens, 16, time.Hour, time.Hour
	c.Planner = testplanner.Start(t, testplanner.Options{Planner: planner.Options{TickEvery: time.Millisecond, Planner: schedule}})
	node := testnode.Start(t, testnode.Options{})
	node.Namespace(t, "m", geo)
	c.store, c.ns = node.Open(t, "m")
	session, err := gateway.New(gateway.Options{Namespace: c.ns, Store: c.store, Planner: c.Planner.Conn})
	c.must(err)
	c.p, c.d = newMember(t, "dropped"), newMember(t, "an answer")
	c.lead(leader.Prefill, "p0", c.p)
	decode := c.d.Listener.Addr().String()
	c.lead(leader.Decode, decode, c.d)
	if o.Engines == nil {
		o.Engines = []Engine{{Name: "p0", URL: c.p.URL}, {URL: c.d.URL}}
	}
	o.Planner, o.Instance = session, "front"
	if o.QueueWait == 0 {
		o.QueueWait = time.Hour
	}
	if o.ReplanWait == 0 {
		o.ReplanWait = time.Hour
	}
	c.started = start(t, o)
	c.await(c.front.Ready)
	return c
}

func (c *cluster) must(err error) {
	c.T.Helper()
	if err != nil {
		c.T.Fatal(err)
	}
}

// lead runs a group of one engine until the test ends.
func (c *cluster) lead(role leader.Role, name string, e *member) {
	c.T.Helper()
	l, err := leader.New(leader.Options{
		Group: role.String(), Node: "node for " + role.String(), Role: role, Geometry: geo, Planner: c.Planner.Conn, FetchEvery: time.Millisecond,
		Members: []leader.Member{{Name: name, Engine: e, DeviceBlocks: 100}},
	})
	c.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { l.Run(ctx) })
	c.T.Cleanup(func() {
		cancel()
		wg.Wait()
	})
}

// ended waits until the planner has ended n requests with an outcome.
func (c *cluster) ended(outcome string, n float64) {
	c.T.Helper()
	c.await(func() bool { return c.value("planned_requests_total", outcome) == n })
}

// call sends a client's request to a path of the API.
func (c *cluster) call(ctx context.Context, path, body string) (*http.Response, string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+path, strings.NewReader(body))
	if err != nil {
		return nil, "", err
	}
	req.Header.Set("Authorization", "Bearer sk-1")
	resp, err := c.Client().Do(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp, string(text), err
}

// TestPlanned: the tokens of a text, of token ids and of a chat reach the planner, and both engines
// get the client's body with the attempt. A second request has a hit.
func TestPlanned(t *testing.T) {
	c := newCluster(t, Options{OutputTokens: 7}, dualpath.Options{})
	words := strings.Repeat("0123456789abcdef", 3)
	list := make([]int, len(words))
	for i, b := range []byte(words) {
		list[i] = int(b)
	}
	ids, err := json.Marshal(list)
	c.must(err)
	chat := `"messages": [{"role": "user", "content": "` + words[:38] + `"}, {"role":"user","content":[{"type":"text","text":"x"}]}]`
	memory, err := c.store.Register(make([]byte, 2*geo.BlockBytes()))
	c.must(err)
	prompt := make([]kv.Token, len(words))
	for i, n := range list {
		prompt[i] = kv.Token(n)
	}
	_, err = c.store.Write(t.Context(), client.WriteRequest{Namespace: c.ns, Tokens: prompt[:32], From: memory})
	c.must(err)
	for i, s := range []struct {
		name, path, body string
		prompt, hit      int
		output           int
		prefill, decode  string
	}{
		{
			"text", "/v1/completions", `{"model":"m","prompt":"` + words + `", "x" : [1.50], "min_tokens":3,"stream_options":{"a":1},"stream":true,"n":2, "max_tokens" : 5 }`, 48, 2, 5,
			`{"model":"m","prompt":"` + words + `","x" : [1.50],"kv_transfer_params":PARAMS,"max_tokens":1,"stream":false,"n":1}`,
			`{"model":"m","prompt":"` + words + `","x" : [1.50],"min_tokens":3,"stream_options":{"a":1},"stream":true,"n":2,"max_tokens" : 5,"kv_transfer_params":PARAMS}`,
		},
		{
			"a list of one text", "/v1/completions", `{"prompt":["` + words + `"]}`, 48, 2, 7,
			`{"prompt":["` + words + `"],"kv_transfer_params":PARAMS,"max_tokens":1,"stream":false,"n":1}`,
			`{"prompt":["` + words + `"],"kv_transfer_params":PARAMS}`,
		},
		{
			"token ids", "/v1/completions", `{"prompt":` + string(ids) + `,"kv_transfer_params": {"a" : 1e2}}`, 48, 2, 7,
			`{"prompt":` + string(ids) + `,"kv_transfer_params":{"a" : 1e2,"penstock":OWN},"max_tokens":1,"stream":false,"n":1}`,
			`{"prompt":` + string(ids) + `,"kv_transfer_params":{"a" : 1e2,"penstock":OWN}}`,
		},
		{
			"chat", "/v1/chat/completions", `{` + chat + `,"max_completion_tokens":9,"max_tokens":5}`, 40 + len(`[{"type":"text","text":"x"}]`), 0, 9,
			`{` + chat + `,"kv_transfer_params":PARAMS,"max_tokens":1,"stream":false,"n":1,"max_completion_tokens":1}`,
			`{` + chat + `,"max_completion_tokens":9,"max_tokens":5,"kv_transfer_params":PARAMS}`,
		},
	} {
		t.Run(s.name, func(t *testing.T) {
			got := make(chan *leader.Request, 2)
			for e, text := range map[*member]string{c.p: "dropped", c.d: "an answer"} {
				e.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
					if r.URL.Path != s.path || r.Header.Get("Authorization") != "Bearer sk-1" {
						t.Errorf("an engine got %s with %v", r.URL, r.Header)
					}
					got <- q
					readAll(q)
					q.Done(nil)
					fmt.Fprint(w, text)
				})
			}
			resp, text, err := c.call(t.Context(), s.path, s.body)
			if err != nil || resp.StatusCode != 200 || text != "an answer" {
				t.Fatalf("%v, %s, %v", resp, text, err)
			}
			a, b := receive(t, got), receive(t, got)
			if a.Name != b.Name || a.Prompt != s.prompt || a.Output != s.output || a.Hit != s.hit {
				t.Errorf("the engines have %+v and %+v", a, b)
			}
			own := fmt.Sprintf(`{"attempt":%q,"epoch":%d}`, a.Name, a.Epoch)
			fill := strings.NewReplacer("PARAMS", `{"penstock":`+own+`}`, "OWN", own)
			if got, want := receive(t, c.p.asked), fill.Replace(s.prefill); got != want {
				t.Errorf("the prefill engine got\n%s; want\n%s", got, want)
			}
			if got, want := receive(t, c.d.asked), fill.Replace(s.decode); got != want {
				t.Errorf("the decode engine got\n%s; want\n%s", got, want)
			}
			c.ended(outcomeDone, float64(i+1))
		})
	}
	c.await(func() bool { return c.value("confirming_requests") == 0 }) // the last request is counted before that
	for name, want := range map[string]float64{
		"attempts_total": 4, "start_seconds": 4, "hit_tokens_total": 3 * 32, "prompt_tokens_total": 3*48 + 40 + 28, "replans_total": 0, "tokenize_errors_total": 0, "requests_total": 4,
	} {
		if got := c.value(name); got != want {
			t.Errorf("%s is %v; want %v", name, got, want)
		}
	}
}

// TestPlannedStream: after the prefill, each event of the decode engine reaches the client
// unchanged before the next one is sent.
func TestPlannedStream(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	next := make(chan struct{}, 1)
	const event = "data: {\"n\": 1.0}\r\n\r\n"
	c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.Header().Set("X-Request-Id", "7")
		for range 5 {
			fmt.Fprint(w, event)
			w.(http.Flusher).Flush()
			hold(t, next)
		}
		q.Done(nil)
		fmt.Fprint(w, ": end\ndata: [DONE]\n\n")
	})
	resp, err := c.Client().Post(c.URL+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x","stream":true}`))
	c.must(err)
	defer resp.Body.Close()
	if resp.Header.Get("X-Request-Id") != "7" || resp.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" {
		t.Errorf("headers %v", resp.Header)
	}
	for range 5 {
		got := make([]byte, len(event))
		if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != event {
			t.Fatalf("%q, %v", got, err)
		}
		next <- struct{}{}
	}
	rest, err := io.ReadAll(resp.Body)
	if err != nil || string(rest) != ": end\ndata: [DONE]\n\n" {
		t.Errorf("the end is %q, %v", rest, err)
	}
	c.ended(outcomeDone, 1)
}

// TestLeavesAfterDone: a client that disconnects after the last event of a stream, before the response ends, has the
// whole response.
func TestLeavesAfterDone(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: {}\n\ndata: [DO")
		w.(http.Flusher).Flush()
		fmt.Fprint(w, "NE]\n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		q.Done(nil)
	})
	resp, err := c.Client().Post(c.URL+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x","stream":true}`))
	c.must(err)
	got := make([]byte, len("data: {}\n\ndata: [DONE]\n\n"))
	if _, err := io.ReadFull(resp.Body, got); err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	c.must(resp.Body.Close())
	c.ended(outcomeDone, 1)
}

// TestReplanned: an engine fails its part before the first byte of the response. The front closes
// both requests, the planner starts the request again, and the client gets only the second
// response.
func TestReplanned(t *testing.T) {
	for _, side := range []string{"prefill", "decode", "the decode engine's connection"} {
		t.Run(side, func(t *testing.T) {
			c := newCluster(t, Options{}, dualpath.Options{})
			var first atomic.Pointer[string]
			for e, fails := range map[*member]bool{c.p: side == "prefill", c.d: side != "prefill"} {
				good := *e.work.Load()
				e.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
					first.CompareAndSwap(nil, &q.Name)
					if q.Name != *first.Load() {
						good(w, r, q)
						return
					}
					if fails {
						q.Done(errLost)
					}
					if fails && strings.HasSuffix(side, "connection") {
						reset(w, r)
					}
					waitGone(w, r)
				})
			}
			resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
			if err != nil || resp.StatusCode != 200 || text != "an answer" {
				t.Fatalf("%v, %s, %v", resp, text, err)
			}
			c.ended(outcomeDone, 1)
			if c.value("attempts_total") != 2 || c.value("replans_total") != 1 {
				t.Errorf("%v attempts, %v replans", c.value("attempts_total"), c.value("replans_total"))
			}
		})
	}
}

// TestEngineStarts: the leader of an engine is at the planner before the engine listens. The front
// sends the engine its part of the attempt when the engine listens.
func TestEngineStarts(t *testing.T) {
	for _, side := range []string{prefillSide, decodeSide} {
		t.Run(side, func(t *testing.T) {
			c := newCluster(t, Options{}, dualpath.Options{})
			at := c.p.Listener.Addr().String()
			late, name := c.p, "p0"
			if side == decodeSide {
				at = c.d.Listener.Addr().String()
				late, name = c.d, c.d.URL
			}
			c.must(late.Listener.Close())
			late.CloseClientConnections()
			type result struct {
				resp *http.Response
				text string
				err  error
			}
			over := make(chan result, 1)
			go func() {
				resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":[1,2,3]}`)
				over <- result{resp, text, err}
			}()
			c.await(func() bool { return c.value("retries_total", name) > 0 })
			open, err := net.Listen("tcp", at)
			c.must(err)
			server := &http.Server{Handler: late.Config.Handler}
			var wg sync.WaitGroup
			wg.Go(func() { _ = server.Serve(open) })
			got := receive(t, over)
			if got.err != nil || got.resp.StatusCode != http.StatusOK || got.text != "an answer" {
				t.Errorf("%+v", got)
			}
			receive(t, late.asked)
			c.ended(outcomeDone, 1)
			if n := c.value("attempts_total"); n != 1 {
				t.Errorf("%v attempts", n)
			}
			c.must(server.Close())
			wg.Wait()
		})
	}
}

// TestEngineStaysAway: a decode engine that does not listen within ReplanWait fails the request.
func TestEngineStaysAway(t *testing.T) {
	c := newCluster(t, Options{ReplanWait: time.Millisecond}, dualpath.Options{})
	c.p.does(silent)
	c.must(c.d.Listener.Close())
	c.d.CloseClientConnections()
	resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":[1,2,3]}`)
	if err != nil || resp.StatusCode != http.StatusBadGateway {
		t.Fatalf("%v, %s, %v", resp, text, err)
	}
	checkError(t, text, "engine_failed")
}

// errLost is the failure of the engines.
var errLost = errors.New("the device is lost")

// checkAborted waits until the contexts of both leaders have ended and the front has closed both
// requests to engines.
func (c *cluster) checkAborted() {
	c.T.Helper()
	for _, e := range []*member{c.p, c.d} {
		receive(c.T, e.gone)
		c.await(func() bool { return e.open.Load() == 0 })
	}
}

// silent is the work of an engine that does not respond.
func silent(w http.ResponseWriter, r *http.Request, _ *leader.Request) { waitGone(w, r) }

// TestDecodeConnectionLost: the connection to the decode engine fails without its leader noticing.
// Before the first byte the front waits for the planner and then responds. After the first byte the
// client's stream ends. Both engines end the request.
func TestDecodeConnectionLost(t *testing.T) {
	c := newCluster(t, Options{ReplanWait: time.Millisecond}, dualpath.Options{})
	c.p.does(silent)
	for _, answer := range []http.HandlerFunc{reset, func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(503) }} {
		c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) { answer(w, r) })
		resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
		if err != nil || resp.StatusCode != http.StatusBadGateway {
			t.Fatalf("%v, %s, %v", resp, text, err)
		}
		checkError(t, text, "engine_failed")
		c.checkAborted()
	}
	c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		fmt.Fprint(w, "data: half\n\n")
		w.(http.Flusher).Flush()
		reset(w, r)
	})
	resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
	if err == nil || text != "data: half\n\n" {
		t.Errorf("%v, %q, %v; want half an answer, and an error", resp, text, err)
	}
	c.checkAborted()
	if c.value("planned_requests_total", outcomeFailed) != 2 || c.value("planned_requests_total", outcomeCut) != 1 || c.value("engine_failures_total", decodeSide) != 2 {
		t.Error("the requests that failed are not counted")
	}
}

// dying are the answers of an engine of which a process has died, before the engine's server ends too.
var dying = map[string]http.HandlerFunc{
	"status": func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusInternalServerError)
		fmt.Fprint(w, `{"error":{"message":"EngineCore encountered an issue."}}`)
	},
	"event": func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, `data: {"error": {"message": "EngineCore encountered an issue."}}`+"\n\ndata: [DONE]\n\n")
	},
}

// TestDecodeEngineDies: the planner starts a request again whose decode engine responds with an error and
// is not healthy. The client gets the error of an engine that is healthy.
func TestDecodeEngineDies(t *testing.T) {
	for name, answer := range dying {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, Options{HealthInterval: time.Hour}, dualpath.Options{})
			good := *c.d.work.Load()
			c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
				c.d.does(good)
				c.d.sick.Store(true)
				defer c.d.sick.Store(false)
				answer(w, r)
				waitGone(w, r)
				q.Done(errors.New("a rank has ended"))
			})
			resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
			if err != nil || resp.StatusCode != http.StatusOK || text != "an answer" {
				t.Fatalf("%v, %s, %v", resp, text, err)
			}
			if n := c.value("engine_failures_total", decodeSide); n != 1 {
				t.Errorf("%v failures are counted", n)
			}
			c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) { answer(w, r) })
			if resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`); err != nil || !strings.Contains(text, "EngineCore") {
				t.Errorf("%v, %s, %v", resp, text, err)
			}
		})
	}
}

// TestPrefillLost: the request to the prefill engine fails and its leader does not notice, so that the
// decode engine would wait for the prompt. The front waits for the planner, responds, and both engines
// end the request.
func TestPrefillLost(t *testing.T) {
	for name, answer := range map[string]http.HandlerFunc{
		"dropped": reset,
		"404":     func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusNotFound) },
		"429":     func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusTooManyRequests) },
		"500":     func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusInternalServerError) },
		"503":     func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) },
		"refused": nil,
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, Options{ReplanWait: time.Millisecond}, dualpath.Options{})
			c.d.does(silent)
			if answer == nil {
				c.must(c.p.Listener.Close())
				c.p.CloseClientConnections()
			} else {
				c.p.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) { answer(w, r) })
			}
			resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":[1,2,3]}`)
			if err != nil || resp.StatusCode != http.StatusBadGateway || !strings.Contains(text, "prefill engine p0") {
				t.Fatalf("%v, %s, %v", resp, text, err)
			}
			checkError(t, text, "engine_failed")
			c.checkAborted()
			if c.value("planned_requests_total", outcomeFailed) != 1 || c.value("engine_failures_total", prefillSide) != 1 {
				t.Error("the request that failed is not counted")
			}
		})
	}
}

// TestPrefillLostAfterDelivery: the request to the prefill engine fails when the decode engine has the
// prompt. The client gets the decode engine's response, however long that takes.
func TestPrefillLostAfterDelivery(t *testing.T) {
	for _, first := range []string{"the report", "the failure"} {
		t.Run(first, func(t *testing.T) {
			var log testkit.Log
			o := Options{Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})), ReplanWait: time.Hour}
			delivered := func() bool { return strings.Contains(log.String(), "the decode engine has the prompt") }
			if first == "the report" {
				o.ReplanWait = time.Nanosecond
			}
			c := newCluster(t, o, dualpath.Options{})
			failed := func() bool { return c.value("engine_failures_total", prefillSide) == 1 }
			held := make(chan *leader.Request, 1)
			c.p.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
				if first == "the report" {
					q.Done(nil)
					c.await(delivered)
				} else {
					held <- q
				}
				w.WriteHeader(http.StatusServiceUnavailable)
			})
			c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
				c.await(failed)
				if first == "the failure" {
					receive(t, held).Done(nil)
					c.await(delivered)
				}
				q.Done(nil)
				fmt.Fprint(w, "an answer")
			})
			resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
			if err != nil || resp.StatusCode != http.StatusOK || text != "an answer" {
				t.Fatalf("%v, %s, %v", resp, text, err)
			}
			c.ended(outcomeDone, 1)
		})
	}
}

// TestPrefillLostTimer: the end of prefill or of the request ends the wait of a request whose prefill
// engine has failed. An engine that accepts no connection fails the request at once.
func TestPrefillLostTimer(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	lost := func(why error) *session {
		s := &session{router: c.front.planned, timer: time.NewTimer(time.Hour), reply: make(chan reply, 1)}
		s.withoutPrefill(why)
		return s
	}
	for _, kind := range []gateway.Kind{gateway.Prefilled, gateway.Done} {
		s := lost(errLost)
		if s.waits != forPrefill || s.ended {
			t.Fatalf("waits for %d, ended %v", s.waits, s.ended)
		}
		if s.on(gateway.Event{Kind: kind}); s.waits != forNothing || s.ended {
			t.Errorf("%v: waits for %d, ended %v", kind, s.waits, s.ended)
		}
	}
	if s := lost(&net.OpError{Op: "dial", Err: errLost}); !s.ended {
		t.Error("the request goes on without a prefill engine")
	}
}

// TestReplannedAfterTheFirstByte: the leader of the decode engine fails the attempt during the
// stream. The client's stream ends, and the request is not started again.
func TestReplannedAfterTheFirstByte(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	fail := make(chan struct{})
	c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		fmt.Fprint(w, "half")
		w.(http.Flusher).Flush()
		hold(t, fail)
		q.Done(errLost)
		<-r.Context().Done()
	})
	resp, err := c.Client().Post(c.URL+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x"}`))
	c.must(err)
	defer resp.Body.Close()
	half := make([]byte, 4)
	_, err = io.ReadFull(resp.Body, half)
	c.must(err)
	close(fail)
	if rest, err := io.ReadAll(resp.Body); err == nil || len(rest) > 0 {
		t.Errorf("%q, %v; want the end of the stream", rest, err)
	}
	c.ended(outcomeCut, 1)
}

// TestPlannedClientGone: the client disconnects before or during the response. The planner aborts
// the request on both engines.
func TestPlannedClientGone(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	c.p.does(silent)
	for i, begun := range []bool{false, true} {
		arrived, over := make(chan struct{}, 1), make(chan error, 1)
		c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
			if begun {
				fmt.Fprint(w, "data: 1\n\n")
			} else {
				arrived <- struct{}{}
			}
			waitGone(w, r)
		})
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+"/v1/completions", strings.NewReader(`{"prompt":"x"}`))
		c.must(err)
		go func() {
			resp, err := c.Client().Do(req)
			if err == nil {
				arrived <- struct{}{}
				_, err = io.ReadAll(resp.Body)
				resp.Body.Close()
			}
			over <- err
		}()
		receive(t, arrived)
		cancel()
		if err := receive(t, over); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		c.checkAborted()
		c.ended(outcomeGone, float64(i+1))
	}
	c.await(func() bool { return c.value("in_flight_requests") == 0 })
	if n := c.value("engine_failures_total"); n != 0 {
		t.Errorf("%v failures", n)
	}
}

// TestPlannerRefuses covers the classes of the planner's refusals.
func TestPlannerRefuses(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{MaxQueue: 1})
	goOn := make(chan struct{})
	arrived := make(chan struct{}, 1)
	good := *c.d.work.Load()
	c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		arrived <- struct{}{}
		hold(t, goOn)
		good(w, r, q)
	})
	first := c.ask(`{"prompt":"x"}`)
	receive(t, arrived)
	resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
	c.must(err)
	if resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") != "3600" {
		t.Errorf("%v, %s", resp, text)
	}
	checkError(t, text, "rate_limit_exceeded")
	close(goOn)
	if code := receive(t, first); code != 200 {
		t.Error(code)
	}
	c.ended(outcomeDone, 1)
	resp, text, err = c.call(t.Context(), "/v1/completions", `{"prompt":"`+strings.Repeat("x", 101*16)+`"}`)
	c.must(err)
	if resp.StatusCode != http.StatusBadRequest || !strings.Contains(text, "2640 tokens") {
		t.Errorf("%v, %s", resp, text)
	}
	checkError(t, text, "context_length_exceeded")
	if n := c.value("rejected_total", rejectPlanner); n != 2 {
		t.Errorf("%v refusals are counted", n)
	}
}

// TestPromptBeyondTheLimits: a prompt that is too long for a storage node, or for the planner's messages, is
// the client's error, and no retry helps.
func TestPromptBeyondTheLimits(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	for _, blocks := range []int{140_000, 180_000} {
		resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":[`+strings.Repeat("7,", 16*blocks)+`7]}`)
		c.must(err)
		if resp.StatusCode != http.StatusBadRequest || resp.Header.Get("Retry-After") != "" {
			t.Errorf("%d blocks: %v, %.300s", blocks, resp, text)
		}
		checkError(t, text, "invalid_request")
	}
}

// TestEveryAttemptFails: the planner's refusal after the last attempt is a 503.
func TestEveryAttemptFails(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	c.p.does(silent)
	c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		q.Done(errLost)
		waitGone(w, r)
	})
	resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
	c.must(err)
	if resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("%v, %s", resp, text)
	}
	checkError(t, text, "planner_refused")
}

// TestPlannerRestarts: the planner is replaced after the prefill engine's part, during the response
// of the decode engine. The response continues, and the new planner ends the request.
func TestPlannerRestarts(t *testing.T) {
	var log testkit.Log
	c := newCluster(t, Options{Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}, dualpath.Options{})
	arrived, prefilled, next := make(chan struct{}, 1), make(chan struct{}, 1), make(chan struct{})
	prefill := *c.p.work.Load()
	c.p.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		prefill(w, r, q)
		prefilled <- struct{}{}
	})
	c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		fmt.Fprint(w, "one ")
		w.(http.Flusher).Flush()
		arrived <- struct{}{}
		hold(t, next)
		q.Done(nil)
		fmt.Fprint(w, "two")
	})
	type result struct {
		text string
		err  error
	}
	over := make(chan result, 1)
	go func() {
		_, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
		over <- result{text, err}
	}()
	receive(t, arrived)
	receive(t, prefilled) // without this Start, the new planner would plan the request again
	c.Planner.Restart()
	c.await(func() bool {
		if strings.Count(log.String(), "the planner has accepted a request") < 2 {
			return false
		}
		top, err := pb.NewPlannerClient(c.Planner.Conn).Top(t.Context(), &pb.TopRequest{})
		return err == nil && len(top.Groups) == 2 && top.Serving == 1
	})
	close(next)
	if got := receive(t, over); got.err != nil || got.text != "one two" {
		t.Errorf("%+v", got)
	}
	c.ended(outcomeDone, 1)
	if n := c.value("attempts_total"); n != 1 {
		t.Errorf("%v attempts", n)
	}
}

// TestPlannerAway: without a planner a request fails after the queue's wait. When a planner is
// available again, requests are served.
func TestPlannerAway(t *testing.T) {
	c := newCluster(t, Options{QueueWait: time.Millisecond}, dualpath.Options{})
	c.Planner.Stop()
	resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
	c.must(err)
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") != "1" {
		t.Errorf("%v, %s", resp, text)
	}
	checkError(t, text, "planner_unavailable")
	c.Planner.Start()
	c.ended(outcomeFailed, 1)
}

// TestUnknownEngine: the planner chooses an engine that the front lacks. Error and log have the
// name of that engine and the names of the front's engines.
func TestUnknownEngine(t *testing.T) {
	var log testkit.Log
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) { tokenize(w, []byte(`{"prompt":"x"}`)) })
	c := newCluster(t, Options{Engines: []Engine{{Name: "p0", URL: e.URL}, {Name: "d7", URL: e.URL + "/d"}}, Logger: slog.New(slog.NewTextHandler(&log, nil))}, dualpath.Options{})
	for range 2 {
		resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
		c.must(err)
		if resp.StatusCode != http.StatusBadGateway || !strings.Contains(text, c.d.Listener.Addr().String()) || !strings.Contains(text, "d7, p0") {
			t.Errorf("%v, %s", resp, text)
		}
		checkError(t, text, "unknown_engine")
	}
	if n := c.value("unknown_engines_total"); n != 2 || strings.Count(log.String(), "level=ERROR") != 1 {
		t.Errorf("%v starts are counted; the log is\n%s", n, &log)
	}
}

// TestUnsupported: requests that cannot be planned are refused without a request to an engine.
func TestUnsupported(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	for _, s := range []struct{ path, body, want string }{
		{"/v1/completions", `{"prompt":["x","y"]}`, "the list has 2 prompts"},
		{"/v1/completions", `{"prompt":[[1],[2]]}`, "the list has 2 prompts"},
		{"/v1/completions", `{"prompt":[]}`, "no tokens"},
		{"/v1/completions", `{"prompt":""}`, "no tokens"},
		{"/v1/completions", `{"prompt":[1.5]}`, "token ids"},
		{"/v1/completions", `{"prompt":{"a":1}}`, "token ids"},
		{"/v1/completions", `{"prompt":null}`, "prompt: there is none"},
		{"/v1/completions", `null`, "prompt: there is none"},
		{"/v1/completions", `{"prompt":"x","cache_salt":""}`, "cache_salt: want a text"},
		{"/v1/completions", `{"prompt":"x","cache_salt":3}`, "cache_salt: want a text"},
		{"/v1/completions", `{"prompt":"x","prompt_embeds":"e"}`, "prompt_embeds: "},
		{"/v1/completions", `{"prompt":"x","truncate_prompt_tokens":4}`, "truncate_prompt_tokens: "},
		{"/v1/completions", `{"prompt":"x","max_tokens":1.5}`, "max_tokens: it is 1.5"},
		{"/v1/completions", `{"prompt":"x","max_tokens":-1}`, "max_tokens: it is -1"},
		{"/v1/completions", `{"prompt":"x","kv_transfer_params":{"penstock":{"attempt":"a"}}}`, "kv_transfer_params.penstock: "},
		{"/v1/completions", `{"prompt":"x","kv_transfer_params":[]}`, "kv_transfer_params: want an object"},
		{"/v1/chat/completions", `{"prompt":"x"}`, "messages: there are none"},
		{"/v1/chat/completions", `{"messages":"x"}`, "messages: want a list"},
	} {
		resp, text, err := c.call(t.Context(), s.path, s.body)
		c.must(err)
		if resp.StatusCode != http.StatusBadRequest || !strings.Contains(text, s.want) {
			t.Errorf("%s: %d %s; want %s", s.body, resp.StatusCode, text, s.want)
		}
	}
	req, err := http.NewRequest(http.MethodPost, c.URL+"/v1/completions", strings.NewReader("compressed"))
	c.must(err)
	req.Header.Set("Content-Encoding", "zstd")
	resp, err := c.Client().Do(req)
	c.must(err)
	resp.Body.Close()
	if resp.StatusCode != http.StatusBadRequest {
		t.Error(resp)
	}
	if len(c.p.asked)+len(c.d.asked) > 0 {
		t.Error("an engine got a request")
	}
}

// alone makes both engines answer "alone" to requests without an attempt, whose bodies got receives, and
// questions about an adapter as identify does.
func (c *cluster) alone(identify http.HandlerFunc) (got chan string) {
	got = make(chan string, 2)
	for _, e := range []*member{c.p, c.d} {
		inner := *e.answer.Load()
		handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var body bytes.Buffer
			if _, err := body.ReadFrom(r.Body); err != nil {
				return // the front has closed the request
			}
			switch {
			case strings.Contains(body.String(), "identify"):
				if want := `{"model":"tuned","prompt":[0],"max_tokens":1,"kv_transfer_params":{"penstock":{"identify":true}}}`; body.String() != want || r.URL.Path != "/v1/completions" || r.Header.Get("Authorization") != "Bearer sk-1" {
					c.Errorf("%s with %v gets %s", r.URL, r.Header, &body)
				}
				identify(w, r)
			case !strings.Contains(body.String(), "penstock") && strings.HasSuffix(r.URL.Path, "completions"):
				got <- body.String()
				fmt.Fprint(w, "alone")
			default:
				r.Body = io.NopCloser(&body)
				inner(w, r)
			}
		})
		e.answer.Store(&handler)
	}
	return got
}

// TestComputedAlone: a request for the logprobs of its prompt, for which vLLM loads no KV, and a beam search, in
// which no request has the attempt, go to one engine, with the client's body.
func TestComputedAlone(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	got := c.alone(nil)
	for _, s := range []struct{ path, fields, reason string }{
		{"/v1/completions", `"prompt":"x","prompt_logprobs":0`, unplannedLogprobs},
		{"/v1/completions", `"prompt":["x","y"],"echo":true,"logprobs":1`, unplannedLogprobs},
		{"/v1/completions", `"prompt":"x","use_beam_search":true,"n":2`, unplannedBeams},
		{"/v1/completions", `"prompt":"x","echo":true`, ""},
		{"/v1/completions", `"prompt":"x","logprobs":1,"echo":false,"use_beam_search":false,"prompt_logprobs":null`, ""},
		{"/v1/chat/completions", `"messages":[],"prompt_logprobs":-1`, unplannedLogprobs},
		{"/v1/chat/completions", `"messages":[],"echo":true`, unplannedLogprobs}, // the default of top_logprobs is 0
		{"/v1/chat/completions", `"messages":[{"content":"x"}],"logprobs":true,"top_logprobs":2`, ""},
	} {
		body, want := "{"+s.fields+"}", "an answer"
		if s.reason != "" {
			want = "alone"
		}
		before := c.value("unplanned_requests_total", s.reason)
		resp, text, err := c.call(t.Context(), s.path, body)
		if err != nil || resp.StatusCode != http.StatusOK || text != want {
			t.Fatalf("%s: %v, %s, %v", body, resp, text, err)
		}
		if s.reason == "" {
			continue
		}
		if sent := receive(t, got); sent != body || c.value("unplanned_requests_total", s.reason) != before+1 {
			t.Errorf("%s: the engine got %s, or the request is not counted", body, sent)
		}
	}
}

// TestAdapters: a request for a LoRA adapter that the engines do not identify, or for a model that they do
// not list, goes to one engine, with the client's body, and the planner does not get it.
func TestAdapters(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	var asked atomic.Int32
	got := c.alone(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		fmt.Fprint(w, `{"choices":[],"kv_transfer_params":null}`)
	})
	lists := func() int { return int(c.p.listed.Load() + c.d.listed.Load()) }
	for i, s := range []struct {
		model, reason, text string
		lists               int // so far
	}{
		{`"m"`, "", "an answer", 1},
		{`"tuned"`, unplannedAdapter, "alone", 1},
		{`"t\u0075ned"`, unplannedAdapter, "alone", 1},
		{`"other"`, unplannedUnlisted, "alone", 2},
		{`"other"`, unplannedUnlisted, "alone", 3},
		{`"m"`, "", "an answer", 3},
		{`null`, "", "an answer", 3},
		{`""`, "", "an answer", 3},
	} {
		body := `{"prompt":[1,2,3],"model":` + s.model + `}`
		before := map[string]float64{s.reason: c.value("unplanned_requests_total", s.reason)}
		attempts := c.value("attempts_total")
		resp, text, err := c.call(t.Context(), "/v1/completions", body)
		if err != nil || resp.StatusCode != http.StatusOK || text != s.text {
			t.Fatalf("%d: %v, %s, %v", i, resp, text, err)
		}
		if s.reason != "" {
			if sent := receive(t, got); sent != body {
				t.Errorf("%d: the engine got %s", i, sent)
			}
			if c.value("unplanned_requests_total", s.reason) != before[s.reason]+1 || c.value("attempts_total") != attempts {
				t.Errorf("%d: the request is not counted, or was planned", i)
			}
		}
		if n := lists(); n != s.lists {
			t.Errorf("%d: %d requests for the list of models; want %d", i, n, s.lists)
		}
	}
	c.ended(outcomeDone, 4)
	if n := asked.Load(); n != 1 {
		t.Errorf("%d questions about the adapter", n)
	}

	// The list is renewed after a time. Until an engine sends another one, the last one is valid.
	expire := func() {
		c.front.planned.models.mu.Lock()
		c.front.planned.models.until = time.Now().Add(-time.Second)
		c.front.planned.models.mu.Unlock()
	}
	for _, e := range []*member{c.p, c.d} {
		e.lists("nothing")
	}
	expire()
	failures := c.value("models_errors_total")
	if resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":[1,2,3],"model":"tuned"}`); err != nil || resp.StatusCode != http.StatusOK || text != "alone" {
		t.Errorf("an adapter while no engine sends its models: %v, %s, %v", resp, text, err)
	} else {
		receive(t, got)
	}
	if n := c.value("models_errors_total"); n != failures+1 {
		t.Errorf("%v errors are counted; want %v", n, failures+1)
	}
	for _, e := range []*member{c.p, c.d} {
		e.lists(`{"data":[{"id":"tuned","parent":null}]}`)
	}
	expire()
	if resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":[1,2,3],"model":"tuned"}`); err != nil || resp.StatusCode != http.StatusOK || text != "an answer" {
		t.Errorf("%v, %s, %v", resp, text, err)
	}

	// Without a list all requests are planned.
	for i, list := range []http.HandlerFunc{say("nothing"), say(`{"data":[]}`), reset, func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusUnauthorized) }, say(strings.Repeat(" ", modelsBytes) + `{"data":[{"id":"x"}]}`)} {
		for _, e := range []*member{c.p, c.d} {
			e.models.Store(&list)
		}
		c.await(func() bool { return c.value("engine_healthy") == 2 })
		if resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":[1,2,3],"model":"x"}`); err != nil || resp.StatusCode != http.StatusOK || text != "an answer" {
			t.Errorf("%v, %s, %v", resp, text, err)
		}
		if n, want := c.value("models_errors_total"), failures+float64(i+2); n != want {
			t.Errorf("%v errors are counted; want %v", n, want)
		}
	}
}

// TestIdentity: a request for a LoRA adapter is planned with ids that the engines' identity of the adapter
// salts. If the attempts fail, because the engines have another one, the request goes to one engine, and
// the identity is asked for again. So it is if no engine answers.
func TestIdentity(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	var answer atomic.Pointer[http.HandlerFunc]
	var asked atomic.Int32
	says := func(f http.HandlerFunc) { answer.Store(&f) }
	alone := c.alone(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		(*answer.Load())(w, r)
	})
	prompt := make([]kv.Token, 2*geo.BlockTokens)
	words, err := json.Marshal(prompt)
	c.must(err)
	body := `{"model":"tuned","prompt":` + string(words) + `}`
	idsOf := func(identity string) []kv.BlockID {
		chain, err := c.ns.Chain()
		c.must(err)
		chain = chain.Salt([]byte("(" + identity + ",())"))
		ids, _ := chain.Append(nil, prompt)
		return ids
	}
	got := make(chan []kv.BlockID, 1)
	good := *c.d.work.Load()
	c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		load, err := gateway.ParsePayload(q.Payload)
		c.must(err)
		got <- load.IDs
		good(w, r, q)
	})
	planned := func(identity string, questions int32) {
		t.Helper()
		resp, text, err := c.call(t.Context(), "/v1/completions", body)
		if err != nil || resp.StatusCode != http.StatusOK || text != "an answer" {
			t.Fatalf("%v, %s, %v", resp, text, err)
		}
		if ids := receive(t, got); !slices.Equal(ids, idsOf(identity)) {
			t.Errorf("the engines have the ids %x of another adapter than %s", ids, identity)
		}
		if n := asked.Load(); n != questions {
			t.Errorf("%d questions; want %d", n, questions)
		}
	}
	unplanned := func(questions int32) {
		t.Helper()
		before := c.value("unplanned_requests_total", unplannedAdapter)
		resp, text, err := c.call(t.Context(), "/v1/completions", body)
		if err != nil || resp.StatusCode != http.StatusOK || text != "alone" {
			t.Fatalf("%v, %s, %v", resp, text, err)
		}
		if sent := receive(t, alone); sent != body {
			t.Errorf("the engine got %s", sent)
		}
		if n := asked.Load(); n != questions || c.value("unplanned_requests_total", unplannedAdapter) != before+1 {
			t.Errorf("%d questions; want %d; or the request is not counted", n, questions)
		}
	}
	says(say(`{"kv_transfer_params":{"penstock":{"adapter":"('one',False)"}}}`))
	planned("('one',False)", 1)
	planned("('one',False)", 1)

	// Both engines have another adapter now.
	says(say(`{"kv_transfer_params":{"penstock":{"adapter":"('two',False)"}}}`))
	works := *c.d.work.Load()
	for _, e := range []*member{c.p, c.d} {
		e.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
			q.Done(errors.New("the gateway planned another prompt"))
			<-r.Context().Done()
		})
	}
	unplanned(1)
	c.d.does(works)
	c.p.does(good)
	planned("('two',False)", 2)

	// The identity is asked for again after a time, and the last one is not used if no engine answers.
	expire := func() {
		c.front.planned.models.setIdentity("tuned", identity{"('two',False)", time.Now().Add(-time.Second)})
	}
	expire()
	planned("('two',False)", 3)
	failures := c.value("models_errors_total")
	for i, f := range []http.HandlerFunc{say("nothing"), func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusUnauthorized) }, say(strings.Repeat(" ", identityBytes) + "{}")} {
		says(f)
		expire()
		unplanned(int32(4 + i))
		if n, want := c.value("models_errors_total"), failures+float64(i+1); n != want {
			t.Errorf("%v errors are counted; want %v", n, want)
		}
	}
}

// imageChat is a chat with an image and an audio.
const imageChat = `{"model":"m","kv_transfer_params":{"mine":1},"messages":[{"content":"x"},{"content":["x",{"type":"image_url","image_url":{"url":"data:"}},{"type":"input_audio"}]}]}`

// renders sets both engines' answer to renderPath.
func (c *cluster) renders(f http.HandlerFunc) {
	for _, e := range []*member{c.p, c.d} {
		e.render.Store(&f)
	}
}

// resume ends the pauses of chats with images.
func (c *cluster) resume() {
	p := &c.front.planned.pauses
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.until)
}

// TestMedia: a chat with images is planned with the tokens, hashes and places that an engine sends, and
// the ids of a second chat are found.
func TestMedia(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	prompt := make([]kv.Token, 40)
	for i := range prompt {
		prompt[i] = kv.Token(i)
	}
	words, err := json.Marshal(prompt)
	c.must(err)
	var asked atomic.Int32
	c.renders(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		body, err := io.ReadAll(r.Body)
		c.must(err)
		want := strings.Replace(imageChat, `"kv_transfer_params":{"mine":1},`, "", 1)
		if want = strings.TrimSuffix(want, "}") + `,"mm_payload":"none"}`; string(body) != want || r.Method != http.MethodPost || r.URL.RawQuery != "" || r.Header.Get("Authorization") != "Bearer sk-1" {
			t.Errorf("%s %s with %v gets %s; want %s", r.Method, r.URL, r.Header, body, want)
		}
		fmt.Fprintf(w, `{"request_id":"x","token_ids":%s,"features":{"mm_hashes":{"image":["aa"],"audio":["bb"]},"kwargs_data":null,"mm_placeholders":{"audio":[{"offset":3,"length":2}],"image":[{"offset":14,"length":4}]}}}`, words)
	})
	chain, err := c.ns.Chain()
	c.must(err)
	chain = chain.Salt([]byte("(None,(('mm','bb',3),('mm','aa',14)))"))
	want, _ := chain.Append(nil, prompt[:16])
	chain = chain.Salt([]byte("(None,(('mm','aa',-2)))"))
	want, _ = chain.Append(want, prompt[16:])
	got := make(chan *leader.Request, 1)
	good := *c.d.work.Load()
	c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		got <- q
		good(w, r, q)
	})
	for i := range int32(2) {
		resp, text, err := c.call(t.Context(), "/v1/chat/completions?a=b", imageChat)
		if err != nil || resp.StatusCode != http.StatusOK || text != "an answer" {
			t.Fatalf("%v, %s, %v", resp, text, err)
		}
		q := receive(t, got)
		load, err := gateway.ParsePayload(q.Payload)
		c.must(err)
		if !slices.Equal(load.IDs, want) || q.Prompt != len(prompt) {
			t.Errorf("the engines have %x of %d tokens; want %x", load.IDs, q.Prompt, want)
		}
		if n := asked.Load(); n != i+1 {
			t.Errorf("%d questions", n)
		}
	}
	if n := c.value("unplanned_requests_total", unplannedMedia) + c.value("render_errors_total"); n != 0 {
		t.Errorf("%v requests are counted as unplanned or errors", n)
	}
	if n := c.value("prompt_tokens_total"); n != float64(2*len(prompt)) {
		t.Errorf("%v tokens are counted", n)
	}
}

// TestRenderedText: the tokens of a chat without images come from renderPath, because they depend on fields that
// /tokenize does not have. If no engine sends them, they come from /tokenize. After a refusal of the
// path no engine is asked for a time.
func TestRenderedText(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	const body = `{"model":"m","reasoning_effort":"high","messages":[{"content":"0123456789"}]}`
	prompts := make(chan int, 1)
	good := *c.d.work.Load()
	c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		prompts <- q.Prompt
		good(w, r, q)
	})
	var asked atomic.Int32
	for i, s := range []struct {
		status        int
		text          string
		prompt, asked int
	}{
		{http.StatusOK, `{"token_ids":[1,2,3,4,5,6,7],"features":null}`, 7, 1},
		{http.StatusOK, `{"token_ids":[1,2,3],"features":{"mm_hashes":{},"mm_placeholders":{}}}`, 3, 1},
		{http.StatusOK, `{"token_ids":[],"features":null}`, len(`"0123456789"`), 1},
		{http.StatusOK, `{}`, len(`"0123456789"`), 1},
		{http.StatusOK, `{"token_ids":[1,2],"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":0,"length":1}]}}}`, len(`"0123456789"`), 1},
		{http.StatusBadRequest, `{"error":{}}`, len(`"0123456789"`), 1},
		{http.StatusForbidden, ``, len(`"0123456789"`), 1},
		{http.StatusOK, `{"token_ids":[1],"features":null}`, len(`"0123456789"`), 0},
	} {
		asked.Store(0)
		c.renders(func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			got, err := io.ReadAll(r.Body)
			if want := strings.TrimSuffix(body, "}") + `,"mm_payload":"none"}`; err != nil || string(got) != want {
				t.Errorf("%s, %v; want %s", got, err, want)
			}
			w.WriteHeader(s.status)
			fmt.Fprint(w, s.text)
		})
		resp, text, err := c.call(t.Context(), "/v1/chat/completions", body)
		if err != nil || resp.StatusCode != http.StatusOK || text != "an answer" {
			t.Fatalf("%d: %v, %s, %v", i, resp, text, err)
		}
		if n := receive(t, prompts); n != s.prompt || int(asked.Load()) != s.asked {
			t.Errorf("%d: the engines have a prompt of %d tokens after %d questions; want %d after %d", i, n, asked.Load(), s.prompt, s.asked)
		}
	}
	if n := c.value("render_errors_total"); n != 0 {
		t.Errorf("%v errors; they count chats with images", n)
	}
}

// TestChatOfOtherTokens: a chat whose tokens came from /tokenize, because the engines refuse renderPath, goes to one
// engine if all its attempts fail. A prompt that is not a chat, and a chat with the tokens of renderPath, fail.
func TestChatOfOtherTokens(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	got := c.alone(nil)
	for _, e := range []*member{c.p, c.d} {
		e.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
			q.Done(errors.New("the gateway planned another prompt"))
			<-r.Context().Done()
		})
	}
	var serves atomic.Bool
	c.renders(func(w http.ResponseWriter, r *http.Request) {
		if !serves.Load() {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		fmt.Fprint(w, `{"token_ids":[1,2,3],"features":null}`)
	})
	const chat = `{"model":"m","messages":[{"content":"0123456789"}]}`
	resp, text, err := c.call(t.Context(), "/v1/chat/completions", chat)
	if err != nil || resp.StatusCode != http.StatusOK || text != "alone" {
		t.Fatalf("%v, %s, %v", resp, text, err)
	}
	receive(t, got)
	if n := c.value("unplanned_requests_total", unplannedTokens); n != 1 {
		t.Errorf("%v requests are counted", n)
	}
	if resp, text, err := c.call(t.Context(), "/v1/completions", `{"model":"m","prompt":"0123456789"}`); err != nil || resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("a prompt: %v, %s, %v", resp, text, err)
	}
	serves.Store(true)
	c.resume()
	if resp, text, err := c.call(t.Context(), "/v1/chat/completions", chat); err != nil || resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("rendered: %v, %s, %v", resp, text, err)
	}
	if n := c.value("unplanned_requests_total", unplannedTokens); n != 1 {
		t.Errorf("%v requests are counted in the end", n)
	}
}

// TestMediaUnplanned: a chat with images goes to one engine if no engine sends its tokens with valid
// hashes and places. After a refusal of the path no engine is asked for a time, for any model. The
// first refusal is logged.
func TestMediaUnplanned(t *testing.T) {
	var log testkit.Log
	c := newCluster(t, Options{BodyMemoryBytes: 64 << 20, Logger: slog.New(slog.NewTextHandler(&log, nil))}, dualpath.Options{})
	got := c.alone(nil)
	var asked atomic.Int32
	unplanned := func(body string, questions int32, errors float64) {
		t.Helper()
		before, failures := c.value("unplanned_requests_total", unplannedMedia), c.value("render_errors_total")
		first := asked.Load()
		c.await(func() bool { return c.value("engine_healthy") == 2 })
		resp, text, err := c.call(t.Context(), "/v1/chat/completions", body)
		if err != nil || resp.StatusCode != http.StatusOK || text != "alone" {
			t.Fatalf("%.200s: %v, %s, %v", body, resp, text, err)
		}
		if sent := receive(t, got); sent != body {
			t.Errorf("the engine got %.200s", sent)
		}
		if n := c.value("unplanned_requests_total", unplannedMedia); n != before+1 {
			t.Errorf("%v requests are counted; want %v", n, before+1)
		}
		if n, failed := asked.Load()-first, c.value("render_errors_total")-failures; n != questions || failed != errors {
			t.Errorf("%d questions and %v errors; want %d and %v", n, failed, questions, errors)
		}
	}
	answers := func(status int, text string) {
		c.renders(func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			w.WriteHeader(status)
			fmt.Fprint(w, text)
		})
	}
	answer := func(hashes, places string) string {
		return `{"token_ids":[1,2,3,4,5,6,7,8],"features":{"mm_hashes":` + hashes + `,"mm_placeholders":` + places + `}}`
	}
	other := strings.Replace(imageChat, `"m"`, `"tuned"`, 1)
	for _, status := range []int{http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented} {
		answers(status, `{"detail":"Not Found"}`)
		unplanned(imageChat, 1, 1)
		unplanned(imageChat, 0, 0)
		unplanned(other, 0, 0)
		c.resume()
	}
	if n := strings.Count(log.String(), "--enable-scale-out"); n != 1 {
		t.Errorf("the refusal is logged %d times:\n%s", n, &log)
	}
	for _, bad := range []struct {
		status int
		text   string
	}{
		{http.StatusNotFound, `{"error":{"message":"The model does not exist","code":404}}`},
		{http.StatusBadRequest, `{"error":{}}`},
		{http.StatusInternalServerError, ""},
		{http.StatusOK, "nothing"},
		{http.StatusOK, `{}`},
		{http.StatusOK, `[]`},
		{http.StatusOK, `{"token_ids":[1,2,3],"features":null}`},
		{http.StatusOK, answer(`{}`, `{}`)},
		{http.StatusOK, answer(`{"image":["a"]}`, `{}`)},
		{http.StatusOK, answer(`{"image":["a"]}`, `{"image":[]}`)},
		{http.StatusOK, answer(`{"image":["a"]}`, `{"audio":[{"offset":1,"length":1}]}`)},
		{http.StatusOK, answer(`{"image":["a"]}`, `{"image":[{"offset":1,"length":1}],"audio":[{"offset":3,"length":1}]}`)},
		{http.StatusOK, answer(`{"image":["a","b"]}`, `{"image":[{"offset":1,"length":1}]}`)},
		{http.StatusOK, answer(`{"image":["a","b"]}`, `{"image":[{"offset":1,"length":3},{"offset":3,"length":2}]}`)},
		{http.StatusOK, answer(`{"image":[""]}`, `{"image":[{"offset":1,"length":1}]}`)},
		{http.StatusOK, answer(`{"image":[null]}`, `{"image":[{"offset":1,"length":1}]}`)},
		{http.StatusOK, answer(`{"image":["a"]}`, `{"image":[{"offset":1}]}`)},
		{http.StatusOK, answer(`{"image":["a"]}`, `{"image":[{"offset":-1,"length":3}]}`)},
		{http.StatusOK, answer(`{"image":["a"]}`, `{"image":[{"offset":7,"length":2}]}`)},
		{http.StatusOK, answer(`{"image":["a"]}`, `{"image":[{"offset":1,"length":9223372036854775807}]}`)},
		{http.StatusOK, strings.Replace(answer(`{"image":["a"]}`, `{"image":[{"offset":1,"length":1}]}`), "8]", "-8]", 1)},
		{http.StatusOK, answer(`{"image":["a"]}`, `{"image":[{"offset":1,"length":1}]}`) + strings.Repeat(" ", 2*mediaBytes+answerBytes+tokenBytes*len(imageChat))},
	} {
		answers(bad.status, bad.text)
		unplanned(imageChat, 1, 1)
	}

	// The first engine ends the connection, and the second, which then gets the chat, answers without hashes.
	asked.Store(0)
	c.await(func() bool { return c.value("engine_healthy") == 2 })
	c.renders(func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) == 1 {
			panic(http.ErrAbortHandler)
		}
		fmt.Fprint(w, `{}`)
	})
	if resp, text, err := c.call(t.Context(), "/v1/chat/completions", imageChat); err != nil || resp.StatusCode != http.StatusOK || text != "alone" || asked.Load() != 2 {
		t.Errorf("%v, %s, %v after %d questions", resp, text, err, asked.Load())
	}
	receive(t, got)

	// Memory is short.
	answers(http.StatusOK, answer(`{"image":["a"]}`, `{"image":[{"offset":1,"length":1}]}`))
	many := `{"messages":[{"content":[` + strings.Repeat(`{},`, 256) + `{}]}]}`
	unplanned(many, 0, 1)
	unplanned(`{"documents":[],"messages":[{"content":[{"image_url":"x"}]}]}`, 0, 0)
	if n := c.value("attempts_total"); n != 0 {
		t.Errorf("%v attempts", n)
	}
}

// TestMediaFails: if all attempts of a chat with an image fail, because the engines have another hash, the
// chat goes to one engine, and so do the next ones of this model.
func TestMediaFails(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	got := c.alone(say(`{"kv_transfer_params":{"penstock":{"adapter":"('one',False)"}}}`))
	var asked atomic.Int32
	c.renders(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		fmt.Fprint(w, `{"token_ids":[1,2,3,4],"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":1,"length":2}]}}}`)
	})
	works := []func(http.ResponseWriter, *http.Request, *leader.Request){*c.p.work.Load(), *c.d.work.Load()}
	for _, e := range []*member{c.p, c.d} {
		e.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
			q.Done(errors.New("the gateway planned another prompt"))
			<-r.Context().Done()
		})
	}
	alone := func(questions int32) {
		t.Helper()
		resp, text, err := c.call(t.Context(), "/v1/chat/completions", imageChat)
		if err != nil || resp.StatusCode != http.StatusOK || text != "alone" {
			t.Fatalf("%v, %s, %v", resp, text, err)
		}
		receive(t, got)
		if n := asked.Load(); n != questions {
			t.Errorf("%d questions; want %d", n, questions)
		}
	}
	alone(1)
	alone(1)
	if n := c.value("unplanned_requests_total", unplannedMedia); n != 2 {
		t.Errorf("%v requests are counted", n)
	}
	if n := c.value("render_errors_total"); n != 0 {
		t.Errorf("%v errors", n)
	}
	c.p.does(works[0])
	c.d.does(works[1])
	other := strings.Replace(imageChat, `"m"`, `"tuned"`, 1)
	if resp, text, err := c.call(t.Context(), "/v1/chat/completions", other); err != nil || resp.StatusCode != http.StatusOK || text != "an answer" {
		t.Errorf("another model: %v, %s, %v", resp, text, err)
	}
	c.resume()
	if resp, text, err := c.call(t.Context(), "/v1/chat/completions", imageChat); err != nil || resp.StatusCode != http.StatusOK || text != "an answer" {
		t.Errorf("after the pause: %v, %s, %v", resp, text, err)
	}
}

// TestTokenize: after a failure another engine is used, the refusal of an engine is the client's
// response, and other responses are failures.
func TestTokenize(t *testing.T) {
	var answer atomic.Pointer[http.HandlerFunc]
	var asked atomic.Int32
	does := func(f http.HandlerFunc) { answer.Store(&f) }
	c := newCluster(t, Options{}, dualpath.Options{})
	for _, e := range []*member{c.p, c.d} {
		inner := *e.answer.Load()
		handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/tokenize" {
				inner(w, r)
				return
			}
			body, _ := io.ReadAll(r.Body)
			if string(body) != `{"add_special_tokens" : false,"prompt":"x"}` || r.Header.Get("Authorization") != "Bearer sk-1" || r.URL.RawQuery != "" {
				t.Errorf("%s with %v gets %s", r.URL, r.Header, body)
			}
			asked.Add(1)
			(*answer.Load())(w, r)
		})
		e.answer.Store(&handler)
	}
	call := func() (*http.Response, string) {
		c.await(func() bool { return c.value("engine_healthy") == 2 })
		resp, text, err := c.call(t.Context(), "/v1/completions?a=b", `{"stop":"x", "add_special_tokens" : false,"prompt":"x"}`)
		c.must(err)
		return resp, text
	}
	var failed atomic.Bool
	does(func(w http.ResponseWriter, r *http.Request) {
		if failed.CompareAndSwap(false, true) {
			w.WriteHeader(503)
			return
		}
		fmt.Fprint(w, `{"tokens":[7,8,9]}`)
	})
	if resp, text := call(); resp.StatusCode != 200 || text != "an answer" || asked.Load() != 2 || c.value("prompt_tokens_total") != 3 {
		t.Errorf("%v, %s after %d questions about %v tokens", resp, text, asked.Load(), c.value("prompt_tokens_total"))
	}
	does(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, "no such template")
	})
	if resp, text := call(); resp.StatusCode != http.StatusUnprocessableEntity || text != "no such template" {
		t.Errorf("%v, %s", resp, text)
	}
	for _, bad := range []string{`{}`, `{"tokens":["x"]}`, `nothing`, strings.Repeat(" ", 1<<17)} {
		does(say(bad))
		if resp, text := call(); resp.StatusCode != http.StatusBadGateway {
			t.Errorf("%.20q: %v, %s", bad, resp, text)
		} else {
			checkError(t, text, "tokenize_failed")
		}
	}
	if n := c.value("tokenize_errors_total"); n != 5 {
		t.Errorf("%v errors are counted", n)
	}
}

// TestEngineRefuses: the refusal of either engine is the client's response, and the planner aborts
// the request. An overloaded prefill engine is not a refusal.
func TestEngineRefuses(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	refuse := func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, "no such field")
	}
	good := []func(http.ResponseWriter, *http.Request, *leader.Request){*c.p.work.Load(), *c.d.work.Load()}
	for i, e := range []*member{c.p, c.d} {
		c.p.does(silent)
		c.d.does(silent)
		e.does(refuse)
		resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
		if err != nil || resp.StatusCode != http.StatusUnprocessableEntity || text != "no such field" {
			t.Errorf("%v, %s, %v", resp, text, err)
		}
		c.checkAborted()
		c.ended(outcomeEngine, float64(i+1))
	}
	c.p.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		w.WriteHeader(http.StatusTooManyRequests)
		q.Done(nil)
	})
	c.d.does(good[1])
	if resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`); err != nil || resp.StatusCode != 200 || text != "an answer" {
		t.Errorf("%v, %s, %v", resp, text, err)
	}
}

// TestConfirming: the client has the response before the planner has ended the request. The front
// waits for the planner for a bounded time and a bounded number of requests, and Drain waits for
// the front.
func TestConfirming(t *testing.T) {
	for _, s := range []struct {
		name    string
		wait    time.Duration
		room    int
		outcome string
	}{
		{"in time", time.Hour, 1, outcomeDone},
		{"too late", time.Nanosecond, 1, outcomeUnconfirmed},
		{"too many", time.Hour, 0, outcomeUnconfirmed},
	} {
		t.Run(s.name, func(t *testing.T) {
			c := newCluster(t, Options{}, dualpath.Options{})
			c.front.planned.confirmWait, c.front.planned.confirming = s.wait, make(chan struct{}, s.room)
			held := make(chan *leader.Request, 1)
			c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
				fmt.Fprint(w, "an answer")
				held <- q
			})
			resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
			if err != nil || resp.StatusCode != 200 || text != "an answer" {
				t.Fatalf("%v, %s, %v", resp, text, err)
			}
			q := receive(t, held)
			if s.outcome == outcomeDone {
				c.await(func() bool { return c.value("confirming_requests") == 1 })
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				if err := c.front.Drain(ctx); !errors.Is(err, context.Canceled) {
					t.Errorf("%v; want that a request has not ended", err)
				}
				q.Done(nil)
			}
			c.must(c.front.Drain(t.Context()))
			if c.value("planned_requests_total", s.outcome) != 1 || c.value("confirming_requests") != 0 {
				t.Errorf("%v requests ended as %s, %v have not", c.value("planned_requests_total", s.outcome), s.outcome, c.value("confirming_requests"))
			}
			resp, text, err = c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
			if err != nil || resp.StatusCode != http.StatusServiceUnavailable {
				t.Errorf("%v, %s, %v", resp, text, err)
			}
			checkError(t, text, "shutting_down")
		})
	}
}

// TestCloseEndsRequests: Close ends the requests for which Drain did not wait.
func TestCloseEndsRequests(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	c.p.does(silent)
	arrived := make(chan struct{}, 1)
	c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		arrived <- struct{}{}
		waitGone(w, r)
	})
	first := c.ask(`{"prompt":"x"}`)
	receive(t, arrived)
	c.front.Close()
	if code := receive(t, first); code != http.StatusServiceUnavailable {
		t.Error(code)
	}
	c.checkAborted()
}

// FuzzBodies compares the bodies for the engines with edits of a decoded map.
func FuzzBodies(f *testing.F) {
	for _, seed := range []string{`{"prompt":"x"}`, `{"n":2,"stream":true,"max_tokens":1e2,"max_completion_tokens":7}`, `{"kv_transfer_params":{"a":1.0,"a":[2]},"min_tokens":3}`, `{"kv_transfer_params":null,"max_completion_tokens":null}`} {
		f.Add([]byte(seed))
	}
	attempt := attemptParams{Attempt: "r.1#2", Epoch: 1 << 62}
	own := map[string]any{"attempt": "r.1#2", "epoch": json.Number("4611686018427387904")}
	f.Fuzz(func(t *testing.T, body []byte) {
		members, err := parseFields(body)
		if err != nil || bytes.Equal(bytes.TrimSpace(body), []byte("null")) {
			return
		}
		params, err := paramsOf(members)
		if err != nil {
			return
		}
		prefill, decode := bodies(members, params, attempt)
		want := decoded(t, body)
		transfer, _ := want[transferField].(map[string]any)
		if transfer == nil {
			transfer = make(map[string]any)
		}
		transfer[transferKey] = own
		want[transferField] = transfer
		checkSame(t, text(t, decode), want)
		delete(want, "min_tokens")
		delete(want, "stream_options")
		want["max_tokens"], want["n"], want["stream"] = json.Number("1"), json.Number("1"), false
		if want["max_completion_tokens"] != nil {
			want["max_completion_tokens"] = json.Number("1")
		}
		checkSame(t, text(t, prefill), want)
	})
}

// TestWeightsAbort: a change of weights with policy abort ends the request at both engines. The
// client gets a 503 with a separate code and may try again.
func TestWeightsAbort(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	bumped := make(chan error, 1)
	c.p.does(silent)
	c.d.does(func(w http.ResponseWriter, r *http.Request, _ *leader.Request) {
		_, err := pb.NewPlannerClient(c.Conn).BumpWeights(c.Context(), &pb.BumpWeightsRequest{Namespace: "m", Epoch: 9, Policy: pb.Drain_DRAIN_ABORT})
		bumped <- err
		waitGone(w, r)
	})
	resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":"x"}`)
	c.must(err)
	c.must(receive(t, bumped))
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" {
		t.Errorf("%v, %s", resp, text)
	}
	checkError(t, text, "weights_changed")
}
