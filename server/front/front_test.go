package front

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// fakeEngine serves /health, and other requests with the function answer.
type fakeEngine struct {
	*httptest.Server
	answer atomic.Pointer[http.HandlerFunc]
	sick   atomic.Bool
	served atomic.Int32
}

// newEngine starts an engine. Its port stays reserved when a test closes the listener, so that a
// connection to the engine is then refused.
func newEngine(t testing.TB, answer http.HandlerFunc) *fakeEngine {
	t.Helper()
	e := &fakeEngine{}
	e.answer.Store(&answer)
	listener, err := net.Listen("tcp", testkit.Port(t))
	if err != nil {
		t.Fatal(err)
	}
	e.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path != "/health":
			e.served.Add(1)
			(*e.answer.Load())(w, r)
		case e.sick.Load():
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	if err := e.Listener.Close(); err != nil {
		t.Fatal(err)
	}
	e.Listener = listener
	e.Start()
	t.Cleanup(e.Close)
	return e
}

func say(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, text) }
}

// reset ends the connection without a response.
func reset(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) }

// started is a front on the network.
type started struct {
	*httptest.Server
	front    *Front
	registry *prometheus.Registry
	t        testing.TB
}

func start(t testing.TB, o Options, engines ...*fakeEngine) *started {
	t.Helper()
	for _, e := range engines {
		o.Engines = append(o.Engines, Engine{URL: e.URL})
	}
	s := &started{registry: prometheus.NewRegistry(), t: t}
	o.Registry = s.registry
	if o.HealthInterval == 0 {
		o.HealthInterval = 5 * time.Millisecond
	}
	o.HealthTimeout = time.Minute
	var err error
	if s.front, err = New(o); err != nil {
		t.Fatal(err)
	}
	s.Server = httptest.NewServer(s.front)
	s.Client().Timeout = time.Minute // only a defect makes a request reach this limit
	t.Cleanup(func() {
		s.Client().CloseIdleConnections()
		s.Close()
		s.front.Close()
	})
	for _, e := range engines {
		if !e.sick.Load() {
			s.await(func() bool { return s.front.EngineHealth()[e.URL] })
		}
	}
	return s
}

// receive returns the next element of ch, or zero if ch is closed. It fails the test after a
// minute.
func receive[T any](t testing.TB, ch <-chan T) T {
	t.Helper()
	limit := time.NewTimer(time.Minute)
	defer limit.Stop()
	var v T
	select {
	case v = <-ch:
	case <-limit.C:
		t.Fatal("nothing was received within a minute")
	}
	return v
}

// hold blocks an engine's handler until ch has an element or is closed, or the test ends.
func hold(t testing.TB, ch <-chan struct{}) {
	select {
	case <-ch:
	case <-t.Context().Done():
	}
}

// await polls until ok.
func (s *started) await(ok func() bool) {
	s.t.Helper()
	limit, tick := time.NewTimer(time.Minute), time.NewTicker(time.Millisecond)
	defer limit.Stop()
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit.C:
			s.t.Fatal("the expected event has not happened")
		}
	}
}

func (s *started) post(body string) (int, string, http.Header) {
	s.t.Helper()
	code, text, header, err := post(s.Client(), s.URL, body)
	if err != nil {
		s.t.Fatal(err)
	}
	return code, text, header
}

// ask sends a request in a goroutine. The channel receives the status, or 0 if there is none.
func (s *started) ask(body string) <-chan int {
	status := make(chan int, 1)
	go func() {
		code, _, _, err := post(s.Client(), s.URL, body)
		if err != nil {
			s.t.Error(err)
			code = 0
		}
		status <- code
	}()
	return status
}

func post(client *http.Client, url, body string) (int, string, http.Header, error) {
	resp, err := client.Post(url+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return 0, "", nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), resp.Header, err
}

