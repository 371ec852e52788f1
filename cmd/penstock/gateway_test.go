package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/internal/certs"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/rdma"
)

// gatewayArgs returns the arguments of a gateway for a test.
func gatewayArgs(engines ...string) []string {
	args := []string{"gateway", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-format", "json"}
	for _, e := range engines {
		args = append(args, "--engine", e)
	}
	return args
}

// startGateway runs a gateway in this process until the test ends or stop is called. It returns
// when an engine is healthy.
func startGateway(t *testing.T, args ...string) *served {
	t.Helper()
	s, r := tryServed(t, nil, args...)
	if s == nil {
		t.Fatalf("gateway: exit %d\n%s", r.code, r.err)
	}
	client := gatewayClient(t, nil)
	within(t, "the gateway is ready", func() bool {
		status, _ := call(t, client, "GET", "http://"+s.ready.HTTP+"/readyz", "")
		return status == http.StatusOK
	})
	return s
}

// gatewayClient returns a client whose connections are closed when the test ends.
func gatewayClient(t *testing.T, secure *tls.Config) *http.Client {
	transport := &http.Transport{TLSClientConfig: secure}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: time.Minute}
}

// within polls until ok returns true, for at most a minute.
func within(t *testing.T, what string, ok func() bool) {
	t.Helper()
	limit, tick := time.NewTimer(time.Minute), time.NewTicker(5*time.Millisecond)
	defer limit.Stop()
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit.C:
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// call returns the status and the body of a response. A POST has an empty object as its body.
func call(t *testing.T, client *http.Client, method, url, token string) (int, string) {
	t.Helper()
	body := ""
	if method == http.MethodPost {
		body = "{}"
	}
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// textEngine starts an engine that responds to each completion with text.
func textEngine(t *testing.T, text string) string {
	e := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/completions" {
			fmt.Fprint(w, text)
		}
	}))
	t.Cleanup(e.Close)
	return e.URL
}

// TestGateway: the command serves the engines' responses and the metrics.
func TestGateway(t *testing.T) {
	testkit.VerifyNone(t)
	s := startGateway(t, gatewayArgs(textEngine(t, "an answer"), textEngine(t, "an answer"))...)
	client := gatewayClient(t, nil)
	for range 4 {
		if status, text := call(t, client, "POST", "http://"+s.ready.Listen+"/v1/completions", ""); status != 200 || text != "an answer" {
			t.Errorf("%d %s", status, text)
		}
	}
	for path, want := range map[string]string{"/healthz": "", "/readyz": `"engines"`, "/metrics": "\npenstock_gateway_requests_total{"} {
		if status, text := call(t, client, "GET", "http://"+s.ready.HTTP+path, ""); status != 200 || !strings.Contains(text, want) {
			t.Errorf("%s: %d, %q is not in\n%s", path, status, want, text)
		}
	}
	if status, _ := call(t, client, "GET", "http://"+s.ready.Listen+"/metrics", ""); status != http.StatusNotFound {
		t.Errorf("metrics at the address of the API: %d", status)
	}
	if r := s.stop(); r.code != exitOK || !strings.Contains(r.err, `"msg":"stopped"`) {
		t.Errorf("exit %d\n%s", r.code, r.err)
	}
}

// TestGatewayTokenAndTLS: the API requires the token and TLS. The address of the metrics requires
// neither.
func TestGatewayTokenAndTLS(t *testing.T) {
	testkit.VerifyNone(t)
	dir := t.TempDir()
	const secret = "0123456789abcdef0123"
	token := writeFile(t, dir, "token", []byte(secret+"\n"))
	ca, cert, key := certificates(t, dir)
	s := startGateway(t, append(gatewayArgs(textEngine(t, "an answer")),
		"--auth-token-file", token, "--auth-tls-cert", cert, "--auth-tls-key", key)...)
	pool, err := certs.Pool(ca)
	if err != nil {
		t.Fatal(err)
	}
	client := gatewayClient(t, &tls.Config{RootCAs: pool})
	for given, want := range map[string]int{"": 401, secret[1:]: 401, secret: 200} {
		if status, text := call(t, client, "POST", "https://"+s.ready.Listen+"/v1/completions", given); status != want {
			t.Errorf("token %q: %d %s; want %d", given, status, text, want)
		}
	}
	stranger := gatewayClient(t, nil)
	if resp, err := stranger.Get("https://" + s.ready.Listen + "/health"); err == nil {
		resp.Body.Close()
		t.Error("a client that does not have the CA was answered")
	}
	if status, _ := call(t, stranger, "GET", "http://"+s.ready.HTTP+"/metrics", ""); status != 200 {
		t.Errorf("metrics: %d", status)
	}
}

