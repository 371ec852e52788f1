package handshake

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"

	"github.com/penstock-kv/penstock/rdma"
)

// TLSScheme is the prefix of the host:port of a listener that uses TLS.
const TLSScheme = "tls://"

// DialTLS performs the client's part of a TLS handshake on nc. If the handshake fails it closes
// nc. The server's certificate must be for cfg.ServerName or, if cfg.ServerName is empty, for the
// host of hostPort.
func DialTLS(ctx context.Context, nc net.Conn, hostPort string, cfg *tls.Config) (net.Conn, error) {
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