// value returns the sum of a metric's series whose labels have all of want as values.
func (s *started) value(name string, want ...string) (sum float64) {
	s.t.Helper()
	families, err := s.registry.Gather()
	if err != nil {
		s.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "penstock_gateway_"+name {
			continue
		}
		for _, m := range f.GetMetric() {
			labels := make(map[string]bool)
			for _, l := range m.GetLabel() {
				labels[l.GetValue()] = true
			}
			all := true
			for _, w := range want {
				all = all && labels[w]
			}
			if all {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

// checkError fails unless the text is an error object of OpenAI's API.
func checkError(t *testing.T, text, code string) {
	t.Helper()
	var got struct {
		Error struct{ Message, Type, Code string }
	}
	if err := json.Unmarshal([]byte(text), &got); err != nil || got.Error.Code != code || got.Error.Message == "" || got.Error.Type == "" {
		t.Errorf("the answer is %s (%v); want an error object with code %s", text, err, code)
	}
}

// TestPassThrough: the engine receives the client's bytes and headers, and the client the engine's.
func TestPassThrough(t *testing.T) {
	var got http.Request
	var gotBody []byte
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		got = *r
		gotBody, _ = io.ReadAll(r.Body)
		w.Header().Set("X-Request-Id", "7")
		w.Header()["Server"] = []string{"uvicorn"}
		w.WriteHeader(http.StatusTeapot)
		fmt.Fprint(w, `{ "error" : 1 }`)
	})
	s := start(t, Options{}, e)
	body := "{ \"prompt\":[1, 2],\n \"unknown\": {\"a\": 1.0}}"
	req, err := http.NewRequest(http.MethodPost, s.URL+"/v1/chat/completions?a=b;c", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{"Authorization": "Bearer sk-1", "X-Forwarded-For": "10.1.1.1", "Traceparent": "00-1", "Connection": "X-Hop", "X-Hop": "1", "User-Agent": ""} {
		req.Header.Set(name, value)
	}
	resp, err := s.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusTeapot || string(text) != `{ "error" : 1 }` || resp.Header.Get("X-Request-Id") != "7" || resp.Header.Get("Server") != "uvicorn" {
		t.Errorf("the client got %d %v %s", resp.StatusCode, resp.Header, text)
	}
	if string(gotBody) != body || got.ContentLength != int64(len(body)) || got.URL.RequestURI() != "/v1/chat/completions?a=b;c" || got.Host != strings.TrimPrefix(e.URL, "http://") {
		t.Errorf("the engine got %s on %s with %q", got.URL, got.Host, gotBody)
	}
	want := map[string]string{"Authorization": "Bearer sk-1", "X-Forwarded-For": "10.1.1.1", "Traceparent": "00-1", "X-Hop": "", "User-Agent": "", "Accept-Encoding": "gzip"}
	for name, value := range want {
		if got.Header.Get(name) != value {
			t.Errorf("the engine got %s: %q; want %q", name, got.Header.Get(name), value)
		}
	}
	if n := s.value("requests_total", e.URL, "418"); n != 1 {
		t.Errorf("%v requests are counted", n)
	}
}

// TestStream: each event arrives before the engine sends the next one, and the bytes are unchanged.
func TestStream(t *testing.T) {
	next := make(chan struct{}, 1)
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for i := range 5 {
			fmt.Fprintf(w, "data: {\"n\": %d}\r\n\r\n", i)
			w.(http.Flusher).Flush()
			hold(t, next)
		}
		fmt.Fprint(w, ": comment\ndata: [DONE]\n\n")
	})
	s := start(t, Options{}, e)
	resp, err := s.Client().Post(s.URL+"/v1/completions", "application/json", strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	for i := range 5 {
		event, err := lines.ReadString('\n')
		blank, _ := lines.ReadString('\n')
		if err != nil || event != fmt.Sprintf("data: {\"n\": %d}\r\n", i) || blank != "\r\n" {
			t.Fatalf("event %d is %q %q, %v", i, event, blank, err)
		}
		if n := s.value("in_flight_requests"); n != 1 {
			t.Errorf("%v requests are in flight", n)
		}
		next <- struct{}{}
	}
	rest, err := io.ReadAll(lines)
	if err != nil || string(rest) != ": comment\ndata: [DONE]\n\n" {
		t.Errorf("the end is %q, %v", rest, err)
	}
	s.await(func() bool { return s.value("in_flight_requests") == 0 })
	if n := s.value("first_byte_seconds"); n != 1 {
		t.Errorf("%v first bytes are counted", n)
	}
}

// TestClientGone: the engine's request ends when the client disconnects, before or during the
// response.
func TestClientGone(t *testing.T) {
	for _, begun := range []bool{false, true} {
		arrived, ended := make(chan struct{}), make(chan struct{})
		e := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
			if begun {
				fmt.Fprint(w, "data: 1\n\n")
			}
			w.(http.Flusher).Flush()
			close(arrived)
			hold(t, r.Context().Done())
			close(ended)
		})
		s := start(t, Options{}, e)
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+"/v1/completions", strings.NewReader(`{}`))
		if err != nil {
			t.Fatal(err)
		}
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			resp, err := s.Client().Do(req)
			if err == nil {
				_, _ = io.ReadAll(resp.Body)
				resp.Body.Close()
			}
		}()
		receive(t, arrived)
		cancel()
		receive(t, ended)
		receive(t, gone)
		s.await(func() bool { return s.value("in_flight_requests") == 0 })
		if !s.front.Ready() {
			t.Error("the engine counts as failed")
		}
	}
}

