package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// rotation is a node in a process of its own, with the files that a test exchanges.
type rotation struct {
	t    *testing.T
	dir  string
	node *process
	// token is the one that clients should use. trust has the certificates of all generations.
	token atomic.Pointer[string]
	trust *x509.CertPool
	// crt and key are the pairs of the generations.
	crt, key [][]byte
}

// startRotation starts a node with token and certificate of generation 0.
func startRotation(t *testing.T, generations int) *rotation {
	t.Helper()
	r := &rotation{t: t, dir: t.TempDir(), trust: x509.NewCertPool()}
	for range generations {
		_, crt, key := certificates(t, t.TempDir())
		r.crt, r.key = append(r.crt, readAll(t, crt)), append(r.key, readAll(t, key))
		r.trust.AppendCertsFromPEM(r.crt[len(r.crt)-1])
	}
	r.replace("crt.pem", r.crt[0])
	r.replace("key.pem", r.key[0])
	r.replace("ca.pem", bytes.Join(r.crt, nil))
	r.serveTokens(0)
	r.configure(256)
	r.useToken(0)
	r.node = startProcess(t, r.dir+"/volume", "--config", r.dir+"/node.yaml")
	return r
}

func readAll(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// replace exchanges a file by one rename.
func (r *rotation) replace(name string, content []byte) {
	r.t.Helper()
	path := filepath.Join(r.dir, name)
	if err := errors.Join(os.WriteFile(path+".new", content, 0o600), os.Rename(path+".new", path)); err != nil {
		r.t.Fatal(err)
	}
}

// tokenOf is the token of a generation.
func tokenOf(generation int) string { return fmt.Sprintf("token-of-generation-%04d", generation) }

// serveTokens writes the token file of the node.
func (r *rotation) serveTokens(generations ...int) {
	r.t.Helper()
	var b bytes.Buffer
	for _, g := range generations {
		fmt.Fprintln(&b, tokenOf(g))
	}
	r.replace("tokens", b.Bytes())
}

// useToken makes clients use the token of a generation.
func (r *rotation) useToken(generation int) {
	token := tokenOf(generation)
	r.token.Store(&token)
	r.replace("client-token", []byte(token+"\n"))
}

// configure writes the configuration file.
func (r *rotation) configure(writes int) {
	r.t.Helper()
	r.replace("node.yaml", fmt.Appendf(nil, "auth:\n  token_file: %[1]s/tokens\n  tls_cert: %[1]s/crt.pem\n  tls_key: %[1]s/key.pem\nlimits:\n  writes: %[2]d\n", r.dir, writes))
}

// run runs a client command with the current token.
func (r *rotation) run(args ...string) result {
	r.t.Helper()
	return r.node.client(r.t).run(append(args, "--ca", r.dir+"/ca.pem", "--token-file", r.dir+"/client-token")...)
}

// applied returns when the node runs with its files.
func (r *rotation) applied() {
	r.t.Helper()
	within(r.t, "the node runs with its files", func() bool {
		d := r.run("config", "diff")
		if d.code != exitOK && d.out == "" {
			r.t.Fatalf("config diff: exit %d, %s", d.code, d.err)
		}
		return d.code == exitOK
	})
}

// serves fails unless both listeners have the certificate of a generation.
func (r *rotation) serves(generation int) {
	r.t.Helper()
	only := x509.NewCertPool()
	only.AppendCertsFromPEM(r.crt[generation])
	for _, addr := range []string{r.node.Ready.Listen, r.node.Ready.DataListen} {
		d := &tls.Dialer{Config: &tls.Config{RootCAs: only, NextProtos: []string{"h2"}}}
		conn, err := d.DialContext(r.t.Context(), "tcp", addr)
		if err != nil {
			r.t.Errorf("%s does not have the certificate of generation %d: %v", addr, generation, err)
			continue
		}
		_ = conn.Close() // it was a handshake
	}
}

func (r *rotation) dial(token string) (*grpc.ClientConn, error) {
	return client.Dial(r.node.Ready.Listen, client.DialOptions{BearerToken: token, TLS: &tls.Config{RootCAs: r.trust}, Timeout: time.Minute})
}

// session is the connections of a client with one token: gRPC, and a Store with its data plane.
type session struct {
	token string
	conn  *grpc.ClientConn
	store *client.Store
	close func() error
}

func (r *rotation) open(ctx context.Context) (*session, error) {
	s := &session{token: *r.token.Load()}
	conn, err := r.dial(s.token)
	if err != nil {
		return nil, err
	}
	secure := &tls.Config{RootCAs: r.trust}
	engine, err := tcp.New(ctx, tcp.Options{TLS: secure})
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	store, err := client.Open(ctx, client.Options{Servers: []string{r.node.Ready.Listen}, Engine: engine, BearerToken: s.token, TLS: secure, DialTimeout: time.Minute, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, errors.Join(err, engine.Close(), conn.Close())
	}
	s.conn, s.store = conn, store
	s.close = func() error { return errors.Join(store.Close(), engine.Close(), conn.Close()) }
	return s, nil
}

// worker writes, reads and compares blocks over one session, until stop is closed. It opens another
// session when the token of the clients has changed. It sends its token on beat after a round, if
// beat is being received from.
func (r *rotation) worker(ctx context.Context, id int, stop <-chan struct{}, beat chan<- string) error {
	s, err := r.open(ctx)
	if err != nil {
		return err
	}
	for round := 0; ; round++ {
		select {
		case <-stop:
			return s.close()
		default:
		}
		if *r.token.Load() != s.token {
			next, err := r.open(ctx)
			if err != nil {
				return fmt.Errorf("with the new token: %w", err)
			}
			if err := s.ended(); err != nil {
				return err
			}
			s = next
		}
		if err := s.round(ctx, id, round); err != nil {
			return fmt.Errorf("worker %d, round %d: %w (%v)", id, round, err, s.store.Stats())
		}
		select {
		case beat <- s.token:
		default:
		}
	}
}

// ended closes the session. It fails if a connection was lost or a call was repeated meanwhile.
func (s *session) ended() error {
	st := s.store.Stats()
	if st.SessionsLost != 0 || st.Connects != 1 || st.DeadCalls != 0 || st.Retries != 0 {
		return errors.Join(fmt.Errorf("the session was not kept: %v", st), s.close())
	}
	return s.close()
}

// round deletes, writes, reads and compares a prompt of 4 blocks, and makes a call over gRPC.
func (s *session) round(ctx context.Context, id, round int) error {
	ns, err := s.store.Namespace(ctx, "m")
	if err != nil {
		return err
	}
	const blocks = 4
	tokens := make([]kv.Token, blocks*ns.Geometry.BlockTokens)
	for i := range tokens {
		tokens[i] = kv.Token(1_000_000*(id+1) + 1000*(round%50) + i)
	}
	chain, err := ns.Chain()
	if err != nil {
		return err
	}
	ids, _ := chain.Append(nil, tokens)
	if _, err := s.store.Delete(ctx, client.KeysRequest{Namespace: ns, IDs: ids}); err != nil {
		return fmt.Errorf("delete: %w", err)
	}
	mem := bytesOf(byte(round+7*id), blocks*int(ns.Geometry.BlockBytes()))
	want := bytes.Clone(mem)
	m, err := s.store.Register(mem)
	if err != nil {
		return err
	}
	defer m.Close(context.WithoutCancel(ctx))
	if w, err := s.store.Write(ctx, client.WriteRequest{Namespace: ns, IDs: ids, From: m}); err != nil || w.Outcome != client.Hit || w.Stored != blocks {
		return fmt.Errorf("write: %+v, %w", w, err)
	}
	clear(mem)
	if got, err := s.store.Read(ctx, client.ReadRequest{Namespace: ns, IDs: ids, Into: m}); err != nil || got.Blocks != blocks || !bytes.Equal(mem, want) {
		return fmt.Errorf("read: %+v, %w; the bytes are the ones written: %v", got, err, bytes.Equal(mem, want))
	}
	if _, err := pb.NewAdminClient(s.conn).GetNamespace(ctx, &pb.GetNamespaceRequest{Name: "m"}); err != nil {
		return fmt.Errorf("gRPC: %w", err)
	}
	return nil
}

// TestReloadUnderLoad: clients read and write while the node's tokens and certificates are exchanged
// three times, by SIGHUP, by config reload and by a change of the files alone. No call fails, and no
// session is lost. A new connection has the new certificate, and a removed token is refused.
func TestReloadUnderLoad(t *testing.T) {
	testkit.Long(t, "exchanges tokens and certificates of a node under load")
	const workers, generations = 3, 4
	r := startRotation(t, generations)
	r.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	stop, beats := make(chan struct{}), make([]chan string, workers)
	failed := make(chan error, workers)
	var running sync.WaitGroup
	for id := range workers {
		beats[id] = make(chan string)
		running.Go(func() {
			if err := r.worker(context.WithoutCancel(t.Context()), id, stop, beats[id]); err != nil {
				failed <- err
			}
		})
	}
	end := sync.OnceFunc(func() { close(stop); running.Wait() })
	defer end()
	// rounds returns when each worker has completed two rounds with a token. The first of them may
	// have begun before the call.
	rounds := func(token string) {
		t.Helper()
		for _, beat := range beats {
			for n := 0; n < 2; {
				select {
				case used := <-beat:
					if used == token {
						n++
					}
				case err := <-failed:
					t.Fatal(err)
				}
			}
		}
	}
	reloads := []func(){
		func() {
			if err := r.node.Signal(syscall.SIGHUP); err != nil {
				t.Fatal(err)
			}
		},
		func() { r.run("config", "reload").must(t) },
		func() {}, // the files are watched
	}
	rounds(tokenOf(0))
	for g := 1; g < generations; g++ {
		reload := reloads[g%len(reloads)]
		// The first phase has both tokens, and the new certificate.
		r.serveTokens(g, g-1)
		r.replace("crt.pem", r.crt[g])
		r.replace("key.pem", r.key[g])
		if g%len(reloads) != 2 {
			r.configure(256 - g) // without a reload this would differ forever
		}
		reload()
		r.applied()
		r.serves(g)
		rounds(tokenOf(g - 1))
		// The second phase: clients change over, one after another, and the old token ends.
		r.useToken(g)
		rounds(tokenOf(g))
		r.serveTokens(g)
		reload()
		r.applied()
		rounds(tokenOf(g))
		r.refuses(g - 1)
	}
	end()
	select {
	case err := <-failed:
		t.Error(err)
	default:
	}
	log := r.node.Log()
	if strings.Contains(log, "token-of-generation") || strings.Contains(log, "PRIVATE KEY") {
		t.Errorf("a secret is in the log:\n%s", log)
	}
	if !strings.Contains(log, `"call":"ReloadConfig"`) {
		t.Errorf("config reload left no audit line:\n%s", log)
	}
	if err := r.node.Stop(); err != nil {
		t.Error(err)
	}
}

// refuses fails unless a new connection with the token of a generation is refused.
func (r *rotation) refuses(generation int) {
	r.t.Helper()
	conn, err := r.dial(tokenOf(generation))
	if err != nil {
		r.t.Fatal(err)
	}
	defer conn.Close()
	if _, err := pb.NewAdminClient(conn).Status(r.t.Context(), &pb.StatusRequest{}); status.Code(err) != codes.Unauthenticated {
		r.t.Errorf("the removed token of generation %d: %v", generation, err)
	}
}

// TestRefusedReload: a reload with a setting that needs a restart, and one with a damaged file, leave
// token, certificate and limits as they were, and the metrics report it. The caller needs the token.
func TestRefusedReload(t *testing.T) {
	r := startRotation(t, 2)
	r.serveTokens(1)
	r.replace("key.pem", []byte("no key\n"))
	if d := r.run("config", "reload"); d.code != exitFailed || !strings.Contains(d.err, "nothing was applied") || !strings.Contains(d.err, "auth.tls_cert") {
		t.Errorf("with a damaged key: exit %d, %s", d.code, d.err)
	}
	r.replace("key.pem", r.key[0])
	r.serveTokens(0)
	r.configure(9)
	f, err := os.OpenFile(r.dir+"/node.yaml", os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintln(f, "  event_history: 17\ndurability: sync"); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	d := r.run("config", "reload")
	for _, want := range []string{"durability: batch → sync: writers rely", "limits.event_history: 65536 → 17: the log of events", "restart to apply it"} {
		if d.code != exitFailed || !strings.Contains(d.err, want) {
			t.Errorf("exit %d without %q: %s", d.code, want, d.err)
		}
	}
	if diff := r.run("config", "diff"); diff.code != exitFailed || !strings.Contains(diff.out, "limits.writes") {
		t.Errorf("limits.writes was applied: exit %d, %s%s", diff.code, diff.out, diff.err)
	}
	r.serves(0)
	if got := r.metric("penstock_config_last_reload_successful"); got != "0" {
		t.Errorf("the last reload was successful: %s", got)
	}
	r.configure(256)
	r.run("config", "reload").must(t)
	if got := r.metric("penstock_config_last_reload_successful"); got != "1" {
		t.Errorf("the last reload was successful: %s", got)
	}
	r.useToken(1)
	for _, args := range [][]string{{"config", "reload"}, {"config", "diff"}} {
		if d := r.run(args...); d.code != exitFailed || !strings.Contains(d.err, "bearer token") {
			t.Errorf("%v with a wrong token: exit %d, %s", args, d.code, d.err)
		}
	}
	if err := r.node.Stop(); err != nil {
		t.Error(err)
	}
}

// metric returns the value of a metric of the node.
func (r *rotation) metric(name string) string {
	r.t.Helper()
	client := &http.Client{Timeout: time.Minute}
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodGet, "http://"+r.node.Ready.HTTP+"/metrics", nil)
	if err != nil {
		r.t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	var body bytes.Buffer
	if _, err := body.ReadFrom(resp.Body); err != nil {
		r.t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^` + name + ` (\S+)$`).FindStringSubmatch(body.String())
	if m == nil {
		r.t.Fatalf("no metric %s", name)
	}
	return m[1]
}

// TestPlannersAndGatewaysReload: at SIGHUP a planner and a gateway accept a new token beside the old
// one and serve a new certificate. With a setting that needs a restart they change nothing and log
// the reason. A change of the token file alone is applied too.
func TestPlannersAndGatewaysReload(t *testing.T) {
	engine := textEngine(t, "an answer")
	for _, c := range []struct {
		kind, settings, fixed, refused string
		// ask makes a call with a token, with TLS. It reports whether the token was accepted.
		ask func(t *testing.T, listen, token string, secure *tls.Config) bool
	}{
		{"planner", "", "schedule:\n  max_queue: 77\n", "schedule.max_queue: 0 → 77: the requests in progress were planned with it", func(t *testing.T, listen, token string, secure *tls.Config) bool {
			conn, err := client.Dial(listen, client.DialOptions{BearerToken: token, TLS: secure, Timeout: time.Minute})
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_, err = pb.NewPlannerClient(conn).Top(t.Context(), &pb.TopRequest{})
			if code := status.Code(err); code != codes.OK && code != codes.Unauthenticated {
				t.Fatal(err)
			}
			return err == nil
		}},
		{"gateway", "engine: [" + engine + "]\n", "max_queue: 77\n", "max_queue: 1024 → 77: the front is made with it", func(t *testing.T, listen, token string, secure *tls.Config) bool {
			var code int
			var text string
			c := gatewayClient(t, secure)
			within(t, "an engine is healthy", func() bool {
				code, text = call(t, c, "POST", "https://"+listen+"/v1/completions", token)
				return code != http.StatusServiceUnavailable
			})
			if code != http.StatusOK && code != http.StatusUnauthorized {
				t.Fatalf("%d %s", code, text)
			}
			return code == http.StatusOK
		}},
	} {
		t.Run(c.kind, func(t *testing.T) {
			r := &rotation{t: t, dir: t.TempDir()}
			listen := testkit.Port(t)
			var secure []*tls.Config
			for range 2 {
				_, crt, key := certificates(t, t.TempDir())
				r.crt, r.key = append(r.crt, readAll(t, crt)), append(r.key, readAll(t, key))
				pool := x509.NewCertPool()
				pool.AppendCertsFromPEM(r.crt[len(r.crt)-1])
				secure = append(secure, &tls.Config{RootCAs: pool})
			}
			r.replace("crt.pem", r.crt[0])
			r.replace("key.pem", r.key[0])
			r.serveTokens(0)
			settings := fmt.Sprintf("listen: %s\nhttp: \"\"\n%sauth:\n  token_file: %[3]s/tokens\n  tls_cert: %[3]s/crt.pem\n  tls_key: %[3]s/key.pem\n", listen, c.settings, r.dir)
			r.replace("settings.yaml", []byte(settings))
			p, err := cluster.StartProcess(t.Context(), cluster.ProcessOptions{
				Name: "the " + c.kind, Args: []string{c.kind, "--log-format", "json", "--config", r.dir + "/settings.yaml"}, Env: append(os.Environ(), childEnv),
			})
			if err != nil {
				t.Fatal(err)
			}
			if !c.ask(t, listen, tokenOf(0), secure[0]) || c.ask(t, listen, tokenOf(1), secure[0]) {
				t.Fatal("at the start it does not accept the old token only")
			}
			hangup := func() {
				if err := p.Signal(syscall.SIGHUP); err != nil {
					t.Fatal(err)
				}
			}
			r.replace("settings.yaml", []byte(settings+c.fixed))
			hangup()
			within(t, "the refusal is in the log", func() bool { return strings.Contains(p.Log(), c.refused) })
			r.serveTokens(0, 1)
			r.replace("crt.pem", r.crt[1])
			r.replace("key.pem", r.key[1])
			r.replace("settings.yaml", []byte(settings+"log:\n  level: debug\n"))
			hangup()
			within(t, "the reload is in the log", func() bool { return strings.Contains(p.Log(), `"key":"log.level"`) })
			for g := range 2 {
				if !c.ask(t, listen, tokenOf(g), secure[1]) {
					t.Errorf("the token of generation %d is refused", g)
				}
			}
			r.serveTokens(1)
			within(t, "the old token is refused", func() bool { return !c.ask(t, listen, tokenOf(0), secure[1]) })
			if !c.ask(t, listen, tokenOf(1), secure[1]) {
				t.Error("the new token is refused")
			}
			if err := p.Stop(); err != nil {
				t.Error(err)
			}
		})
	}
}
