package server

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/webmux"
	"github.com/penstock-kv/penstock/server/console"
	"github.com/penstock-kv/penstock/server/planner"
)

// PlannerService serves the calls of a planner. *planner.Service and *planner.Elected implement it.
type PlannerService interface {
	pb.PlannerServer
	// Recent returns up to n of the last requests that were planned, the newest first, or the reason for
	// which the planner does not serve.
	Recent(n int) ([]planner.RecentRequest, error)
	// Close ends every stream. It may be called twice.
	Close()
}

// PlannerOptions are the options of a PlannerNode. The PlannerNode owns Service and closes it.
type PlannerOptions struct {
	Service PlannerService
	// Tokens, Roles, ClientCAs and TLS have the same meaning as in Options.
	Tokens    Tokens
	Roles     Roles
	ClientCAs ClientCAs
	TLS       *tls.Config
	Registry  *prometheus.Registry
	// Logger receives a line for each operator call (audit). Nil disables the audit.
	Logger *slog.Logger
	// Name is the name of the planner on the pages of its console.
	Name string
	// ConsoleInterval is the time between two updates of a page of the console. Default: 2 s.
	ConsoleInterval time.Duration
}

// PlannerNode serves a planner: gRPC for gateways and leaders, HTTP for browsers, scrapers and probes.
type PlannerNode struct {
	service PlannerService
	grpc    *grpc.Server
	http    *http.Server
	console *console.Console
	// connections is nil without TLS.
	connections *connections
}

// plannerMessageBytes is the maximum size of one message to a planner, in bytes. When an engine
// group registers again, it sends the payloads of all requests that it holds.
// planner.Options.PayloadBytes limits the payloads of the whole cluster.
const plannerMessageBytes = 288 << 20

// NewPlannerNode makes the servers. Serve starts them.
func NewPlannerNode(opts PlannerOptions) *PlannerNode {
	audit := newAudit(opts.Logger)
	guard := guard{tokens: opts.Tokens, roles: opts.Roles}
	n := &PlannerNode{service: opts.Service}
	if opts.TLS != nil {
		n.connections = newConnections(opts.TLS, opts.ClientCAs, opts.Logger)
	}
	n.grpc = grpc.NewServer(append(grpcOptions(opts.Tokens, guard, n.connections, audit), grpc.MaxRecvMsgSize(plannerMessageBytes))...)
	pb.RegisterPlannerServer(n.grpc, opts.Service)
	n.console = console.New(console.Options{Planner: plannerSource{opts.Service}, Access: consoleAccess{guard}, Node: opts.Name, Interval: opts.ConsoleInterval})
	n.http = httpServer(guard.web(n.routes(opts.Registry), audit))
	return n
}

// EndUnverified ends the connections of clients whose certificates auth.client_ca does not verify any more, and so the streams of
// engine groups and gateways. It is called after the file was replaced.
func (n *PlannerNode) EndUnverified() { n.connections.endUnverified() }

// routes are commonRoutes, /readyz, /leaderz and the console.
func (n *PlannerNode) routes(registry *prometheus.Registry) *webmux.Mux {
	mux := commonRoutes(registry)
	mux.HandleFunc("GET /readyz", n.readyz)
	mux.HandleFunc("GET /leaderz", n.leaderz)
	n.console.Register(mux)
	return mux
}

// leaderz responds 200 if this planner serves: it leads, or it is not elected. A standby responds 503.
// A load balancer that checks it sends all calls to the leader.
func (n *PlannerNode) leaderz(w http.ResponseWriter, r *http.Request) {
	st, err := n.service.Election(r.Context(), &pb.ElectionRequest{})
	w.Header().Set("Content-Type", "application/json")
	if err != nil || !st.GetLeads() {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"leads": st.GetLeads(), "term": st.GetTerm(), "leader": st.GetLeader()}) // as in readyz
}

// readyz responds 200 if the planner serves (leaderz) and engine groups of both roles (prefill and
// decode) are registered, and 503 otherwise. Without the groups the planner accepts requests, but the
// requests wait.
func (n *PlannerNode) readyz(w http.ResponseWriter, r *http.Request) {
	top, err := n.service.Top(r.Context(), &pb.TopRequest{})
	groups := map[string]int{"prefill": 0, "decode": 0}
	for _, g := range top.GetGroups() {
		if g.Role == pb.Side_SIDE_PREFILL {
			groups["prefill"]++
		} else {
			groups["decode"]++
		}
	}
	w.Header().Set("Content-Type", "application/json")
	if err != nil || groups["prefill"] == 0 || groups["decode"] == 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	answer := map[string]any{"groups": groups}
	if err != nil {
		answer["error"] = status.Convert(err).Message()
	}
	_ = json.NewEncoder(w).Encode(answer) // an error means that the caller has disconnected
}

// Serve serves gRPC on control and, if web is not nil, HTTP on web, until Shutdown is called or one
// of the servers fails.
func (n *PlannerNode) Serve(control, web net.Listener) error {
	stop := func() {
		n.console.Stop()
		n.grpc.Stop()
		_ = n.http.Close() // an error is ignored: Close closes only listeners and connections
	}
	return serveAll(stop, append(serveWeb(n.http, web), func() error { return n.grpc.Serve(control) })...)
}

// Shutdown ends every stream with a status that makes the client reconnect. It returns when all
// calls have ended. If ctx ends first, Shutdown cancels the remaining calls and returns ctx's
// error.
func (n *PlannerNode) Shutdown(ctx context.Context) error {
	n.service.Close()
	n.console.Stop()
	stopped := make(chan struct{})
	go func() {
		n.grpc.GracefulStop()
		close(stopped)
	}()
	select {
	case <-stopped:
	case <-ctx.Done():
		n.grpc.Stop()
		<-stopped
	}
	err := n.http.Shutdown(ctx)
	n.console.Close()
	return err
}
