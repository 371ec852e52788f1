// Package testplanner runs a planner inside a test's process: the real service over gRPC. A test
// can stop the planner and start another planner without state at the same address. Only tests
// import the package.
package testplanner

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/test/bufconn"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/planner"
)

// Options configures a Planner.
type Options struct {
	Planner planner.Options
	// Server and Dial are added to the options of the server and of Conn.
	Server []grpc.ServerOption
	Dial   []grpc.DialOption
	// TCP makes the planner also listen on a loopback port, Planner.Addr.
	TCP bool
}

// Planner is a planner and a connection to it.
type Planner struct {
	// Conn connects to the running planner. If none is running, it retries immediately.
	Conn *grpc.ClientConn
	// Addr is the planner's host:port, which a restart does not change. Addr is empty without
	// Options.TCP.
	Addr string

	t    testing.TB
	opts Options

	mu       sync.Mutex
	listener *bufconn.Listener
	stop     func() // nil: there is no planner
}

// Start starts a planner, and stops it when the test ends.
func Start(t testing.TB, o Options) *Planner {
	t.Helper()
	p := &Planner{t: t, opts: o, listener: bufconn.Listen(1)}
	p.Start()
	dial := append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: time.Millisecond, Multiplier: 1, MaxDelay: time.Millisecond}, MinConnectTimeout: time.Minute,
		}),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			p.mu.Lock()
			l := p.listener
			p.mu.Unlock()
			return l.DialContext(ctx)
		}),
	}, o.Dial...)
	conn, err := grpc.NewClient("passthrough:planner", dial...)
	if err != nil {
		t.Fatal(err)
	}
	p.Conn = conn
	t.Cleanup(func() {
		_ = conn.Close()
		p.Stop()
	})
	return p
}

// Start starts a planner without state. No planner may be running.
func (p *Planner) Start() {
	p.t.Helper()
	service, err := planner.New(p.opts.Planner)
	if err != nil {
		p.t.Fatal(err)
	}
	// The same policy as a planner node: client.Dial sends a ping every 10 s.
	pings := grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true})
	server := grpc.NewServer(append([]grpc.ServerOption{pings}, p.opts.Server...)...)
	pb.RegisterPlannerServer(server, service)
	l := bufconn.Listen(1 << 16)
	listeners := []net.Listener{l}
	if p.opts.TCP {
		if p.Addr == "" {
			p.Addr = "127.0.0.1:0"
		}
		port, err := net.Listen("tcp", p.Addr)
		if err != nil {
			service.Close()
			p.t.Fatal(err)
		}
		p.Addr = port.Addr().String()
		listeners = append(listeners, port)
	}
	served := make(chan error, len(listeners))
	for _, l := range listeners {
		go func() { served <- server.Serve(l) }()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listener = l
	p.stop = func() {
		service.Close()
		server.Stop()
		for range listeners {
			if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				p.t.Errorf("planner: %v", err)
			}
		}
	}
}

// Stop ends the planner, if one is running.
func (p *Planner) Stop() {
	p.mu.Lock()
	stop := p.stop
	p.stop = nil
	p.mu.Unlock()
	if stop != nil {
		stop()
	}
}

// Restart stops the planner and starts a planner without state.
func (p *Planner) Restart() {
	p.t.Helper()
	p.Stop()
	p.Start()
}
