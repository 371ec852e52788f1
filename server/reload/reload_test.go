package reload_test

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/reload"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	oldToken = "0123456789abcdef-old"
	newToken = "0123456789abcdef-new"
)

// process is a process with a configuration that a test changes.
type process struct {
	t        *testing.T
	dir      string
	next     config.Config // what the next Read returns
	readErr  error
	reading  func(context.Context) error // called by Read, nil: Read takes no time
	prepare  func() error
	check    func(*access.Policy) error // nil: every policy can be used
	applied  atomic.Int32
	changed  atomic.Int32
	creds    *reload.Credentials
	reloader *reload.Reloader
	registry *prometheus.Registry
	log      chan string
	// secure is the configuration of the listener. sessions are the TLS sessions that clients may resume.
	secure   *tls.Config
	sessions tls.ClientSessionCache
}

// newProcess starts a process with token, certificate and CA, in files of their own.
func newProcess(t *testing.T) *process {
	t.Helper()
	p := &process{t: t, dir: t.TempDir(), next: config.Default(), log: make(chan string, 100), sessions: tls.NewLRUClientSessionCache(10)}
	p.write("token", oldToken)
	p.writePair(1)
	p.next.Auth = config.Auth{TokenFile: p.path("token"), TLSCert: p.path("crt"), TLSKey: p.path("key")}
	p.start()
	return p
}

func (p *process) start() {
	p.t.Helper()
	var err error
	if p.creds, err = reload.OpenCredentials(p.next.Auth); err != nil {
		p.t.Fatal(err)
	}
	running := p.next
	p.secure = p.creds.ServerTLS()
	p.registry = prometheus.NewRegistry()
	p.reloader = reload.New(running.Keys(), reload.Options{
		Read: func(ctx context.Context) (reload.Candidate, error) {
			if p.reading != nil {
				if err := p.reading(ctx); err != nil {
					return reload.Candidate{}, err
				}
			}
			next := p.next
			return reload.Candidate{Keys: next.Keys(), Auth: next.Auth, Prepare: p.prepare, Apply: func() { p.applied.Add(1) }}, p.readErr
		},
		Path: "the file", Credentials: p.creds, Check: p.check, Changed: func() { p.changed.Add(1) }, Metrics: metrics.NewReloads(p.registry), Settle: time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(logTo(p.log), &slog.HandlerOptions{Level: slog.LevelInfo})),
	})
}

// logTo sends each line to a channel.
type logTo chan string

func (l logTo) Write(line []byte) (int, error) {
	l <- string(line)
	return len(line), nil
}

// run watches the files and receives signals until the test ends.
func (p *process) run(hangups <-chan os.Signal) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.reloader.Run(ctx, hangups)
	}()
	p.t.Cleanup(func() {
		cancel()
		<-ended
	})
}

// logged waits for a line of the log with the text, and returns the lines up to it.
func (p *process) logged(text string) (lines []string) {
	p.t.Helper()
	late := time.After(time.Minute) // only a line that never comes reaches it
	for {
		select {
		case line := <-p.log:
			if lines = append(lines, line); strings.Contains(line, text) {
				return lines
			}
		case <-late:
			p.t.Fatalf("no line with %q after %q", text, lines)
		}
	}
}

func (p *process) path(name string) string { return filepath.Join(p.dir, name) }

// write replaces a file by one rename, as an operator should.
func (p *process) write(name, content string) {
	p.t.Helper()
	path := p.path(name)
	if err := errors.Join(os.WriteFile(path+".tmp", []byte(content), 0o600), os.Rename(path+".tmp", path)); err != nil {
		p.t.Fatal(err)
	}
}

// pair returns a certificate with the serial number, and its key.
func pair(t *testing.T, serial int64) (crt, key string) {
	t.Helper()
	c, k := testkit.PairPEM(t, testkit.NewAuthority(t).Issue(func(c *x509.Certificate) { c.SerialNumber = big.NewInt(serial) }))
	return string(c), string(k)
}

