package server

import (
	"net/http"
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
	// The metrics have the names and the traffic of all namespaces.
	"/metrics":         access.Operate,
	"/metrics/summary": access.Operate,
	"/debug/pprof/":    access.Operate,
}

// webRule returns the role that a path needs.
func webRule(path string) access.Role {
	if role, ok := webRules[path]; ok {
		return role
	}
	return access.Operate
}

// web passes the allowed requests on to next. Probes are admitted without a token, because kubelets
// and load balancers have none.
func (g guard) web(next http.Handler, log audit) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		policy := g.roles.current()
		if policy == nil {
			next.ServeHTTP(w, r)
			return
		}
		id, err := identify(policy, r.Header.Values("Authorization"), "")
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
		}
		if err == nil {
			next.ServeHTTP(w, r.WithContext(ctx))
			return
		}
		log.refusal(ctx, r.Method+" "+strings.ToValidUTF8(r.URL.Path, ""), r.RemoteAddr, nil, err)
		code := http.StatusForbidden
		if status.Code(err) == codes.Unauthenticated {
			code = http.StatusUnauthorized
			w.Header().Set("WWW-Authenticate", "Bearer")
		}
		http.Error(w, err.Error(), code)
	})
}
