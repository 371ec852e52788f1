package tcp

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

// authority signs certificates for 127.0.0.1.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "penstock test CA"},
		NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: time.Now().Add(48 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert: cert, key: key}
}

// issue returns a certificate that was valid from a day ago for validFor.
func (a *authority) issue(t *testing.T, validFor time.Duration) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now().Add(-24 * time.Hour)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "penstock test"},
		NotBefore: start, NotAfter: start.Add(validFor),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

// TestTLSMistakesAreNamed: the error of a failed connection names the wrong part of the TLS
// configuration, and no connection falls back to plain text.
func TestTLSMistakesAreNamed(t *testing.T) {
	testkit.VerifyNone(t)
	ca, stranger := newAuthority(t), newAuthority(t)
	const good, expired = 48 * time.Hour, time.Hour
	mutual := func(server time.Duration) *tls.Config {
		return &tls.Config{
			Certificates: []tls.Certificate{ca.issue(t, server)},
			ClientCAs:    ca.pool(), ClientAuth: tls.RequireAndVerifyClientCert,
		}
	}
	client := func(roots, signer *authority, validFor time.Duration) *tls.Config {
		return &tls.Config{RootCAs: roots.pool(), Certificates: []tls.Certificate{signer.issue(t, validFor)}}
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
		{"client without a certificate", mutual(good), &tls.Config{RootCAs: ca.pool()}, "certificate required"},
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