func (p *process) writePair(serial int64) {
	p.t.Helper()
	crt, key := pair(p.t, serial)
	p.write("crt", crt)
	p.write("key", key)
}

// connect makes a TLS connection to the process, and returns the client's end and the server's.
func (p *process) connect(certificates ...tls.Certificate) (*tls.Conn, *tls.Conn, error) {
	p.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		p.t.Fatal(err)
	}
	defer l.Close()
	a, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		p.t.Fatal(err)
	}
	b, err := l.Accept()
	if err != nil {
		p.t.Fatal(err)
	}
	server := tls.Server(b, p.secure)
	client := tls.Client(a, &tls.Config{InsecureSkipVerify: true, ServerName: "node", Certificates: certificates, ClientSessionCache: p.sessions})
	failed := make(chan error, 1)
	go func() { failed <- server.Handshake() }()
	err = client.Handshake()
	if err != nil {
		_ = a.Close() // ends the server's handshake
	}
	if serverErr := <-failed; serverErr != nil && err == nil {
		err = serverErr
	}
	p.t.Cleanup(func() { _ = errors.Join(a.Close(), b.Close()) }) // one end may be closed
	return client, server, err
}

// serial returns the serial number of the certificate that a new connection gets.
func (p *process) serial() int64 {
	p.t.Helper()
	client, _, err := p.connect()
	if err != nil {
		p.t.Fatal(err)
	}
	return client.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
}

// counted fails unless the reloads were counted by result, and the gauge has the value.
func (p *process) counted(successful int, want map[string]int) {
	p.t.Helper()
	text := "# HELP penstock_config_reloads_total Reloads of settings, tokens and certificates by their result (applied, unchanged, refused because a setting needs a restart, failed because a value or a file is bad).\n# TYPE penstock_config_reloads_total counter\n"
	for _, result := range []string{"applied", "failed", "refused", "unchanged"} {
		text += fmt.Sprintf("penstock_config_reloads_total{result=%q} %d\n", result, want[result])
	}
	text += "# HELP penstock_config_last_reload_successful 1 if the last reload was applied or changed nothing, 0 if it was refused or failed. 1 before the first reload.\n# TYPE penstock_config_last_reload_successful gauge\n"
	text += fmt.Sprintf("penstock_config_last_reload_successful %d\n", successful)
	if err := testutil.GatherAndCompare(p.registry, strings.NewReader(text), "penstock_config_reloads_total", "penstock_config_last_reload_successful"); err != nil {
		p.t.Error(err)
	}
}

// TestReloadApplies: settings, tokens and certificates change together, and the result names them
// without their secrets.
func TestReloadApplies(t *testing.T) {
	p := newProcess(t)
	p.write("token", newToken+"\n"+oldToken+"\n")
	p.writePair(2)
	p.next.Limits.Writes = 7
	diff, err := p.reloader.Diff(t.Context())
	if err != nil || p.applied.Load() != 0 || len(p.creds.Tokens()) != 1 || p.serial() != 1 {
		t.Fatalf("Diff changed something: %v, %d tokens, certificate %d", err, len(p.creds.Tokens()), p.serial())
	}
	got, err := p.reloader.Reload(t.Context())
	if err != nil || !slices.Equal(got, diff) || p.applied.Load() != 1 {
		t.Fatalf("applied %v (%d times), %v; Diff returned %v", got, p.applied.Load(), err, diff)
	}
	var keys []string
	for _, c := range got {
		keys = append(keys, c.Key)
		if strings.Contains(c.String(), "0123456789abcdef") || strings.Contains(c.String(), "PRIVATE") || c.Restart != "" {
			t.Errorf("the change is %s", c)
		}
	}
	if want := []string{"limits.writes", "auth.token_file", "auth.tls_cert"}; !slices.Equal(keys, want) {
		t.Errorf("changes of %q, want %q", keys, want)
	}
	if !strings.HasSuffix(got[1].New, "token (2 tokens, 1 added, 0 removed)") {
		t.Errorf("the change of the tokens is %s", got[1])
	}
	if tokens := p.creds.Tokens(); !slices.Equal(tokens, []string{newToken, oldToken}) || p.serial() != 2 {
		t.Errorf("it accepts %q with certificate %d", tokens, p.serial())
	}
	if again, err := p.reloader.Reload(t.Context()); err != nil || len(again) != 0 {
		t.Errorf("the second reload applied %v, %v", again, err)
	}
	p.counted(1, map[string]int{"applied": 1, "unchanged": 1})
}