// TestAnotherEngine: after an engine fails before its first byte, the request goes to the other
// engine.
func TestAnotherEngine(t *testing.T) {
	status := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(code) }
	}
	for name, fail := range map[string]http.HandlerFunc{
		"connection reset": reset,
		"reset behind the status": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			w.(http.Flusher).Flush()
			reset(w, r)
		},
		"502": status(502), "503": status(503), "504": status(504),
	} {
		t.Run(name, func(t *testing.T) {
			bad, good := newEngine(t, fail), newEngine(t, say("good"))
			s := start(t, Options{HealthInterval: time.Minute}, bad, good)
			for range 4 { // at first, half of the requests go to each engine
				if code, text, _ := s.post(`{"prompt":"x"}`); code != 200 || text != "good" {
					t.Fatalf("%d %s", code, text)
				}
			}
			if n := s.value("retries_total", bad.URL); n < 1 {
				t.Errorf("%v retries are counted", n)
			}
			if n := s.value("requests_total", good.URL, "200"); n != 4 {
				t.Errorf("%v requests are counted", n)
			}
		})
	}
}

// TestEngineDies: an error of an engine that is not healthy any more is not the client's answer, and the
// request goes to the other engine. The error of a healthy engine is the client's answer.
func TestEngineDies(t *testing.T) {
	for name, answer := range dying {
		t.Run(name, func(t *testing.T) {
			bad, good := newEngine(t, answer), newEngine(t, say("good"))
			s := start(t, Options{HealthInterval: time.Hour}, bad)
			if _, text, _ := s.post(`{"prompt":"x"}`); !strings.Contains(text, "EngineCore") {
				t.Errorf("a healthy engine: %s", text)
			}
			s = start(t, Options{HealthInterval: time.Hour}, bad, good)
			bad.sick.Store(true)
			for range 4 { // at first, half of the requests go to each engine
				if code, text, _ := s.post(`{"prompt":"x"}`); code != 200 || text != "good" {
					t.Errorf("%d %s", code, text)
				}
			}
			if n := s.value("retries_total", bad.URL); n != 1 {
				t.Errorf("%v retries are counted", n)
			}
		})
	}
}

// TestEngineThatIsGone: when no process listens at an engine's address, requests go to the other
// engine. They return when the engine listens again.
func TestEngineThatIsGone(t *testing.T) {
	gone, good := newEngine(t, say("good")), newEngine(t, say("good"))
	s := start(t, Options{}, gone, good)
	addr := gone.Listener.Addr().String()
	gone.CloseClientConnections()
	gone.Close()
	for range 4 {
		if code, _, _ := s.post(`{"prompt":"x"}`); code != 200 {
			t.Fatal(code)
		}
	}
	s.await(func() bool { return !s.front.EngineHealth()["http://"+addr] })
	back := httptest.NewUnstartedServer(say("good"))
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	back.Listener.Close()
	back.Listener = listener
	back.Start()
	defer back.Close()
	s.await(func() bool { return s.front.EngineHealth()["http://"+addr] })
}

