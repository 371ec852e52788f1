package zmtp

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
)

// Listen listens on a ZeroMQ endpoint: tcp://HOST:PORT or ipc://PATH. The host * means all
// addresses. The port 0 or * means a free port.
func Listen(ctx context.Context, endpoint string) (net.Listener, error) {
	network, address, err := parse(endpoint)
	if err != nil {
		return nil, err
	}
	var c net.ListenConfig
	l, err := c.Listen(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("zmtp: listen on %s: %w", endpoint, err)
	}
	return l, nil
}

// Check returns an error if an endpoint is invalid for Listen.
func Check(endpoint string) error {
	_, _, err := parse(endpoint)
	return err
}

// Endpoint returns the ZeroMQ endpoint of a listener's address.
func Endpoint(a net.Addr) string {
	if a.Network() == "unix" {
		return "ipc://" + a.String()
	}
	return "tcp://" + a.String()
}

func parse(endpoint string) (network, address string, err error) {
	scheme, rest, _ := strings.Cut(endpoint, "://")
	switch scheme {
	case "ipc":
		if rest == "" {
			return "", "", fmt.Errorf("zmtp: endpoint %q names no socket; want ipc://PATH", endpoint)
		}
		return "unix", rest, nil
	case "tcp":
	default:
		return "", "", fmt.Errorf("zmtp: endpoint %q; want tcp://HOST:PORT, tcp://*:PORT or ipc://PATH", endpoint)
	}
	host, port, err := net.SplitHostPort(rest)
	if err != nil || host == "" {
		return "", "", fmt.Errorf("zmtp: endpoint %q is not tcp://HOST:PORT; the host * means all addresses", endpoint)
	}
	if port == "*" {
		port = "0"
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", "", fmt.Errorf("zmtp: endpoint %q: port %q is not a number from 0 to 65535", endpoint, port)
	}
	if host == "*" {
		host = ""
	}
	return "tcp", net.JoinHostPort(host, port), nil
}
