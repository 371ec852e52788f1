package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/server/console"
	"github.com/penstock-kv/penstock/server/handoff"
	"github.com/penstock-kv/penstock/server/membership"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/reload"
	"github.com/penstock-kv/penstock/server/storage"
)

var (
	errCursor = errors.New("the cursor was not returned by ListBlocks")
	errRate   = errors.New("a rate cannot be negative")
)

// Limits are the limits that the server reports to clients and enforces.
type Limits struct {
	// ReadBytes and WriteBytes bound the payload of one Read and one Reserve.
	ReadBytes, WriteBytes int64
	// ChainBlocks bounds the chain of one call.
	ChainBlocks int
	// LandWithin bounds the time that Commit waits for bytes that have not arrived. SetLandWithin
	// changes it.
	LandWithin time.Duration
}

// Volume describes the device of one volume and the reason for the choice of its backend.
type Volume struct {
	Device blockio.Device
	Reason string
}

// MemoryPart is one part of the memory budget, with a name for display.
type MemoryPart struct {
	Name  string
	Bytes int64
}

// Options are the options of a Server. The server owns Data and Local and closes them. The caller
// closes Storage, Arena and the listeners, after Shutdown.
type Options struct {
	// Node and Version are the node's name and the program's version.
	Node, Version string
	Storage       *storage.Node
	Arena         *arena.Arena
	Data          rdma.Engine
	// Sessions decides which peers Data admits. Describe returns its tokens. DataPort is the TCP port
	// of Data, 0 if Data does not listen on TCP.
	Sessions *Sessions
	DataPort int
	// Local lends the arena to engines on this host. Nil disables that.
	Local   *handoff.Listener
	Limits  Limits
	Volumes []Volume
	// LinkRate returns the rate of the link of a NIC of Data in bits per second, 0 if the rate is
	// unknown. Nil: no rate is known.
	LinkRate func(rdma.NIC) int64
	// Durability, CapacityBytes and MemoryBudget are shown in Status. MemoryBudget returns the
	// parts of the budget for resident memory; it is nil if there is no budget.
	Durability    string
	CapacityBytes int64
	MemoryBudget  func() []MemoryPart

	// Tokens returns the bearer tokens, one of which every gRPC call must carry. TLS, if not nil,
	// is the configuration of the gRPC listener. If TLS has ClientCAs, clients need certificates.
	Tokens Tokens
	TLS    *tls.Config
	// ClientCAs returns the certificates of TLS.ClientCAs that are used at present. EndRemovedSessions ends connections and sessions that
	// none of them has verified.
	ClientCAs ClientCAs
	// Roles returns the policy of the roles file or document. While it returns one, Tokens is not used.
	Roles Roles
	// RolesDocument is the roles document in etcd, and RolesState returns the state of the node's copy. Nil: the calls
	// GetRoles and SetRoles are refused.
	RolesDocument RolesDocument
	RolesState    func() reload.RolesState
	// Cluster is the node's membership of a cluster; nil: the node stands alone.
	Cluster *membership.Cluster
	// Adopter adopts the shared volumes of other nodes; nil: the call AdoptVolume is refused. Fence is
	// the fencing number of this node's shared volumes, 0 if they are not shared.
	Adopter Adopter
	Fence   uint32
	// Config compares and reloads the configuration. If it is nil, the calls DiffConfig and
	// ReloadConfig are refused.
	Config Reloader

	// ConsoleInterval is the time between two updates of a page of the console. Default: 2 s.
	ConsoleInterval time.Duration

	Metrics  *metrics.Node
	Registry *prometheus.Registry
	Logger   *slog.Logger
	Now      func() time.Time
}

// Server is a storage node on the network.
type Server struct {
	opts Options
	node *storage.Node
	// namespaces changes namespaces: those of the node, or those of its cluster.
	namespaces Namespaces
	data       rdma.Engine
	sessions   *Sessions
	// connections is nil without TLS.
	connections *connections
	guard       guard
	rates       rates
	audit       audit
	region      rdma.Region
	grpc        *grpc.Server
	cache       *cacheService
	calls       *calls
	http        *http.Server
	console     *console.Console
	// messages reports whether the data plane accepts calls.
	messages atomic.Bool
	windows  sync.Map // storage.ReservationID → *openWindow
	// landWithin is Limits.LandWithin, in nanoseconds.
	landWithin atomic.Int64
	started    time.Time
	later      laterCall // of endRemoved

	stopping chan struct{} // closed when streams should end
	stopOnce sync.Once
}

// maxMessageBytes is the maximum size of one gRPC message. A chain of 131,072 ids takes 2 MiB. The
// checksums of a large read take a few MiB.
const maxMessageBytes = 16 << 20

// maxHeaderBytes is the maximum size of the headers of one gRPC call. A bearer token and the headers
// of a trace take less than 1 KiB. Headers arrive before the caller is authenticated, and the default
// of gRPC is 16 MiB.
const maxHeaderBytes = 64 << 10

// streamsMax is the maximum number of concurrent calls on one gRPC connection.
const streamsMax = 1024

// streamWindowBytes and connWindowBytes are the flow-control windows of gRPC, in bytes, for one
// call and for one connection. A typical request fits into one window.
const (
	streamWindowBytes = 1 << 20
	connWindowBytes   = 4 << 20
)