// TestEngineHangs: a request at an engine that does not answer and fails its polls goes to another engine,
// at once or when one is healthy. A response that has begun continues.
func TestEngineHangs(t *testing.T) {
	hung, ended, resume := make(chan struct{}, 2), make(chan struct{}, 2), make(chan struct{})
	a := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.Contains(string(body), "stream") {
			fmt.Fprint(w, "begin ")
			_ = http.NewResponseController(w).Flush()
			hold(t, resume)
			fmt.Fprint(w, "end")
			return
		}
		hung <- struct{}{}
		<-r.Context().Done()
		ended <- struct{}{}
	})
	b := newEngine(t, say("from b"))
	b.sick.Store(true)
	s := start(t, Options{}, a, b)
	resp, err := s.Client().Post(s.URL+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"stream"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	first := s.ask(`{"prompt":"x"}`)
	receive(t, hung)
	a.sick.Store(true)
	s.await(func() bool { return !s.front.EngineHealth()[a.URL] })
	select {
	case code := <-first:
		t.Fatalf("without another engine: status %d", code)
	default:
	}
	b.sick.Store(false)
	if code := receive(t, first); code != http.StatusOK {
		t.Errorf("with another engine: status %d", code)
	}
	receive(t, ended)
	a.sick.Store(false)
	s.await(func() bool { return s.front.EngineHealth()[a.URL] })
	b.sick.Store(true)
	s.await(func() bool { return !s.front.EngineHealth()[b.URL] })
	second := s.ask(`{"prompt":"y"}`)
	receive(t, hung)
	b.sick.Store(false)
	s.await(func() bool { return s.front.EngineHealth()[b.URL] })
	a.sick.Store(true)
	if code := receive(t, second); code != http.StatusOK {
		t.Errorf("beside another engine: status %d", code)
	}
	receive(t, ended)
	close(resume)
	if text, err := io.ReadAll(resp.Body); string(text) != "begin end" || err != nil {
		t.Errorf("the stream is %q, %v", text, err)
	}
	s.await(func() bool { return s.value("in_flight_requests") == 0 })
	s.front.pool.mu.Lock()
	defer s.front.pool.mu.Unlock()
	if n := len(s.front.pool.silent); n != 0 {
		t.Errorf("%d requests wait for engines after the end", n)
	}
}

// TestNoSecondAnswer: when an engine fails during a response, the response is cut off, and the
// other engine does not get the request.
func TestNoSecondAnswer(t *testing.T) {
	var served atomic.Int32
	half := func(w http.ResponseWriter, r *http.Request) {
		served.Add(1)
		fmt.Fprint(w, "data: half\n\n")
		w.(http.Flusher).Flush()
		reset(w, r)
	}
	s := start(t, Options{}, newEngine(t, half), newEngine(t, half))
	resp, err := s.Client().Post(s.URL+"/v1/completions", "application/json", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil || string(text) != "data: half\n\n" || served.Load() != 1 {
		t.Errorf("%q, %v, from %d engines; want half an answer from one, and an error", text, err, served.Load())
	}
}

// TestLastFailure: the last engine's response is passed on, and attempts are bounded.
func TestLastFailure(t *testing.T) {
	busy := func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprint(w, "loading")
	}
	engines := []*fakeEngine{newEngine(t, busy), newEngine(t, busy), newEngine(t, busy)}
	s := start(t, Options{MaxAttempts: 2, HealthInterval: time.Minute}, engines...)
	if code, text, _ := s.post(`{}`); code != 503 || text != "loading" {
		t.Errorf("%d %s", code, text)
	}
	if n := engines[0].served.Load() + engines[1].served.Load() + engines[2].served.Load(); n != 2 {
		t.Errorf("%d attempts; want 2", n)
	}

	s = start(t, Options{HealthInterval: time.Minute}, newEngine(t, reset))
	code, text, _ := s.post(`{}`)
	if code != 502 {
		t.Errorf("%d %s", code, text)
	}
	checkError(t, text, "engine_failed")
}

