package server

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"net"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/internal/webmux"
)

// Front is the handler of the OpenAI-compatible API. *front.Front implements it. Front is an
// interface because package front imports the client of the cluster, and a storage node must not
// link that client.
type Front interface {
	http.Handler
	// Ready reports whether any engine is healthy. EngineHealth returns for each engine, by name,
	// whether it is healthy.
	Ready() bool
	EngineHealth() map[string]bool
	// Drain waits for work that continues after responses were sent. It returns nil when that work
	// has ended, or ctx's error.
	Drain(ctx context.Context) error
	// Close ends the front. It is called when no request is being served.
	Close()
}

// FrontOptions are the options of a FrontNode. The FrontNode owns and closes Front.
type FrontOptions struct {
	Front Front
	// TLS is the configuration of the API's listener. Nil serves plain HTTP.
	TLS      *tls.Config
	Registry *prometheus.Registry
}

// FrontNode serves a gateway of inference engines: the OpenAI-compatible API for clients, and HTTP
// for scrapers and probes.
type FrontNode struct {
	front Front
	tls   *tls.Config
	api   *http.Server
	http  *http.Server
}

// NewFrontNode makes the servers. Serve starts them.
func NewFrontNode(opts FrontOptions) *FrontNode {
	n := &FrontNode{front: opts.Front, tls: opts.TLS, api: httpServer(opts.Front)}
	n.http = httpServer(n.routes(opts.Registry))
	return n
}

// routes are commonRoutes and /readyz.
func (n *FrontNode) routes(registry *prometheus.Registry) *webmux.Mux {
	mux := commonRoutes(registry)
	mux.HandleFunc("GET /readyz", n.readyz)
	return mux
}

// readyz responds 200 if any engine is healthy, and 503 otherwise.
func (n *FrontNode) readyz(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if !n.front.Ready() {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"engines": n.front.EngineHealth()}) // an error means that the caller has disconnected
}

// Serve serves the API on api and, if web is not nil, scrapers on web, until Shutdown is called or
// one of the servers fails.
func (n *FrontNode) Serve(api, web net.Listener) error {
	if n.tls != nil {
		api = tls.NewListener(api, n.tls)
	}
	stop := func() { _ = errors.Join(n.api.Close(), n.http.Close()) } // an error is ignored: Close closes only listeners and connections
	return serveAll(stop, append(serveWeb(n.http, web), func() error { return n.api.Serve(api) })...)
}

// Shutdown stops accepting requests. It returns when all requests, including streams, have ended.
// If ctx ends first, it cuts the remaining requests off and returns ctx's error.
func (n *FrontNode) Shutdown(ctx context.Context) error {
	err := n.api.Shutdown(ctx)
	if err != nil {
		err = errors.Join(err, n.api.Close())
	} else {
		err = n.front.Drain(ctx)
	}
	n.front.Close()
	return errors.Join(err, n.http.Close())
}
