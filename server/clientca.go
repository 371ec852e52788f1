package server

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"slices"
	"sync"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// ClientCAs returns the SHA-256 of each certificate of auth.client_ca, as the file is used at present. If it returns
// none, or if the function is nil, clients need no certificate.
type ClientCAs func() [][sha256.Size]byte

// current returns the authorities that are accepted at present, none if the function is nil.
func (c ClientCAs) current() [][sha256.Size]byte {
	if c == nil {
		return nil
	}
	return c()
}

// authorityOf returns an authority among accepted that has verified the certificate of a connection. ok is false if
// none has.
func authorityOf(state tls.ConnectionState, accepted [][sha256.Size]byte) (authority [sha256.Size]byte, ok bool) {
	for _, chain := range state.VerifiedChains {
		authority = sha256.Sum256(chain[len(chain)-1].Raw)
		if slices.Contains(accepted, authority) {
			return authority, true
		}
	}
	return [sha256.Size]byte{}, false
}

// tlsState returns the state of the TLS connection of a call over gRPC, the zero value without TLS.
func tlsState(ctx context.Context) tls.ConnectionState {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return tls.ConnectionState{}
	}
	t, _ := p.AuthInfo.(credentials.TLSInfo)
	return t.State
}

// certificateOf returns the verified certificate of a connection, nil if its client has none.
func certificateOf(state tls.ConnectionState) *x509.Certificate {
	if len(state.VerifiedChains) == 0 {
		return nil
	}
	return state.PeerCertificates[0]
}

// connections are the TLS connections of a gRPC server. A connection ends when auth.client_ca was replaced and no longer
// has the authority that verified the certificate of its client (endUnverified).
type connections struct {
	credentials.TransportCredentials
	accepted ClientCAs
	log      *slog.Logger

	mu   sync.Mutex
	open map[*connection]bool
}

func newConnections(secure *tls.Config, accepted ClientCAs, log *slog.Logger) *connections {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &connections{TransportCredentials: credentials.NewTLS(secure), accepted: accepted, log: log, open: make(map[*connection]bool)}
}

// connection is a connection after its handshake.
type connection struct {
	net.Conn
	raw   net.Conn
	state tls.ConnectionState
	of    *connections
}

// Close implements net.Conn.
func (c *connection) Close() error {
	c.of.mu.Lock()
	delete(c.of.open, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// verified reports whether the certificate of the client is still verified, or none is required.
func (c *connection) verified(accepted [][sha256.Size]byte) bool {
	if len(accepted) == 0 {
		return true
	}
	_, ok := authorityOf(c.state, accepted)
	return ok
}

// ServerHandshake implements credentials.TransportCredentials.
func (c *connections) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	made := &connection{Conn: conn, raw: raw, of: c}
	if t, ok := info.(credentials.TLSInfo); ok {
		made.state = t.State
	}
	c.mu.Lock()
	c.open[made] = true
	c.mu.Unlock()
	// The authorities may have been replaced during the handshake, before endUnverified could find the connection.
	if !made.verified(c.accepted.current()) {
		_ = made.Close() // the handshake fails anyway
		return nil, nil, errors.New("auth.client_ca of the node was replaced during the handshake, and does not verify the client's certificate any more")
	}
	return made, info, nil
}

// Clone implements credentials.TransportCredentials. The connections of the clone are in c too.
func (c *connections) Clone() credentials.TransportCredentials { return c }

// endUnverified closes the connections whose clients have no certificate that an authority in use has verified. Calls in progress on
// them fail with the code Unavailable, and a client with another certificate connects again.
func (c *connections) endUnverified() {
	if c == nil {
		return
	}
	accepted := c.accepted.current()
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn := range c.open {
		if conn.verified(accepted) {
			continue
		}
		subject := ""
		if cert := certificateOf(conn.state); cert != nil {
			subject = cert.Subject.String()
		}
		c.log.Info("connection ended: auth.client_ca does not verify the certificate of its client", "peer", conn.RemoteAddr().String(), "subject", subject)
		// The close of the TLS connection would wait for a client that does not read. gRPC closes it when it finds the raw one closed.
		_ = conn.raw.Close()
	}
}
