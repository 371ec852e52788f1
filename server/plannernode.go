package server

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/planner"
)

// PlannerOptions are what a PlannerNode is made of. It takes over Service.
type PlannerOptions struct {
	Service *planner.Service
	// BearerToken and TLS are as in Options.
	BearerToken string
	TLS         *tls.Config
	Registry    *prometheus.Registry
	// Logger takes the operator's calls (audit); nil: none.
	Logger *slog.Logger
}

// PlannerNode is a planner on the network: gRPC for gateways and leaders, HTTP
// for scrapers and probes.
type PlannerNode struct {
	service *planner.Service
	grpc    *grpc.Server
	http    *http.Server
}

// plannerMessageBytes bounds one message to a planner. A group that registers again
// brings the payloads of all requests that it holds; planner.Options.PayloadBytes
// bounds those of the whole cluster.
const plannerMessageBytes = 288 << 20

// NewPlannerNode makes the servers; nothing is served yet.
func NewPlannerNode(opts PlannerOptions) *PlannerNode {
	n := &PlannerNode{service: opts.Service, grpc: grpc.NewServer(append(grpcOptions(opts.BearerToken, opts.TLS, opts.Logger), grpc.MaxRecvMsgSize(plannerMessageBytes))...)}
	pb.RegisterPlannerServer(n.grpc, opts.Service)
	mux := commonRoutes(opts.Registry)
	mux.HandleFunc("GET /readyz", n.readyz)
	n.http = httpServer(mux)
	return n
}

// readyz answers once groups of both roles are up: before, every request only
// waits. The planner takes submissions all the same.
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
	_ = json.NewEncoder(w).Encode(map[string]any{"groups": groups}) // the caller has gone
}

// Serve answers gRPC on control and, if it is not nil, HTTP on web, until
// Shutdown or until one of them fails.
func (n *PlannerNode) Serve(control, web net.Listener) error {
	stop := func() {
		n.grpc.Stop()
		_ = n.http.Close() // it only closes listeners and connections
	}
	return serveAll(stop, append(serveWeb(n.http, web), func() error { return n.grpc.Serve(control) })...)
}

// Shutdown ends every stream with a word to come back, and returns when all
// calls have ended, or with ctx's error after it has cut them off.
func (n *PlannerNode) Shutdown(ctx context.Context) error {
	n.service.Close()
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
	return n.http.Shutdown(ctx)
}
