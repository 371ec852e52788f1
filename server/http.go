package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"

	"github.com/penstock-kv/penstock/internal/webmux"
)

// commonRoutes are /metrics, /healthz (alias /health) and, for callers on this machine only,
// /debug/pprof.
func commonRoutes(registry *prometheus.Registry) *webmux.Mux {
	mux := new(webmux.Mux)
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{Registry: registry}))
	mux.HandleFunc("GET /healthz", healthz)
	mux.HandleFunc("GET /health", healthz)
	mux.Handle("/debug/pprof/", loopbackOnly(http.HandlerFunc(pprof.Index)))
	mux.Handle("/debug/pprof/cmdline", loopbackOnly(http.HandlerFunc(pprof.Cmdline)))
	mux.Handle("/debug/pprof/profile", loopbackOnly(http.HandlerFunc(pprof.Profile)))
	mux.Handle("/debug/pprof/symbol", loopbackOnly(http.HandlerFunc(pprof.Symbol)))
	mux.Handle("/debug/pprof/trace", loopbackOnly(http.HandlerFunc(pprof.Trace)))
	return mux
}

// serveAll calls the functions serves concurrently and returns when all have returned. When one of
// them fails, serveAll calls stop, which ends the others. The error is nil if all of them ended
// because of a shutdown.
func serveAll(stop func(), serves ...func() error) error {
	failed := make(chan error, len(serves))
	for _, serve := range serves {
		go func() { failed <- serve() }()
	}
	var errs []error
	for range serves {
		if err := <-failed; err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, grpc.ErrServerStopped) {
			errs = append(errs, err)
			stop()
		}
	}
	return errors.Join(errs...)
}

// serveWeb returns a slice with one function, which serves HTTP on web, or an empty slice if web is
// nil.
func serveWeb(s *http.Server, web net.Listener) []func() error {
	if web == nil {
		return nil
	}
	return []func() error{func() error { return s.Serve(web) }}
}

// routes are commonRoutes, /metrics/summary, /readyz and the console.
func (s *Server) routes() *webmux.Mux {
	mux := commonRoutes(s.opts.Registry)
	mux.HandleFunc("GET /metrics/summary", s.summary)
	mux.HandleFunc("GET /readyz", s.readyz)
	s.console.Register(mux)
	return mux
}

// healthz responds 200 while the process runs.
func healthz(w http.ResponseWriter, _ *http.Request) {
	fmt.Fprintln(w, "ok")
}

// readyz responds 200 if clients should send traffic to the node, and 503 otherwise
// (storage.Node.Ready, Cluster.Admit, no roles document from etcd or an outdated one). The body has the reason and the state of each
// volume. With roles only callers with the role operate get these, because they have paths of the node.
func (s *Server) readyz(w http.ResponseWriter, r *http.Request) {
	state, reason := s.node.WriteState()
	w.Header().Set("Content-Type", "application/json")
	err := s.node.Ready()
	if err == nil && s.opts.Cluster != nil {
		if err = s.opts.Cluster.Admit(""); err != nil {
			state = "no_lease"
		}
	}
	if policy := s.guard.roles.current(); err == nil && policy != nil && policy.Principals() == 0 {
		state, err = "no_roles", errors.New("there is no roles document from etcd, so every call is refused")
	} else if err == nil && policy != nil {
		if err = outdated(policy, false); err != nil {
			state = "no_roles"
		}
	}
	if err != nil {
		reason = err.Error()
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	type volumeState struct {
		Path   string `json:"path"`
		State  string `json:"state"`
		Reason string `json:"reason,omitempty"`
	}
	answer := struct {
		State   string        `json:"state"`
		Reason  string        `json:"reason"`
		Volumes []volumeState `json:"volumes"`
	}{State: state, Reason: clip(reason)}
	if !operates(r.Context()) {
		_ = json.NewEncoder(w).Encode(map[string]string{"state": state}) // an error means that the caller has disconnected
		return
	}
	for _, v := range s.node.Stats().Store.Volumes {
		vs := volumeState{Path: v.Path, State: v.Health.State.String()}
		if v.Health.Cause != nil {
			vs.Reason = sentence(v.Health.Cause)
		}
		answer.Volumes = append(answer.Volumes, vs)
	}
	_ = json.NewEncoder(w).Encode(answer) // an error means that the caller has disconnected
}

// summary responds with a short text, for use with curl.
func (s *Server) summary(w http.ResponseWriter, _ *http.Request) {
	st := s.status()
	fmt.Fprintf(w, "node=%s state=%s io=%s blocks=%d used_bytes=%d capacity_bytes=%d namespaces=%d leases=%d arena_used_bytes=%d rss_bytes=%d corrupt_blocks=%d\n",
		st.GetNode(), st.GetState(), st.GetIo(), st.GetBlocks(), st.GetUsedBytes(), st.GetCapacityBytes(), st.GetNamespaces(), st.GetLeases(), st.GetArenaUsedBytes(), st.GetRssBytes(), st.GetCorruptBlocks())
}

// loopbackOnly restricts profiles, which contain memory contents, to callers on this machine.
func loopbackOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.RemoteAddr)
		if ip := net.ParseIP(host); err != nil || ip == nil || !ip.IsLoopback() {
			http.Error(w, "profiles are served to loopback callers only", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}
