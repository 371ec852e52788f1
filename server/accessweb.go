package server

import (
	"context"
	"net"
	"net/http"
	"os"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/server/access"
)

// webRules has the role that each path of the HTTP listener needs. 0 means that every caller is
// admitted. All other paths, such as those below /debug/pprof/, need operate.
var webRules = map[string]access.Role{
	"/healthz": 0,
	"/health":  0,
	"/readyz":  0,
	"/leaderz": 0,
	// The metrics have the names and the traffic of all namespaces.
	"/metrics":         access.Operate,
	"/metrics/summary": access.Operate,
	"/debug/pprof/":    access.Operate,
	// The console. The static files are the same for every node.
	"/":                access.Operate,
	"/live/overview":   access.Operate,
	"/namespaces":      access.Any,
	"/live/namespaces": access.Any,
	// The reasons of cuts and the heat concern all namespaces.
	"/prefixes":      access.Operate,
	"/live/prefixes": access.Operate,
	"/pins":          access.Admin,
	"/live/pins":     access.Admin,
	"/actions":       access.Operate,
	"/live/actions":  access.Operate,
	// The console of a planner, beside "/".
	"/live/dualpath":     access.Operate,
	"/requests":          access.Operate,
	"/live/requests":     access.Operate,
	"/console/style.css": 0,
	"/console/live.js":   0,
	"/console/icon.svg":  0,
}

// webShownOutdated has the paths with a role that an outdated policy admits, as shownOutdated has the methods.
var webShownOutdated = map[string]bool{
	"/metrics":         true,
	"/metrics/summary": true,
	"/":                true,
	"/live/overview":   true,
	"/live/dualpath":   true,
}

// webRule returns the role that a path needs.
func webRule(path string) access.Role {
	if role, ok := webRules[path]; ok {
		return role
	}
	return access.Operate
}

// admitWeb decides a request by its path and the roles file in use. The context carries the caller's
// identity, also if the request is refused.
func (g guard) admitWeb(r *http.Request) (context.Context, error) {
	policy := g.roles.current()
	if policy == nil {
		return r.Context(), admitHost(r)
	}
	id, err := identify(policy, credentialsOf(r), "")
	if id.Principal == nil {
		id.Principal = new(access.Principal)
	}
	ctx := withIdentity(r.Context(), id)
	need := webRule(r.URL.Path)
	switch {
	case need == 0:
		err = nil
	case err == nil && !id.Principal.HasAnywhere(need):
		err = lacks(id, need, "on any namespace")
	case err == nil:
		err = outdated(policy, webShownOutdated[r.URL.Path])
	}
	return ctx, err
}

// admitHost refuses a request for the console, over the loopback interface and without a token, whose
// Host is a name of another machine. A browser sends such a request for a page of an attacker whose
// name resolves to 127.0.0.1 (DNS rebinding), and the page could read the response.
func admitHost(r *http.Request) error {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if !ok || !local.IP.IsLoopback() || !isConsole(r.URL.Path) {
		return nil
	}
	name := r.Host
	if host, _, err := net.SplitHostPort(name); err == nil {
		name = host
	}
	name = strings.ToLower(strings.Trim(name, "[]"))
	own, err := os.Hostname()
	if net.ParseIP(name) != nil || name == "localhost" || strings.HasSuffix(name, ".localhost") || err == nil && name == strings.ToLower(own) {
		return nil
	}
	return refuse(codes.PermissionDenied, "the console is open to every caller on this machine, so a request over the loopback interface must be for localhost, an IP address or the name of this machine, and not for %q; set auth.roles_file or auth.roles_etcd to use another name", shorten(name))
}

// credentialsOf returns the Authorization headers of a request. A browser sends the token of the
// console's user as the password of HTTP's Basic scheme; the user name is not used. Other paths need
// the Bearer scheme.
func credentialsOf(r *http.Request) []string {
	headers := r.Header.Values("Authorization")
	if _, password, ok := r.BasicAuth(); ok && len(headers) == 1 && isConsole(r.URL.Path) {
		return []string{"Bearer " + password}
	}
	return headers
}

// web passes the allowed requests on to next. Probes are admitted without a token, because kubelets
// and load balancers have none.
func (g guard) web(next http.Handler, log audit) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, err := g.admitWeb(r)
		if err == nil {
			next.ServeHTTP(w, r.WithContext(ctx))
			return
		}
		log.refusal(ctx, r.Method+" "+strings.ToValidUTF8(r.URL.Path, ""), r.RemoteAddr, nil, err)
		code := http.StatusForbidden
		switch status.Code(err) {
		case codes.Unavailable: // there is no roles document from etcd, or it is outdated
			code = http.StatusServiceUnavailable
		case codes.Unauthenticated:
			code = http.StatusUnauthorized
			w.Header().Set("WWW-Authenticate", "Bearer")
			if isConsole(r.URL.Path) {
				w.Header().Set("WWW-Authenticate", `Basic realm="Penstock: the token is the password", charset="UTF-8"`)
			}
		}
		http.Error(w, err.Error(), code)
	})
}