// TestRefusedReloadAppliesNothing: with a setting that needs a restart, a bad setting, or a damaged
// file, every setting and file stays as it was. The error names the setting or file, and no secret.
func TestRefusedReloadAppliesNothing(t *testing.T) {
	const secret = "0123456789abcdef-secret"
	for _, c := range []struct {
		name, result string
		set          func(p *process)
		says         []string
		restart      bool
	}{
		{"two settings that need a restart", "refused", func(p *process) { p.next.Arena, p.next.Durability = 64<<20, "sync" },
			[]string{"arena: 256 MiB → 64 MiB: the arena is registered with devices and NICs; restart", "durability: batch → sync: writers rely"}, true},
		{"TLS off", "refused", func(p *process) { p.next.Auth.TLSCert, p.next.Auth.TLSKey = "", "" }, []string{"auth.tls_cert: ", "plain text and TLS"}, true},
		{"a bad value", "failed", func(p *process) { p.readErr = errors.New("config: limits.writes: must be positive") }, []string{"nothing was applied", "limits.writes"}, false},
		{"no token file", "failed", func(p *process) { p.next.Auth.TokenFile = p.path("none") }, []string{"auth.token_file", "none"}, false},
		{"a token file without tokens", "failed", func(p *process) { p.write("token", "\n") }, []string{"auth.token_file", "a token of 0 characters"}, false},
		{"a short token", "failed", func(p *process) { p.write("token", secret+"\nshort\n") }, []string{"a token of 5 characters"}, false},
		{"a certificate without its key", "failed", func(p *process) { crt, _ := pair(t, 3); p.write("crt", crt) }, []string{"auth.tls_cert", "does not match"}, false},
		{"half a certificate", "failed", func(p *process) { crt, _ := pair(t, 3); p.write("crt", crt[:len(crt)/2]) }, []string{"auth.tls_cert"}, false},
		{"no CA", "failed", func(p *process) { p.next.Auth.ClientCA = p.path("token") }, []string{"auth.client_ca", "no certificate in PEM"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newProcess(t)
			p.next.Limits.Writes = 7 // a reload would apply this
			p.write("token", secret+"\n")
			c.set(p)
			changes, err := p.reloader.Reload(t.Context())
			if err == nil || len(changes) != 0 || errors.Is(err, reload.ErrRestart) != c.restart {
				t.Fatalf("applied %v, %v", changes, err)
			}
			for _, want := range c.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is not in the error: %v", want, err)
				}
			}
			lines := p.logged("not reloaded")
			if strings.Contains(err.Error(), secret) || strings.Contains(strings.Join(lines, ""), secret) {
				t.Errorf("a token is in the error or the log: %v", err)
			}
			if p.applied.Load() != 0 || !slices.Equal(p.creds.Tokens(), []string{oldToken}) || p.serial() != 1 {
				t.Errorf("settings applied %d times, tokens %d, certificate %d", p.applied.Load(), len(p.creds.Tokens()), p.serial())
			}
			p.counted(0, map[string]int{c.result: 1})
		})
	}
}

