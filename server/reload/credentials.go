package reload

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/internal/bearer"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/config"
)

// Credentials are the bearer tokens, the roles and the certificates with which a process serves. All methods
// may be called concurrently.
type Credentials struct {
	current atomic.Pointer[contents]
	// document is the roles document in etcd. It is not used without auth.RolesEtcd.
	document atomic.Pointer[RolesState]
}

// contents are the parsed files of config.Auth. They do not change.
type contents struct {
	auth config.Auth
	// tokens are sorted. first is the first one of the file, "" without auth.TokenFile.
	tokens []string
	first  string
	// roles is nil without auth.RolesFile.
	roles *access.Policy
	// tls is nil without auth.TLSCert.
	tls *tls.Config
	// authorities has the SHA-256 of each certificate of auth.ClientCA.
	authorities [][sha256.Size]byte
	// leaf describes the certificate and ca the client CA, for people. Each is "" if there is no
	// such file.
	leaf, ca string
}

// OpenCredentials reads the files of auth.
func OpenCredentials(auth config.Auth) (*Credentials, error) {
	read, err := readContents(auth)
	if err != nil {
		return nil, err
	}
	c := &Credentials{}
	c.current.Store(read)
	c.document.Store(&RolesState{Policy: access.None(), Problem: "etcd was not read yet"})
	return c, nil
}

// Tokens returns the bearer tokens, each of which is accepted. If there is none, no token is
// required.
func (c *Credentials) Tokens() []string { return c.current.Load().tokens }

// FirstToken returns the first bearer token of auth.TokenFile, which the process sends as a client of processes with the same
// file. Without auth.TokenFile it returns "".
func (c *Credentials) FirstToken() string { return c.current.Load().first }

// ClientCAs returns the SHA-256 of each certificate of auth.ClientCA, which verify the certificates of clients. Without
// auth.ClientCA it returns none. The caller does not change the slice.
func (c *Credentials) ClientCAs() [][sha256.Size]byte { return c.current.Load().authorities }

// Roles returns the policy of the roles file or of the roles document in etcd, nil if auth has neither. After
// RolesState.Until the policy is outdated (access.Policy.Outdated).
func (c *Credentials) Roles() *access.Policy {
	if current := c.current.Load(); current.auth.RolesEtcd == "" {
		return current.roles
	}
	d := c.document.Load()
	if d.outdated != nil && time.Now().After(d.Until) {
		return d.outdated
	}
	return d.Policy
}

// ServerTLS returns the configuration of listeners, or nil if they serve plain text. Each handshake
// uses the certificates that are current when it begins.
func (c *Credentials) ServerTLS() *tls.Config {
	if c.current.Load().tls == nil {
		return nil
	}
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return c.current.Load().tls, nil },
	}
}

func readContents(auth config.Auth) (*contents, error) {
	c := &contents{auth: auth}
	var err error
	if c.tokens, err = bearer.Read(auth.TokenFile); err != nil {
		return nil, fmt.Errorf("config: auth.token_file: %w", err)
	}
	if len(c.tokens) > 0 {
		c.first = c.tokens[0]
	}
	slices.Sort(c.tokens) // for callers of the process their order has no meaning
	c.tokens = slices.Compact(c.tokens)
	if c.roles, err = access.ReadFile(auth.RolesFile); err != nil {
		return nil, fmt.Errorf("config: auth.roles_file: %w", err)
	}
	if auth.TLSCert == "" {
		return c, nil
	}
	pair, err := tls.LoadX509KeyPair(auth.TLSCert, auth.TLSKey)
	if err != nil {
		return nil, fmt.Errorf("config: auth.tls_cert: %w", err)
	}
	leaf, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		return nil, fmt.Errorf("config: auth.tls_cert: %w", err)
	}
	c.leaf = fmt.Sprintf("certificate %x, expires %s", fingerprint(slices.Concat(pair.Certificate...)), leaf.NotAfter.UTC().Format(time.RFC3339))
	c.tls = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	if auth.ClientCA == "" {
		return c, nil
	}
	text, err := os.ReadFile(auth.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("config: auth.client_ca: %w", err)
	}
	c.tls.ClientCAs, c.tls.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
	for _, cert := range certificates(text) {
		c.tls.ClientCAs.AddCert(cert)
		c.authorities = append(c.authorities, sha256.Sum256(cert.Raw))
	}
	if len(c.authorities) == 0 {
		return nil, fmt.Errorf("config: auth.client_ca: %s holds no certificate in PEM", auth.ClientCA)
	}
	c.ca = fmt.Sprintf("certificates %x", fingerprint(text))
	return c, nil
}

