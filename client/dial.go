package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/penstock-kv/penstock/internal/options"
)

// DialOptions configure the gRPC connection to a node.
type DialOptions struct {
	// BearerToken is sent with every call. Dial refuses it over plaintext to a host that is not
	// loopback, unless Insecure is set.
	BearerToken string
	// TokenSource, if not nil, is called for every call, and returns the token to send instead of BearerToken. So a token
	// can be replaced on an open connection. It may be called concurrently, and must not wait.
	TokenSource func() string
	// TLS, if set, protects the connection; nil means plaintext.
	TLS *tls.Config
	// Insecure allows a bearer token over plaintext.
	Insecure bool
	// Timeout bounds one attempt to connect. Default (0): 3 s.
	Timeout time.Duration
}

// maxMessageBytes is the largest gRPC message that the client sends or accepts. The node has the
// same limit.
const maxMessageBytes = 16 << 20

// HTTP/2 flow-control windows: the number of bytes that a node may send before the client grants
// more, in one call and in all calls of a connection.
const (
	streamWindowBytes = 1 << 20
	connWindowBytes   = 4 << 20
)

// Dial returns a connection to the node at target (host:port, unix:PATH, or a gRPC target of the
// schemes dns, passthrough, ipv4 and ipv6) for calls of penstock.v1. The CLI uses it for Admin
// calls. Dial does not wait for the node. It ignores proxies in the environment, because storage
// nodes are on the local network.
func Dial(target string, opts DialOptions) (*grpc.ClientConn, error) {
	if err := CheckServer(target); err != nil {
		return nil, fmt.Errorf("client: dial: %w", err)
	}
	options.SetDefault(&opts.Timeout, 3*time.Second)
	tokens := opts.TokenSource
	if tokens == nil && opts.BearerToken != "" {
		tokens = func() string { return opts.BearerToken }
	}
	if tokens != nil && opts.TLS == nil && !opts.Insecure && !isLocal(target) {
		return nil, fmt.Errorf("client: dial %s: a bearer token would go over the network in plaintext; configure TLS, or set Insecure (--insecure) if the network is trusted", target)
	}
	creds := insecure.NewCredentials()
	if opts.TLS != nil {
		creds = credentials.NewTLS(opts.TLS)
	}
	dialOptions := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithNoProxy(),
		grpc.WithStatsHandler(otelgrpc.NewClientHandler()),
		// The windows are fixed, because gRPC would otherwise estimate the path's bandwidth with a
		// ping for nearly every call. Only control messages use this connection.
		grpc.WithInitialWindowSize(streamWindowBytes),
		grpc.WithInitialConnWindowSize(connWindowBytes),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: opts.Timeout,
		}),
		// Keepalive detects within 15 s that a node has vanished without closing the connection,
		// also during a call without a deadline. The node accepts one ping in 5 s.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
	}
	if tokens != nil {
		dialOptions = append(dialOptions, grpc.WithPerRPCCredentials(bearer(tokens)))
	}
	if !strings.Contains(target, "://") && !strings.HasPrefix(target, "unix:") {
		// The dialer resolves the name at each attempt. gRPC parses the target as a URL, in which
		// the % of an IPv6 zone starts an escape.
		target = "passthrough:///" + strings.ReplaceAll(target, "%", "%25")
	}
	conn, err := grpc.NewClient(target, dialOptions...)
	if err != nil {
		return nil, fmt.Errorf("client: dial %s: %w", target, err)
	}
	return conn, nil
}

// bearer returns the token of a call. It implements gRPC's per-RPC credentials.
type bearer func() string

var _ credentials.PerRPCCredentials = bearer(nil)

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	token := b()
	if token == "" {
		return nil, nil
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials. It returns false, because Dial
// has already checked whether plaintext is allowed.
func (b bearer) RequireTransportSecurity() bool { return false }

// CheckServer returns an error if target cannot be the address of a node. Without this check, a
// wrong address would only cause misses.
func CheckServer(target string) error {
	if target == "" {
		return errors.New("no server given; want host:port")
	}
	for _, scheme := range []string{"unix:", "unix-abstract:"} {
		if path, ok := strings.CutPrefix(target, scheme); ok {
			if strings.Trim(path, "/") == "" {
				return fmt.Errorf("server %q names no socket; want unix:PATH", target)
			}
			return nil
		}
	}
	address := target
	if scheme, rest, ok := strings.Cut(target, "://"); ok {
		switch scheme {
		case "dns", "passthrough", "ipv4", "ipv6":
		default:
			return fmt.Errorf("server %q is of scheme %s; want host:port, the address of the node's gRPC (its --listen)", target, scheme)
		}
		_, address, _ = strings.Cut(rest, "/") // drops the authority, which is before the address and may be empty
	}
	host, port, err := net.SplitHostPort(address)
	switch {
	case err != nil:
		return fmt.Errorf("server %q is not host:port: %w", target, err)
	case host == "":
		return fmt.Errorf("server %q names no host; want host:port", target)
	case strings.ContainsAny(host, " \t\r\n/\\@?#,"):
		return fmt.Errorf("server %q: %q is not the name or the address of a host; want host:port", target, host)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("server %q: port %q is not a number from 1 to 65535", target, port)
	}
	return nil
}

// hostOf returns the host of a gRPC target, or "" if the target has none (a unix socket).
func hostOf(target string) string {
	if strings.HasPrefix(target, "unix:") {
		return ""
	}
	if i := strings.Index(target, "://"); i >= 0 {
		target = target[i+3:]
		target = target[strings.Index(target, "/")+1:]
	}
	host, _, err := net.SplitHostPort(target)
	if err != nil {
		return target
	}
	return host
}

// isLocal reports whether traffic to target cannot leave this machine.
func isLocal(target string) bool {
	host := hostOf(target)
	return strings.HasPrefix(target, "unix:") || isLoopback(host)
}

// isLoopback reports whether host is a loopback address or localhost.
func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