// TestRoles: a reload and a change of the file exchange the roles. A damaged file changes nothing, and
// its error has no token. Changed is called after each exchange.
func TestRoles(t *testing.T) {
	p := newProcess(t)
	roles := func(principals ...string) string {
		text := "principals:\n"
		for _, name := range principals {
			text += fmt.Sprintf("  - {name: %s, tokens: [sha256:%x], grants: [{roles: [read], namespaces: [m]}]}\n", name, sha256.Sum256([]byte(newToken+name)))
		}
		return text
	}
	names := func() (found []string) {
		for _, name := range []string{"a", "b", "c"} {
			if policy := p.creds.Roles(); policy != nil {
				if _, ok := policy.ByHeader("Bearer " + newToken + name); ok {
					found = append(found, name)
				}
			}
		}
		return found
	}
	if p.creds.Roles() != nil {
		t.Fatal("there are roles without a file")
	}
	p.write("roles", roles("a"))
	p.next.Auth.RolesFile, p.next.Auth.TokenFile = p.path("roles"), ""
	changes, err := p.reloader.Reload(t.Context())
	if err != nil || len(changes) != 2 || p.changed.Load() != 1 || !slices.Equal(names(), []string{"a"}) || len(p.creds.Tokens()) != 0 {
		t.Fatalf("%v, %v; Changed was called %d times; principals %q", changes, err, p.changed.Load(), names())
	}
	for damage, says := range map[string]string{
		strings.Replace(roles("a", "b"), "sha256:", oldToken, 1): "principals.0.tokens.0",
		"principals: []\n": "the file has no principal",
	} {
		p.write("roles", damage)
		if _, err := p.reloader.Reload(t.Context()); err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "auth.roles_file") || strings.Contains(err.Error(), oldToken) {
			t.Errorf("a damaged file: %v", err)
		}
		if p.changed.Load() != 1 || !slices.Equal(names(), []string{"a"}) {
			t.Errorf("a damaged file has changed the principals to %q", names())
		}
	}
	p.write("roles", roles("a", "b"))
	changes, err = p.reloader.Reload(t.Context())
	if err != nil || len(changes) != 1 || changes[0].Key != "auth.roles_file" || !strings.Contains(changes[0].String(), "1 principal, SHA-256") || !strings.Contains(changes[0].New, "2 principals") {
		t.Errorf("%v, %v", changes, err)
	}
	for _, line := range p.logged("2 principals") {
		if strings.Contains(line, oldToken) || strings.Contains(line, newToken) {
			t.Errorf("a token is in the log: %s", line)
		}
	}
	p.run(nil)
	p.write("roles", roles("b", "c"))
	for !slices.Equal(names(), []string{"b", "c"}) {
		p.logged("configuration reloaded")
	}
	if p.changed.Load() != 3 {
		t.Errorf("Changed was called %d times, want 3", p.changed.Load())
	}
}