// TestStaleConnection: an engine closes an idle connection as a request arrives. The request is
// sent again to the engine, which does not count as failed.
func TestStaleConnection(t *testing.T) {
	e := newEngine(t, say("ok"))
	s := start(t, Options{HealthInterval: time.Hour}, e)
	if code, _, _ := s.post(`{}`); code != 200 {
		t.Fatal(code)
	}
	again := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ok := say("ok")
		e.answer.Store((*http.HandlerFunc)(&ok))
		reset(w, r)
	})
	e.answer.Store(&again)
	if code, text, _ := s.post(`{}`); code != 200 || text != "ok" {
		t.Errorf("%d %s", code, text)
	}
	if !s.front.Ready() || s.value("retries_total") != 1 {
		t.Errorf("ready %v, %v retries", s.front.Ready(), s.value("retries_total"))
	}
}

// TestBackPressure: a request without room in an engine and in the queue gets 429.
func TestBackPressure(t *testing.T) {
	arrived, goOn := make(chan struct{}, 10), make(chan struct{})
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		arrived <- struct{}{}
		hold(t, goOn)
	})
	s := start(t, Options{MaxInFlight: 1, MaxQueue: 1, QueueWait: time.Hour}, e)
	first := s.ask(`{}`)
	receive(t, arrived)
	second := s.ask(`{}`)
	s.await(func() bool { return s.value("queued_requests") == 1 })
	code, text, header := s.post(`{}`)
	if code != http.StatusTooManyRequests || header.Get("Retry-After") != "3600" {
		t.Errorf("%d %s, Retry-After %q", code, text, header.Get("Retry-After"))
	}
	checkError(t, text, "rate_limit_exceeded")
	close(goOn)
	if a, b := receive(t, first), receive(t, second); a != 200 || b != 200 {
		t.Errorf("%d, %d", a, b)
	}
	if s.value("rejected_total", "queue") != 1 {
		t.Error("the request that was refused is not counted")
	}
}

// TestQueueWait: a request that has waited too long in the queue gets 429.
func TestQueueWait(t *testing.T) {
	arrived, goOn := make(chan struct{}, 10), make(chan struct{})
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		arrived <- struct{}{}
		hold(t, goOn)
	})
	s := start(t, Options{MaxInFlight: 1, QueueWait: time.Millisecond}, e)
	first := s.ask(`{}`)
	receive(t, arrived)
	code, text, header := s.post(`{}`)
	if code != http.StatusTooManyRequests || header.Get("Retry-After") != "1" {
		t.Errorf("%d %s, Retry-After %q", code, text, header.Get("Retry-After"))
	}
	checkError(t, text, "rate_limit_exceeded")
	close(goOn)
	if code := receive(t, first); code != 200 {
		t.Error(code)
	}
}

// TestRefusals: the responses that the front makes itself.
func TestRefusals(t *testing.T) {
	e := newEngine(t, say("ok"))
	s := start(t, Options{MaxBodyBytes: 100, Tokens: func() []string { return []string{"secret"} }}, e)
	for _, c := range []struct {
		name, method, path, token, body string
		chunked                         bool
		status                          int
		code                            string
	}{
		{"a good request", "POST", "/v1/completions", "secret", `{}`, false, 200, ""},
		{"models", "GET", "/v1/models", "secret", "", false, 200, ""},
		{"one model", "GET", "/v1/models/org/model", "secret", "", false, 200, ""},
		{"no token", "POST", "/v1/completions", "", `{}`, false, 401, "invalid_api_key"},
		{"another token", "GET", "/v1/models", "secre", "", false, 401, "invalid_api_key"},
		{"no JSON", "POST", "/v1/completions", "secret", `{"prompt`, false, 400, "invalid_json"},
		{"a list", "POST", "/v1/chat/completions", "secret", `[]`, false, 400, "invalid_json"},
		{"too long", "POST", "/v1/completions", "secret", strings.Repeat(" ", 101), false, 413, "request_too_large"},
		{"too long, of unknown length", "POST", "/v1/completions", "secret", strings.Repeat(" ", 101), true, 413, "request_too_large"},
		{"another method", "GET", "/v1/completions", "secret", "", false, 405, "method_not_allowed"},
		{"another path", "POST", "/v1/audio", "secret", `{}`, false, 404, "not_found"},
	} {
		req, err := http.NewRequest(c.method, s.URL+c.path, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		if c.chunked {
			req.ContentLength = -1
		}
		if c.token != "" {
			req.Header.Set("Authorization", "Bearer "+c.token)
		}
		resp, err := s.Client().Do(req)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != c.status {
			t.Errorf("%s: %d %s; want %d", c.name, resp.StatusCode, text, c.status)
		} else if c.code != "" {
			checkError(t, string(text), c.code)
		}
	}
	if n := e.served.Load(); n != 3 {
		t.Errorf("the engine got %d requests; want 3", n)
	}
}

// TestBodyMemory: the total size of bodies is bounded.
func TestBodyMemory(t *testing.T) {
	arrived, goOn := make(chan struct{}), make(chan struct{})
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		close(arrived)
		hold(t, goOn)
	})
	s := start(t, Options{MaxBodyBytes: 1000, BodyMemoryBytes: 1000 + bodyOverhead}, e)
	body := `{"prompt":"` + strings.Repeat("x", 900) + `"}`
	first := s.ask(body)
	receive(t, arrived)
	code, text, _ := s.post(body)
	if code != http.StatusTooManyRequests {
		t.Errorf("%d %s", code, text)
	}
	close(goOn)
	if code := receive(t, first); code != 200 {
		t.Error(code)
	}
}

