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
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/server/handoff"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/storage"
)

var (
	errCursor = errors.New("cursor is not one that ListBlocks returned")
	errRate   = errors.New("a rate cannot be negative")
)

// Limits are what the server tells clients and holds them to.
type Limits struct {
	// ReadBytes and WriteBytes bound the payload of one Read and one Reserve.
	ReadBytes, WriteBytes int64
	// ChainBlocks bounds the chain of one call.
	ChainBlocks int
	// LandWithin is how long Commit waits for bytes that were not confirmed yet.
	LandWithin time.Duration
}

// Volume is one volume's device and why this kind of device was chosen.
type Volume struct {
	Device blockio.Device
	Reason string
}

// MemoryPart is one part of the memory budget, by a name that people read.
type MemoryPart struct {
	Name  string
	Bytes int64
}

// Options are what a Server is made of. The server takes over Data and Local and
// closes them; Node, Arena and the listeners stay the caller's to close, after Shutdown.
type Options struct {
	// Node, Version: who this is.
	Node, Version string
	Storage       *storage.Node
	Arena         *arena.Arena
	Data          rdma.Engine
	// DataToken is what a peer proves to Data; Describe hands it out. DataPort is
	// the TCP port where Data listens; 0: it does not listen on one.
	DataToken rdma.Token
	DataPort  int
	// Local lends the arena to engines on this host; nil: nobody does.
	Local   *handoff.Listener
	Limits  Limits
	Volumes []Volume
	// Durability, CapacityBytes and MemoryBudget are shown in Status. MemoryBudget
	// returns the parts of what resident memory should stay below; nil: there is no
	// such budget.
	Durability    string
	CapacityBytes int64
	MemoryBudget  func() []MemoryPart

	// BearerToken, if not empty, is required of every gRPC call. TLS, if set, is
	// used by the gRPC listener; with ClientCAs in it, clients need certificates.
	BearerToken string
	TLS         *tls.Config

	Metrics  *metrics.Node
	Registry *prometheus.Registry
	Logger   *slog.Logger
	Now      func() time.Time
}

// Server is a storage node on the network.
type Server struct {
	opts   Options
	node   *storage.Node
	data   rdma.Engine
	region rdma.Region
	grpc   *grpc.Server
	cache  *cacheService
	calls  *calls
	http   *http.Server
	// messages is whether the data plane takes calls.
	messages atomic.Bool
	windows  sync.Map // storage.ReservationID → *openWindow
	started  time.Time

	stopping chan struct{} // closed when streams should end
	stopOnce sync.Once
}

// maxMessageBytes bounds one gRPC message. A chain of 131,072 ids takes 2 MiB, the
// checksums of a large read take a few MiB.
const maxMessageBytes = 16 << 20

// streamsMax bounds the concurrent calls on one connection.
const streamsMax = 1024

// Flow-control windows of gRPC for one call and for one connection. A usual request fits
// into one window.
const (
	streamWindowBytes = 1 << 20
	connWindowBytes   = 4 << 20
)

// New registers the arena with the transfer engine and makes the services. It
// serves nothing yet.
func New(opts Options) (*Server, error) {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	// Local: only windows open arena memory to peers, one reservation at a time.
	region, err := opts.Data.Register(opts.Arena.Bytes(), rdma.RegisterOptions{Local: true})
	if err != nil {
		return nil, fmt.Errorf("server: register arena: %w", err)
	}
	s := &Server{
		opts:     opts,
		node:     opts.Storage,
		data:     opts.Data,
		region:   region,
		started:  opts.Now(),
		stopping: make(chan struct{}),
	}
	s.grpc = grpc.NewServer(grpcOptions(opts.BearerToken, opts.TLS, opts.Logger)...)
	s.cache = &cacheService{Server: s}
	s.calls = newCalls(s.cache)
	pb.RegisterCacheServer(s.grpc, s.cache)
	pb.RegisterAdminServer(s.grpc, &adminService{Server: s})
	opts.Registry.MustRegister(&collector{server: s})
	s.http = httpServer(s.routes())
	return s, nil
}

// grpcOptions are those of every gRPC server of ours: bounds, spans, the audit of
// admin calls, the bearer token and TLS where they are set.
func grpcOptions(token string, secure *tls.Config, log *slog.Logger) []grpc.ServerOption {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	audit := audit{log: log}
	auth := authenticator{token: token, audit: audit}
	o := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessageBytes),
		grpc.MaxSendMsgSize(maxMessageBytes),
		// Fixed windows: without them gRPC estimates the path's bandwidth with a
		// ping for nearly every call, which costs a call between two processes
		// of one host a fifth of its time. The bytes of blocks do not come here.
		grpc.InitialWindowSize(streamWindowBytes),
		grpc.InitialConnWindowSize(connWindowBytes),
		grpc.StatsHandler(otelgrpc.NewServerHandler()),
		grpc.InTapHandle(auth.tap),
		grpc.UnaryInterceptor(audit.unary),
		grpc.StreamInterceptor(audit.stream),
		grpc.MaxConcurrentStreams(streamsMax),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
	}
	if secure != nil {
		o = append(o, grpc.Creds(credentials.NewTLS(secure)))
	}
	return o
}

// httpServer serves routes with limits on slow callers.
func httpServer(routes http.Handler) *http.Server {
	return &http.Server{Handler: routes, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute}
}

// Serve answers gRPC on control and, if it is not nil, HTTP on web, until
// Shutdown or until one of them fails.
func (s *Server) Serve(control, web net.Listener) error {
	s.messages.Store(s.calls.listen())
	serves := append(serveWeb(s.http, web), func() error { return s.grpc.Serve(control) })
	if s.opts.Local != nil {
		serves = append(serves, func() error { return s.opts.Local.Serve(s.cache.answerLocal) })
	}
	return serveAll(s.stop, serves...)
}

// stop ends both servers at once.
func (s *Server) stop() {
	s.stopStreams()
	s.calls.cancel()
	s.grpc.Stop()
	_ = s.http.Close() // it only closes listeners and connections
	if s.opts.Local != nil {
		_ = s.opts.Local.Close() // likewise
	}
}

func (s *Server) stopStreams() { s.stopOnce.Do(func() { close(s.stopping) }) }

// Shutdown drains: new writes are refused at once and /readyz fails, calls in
// flight finish until ctx ends, then the servers and the data plane are closed.
func (s *Server) Shutdown(ctx context.Context) error {
	s.node.Drain()
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
	if s.opts.Local != nil {
		// After the calls: no Read is under way that could use what comes back.
		errs = append(errs, s.opts.Local.Close())
	}
	return errors.Join(append(errs, s.data.Close())...)
}