// TestConnectionsOutliveTheirCertificate: a connection works after the certificate and the CA were
// replaced. A new connection needs a certificate of the new CA, also if it could resume a session.
func TestConnectionsOutliveTheirCertificate(t *testing.T) {
	p := newProcess(t)
	old, next := testkit.NewAuthority(t), testkit.NewAuthority(t)
	oldPair := old.Issue(nil)
	p.write("ca", string(old.PEM))
	p.next.Auth.ClientCA = p.path("ca")
	// authority compares the authorities in use with the one of a test.
	authority := func(want *testkit.Authority) {
		t.Helper()
		block, _ := pem.Decode(want.PEM)
		if got := p.creds.ClientCAs(); len(got) != 1 || got[0] != sha256.Sum256(block.Bytes) {
			t.Errorf("authorities %x; want that of the file", got)
		}
	}
	if _, err := p.reloader.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	authority(old)
	if _, _, err := p.connect(); err == nil {
		t.Fatal("a client without a certificate is accepted")
	}
	client, server, err := p.connect(oldPair)
	if err != nil {
		t.Fatal(err)
	}
	// A client gets its tickets with the first bytes that it reads.
	if _, err := server.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(client, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	if again, _, err := p.connect(oldPair); err != nil || !again.ConnectionState().DidResume {
		t.Errorf("the session is not resumed before the reload: %v", err)
	}
	p.write("ca", string(next.PEM))
	p.writePair(2)
	if _, err := p.reloader.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	authority(next)
	go func() { _, _ = client.Write([]byte("still")) }() // the read reports a failure
	got := make([]byte, 5)
	if _, err := io.ReadFull(server, got); err != nil || string(got) != "still" {
		t.Errorf("the old connection: %q, %v", got, err)
	}
	if _, _, err := p.connect(oldPair); err == nil {
		t.Error("a certificate of the removed CA is accepted")
	}
	if client, _, err := p.connect(next.Issue(nil)); err != nil || client.ConnectionState().PeerCertificates[0].SerialNumber.Int64() != 2 {
		t.Errorf("a certificate of the new CA: %v", err)
	}
}

// TestHangup: a signal reloads.
func TestHangup(t *testing.T) {
	p := newProcess(t)
	hangups := make(chan os.Signal)
	p.run(hangups)
	p.next.Limits.Writes = 7
	hangups <- os.Interrupt // the kind is chosen by the sender
	p.logged("configuration reloaded")
	if p.applied.Load() != 1 {
		t.Errorf("applied %d times", p.applied.Load())
	}
}

// TestWatch: the files are used after they were replaced, in each of the ways in which a directory of
// secrets is changed.
func TestWatch(t *testing.T) {
	for name, replace := range map[string]struct {
		// lay makes p.dir/live, with the files of generation 1.
		lay func(t *testing.T, dir string)
		// next changes it to the files of generation 2.
		next func(t *testing.T, dir string)
	}{
		"files renamed over": {
			lay:  func(t *testing.T, dir string) { generation(t, dir+"/live", 1) },
			next: func(t *testing.T, dir string) { generation(t, dir+"/tmp", 2); moveInto(t, dir+"/tmp", dir+"/live") },
		},
		"files written in place": {
			lay:  func(t *testing.T, dir string) { generation(t, dir+"/live", 1) },
			next: func(t *testing.T, dir string) { generation(t, dir+"/live", 2) },
		},
		"a secret of Kubernetes": { // live/crt → ..data/crt, and ..data → ..generation
			lay: func(t *testing.T, dir string) {
				generation(t, dir+"/live/..1", 1)
				link(t, "..1", dir+"/live/..data")
				for _, f := range []string{"token", "crt", "key"} {
					link(t, "..data/"+f, dir+"/live/"+f)
				}
			},
			next: func(t *testing.T, dir string) {
				generation(t, dir+"/live/..2", 2)
				link(t, "..2", dir+"/live/..data")
				if err := os.RemoveAll(dir + "/live/..1"); err != nil {
					t.Fatal(err)
				}
			},
		},
		"the directory is a link": {
			lay:  func(t *testing.T, dir string) { generation(t, dir+"/1", 1); link(t, "1", dir+"/live") },
			next: func(t *testing.T, dir string) { generation(t, dir+"/2", 2); link(t, dir+"/2", dir+"/live") },
		},
		"links to an archive": {
			lay: func(t *testing.T, dir string) {
				generation(t, dir+"/archive/1", 1)
				for _, f := range []string{"token", "crt", "key"} {
					link(t, "../archive/1/"+f, dir+"/live/"+f)
				}
			},
			next: func(t *testing.T, dir string) {
				generation(t, dir+"/archive/2", 2)
				for _, f := range []string{"token", "crt", "key"} {
					link(t, "../archive/2/"+f, dir+"/live/"+f)
				}
			},
		},
		"the directory is replaced": {
			lay: func(t *testing.T, dir string) { generation(t, dir+"/live", 1) },
			next: func(t *testing.T, dir string) {
				if err := os.Rename(dir+"/live", dir+"/was"); err != nil {
					t.Fatal(err)
				}
				generation(t, dir+"/live", 2)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProcess(t)
			replace.lay(t, p.dir)
			p.next.Auth = config.Auth{TokenFile: p.path("live/token"), TLSCert: p.path("live/crt"), TLSKey: p.path("live/key")}
			p.start()
			p.run(nil)
			want := func(n int64) {
				t.Helper()
				for p.serial() != n || p.creds.Tokens()[0] != tokenOf(n) {
					p.logged("configuration reloaded")
				}
			}
			want(1)
			replace.next(t, p.dir)
			want(2)
			if p.applied.Load() != 0 {
				t.Error("settings were applied")
			}
		})
	}
}

func tokenOf(n int64) string { return fmt.Sprintf("0123456789abcdef-%d", n) }

// generation writes the n-th token and pair into a directory.
func generation(t *testing.T, dir string, n int64) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	crt, key := pair(t, n)
	for name, content := range map[string]string{"token": tokenOf(n), "crt": crt, "key": key} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// moveInto renames the files of a directory over those of another.
func moveInto(t *testing.T, from, to string) {
	t.Helper()
	for _, name := range []string{"token", "crt", "key"} {
		if err := os.Rename(filepath.Join(from, name), filepath.Join(to, name)); err != nil {
			t.Fatal(err)
		}
	}
}

// link makes path a symbolic link to target, by one rename.
func link(t *testing.T, target, path string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.Symlink(target, path+".tmp"), os.Rename(path+".tmp", path)); err != nil {
		t.Fatal(err)
	}
}