// TestGatewayMistakes: an invalid configuration has the exit code of a usage error, and the error
// has the key.
func TestGatewayMistakes(t *testing.T) {
	typo := writeFile(t, t.TempDir(), "gateway.yaml", []byte("engine: [http://a]\nmax_que: 5\n"))
	for _, c := range []struct {
		args, environ []string
		want          string
	}{
		{nil, nil, "engine: name at least one (--engine URL)"},
		{[]string{"--engine", "10.0.0.1:8000"}, nil, "config: engine: "},
		{[]string{"--engine", "http://a", "--max-body", "lots"}, nil, `"lots" is not a size`},
		{[]string{"--engine", "http://a", "--listen", "0.0.0.0:7440"}, nil, "config: listen: "},
		{[]string{"--config", typo}, nil, typo + `:2: unknown key "max_que"; did you mean "max_queue"?`},
		{nil, []string{"PENSTOCK_ENGINE=http://a", "PENSTOCK_QUEUE_WAIT=long"}, "PENSTOCK_QUEUE_WAIT"},
		{[]string{"http://a"}, nil, "http://a"},
		{[]string{"--engine", "http://a", "--planner", "a:7430", "--servers", "a:7420"}, nil, "config: namespace: "},
	} {
		r := penstock(t, "", c.environ, append([]string{"gateway"}, c.args...)...)
		if r.code != exitUsage || !strings.Contains(r.err, c.want) || strings.Count(r.err, "bad configuration") > 1 {
			t.Errorf("%v %v: exit %d, %q without %q", c.environ, c.args, r.code, r.err, c.want)
		}
	}
	missing := t.TempDir() + "/missing"
	for _, flag := range []string{"--auth-token-file", "--engine-ca"} {
		r := penstock(t, "", nil, append(gatewayArgs("http://127.0.0.1:1"), flag, missing)...)
		if r.code != exitFailed || !strings.Contains(r.err, missing) {
			t.Errorf("%s: exit %d, %q without %q", flag, r.code, r.err, missing)
		}
	}
}

// TestGatewayDrains: after SIGTERM new connections are refused, and an open stream continues to its
// end.
func TestGatewayDrains(t *testing.T) {
	testkit.VerifyNone(t)
	goOn := make(chan struct{})
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/completions" {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: first\n\n")
		w.(http.Flusher).Flush()
		select {
		case <-goOn:
			fmt.Fprint(w, "data: [DONE]\n\n")
		case <-r.Context().Done():
		case <-t.Context().Done():
		}
	}))
	t.Cleanup(engine.Close)
	p, err := cluster.StartProcess(t.Context(), cluster.ProcessOptions{
		Name: "the gateway", Args: append(gatewayArgs(engine.URL), "--drain-timeout", "5m"), Env: append(os.Environ(), childEnv),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Kill() }) // it has already ended unless the test failed
	client := gatewayClient(t, nil)
	base := "http://" + p.Ready.Listen
	within(t, "the engine is healthy", func() bool {
		status, _ := call(t, client, "GET", base+"/health", "")
		return status == http.StatusOK
	})
	resp, err := client.Post(base+"/v1/completions", "application/json", strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	const first = "data: first\n\n"
	begun := make([]byte, len(first))
	if _, err := io.ReadFull(resp.Body, begun); err != nil || string(begun) != first {
		t.Fatalf("the stream begins with %q, %v", begun, err)
	}
	if err := p.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	within(t, "new connections are refused", func() bool {
		c, err := net.Dial("tcp", p.Ready.Listen)
		if err == nil {
			_ = c.Close()
		}
		return err != nil
	})
	close(goOn)
	rest, err := io.ReadAll(resp.Body)
	if err != nil || string(rest) != "data: [DONE]\n\n" {
		t.Errorf("the stream ends with %q, %v", rest, err)
	}
	within(t, "the gateway ends", func() bool {
		select {
		case <-p.Over():
			return true
		default:
			return false
		}
	})
	if err := p.Err(); err != nil || !strings.Contains(p.Log(), `"msg":"draining"`) || !strings.Contains(p.Log(), `"msg":"stopped"`) {
		t.Errorf("it ended with %v\n%s", err, p.Log())
	}
}

