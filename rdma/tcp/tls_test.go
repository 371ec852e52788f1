package tcp

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

// testTLS returns a configuration for both sides with a certificate of its own.
func testTLS(t testing.TB) *tls.Config {
	ca := testkit.NewAuthority(t)
	return &tls.Config{RootCAs: ca.Pool, Certificates: []tls.Certificate{ca.Issue(nil)}}
}

// TestTLSMistakesAreNamed: the error of a failed connection names the wrong part of the TLS
// configuration, and no connection falls back to plain text.
func TestTLSMistakesAreNamed(t *testing.T) {
	testkit.VerifyNone(t)
	ca, stranger := testkit.NewAuthority(t), testkit.NewAuthority(t)
	const good, expired = time.Hour, -time.Hour // from now
	issue := func(by *testkit.Authority, validFor time.Duration) []tls.Certificate {
		return []tls.Certificate{by.Issue(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(validFor) })}
	}
	mutual := func(server time.Duration) *tls.Config {
		return &tls.Config{
			Certificates: issue(ca, server),
			ClientCAs:    ca.Pool, ClientAuth: tls.RequireAndVerifyClientCert,
		}
	}
	client := func(roots, signer *testkit.Authority, validFor time.Duration) *tls.Config {
		return &tls.Config{RootCAs: roots.Pool, Certificates: issue(signer, validFor)}
	}
	for _, tc := range []struct {
		name           string
		server, client *tls.Config
		want           string // "" is success
	}{
		{"both sides certified", mutual(good), client(ca, ca, good), ""},
		{"client without TLS", mutual(good), nil, "requires TLS"},
		{"client trusts another CA", mutual(good), client(stranger, ca, good), "unknown authority"},
		{"server's certificate expired", mutual(expired), client(ca, ca, good), "expired"},
		{"client without a certificate", mutual(good), &tls.Config{RootCAs: ca.Pool}, "certificate required"},
		{"client of another CA", mutual(good), client(ca, stranger, good), "unknown certificate authority"},
		{"client's certificate expired", mutual(good), client(ca, ca, expired), "expired"},
		{"server without TLS", nil, client(ca, ca, good), ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx := testContext(t)
			s := newServer(t, Options{TLS: tc.server})
			if _, secure := HostPort(s.Addr().NICs[0]); secure != (tc.server != nil) {
				t.Errorf("address %q", s.Addr().NICs[0])
			}
			c := closing(t, newEngine(t, Options{TLS: tc.client}))
			_, err := c.Connect(ctx, s.Addr(), s.opts.Token)
			if tc.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("connect: %v; want %q in it", err, tc.want)
			}
			if tc.name == "client without TLS" && !errors.Is(err, rdma.ErrAuth) {
				t.Errorf("%v is not ErrAuth", err)
			}
			// An address without the scheme sends plain text to a TLS listener.
			plain, _ := HostPort(s.Addr().NICs[0])
			if _, err := c.Connect(ctx, rdma.Addr{NICs: []rdma.NetAddr{rdma.NetAddr(plain)}}, s.opts.Token); err == nil {
				t.Error("plain text was accepted")
			}
		})
	}
}

// TestTLSOnly: an engine that dials peers with TLS only refuses an address without TLS.
func TestTLSOnly(t *testing.T) {
	testkit.VerifyNone(t)
	cfg := testTLS(t)
	plain, secure := newServer(t, Options{}), newServer(t, Options{TLS: cfg})
	c := closing(t, newEngine(t, Options{TLS: cfg, TLSOnly: true}))
	if _, err := c.Connect(testContext(t), plain.Addr(), plain.opts.Token); !errors.Is(err, rdma.ErrAuth) || !strings.Contains(err.Error(), "has no TLS") {
		t.Errorf("connect: %v; want ErrAuth", err)
	}
	if _, err := c.Connect(testContext(t), secure.Addr(), secure.opts.Token); err != nil {
		t.Error(err)
	}
	if e, err := New(t.Context(), Options{TLSOnly: true}); err == nil {
		t.Error("TLSOnly without TLS was accepted", e.Close())
	}
}

// BenchmarkTLS alternates writes of 4 MiB over TLS and plain text. It reports rate and CPU time
// of TLS (both sides are in this process) as multiples of plain text's.
func BenchmarkTLS(b *testing.B) {
	secure := func(cfg *tls.Config) *flow {
		e, err := New(context.Background(), Options{Listen: "127.0.0.1:0", Token: rdma.Token(testToken), TLS: cfg})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = e.Close() })
		r, err := e.Register(newArena(b, arenaBytes), rdma.RegisterOptions{})
		if err != nil {
			b.Fatal(err)
		}
		client, err := New(context.Background(), Options{TLS: cfg})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = client.Close() })
		return flowOf(b, client, r.Desc(), 4<<20, 0, 4)
	}
	plain, tls := secure(nil), secure(testTLS(b))
	var rates, cpus []float64
	for b.Loop() {
		p, s := plain.measure(b, 200*time.Millisecond), tls.measure(b, 200*time.Millisecond)
		rates, cpus = append(rates, s.rate/p.rate), append(cpus, s.cpu/p.cpu)
	}
	b.ReportMetric(median(rates), "rate/plain")
	b.ReportMetric(median(cpus), "cpu/plain")
	b.ReportMetric(0, "ns/op")
}
