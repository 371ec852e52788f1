package group_test

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/rdmatest/simrdma"
)

// TestMaxPeers: one session beyond MaxPeers is refused with the reason.
func TestMaxPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fabricOf(t, 12, simrdma.FabricOptions{})
		server := start(t, f, "s", true, 1, kinds[0].nic, func(o *group.Options) { o.MaxPeers = 2 })
		for i := range 2 {
			connect(t, start(t, f, fmt.Sprint("c", i), false, 1, kinds[0].nic, nil), server)
		}
		late := start(t, f, "late", false, 1, kinds[0].nic, nil)
		if _, err := late.Connect(t.Context(), server.Addr(), testToken); !errors.Is(err, rdma.ErrBusy) {
			t.Fatalf("the third of two: %v", err)
		}
	})
}

// TestAdmission: an engine with an Admission accepts its tokens, and refuses other tokens and the
// peers that Admit refuses.
func TestAdmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fabricOf(t, 15, simrdma.FabricOptions{})
		tokens := []rdma.Token{rdma.Token("the token of client a"), rdma.Token("the token of client b")}
		proved := make(map[rdma.EngineID]string)
		var banned, busy rdma.EngineID
		server := start(t, f, "s", true, 1, kinds[0].nic, func(o *group.Options) {
			o.Admission = &rdma.Admission{Tokens: func() []rdma.Token { return tokens }, Admit: func(peer rdma.EngineID, token rdma.Token) error {
				if peer == banned {
					return errors.New("banned")
				}
				if peer == busy {
					return fmt.Errorf("client a has too many sessions: %w", rdma.ErrBusy)
				}
				proved[peer] = string(token)
				return nil
			}}
		})
		for i, token := range tokens {
			c := start(t, f, fmt.Sprint("c", i), false, 1, kinds[0].nic, nil)
			if _, err := c.Connect(t.Context(), server.Addr(), token); err != nil || proved[c.Addr().Engine] != string(token) {
				t.Fatalf("client %d: %v, Admit got %q", i, err, proved[c.Addr().Engine])
			}
		}
		other := start(t, f, "other", false, 1, kinds[0].nic, nil)
		if _, err := other.Connect(t.Context(), server.Addr(), testToken); !errors.Is(err, rdma.ErrAuth) {
			t.Errorf("a token that is not in the set: %v", err)
		}
		banned = other.Addr().Engine
		if _, err := other.Connect(t.Context(), server.Addr(), tokens[0]); !errors.Is(err, rdma.ErrAuth) {
			t.Errorf("an engine that Admit refuses: %v", err)
		}
		banned, busy = rdma.EngineID{}, other.Addr().Engine
		synctest.Wait() // the earlier refusals are counted
		before := server.Stats().AuthFailures
		if _, err := other.Connect(t.Context(), server.Addr(), tokens[0]); !errors.Is(err, rdma.ErrBusy) || server.Stats().AuthFailures != before {
			t.Errorf("an engine that Admit refuses as busy: %v, %d failures of authentication", err, server.Stats().AuthFailures-before)
		}
	})
}

// TestKindsDiffer: engines whose NICs have different guarantees do not connect.
func TestKindsDiffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fabricOf(t, 13, simrdma.FabricOptions{})
		server := start(t, f, "s", true, 1, simrdma.NICOptions{}.LikeRC(), nil)
		client := start(t, f, "c", false, 1, simrdma.NICOptions{}.LikeSRD(), nil)
		if _, err := client.Connect(t.Context(), server.Addr(), testToken); !errors.Is(err, rdma.ErrUnsupported) {
			t.Fatal(err)
		}
	})
}

