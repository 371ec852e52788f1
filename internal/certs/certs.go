// Package certs reads certificates of TLS from PEM files, for processes that dial or serve peers. A
// certificate that an operator or an issuer renews in place is used without a restart.
//
//	handshake ─► Pair.get: stat of both files ── as at the last read ─► the pair in memory
//	                           └─ changed ─► read both ─ valid ─► the new pair
//	                                            └─ invalid ─► the pair in memory, and a warning
//
// Certificates of authorities are read once. A node, planner or gateway, which reloads its settings as a
// whole, exchanges its own certificate by server/reload instead.
package certs

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
)

// Pool returns the certificates of authorities in a file.
func Pool(path string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no certificate in PEM", path)
	}
	return pool, nil
}

// Pair is a certificate and its private key, in two files. All methods may be called concurrently.
type Pair struct {
	certPath, keyPath string
	log               *slog.Logger

	mu      sync.Mutex
	current *tls.Certificate
	// read is the state of the files at the last read, whether or not it succeeded. Both elements are
	// nil if a file was missing.
	read [2]fs.FileInfo
}

// OpenPair reads a pair. log gets a warning when changed files cannot be used.
func OpenPair(certPath, keyPath string, log *slog.Logger) (*Pair, error) {
	p := &Pair{certPath: certPath, keyPath: keyPath, log: log}
	var err error
	if p.read, err = p.stat(); err != nil {
		return nil, err
	}
	if p.current, err = p.load(); err != nil {
		return nil, err
	}
	return p, nil
}

// SetOn makes c use the pair, as a client and as a server. Each handshake uses the content that the
// files have when the handshake begins.
func (p *Pair) SetOn(c *tls.Config) {
	c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.get(), nil }
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return p.get(), nil }
}

// get returns the pair of the files. If they cannot be used, for example because only one of the two
// has been replaced, it returns the last pair that could be used.
func (p *Pair) get() *tls.Certificate {
	p.mu.Lock()
	defer p.mu.Unlock()
	state, err := p.stat()
	if err == nil && p.unchanged(state) || err != nil && p.read[0] == nil {
		return p.current
	}
	p.read = state
	var next *tls.Certificate
	if err == nil {
		next, err = p.load()
	}
	if err != nil {
		p.log.Warn("a changed certificate cannot be used; connections begin with the previous one", "cert", p.certPath, "key", p.keyPath, "err", err)
		return p.current
	}
	p.current = next
	return p.current
}

// stat returns the state of both files. It follows symbolic links: Kubernetes replaces the files of a
// secret by a link to other files.
func (p *Pair) stat() (state [2]fs.FileInfo, err error) {
	for i, path := range []string{p.certPath, p.keyPath} {
		if state[i], err = os.Stat(path); err != nil {
			return [2]fs.FileInfo{}, err
		}
	}
	return state, nil
}

// unchanged reports whether both files are the same files as at the last read, with the same size and time.
func (p *Pair) unchanged(state [2]fs.FileInfo) bool {
	for i, is := range state {
		was := p.read[i]
		if was == nil || !os.SameFile(was, is) || was.Size() != is.Size() || !was.ModTime().Equal(is.ModTime()) {
			return false
		}
	}
	return true
}

func (p *Pair) load() (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(p.certPath, p.keyPath)
	if err != nil {
		return nil, err
	}
	return &pair, nil
}