// idle is an engine without KV, which ends its part of a request at once.
type idle struct{}

func (idle) Start(_ context.Context, r *leader.Request) { r.Done(nil) }
func (idle) Read(string, traffic.Part)                  {}
func (idle) Cut(string)                                 {}
func (idle) Recompute(string, traffic.Part)             {}

// startPrefillDecode runs a planner and a leader of each role until the test ends, and returns the
// arguments of a gateway for a namespace on a node. settings are further arguments of the planner. The engines simulate only HTTP; asked gets the
// body of each completion.
func startPrefillDecode(t *testing.T, node *served, namespace string, asked func(body string), settings ...string) (planner *served, args []string) {
	t.Helper()
	address := testkit.Port(t)
	planner, r := tryServed(t, nil, append([]string{"planner", "--listen", address, "--http", "127.0.0.1:0", "--log-format", "json", "--schedule-block-tokens", "4", "--schedule-min-part", "4"}, settings...)...)
	if planner == nil {
		t.Fatalf("planner: exit %d\n%s", r.code, r.err)
	}
	conn, err := client.Dial(address, client.DialOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var leaders sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		leaders.Wait()
		_ = conn.Close()
	})
	args = gatewayArgs()
	for role, name := range map[leader.Role]string{leader.Prefill: "p0", leader.Decode: "d0"} {
		var moved atomic.Uint64 // bytes of KV, as if each request moved one block each way
		e := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/tokenize":
				fmt.Fprint(w, `{"tokens":[1,2,3,4,5,6]}`)
			case "/v1/completions":
				body, _ := io.ReadAll(r.Body)
				asked(string(body))
				moved.Add(4096)
				fmt.Fprint(w, name)
			}
		}))
		t.Cleanup(e.Close)
		args = append(args, "--engine", name+"="+e.URL)
		l, err := leader.New(leader.Options{
			Group: name, Node: name, Role: role, Geometry: kv.SingleGroup(2, 4, 512), Planner: conn, FetchEvery: time.Millisecond,
			Members: []leader.Member{{
				Name: name, Engine: idle{}, DeviceBlocks: 1000,
				NICs: func() []rdma.NIC {
					return []rdma.NIC{{Name: "c0", Up: true, BytesOut: moved.Load(), BytesIn: moved.Load()}}
				},
			}},
		})
		if err != nil {
			t.Fatal(err)
		}
		leaders.Go(func() { l.Run(ctx) })
	}
	return planner, append(args, "--planner", address, "--namespace", namespace, "--servers", node.ready.Listen)
}

// TestGatewayOfCluster: the command connects to the planner and the storage node, and a request
// reaches both engines of a cluster. The engines simulate only HTTP.
func TestGatewayOfCluster(t *testing.T) {
	testkit.VerifyNone(t)
	node := startServed(t, t.TempDir())
	node.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	asked := make(chan string, 2)
	_, args := startPrefillDecode(t, node, "m", func(body string) { asked <- body })
	s := startGateway(t, args...)
	resp, err := gatewayClient(t, nil).Post("http://"+s.ready.Listen+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 || string(text) != "d0" {
		t.Errorf("%v, %s, %v", resp, text, err)
	}
	for range 2 {
		if body := <-asked; !strings.Contains(body, `"kv_transfer_params":{"penstock":{"attempt":"`) {
			t.Errorf("an engine got %s", body)
		}
	}
	if r := s.stop(); r.code != exitOK || !strings.Contains(r.err, `"msg":"stopped"`) {
		t.Errorf("exit %d\n%s", r.code, r.err)
	}
	r := penstock(t, "", nil, append(args, "--namespace", "other")...)
	if r.code == exitOK || !strings.Contains(r.err, "other") {
		t.Errorf("a namespace that is not there: exit %d, %s", r.code, r.err)
	}
}
