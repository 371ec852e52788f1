package group

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"strings"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/handshake"
)

// Control is the transport on which sessions begin: a reliable, ordered stream. The end of a
// stream reports the peer's death. The zero value neither listens nor dials. Connections must
// allow SetDeadline and Close from any goroutine, as the connections of package net and net.Pipe
// do.
type Control struct {
	// Listener accepts sessions; nil: the engine accepts none. The engine closes Listener.
	Listener net.Listener
	// Addr is the address that peers pass to their Dial. Default: Listener's own address. At most
	// 200 bytes, without '#'.
	Addr string
	// Dial opens a connection to the Addr of another engine; nil: the engine cannot dial. For a
	// wrong certificate it should return an rdma.ErrAuth.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
}

// TCP returns a Control over TCP. listen is the host:port to accept on; empty means that the
// Control only dials. advertise is the address that peers dial, if it is not listen. cfg, if not
// nil, secures accepted connections. It also secures a dialed connection if the dialed address
// states that its listener uses TLS. TLS protects the control connection only: the payload is sent
// over the NICs, which do not encrypt it.
func TCP(ctx context.Context, listen, advertise string, cfg *tls.Config) (Control, error) {
	c := Control{Dial: func(ctx context.Context, addr string) (net.Conn, error) { return dialTCP(ctx, addr, cfg) }}
	if listen == "" {
		return c, nil
	}
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(ctx, "tcp", listen)
	if err != nil {
		return Control{}, fmt.Errorf("group: listen on %s: %w", listen, err)
	}
	c.Listener, c.Addr = l, advertise
	if c.Addr == "" {
		c.Addr = l.Addr().String()
	}
	if cfg != nil {
		c.Listener, c.Addr = tls.NewListener(l, cfg), handshake.TLSScheme+c.Addr
	}
	return c, nil
}

// Unix returns a Control over a unix socket at path. If path is empty, the Control only dials.
func Unix(ctx context.Context, path string) (Control, error) {
	c := Control{Dial: func(ctx context.Context, addr string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", addr)
	}}
	if path == "" {
		return c, nil
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return Control{}, fmt.Errorf("group: listen on %s: %w", path, err)
	}
	c.Listener, c.Addr = l, path
	return c, nil
}

// dialTCP opens a TCP connection, with TLS if the address requires it.
func dialTCP(ctx context.Context, addr string, cfg *tls.Config) (net.Conn, error) {
	hostPort, secure := strings.CutPrefix(addr, handshake.TLSScheme)
	if secure && cfg == nil {
		return nil, fmt.Errorf("%s requires TLS and this engine has no TLS configuration: %w", hostPort, rdma.ErrAuth)
	}
	var d net.Dialer
	d.SetMultipathTCP(false)
	nc, err := d.DialContext(ctx, "tcp", hostPort)
	if err != nil || !secure {
		return nc, err
	}
	return handshake.DialTLS(ctx, nc, hostPort, cfg)
}