// TestBodyMemoryOfUnknownLength: a body without Content-Length counts with the maximum length until
// it has arrived, and then with its own length.
func TestBodyMemoryOfUnknownLength(t *testing.T) {
	arrived, goOn := make(chan struct{}, 2), make(chan struct{})
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		arrived <- struct{}{}
		hold(t, goOn)
	})
	s := start(t, Options{MaxBodyBytes: 1000, BodyMemoryBytes: 1100 + 2*bodyOverhead}, e)
	codes := make(chan int, 2)
	for range 2 {
		go func() {
			resp, err := s.Client().Post(s.URL+"/v1/completions", "application/json", io.MultiReader(strings.NewReader(`{"prompt":"x"}`)))
			if err != nil {
				t.Error(err)
				codes <- 0
				return
			}
			resp.Body.Close()
			codes <- resp.StatusCode
		}()
		receive(t, arrived)
	}
	close(goOn)
	if a, b := receive(t, codes), receive(t, codes); a != 200 || b != 200 {
		t.Errorf("%d, %d", a, b)
	}
}

// TestPaths: the engine gets the path in the client's spelling, after the path of its URL.
func TestPaths(t *testing.T) {
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.URL.EscapedPath()) })
	for _, base := range []string{"", "/behind/a%20proxy"} {
		s := start(t, Options{Engines: []Engine{{URL: e.URL + base}}})
		s.await(s.front.Ready)
		for _, path := range []string{"/v1/models", "/v1/models/org%2Fname", "/v1/models/%25zz", "/v1/models/a%2525", "/v1/models/a%20b"} {
			resp, err := s.Client().Get(s.URL + path)
			if err != nil {
				t.Fatal(err)
			}
			got, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if string(got) != base+path {
				t.Errorf("%s arrived as %s", base+path, got)
			}
		}
		for _, path := range []string{"/v1/models/%2e%2e/%2e%2e/metrics", "/v1/models/..%2F..%2Fmetrics", "/v1/models/%2E", "/v1/models/a%2F..%2Fb"} {
			resp, err := s.Client().Get(s.URL + path)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusNotFound {
				t.Errorf("%s: %s", path, resp.Status)
			}
		}
	}
}

// TestHealth: /health is 200 while any engine is healthy.
func TestHealth(t *testing.T) {
	a, b := newEngine(t, say("a")), newEngine(t, say("b"))
	a.sick.Store(true)
	b.sick.Store(true)
	s := start(t, Options{}, a, b)
	health := func() int {
		resp, err := s.Client().Get(s.URL + "/health")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		_, _ = io.Copy(io.Discard, resp.Body)
		return resp.StatusCode
	}
	if got := health(); got != http.StatusServiceUnavailable {
		t.Errorf("without engines: %d", got)
	}
	code, text, header := s.post(`{}`)
	if seconds, err := strconv.Atoi(header.Get("Retry-After")); code != http.StatusServiceUnavailable || err != nil || seconds < 1 {
		t.Errorf("%d %s, Retry-After %q", code, text, header.Get("Retry-After"))
	}
	checkError(t, text, "no_engine")
	b.sick.Store(false)
	s.await(func() bool { return health() == http.StatusOK })
	if code, text, _ := s.post(`{}`); code != 200 || text != "b" {
		t.Errorf("%d %s; want that the healthy engine answers", code, text)
	}
	b.sick.Store(true)
	s.await(func() bool { return health() == http.StatusServiceUnavailable })
}

