package certs_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/certs"
	"github.com/penstock-kv/penstock/internal/testkit"
)

// files returns the paths of a new pair with a serial number.
func files(t *testing.T, serial int64) (cert, key string) {
	t.Helper()
	crt, secret := testkit.PairPEM(t, testkit.NewAuthority(t).Issue(func(c *x509.Certificate) { c.SerialNumber = big.NewInt(serial) }))
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "crt"), filepath.Join(dir, "key")
	if err := errors.Join(os.WriteFile(cert, crt, 0o600), os.WriteFile(key, secret, 0o600)); err != nil {
		t.Fatal(err)
	}
	return cert, key
}

// serials performs a handshake between two peers that use the pair, and returns the serial numbers of
// the certificates that each one received.
func serials(t *testing.T, p *certs.Pair) (server, client int64) {
	t.Helper()
	near, far := net.Pipe()
	c := &tls.Config{InsecureSkipVerify: true, ServerName: "peer"}
	s := &tls.Config{ClientAuth: tls.RequireAnyClientCert}
	p.SetOn(c)
	p.SetOn(s)
	a, b := tls.Client(near, c), tls.Server(far, s)
	done := make(chan error, 1)
	go func() { done <- b.Handshake() }()
	if err := a.Handshake(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	_ = near.Close()
	_ = far.Close()
	return a.ConnectionState().PeerCertificates[0].SerialNumber.Int64(), b.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
}

// TestPairIsRenewed: each handshake uses the pair that is in the files. While only one of the files is
// replaced, or one is missing, the previous pair stays in use, and each change is logged once.
func TestPairIsRenewed(t *testing.T) {
	var log bytes.Buffer
	cert, key := files(t, 1)
	p, err := certs.OpenPair(cert, key, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	expect := func(serial int64, warnings int) {
		t.Helper()
		for range 2 {
			if server, client := serials(t, p); server != serial || client != serial {
				t.Errorf("the server has certificate %d and the client certificate %d; want %d", server, client, serial)
			}
		}
		if n := strings.Count(log.String(), "cannot be used"); n != warnings {
			t.Errorf("%d warnings; want %d:\n%s", n, warnings, log.String())
		}
	}
	replace := func(path, by string) {
		t.Helper()
		if err := os.Rename(by, path); err != nil {
			t.Fatal(err)
		}
	}
	expect(1, 0)
	newCert, newKey := files(t, 2)
	replace(cert, newCert)
	expect(1, 1)
	replace(key, newKey)
	expect(2, 1)
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	expect(2, 2)
	newCert, newKey = files(t, 3)
	replace(cert, newCert)
	replace(key, newKey)
	expect(3, 2)
}

// TestOpenRefuses: an error names the file.
func TestOpenRefuses(t *testing.T) {
	cert, key := files(t, 1)
	other, _ := files(t, 2)
	for _, c := range []struct{ cert, key, want string }{
		{cert, "/no/such/key", "/no/such/key"}, {"/no/such/cert", key, "/no/such/cert"}, {other, key, "does not match"}, {key, key, "PEM"},
	} {
		if _, err := certs.OpenPair(c.cert, c.key, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("OpenPair(%s, %s): %v; want %q", c.cert, c.key, err, c.want)
		}
	}
	for path, want := range map[string]string{"/no/such": "/no/such", key: "no certificate"} {
		if _, err := certs.Pool(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Pool(%s): %v; want %q", path, err, want)
		}
	}
}
