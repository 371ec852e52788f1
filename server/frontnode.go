package server

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"net"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
)

// Front is the handler of the API. *front.Front implements it. It is an interface because
// package front is a client of the cluster, and a storage node must not carry one.
type Front interface {
	http.Handler
	// Ready reports whether any engine is healthy. EngineHealth has the engines by name.
	Ready() bool
	EngineHealth() map[string]bool
	// Drain returns when what outlives the answers of requests has ended, or with ctx's error.
	Drain(ctx context.Context) error
	// Close ends the front. It is called when no request is served any more.
	Close()
}

// FrontOptions are what a FrontNode is made of. It takes over Front.
type FrontOptions struct {
	Front Front
	// TLS is that of the API's listener; nil serves plain HTTP.
	TLS      *tls.Config
	Registry *prometheus.Registry
}

// FrontNode is a gateway of inference engines on the network: the OpenAI-compatible API
// for clients, HTTP for scrapers and probes.
type FrontNode struct {
	front Front
	tls   *tls.Config
	api   *http.Server
	http  *http.Server
}

// NewFrontNode makes the servers; nothing is served yet.
func NewFrontNode(opts FrontOptions) *FrontNode {
	n := &FrontNode{front: opts.Front, tls: opts.TLS, api: httpServer(opts.Front)}
	mux := commonRoutes(opts.Registry)
	mux.HandleFunc("GET /readyz", n.readyz)
	n.http = httpServer(mux)
	return n
}

// readyz answers 200 if any engine is healthy, and else 503.
func (n *FrontNode) readyz(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if !n.front.Ready() {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"engines": n.front.EngineHealth()}) // an error: the caller has gone
}

// Serve answers the API on api and, if it is not nil, scrapers on web, until Shutdown or
// until one of them fails.
func (n *FrontNode) Serve(api, web net.Listener) error {
	if n.tls != nil {
		api = tls.NewListener(api, n.tls)
	}
	stop := func() { _ = errors.Join(n.api.Close(), n.http.Close()) } // they only close listeners and connections
	return serveAll(stop, append(serveWeb(n.http, web), func() error { return n.api.Serve(api) })...)
}

// Shutdown stops accepting, and returns when all requests have ended, streams included,
// or with ctx's error after it has cut them off.
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