// TestConversationsStay: all turns of a conversation over HTTP go to one engine.
func TestConversationsStay(t *testing.T) {
	engines := []*fakeEngine{newEngine(t, say("0")), newEngine(t, say("1")), newEngine(t, say("2"))}
	s := start(t, Options{}, engines...)
	homes := make(map[string]int)
	for c := range 9 {
		home := ""
		text := fmt.Sprintf("conversation %d: ", c)
		for turn := range 4 {
			text += strings.Repeat("some words ", 50)
			body, err := json.Marshal(map[string]any{"messages": []map[string]string{{"role": "user", "content": text}}})
			if err != nil {
				t.Fatal(err)
			}
			resp, err := s.Client().Post(s.URL+"/v1/chat/completions", "application/json", bytes.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			answer, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if turn > 0 && string(answer) != home {
				t.Errorf("turn %d of conversation %d: engine %s; before it was %s", turn, c, answer, home)
			}
			home = string(answer)
		}
		homes[home]++
	}
	if len(homes) != 3 || s.value("prefix_hits_blocks_total") == 0 {
		t.Errorf("conversations by engine: %v", homes)
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{
		{},
		{Engines: []Engine{{URL: "10.0.0.1:8000"}}},
		{Engines: []Engine{{URL: "ftp://a"}}},
		{Engines: []Engine{{URL: "http://user:secret@a"}}},
		{Engines: []Engine{{URL: "http://user:secret@a:port"}}},
		{Engines: []Engine{{URL: "http://a"}, {URL: "http://a/"}}},
		{Engines: []Engine{{Name: "a", URL: "http://a"}, {Name: "a", URL: "http://b"}}},
		{Engines: []Engine{{URL: "http://a"}}, LoadFactor: 0.5},
		{Engines: []Engine{{URL: "http://a"}}, BodyMemoryBytes: 1},
	} {
		f, err := New(o)
		if err == nil {
			f.Close()
			t.Errorf("%+v is accepted", o)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("the password is in %v", err)
		}
	}
}

// TestMetricsPage compares docs/metrics.md with the registry.
func TestMetricsPage(t *testing.T) {
	testkit.CheckMetricsPage(t, "penstock_gateway_", DescribeMetrics)
}

// BenchmarkOverhead compares requests through the front with requests to the engine, sent
// alternately, by their medians.
func BenchmarkOverhead(b *testing.B) {
	for _, size := range []int{1 << 10, 64 << 10} {
		b.Run(fmt.Sprintf("prompt=%dKiB", size>>10), func(b *testing.B) {
			e := newEngine(b, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				fmt.Fprint(w, `{"choices":[{"text":"ok"}]}`)
			})
			s := start(b, Options{HealthInterval: time.Hour}, e)
			body := `{"prompt":"` + strings.Repeat("0123456789abcdef", size/16) + `"}`
			timed := func(url string) time.Duration {
				begun := time.Now()
				if code, text, _, err := post(s.Client(), url, body); err != nil || code != 200 {
					b.Fatal(code, text, err)
				}
				return time.Since(begun)
			}
			timed(e.URL)
			timed(s.URL)
			var direct, through []time.Duration
			for b.Loop() {
				direct = append(direct, timed(e.URL))
				through = append(through, timed(s.URL))
			}
			slices.Sort(direct)
			slices.Sort(through)
			d, f := direct[len(direct)/2], through[len(through)/2]
			b.ReportMetric(float64(f)/float64(d), "front/direct")
			b.ReportMetric(float64((f-d).Nanoseconds())/1e3, "added-µs")
			b.ReportMetric(float64(d.Nanoseconds())/1e3, "direct-µs")
		})
	}
}