// TestHalfWrittenPair: a certificate whose key is not there yet leaves the old pair in use. It is
// logged once, although the directory changes again and again. With its key the new pair is used.
func TestHalfWrittenPair(t *testing.T) {
	p := newProcess(t)
	p.run(nil)
	crt, key := pair(t, 2)
	p.write("crt", crt)
	damaged := func(lines []string) (n int) {
		for _, line := range lines {
			if strings.Contains(line, "cannot be used") {
				n++
			}
		}
		return n
	}
	seen := damaged(p.logged("cannot be used"))
	if got := p.serial(); got != 1 {
		t.Errorf("the certificate is %d", got)
	}
	p.counted(0, map[string]int{"failed": 1})
	for i := range 10 {
		p.write("other", fmt.Sprint(i))
	}
	p.write("key", key)
	seen += damaged(p.logged("configuration reloaded"))
	if got := p.serial(); seen != 1 || got != 2 {
		t.Errorf("the damage was logged %d times; the certificate is %d", seen, got)
	}
	p.counted(1, map[string]int{"failed": 1, "applied": 1})
	// Damage that is undone counts as a success, and changes nothing.
	p.write("key", "no key")
	p.logged("cannot be used")
	p.write("key", key)
	p.logged("configuration reloaded")
	p.counted(1, map[string]int{"failed": 2, "applied": 1, "unchanged": 1})
}

// TestWatchFollowsTheSettings: after a reload that changes the path of the tokens, at a signal or by a call, the
// file at the new path is watched.
func TestWatchFollowsTheSettings(t *testing.T) {
	p := newProcess(t)
	hangups := make(chan os.Signal)
	p.run(hangups)
	generation(t, p.path("elsewhere"), 5)
	p.next.Auth.TokenFile = p.path("elsewhere/token")
	hangups <- os.Interrupt
	p.logged("configuration reloaded")
	if got := p.creds.Tokens(); !slices.Equal(got, []string{tokenOf(5)}) {
		t.Fatalf("it accepts %q", got)
	}
	p.write("elsewhere/token", tokenOf(6))
	p.logged("configuration reloaded")
	if got := p.creds.Tokens(); !slices.Equal(got, []string{tokenOf(6)}) {
		t.Errorf("it accepts %q", got)
	}
	other := t.TempDir() // not below a watched directory
	generation(t, other, 7)
	p.next.Auth.TokenFile = other + "/token"
	if _, err := p.reloader.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	generation(t, other, 8)
	p.logged("token (1 token, 1 added, 1 removed)")
	if got := p.creds.Tokens(); !slices.Equal(got, []string{tokenOf(8)}) {
		t.Errorf("after a reload by a call it accepts %q", got)
	}
}