// controls returns transports for sessions; each has the listener's and the dialer's side.
func controls(t *testing.T) map[string][2]group.Control {
	t.Helper()
	out := make(map[string][2]group.Control)
	pair := func(name string, listen, dial func() (group.Control, error)) {
		l, err := listen()
		if err != nil {
			t.Fatal(err)
		}
		d, err := dial()
		if err != nil {
			t.Fatal(err)
		}
		out[name] = [2]group.Control{l, d}
	}
	ctx := t.Context()
	pair("tcp", func() (group.Control, error) { return group.TCP(ctx, "127.0.0.1:0", "", nil) },
		func() (group.Control, error) { return group.TCP(ctx, "", "", nil) })
	path := filepath.Join(t.TempDir(), "engine.sock")
	pair("unix", func() (group.Control, error) { return group.Unix(ctx, path) }, func() (group.Control, error) { return group.Unix(ctx, "") })
	ca := testkit.NewAuthority(t)
	serverTLS, clientTLS := &tls.Config{Certificates: []tls.Certificate{ca.Issue(nil)}}, &tls.Config{RootCAs: ca.Pool}
	pair("tls", func() (group.Control, error) { return group.TCP(ctx, "127.0.0.1:0", "", serverTLS) },
		func() (group.Control, error) { return group.TCP(ctx, "", "", clientTLS) })
	return out
}

// TestControls: sessions begin over TCP, with and without TLS, and over a unix
// socket, in real time.
func TestControls(t *testing.T) {
	for name, c := range controls(t) {
		t.Run(name, func(t *testing.T) {
			f := fabricOf(t, 14, simrdma.FabricOptions{})
			open := func(host string, c group.Control) *group.Engine {
				d, err := f.Open(simrdma.NICOptions{Host: host, Name: host}.LikeRC())
				if err != nil {
					t.Fatal(err)
				}
				e, err := group.New(t.Context(), group.Options{Provider: "sim", Domains: []group.Domain{d}, Control: c, Token: testToken})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if err := e.Close(); err != nil {
						t.Error(err)
					}
				})
				return e
			}
			server, client := open("s"+name, c[0]), open("c"+name, c[1])
			connect(t, client, server)
			src, _ := region(t, client, 1000, true)
			dst, _ := region(t, server, 1000, false)
			if err := write(t, client, rdma.Write{Src: src, Dst: dst.Desc(), Len: 1000, Imm: rdma.ImmOf(1)}); err != nil {
				t.Fatal(err)
			}
			if name != "tls" {
				return
			}
			plain, err := group.TCP(t.Context(), "", "", nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := open("plain", plain).Connect(t.Context(), server.Addr(), testToken); !errors.Is(err, rdma.ErrAuth) || !strings.Contains(err.Error(), "TLS") {
				t.Errorf("without TLS: %v", err)
			}
			stranger, err := group.TCP(t.Context(), "", "", &tls.Config{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := open("stranger", stranger).Connect(t.Context(), server.Addr(), testToken); !errors.Is(err, rdma.ErrAuth) {
				t.Errorf("with another authority: %v", err)
			}
		})
	}
}

// TestIntruders: connections that send nothing, close, send invalid bytes or do not hold the
// token are refused, and other sessions are not affected.
func TestIntruders(t *testing.T) {
	c, err := group.TCP(t.Context(), "127.0.0.1:0", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	f := fabricOf(t, 15, simrdma.FabricOptions{})
	d, err := f.Open(simrdma.NICOptions{Host: "s", Name: "s"}.LikeRC())
	if err != nil {
		t.Fatal(err)
	}
	server, err := group.New(t.Context(), group.Options{Provider: "sim", Domains: []group.Domain{d}, Control: c, Token: testToken, HandshakeTimeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	for name, say := range map[string][]byte{"silent": {}, "nonsense": bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 20), "half a hello": []byte("PGD1")} {
		nc, err := net.Dial("tcp", c.Addr)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := nc.Write(say); err != nil {
			t.Fatal(err)
		}
		// The engine closes the connection, at the latest after HandshakeTimeout.
		if _, err := io.Copy(io.Discard, nc); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: %v", name, err)
		}
		nc.Close()
	}
	if n := server.Stats().AuthFailures; n != 3 {
		t.Errorf("%d failures counted", n)
	}
	if nc, err := net.Dial("tcp", c.Addr); err != nil {
		t.Fatal(err)
	} else {
		nc.Close()
	}
	if len(server.Peers()) != 0 {
		t.Error("there is a session")
	}
}
