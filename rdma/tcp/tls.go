package tcp

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"strings"

	"github.com/penstock-kv/penstock/rdma"
)

// tlsScheme stands in front of the host:port of a listener that speaks TLS.
const tlsScheme = "tls://"

// HostPort returns the host:port of an address of this provider, and whether it
// is to be dialed with TLS.
func HostPort(a rdma.NetAddr) (hostPort string, secure bool) {
	return strings.CutPrefix(string(a), tlsScheme)
}

// dialTLS performs the client's side of a TLS handshake on nc, which it closes
// if that fails.
func (e *Engine) dialTLS(ctx context.Context, nc net.Conn, hostPort string) (net.Conn, error) {
	cfg := e.opts.TLS
	if cfg.ServerName == "" {
		host, _, err := net.SplitHostPort(hostPort)
		if err != nil {
			_ = nc.Close()
			return nil, err
		}
		cfg = cfg.Clone()
		cfg.ServerName = host
	}
	c := tls.Client(nc, cfg)
	if err := c.HandshakeContext(ctx); err != nil {
		_ = nc.Close()
		return nil, fmt.Errorf("TLS with %s: %w: %w", hostPort, rdma.ErrAuth, err)
	}
	return c, nil
}