// TestSlowReload: while a reload reads the configuration, and while it prepares the change, changed files
// are used, Diff and TakeRoles return, and a second reload waits until its context ends. The reload
// does not bring back files that were replaced meanwhile.
func TestSlowReload(t *testing.T) {
	for _, phase := range []string{"read", "prepare"} {
		t.Run(phase, func(t *testing.T) {
			p := newProcess(t)
			p.run(nil)
			began, goOn := make(chan struct{}), make(chan struct{})
			first := atomic.Bool{}
			wait := func() error {
				if first.CompareAndSwap(false, true) {
					close(began)
					<-goOn
				}
				return nil
			}
			if phase == "read" {
				p.reading = func(context.Context) error { return wait() }
			} else {
				p.prepare = wait
			}
			p.next.Limits.Writes = 7
			ended := make(chan error, 1)
			go func() {
				_, err := p.reloader.Reload(context.Background())
				ended <- err
			}()
			<-began
			p.write("token", newToken)
			p.logged("configuration reloaded")
			if changes, err := p.reloader.Diff(t.Context()); err != nil || len(changes) != 1 || changes[0].Key != "limits.writes" {
				t.Errorf("Diff: %v, %v", changes, err)
			}
			p.reloader.TakeRoles([]byte("principals: []"), 1, time.Time{})
			if state := p.creds.RolesState(); state.Problem == "etcd was not read yet" {
				t.Errorf("the roles document has no effect: %+v", state)
			}
			ctx, leave := context.WithCancel(t.Context())
			leave()
			if _, err := p.reloader.Reload(ctx); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "an earlier reload has not ended") {
				t.Errorf("a second reload: %v", err)
			}
			close(goOn)
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
			if got := p.creds.Tokens(); p.applied.Load() != 1 || !slices.Equal(got, []string{newToken}) {
				t.Errorf("applied %d times, tokens %q", p.applied.Load(), got)
			}
		})
	}
}

// TestReloadEndsWithItsContext: Run returns although a reload at a signal reads a configuration that never
// comes, and a reload of a caller ends when the caller no longer waits. Both change nothing.
func TestReloadEndsWithItsContext(t *testing.T) {
	p := newProcess(t)
	began := make(chan struct{})
	p.reading = func(ctx context.Context) error {
		began <- struct{}{}
		<-ctx.Done()
		return context.Cause(ctx)
	}
	for name, do := range map[string]func(ctx context.Context){
		"signal": func(ctx context.Context) {
			hangups := make(chan os.Signal, 1)
			hangups <- os.Interrupt
			p.reloader.Run(ctx, hangups)
		},
		"call": func(ctx context.Context) {
			if _, err := p.reloader.Reload(ctx); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "nothing was applied") {
				t.Error(err)
			}
		},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			do(ctx)
		}()
		<-began
		cancel()
		<-ended
		if p.logged("not reloaded"); p.applied.Load() != 0 {
			t.Errorf("%s: applied %d times", name, p.applied.Load())
		}
	}
}

// TestDocumentation: doc.go names exactly the settings of a storage node that a reload applies.
func TestDocumentation(t *testing.T) {
	raw, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(raw), "Settings of a storage node that a reload applies:")
	list, _, ok := strings.Cut(list, "A planner and a gateway")
	if !ok {
		t.Fatal("doc.go has no list of settings")
	}
	words := strings.Fields(list)
	c := config.Default()
	for _, k := range c.Keys() {
		if slices.Contains(words, k.Path) != (k.Restart == "") {
			t.Errorf("%s: the list has it: %v; the reason why it needs a restart: %q", k.Path, slices.Contains(words, k.Path), k.Restart)
		}
	}
}