// New registers the arena with the transfer engine and makes the services. Serve starts them.
func New(opts Options) (*Server, error) {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	// Local is set, so that peers can access arena memory only through windows, one for each
	// reservation.
	region, err := opts.Data.Register(opts.Arena.Bytes(), rdma.RegisterOptions{Local: true})
	if err != nil {
		return nil, fmt.Errorf("server: register arena: %w", err)
	}
	s := &Server{
		opts:     opts,
		node:     opts.Storage,
		data:     opts.Data,
		sessions: opts.Sessions,
		guard:    guard{tokens: opts.Tokens, roles: opts.Roles, held: opts.Storage},
		audit:    newAudit(opts.Logger),
		region:   region,
		started:  opts.Now(),
		later:    laterCall{after: openingMax},
		stopping: make(chan struct{}),
	}
	s.namespaces = opts.Storage
	if opts.Cluster != nil {
		s.namespaces = opts.Cluster
	}
	s.SetLandWithin(opts.Limits.LandWithin)
	opts.Sessions.watch(opts.Data.Peers)
	if opts.TLS != nil {
		s.connections = newConnections(opts.TLS, opts.ClientCAs, opts.Logger)
	}
	s.grpc = grpc.NewServer(grpcOptions(opts.Tokens, s.guard, s.connections, s.audit, s.admitUnary)...)
	s.cache = &cacheService{Server: s}
	s.calls = newCalls(s.cache)
	pb.RegisterCacheServer(s.grpc, s.cache)
	admin := &adminService{Server: s}
	pb.RegisterAdminServer(s.grpc, admin)
	s.console = console.New(console.Options{Source: &consoleSource{adminService: admin}, Access: consoleAccess{s.guard}, Node: opts.Node, Interval: opts.ConsoleInterval, Now: opts.Now})
	opts.Registry.MustRegister(&collector{server: s})
	s.http = httpServer(s.guard.web(s.routes(), s.audit))
	return s, nil
}

// SetLandWithin replaces Limits.LandWithin for the Commits that begin afterwards.
func (s *Server) SetLandWithin(d time.Duration) { s.landWithin.Store(int64(d)) }

// grpcOptions are the options of every gRPC server: bounds, spans, the audit of admin calls, and
// the bearer token, the roles and TLS if they are configured. The interceptors in more run inside the
// audit and the guard.
func grpcOptions(tokens Tokens, guard guard, secure *connections, audit audit, more ...grpc.UnaryServerInterceptor) []grpc.ServerOption {
	auth := authenticator{tokens: tokens, guard: guard, audit: audit}
	o := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessageBytes),
		grpc.MaxSendMsgSize(maxMessageBytes),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		// The windows are fixed. Otherwise gRPC sends a ping in nearly every call to estimate the
		// bandwidth of the path, which takes a fifth of the time of a call between two processes of
		// one host. Blocks do not travel over gRPC.
		grpc.InitialWindowSize(streamWindowBytes),
		grpc.InitialConnWindowSize(connWindowBytes),
		grpc.StatsHandler(otelgrpc.NewServerHandler()),
		grpc.InTapHandle(auth.tap),
		grpc.ChainUnaryInterceptor(append([]grpc.UnaryServerInterceptor{audit.unary, guard.unary}, more...)...),
		grpc.ChainStreamInterceptor(audit.stream, guard.stream),
		grpc.MaxConcurrentStreams(streamsMax),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
	}
	if secure != nil {
		o = append(o, grpc.Creds(secure))
	}
	return o
}

// httpServer returns an HTTP server for routes, with limits of the time that a slow caller may
// take.
func httpServer(routes http.Handler) *http.Server {
	return &http.Server{Handler: routes, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute}
}

// Serve serves gRPC on control and, if web is not nil, HTTP on web, until Shutdown is called or one
// of the servers fails.
func (s *Server) Serve(control, web net.Listener) error {
	s.messages.Store(s.calls.listen())
	serves := append(serveWeb(s.http, web), func() error { return s.grpc.Serve(control) })
	if s.opts.Local != nil {
		serves = append(serves, func() error { return s.opts.Local.Serve(s.cache.answerLocal) })
	}
	return serveAll(s.stop, serves...)
}

// stop ends gRPC, HTTP and the unix socket immediately, without waiting for calls.
func (s *Server) stop() {
	s.stopStreams()
	s.calls.cancel()
	s.grpc.Stop()
	_ = s.http.Close() // an error is ignored: Close closes only listeners and connections
	if s.opts.Local != nil {
		_ = s.opts.Local.Close() // an error is ignored: Close closes only listeners and connections
	}
}

// stopStreams ends the streams of gRPC and of the console, and the timer of EndRemovedSessions.
func (s *Server) stopStreams() {
	s.stopOnce.Do(func() { close(s.stopping) })
	s.console.Stop()
	s.later.stop()
}

// Shutdown drains the node: it refuses new writes at once and makes /readyz fail. Running calls
// finish until ctx ends. Then it closes the servers and the data plane.
func (s *Server) Shutdown(ctx context.Context) error {
	s.node.Drain()
	if s.opts.Cluster != nil {
		s.opts.Cluster.Stop()
	}
	s.stopStreams()
	graceful := make(chan struct{})
	go func() {
		s.grpc.GracefulStop()
		close(graceful)
	}()
	s.calls.drain(ctx)
	select {
	case <-graceful:
	case <-ctx.Done():
		s.grpc.Stop()
		<-graceful
	}
	errs := []error{s.http.Close()}
	s.console.Close()
	if s.opts.Local != nil {
		// All calls have ended, so no Read uses the lent memory that Close releases.
		errs = append(errs, s.opts.Local.Close())
	}
	return errors.Join(append(errs, s.data.Close())...)
}