// certificates returns the certificates in a text in PEM. Blocks that are no certificates are ignored, as
// x509.CertPool.AppendCertsFromPEM ignores them.
func certificates(text []byte) (all []*x509.Certificate) {
	for {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil {
			return all
		}
		if block.Type != "CERTIFICATE" || len(block.Headers) > 0 {
			continue
		}
		if cert, err := x509.ParseCertificate(block.Bytes); err == nil {
			all = append(all, cert)
		}
	}
}

// fingerprint returns the first 8 bytes of the SHA-256 of public, which are enough to tell files
// apart.
func fingerprint(public []byte) []byte {
	sum := sha256.Sum256(public)
	return sum[:8]
}

// equal reports whether both hold the same tokens, roles and certificates. The private keys are not
// compared, because a certificate determines its private key.
func (c *contents) equal(d *contents) bool {
	return c.leaf == d.leaf && c.ca == d.ca && c.roles.Equal(d.roles) && slices.Equal(c.tokens, d.tokens) && c.first == d.first
}

// changes returns a Change for each file that has another content in next but the same path.
// Another path is a change of the setting, which changes does not return.
func (c *contents) changes(next *contents) []config.Change {
	var all []config.Change
	if added, removed := without(next.tokens, c.tokens), without(c.tokens, next.tokens); c.auth.TokenFile == next.auth.TokenFile && !slices.Equal(c.tokens, next.tokens) {
		all = append(all, config.Change{
			Key: "auth.token_file",
			Old: fmt.Sprintf("%s (%s)", c.auth.TokenFile, tokenCount(c.tokens)),
			New: fmt.Sprintf("%s (%s, %d added, %d removed)", c.auth.TokenFile, tokenCount(next.tokens), added, removed),
		})
	}
	content := func(key, path, nextPath, was, is string) {
		if path == nextPath && was != is {
			all = append(all, config.Change{Key: key, Old: fmt.Sprintf("%s (%s)", path, was), New: fmt.Sprintf("%s (%s)", path, is)})
		}
	}
	content("auth.roles_file", c.auth.RolesFile, next.auth.RolesFile, describeRoles(c.roles), describeRoles(next.roles))
	content("auth.tls_cert", c.auth.TLSCert, next.auth.TLSCert, c.leaf, next.leaf)
	content("auth.client_ca", c.auth.ClientCA, next.auth.ClientCA, c.ca, next.ca)
	return all
}

// describeRoles describes a policy for people, "" for none.
func describeRoles(p *access.Policy) string {
	if p == nil {
		return ""
	}
	count := fmt.Sprintf("%d principals", p.Principals())
	if p.Principals() == 1 {
		count = "1 principal"
	}
	return fmt.Sprintf("%s, SHA-256 %x", count, p.Digest())
}

// without counts the tokens that are not in others.
func without(tokens, others []string) int {
	n := 0
	for _, t := range tokens {
		if !slices.Contains(others, t) {
			n++
		}
	}
	return n
}

func tokenCount(tokens []string) string {
	if len(tokens) == 1 {
		return "1 token"
	}
	return fmt.Sprintf("%d tokens", len(tokens))
}

// paths returns the paths of the files that auth names.
func paths(auth config.Auth) []string {
	all := []string{auth.TokenFile, auth.RolesFile, auth.TLSCert, auth.TLSKey, auth.ClientCA}
	return slices.DeleteFunc(all, func(path string) bool { return path == "" })
}
