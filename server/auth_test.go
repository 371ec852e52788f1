package server

import (
	"log/slog"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/access"
)

// TestTapDuringReload: a call whose headers arrive while a reload adds or removes the roles file is
// decided by the roles file or by the tokens, and never by neither.
func TestTapDuringReload(t *testing.T) {
	policy, err := access.Parse("roles.yaml", []byte("principals:\n  - {name: a, subjects: [CN=a], grants: [{roles: [read], namespaces: [m]}]}\n"))
	if err != nil {
		t.Fatal(err)
	}
	for name, loads := range map[string][]*access.Policy{
		"the file is removed": {policy, nil},
		"the file is added":   {nil, policy},
	} {
		n := 0
		a := authenticator{
			tokens: func() []string { return []string{"a token of the token file"} },
			guard: guard{roles: func() *access.Policy {
				p := loads[min(n, len(loads)-1)]
				n++
				return p
			}},
			audit: audit{log: slog.New(slog.DiscardHandler)},
		}
		if _, err := a.tap(t.Context(), &tap.Info{FullMethodName: pb.Cache_Match_FullMethodName, Header: metadata.MD{}}); status.Code(err) != codes.Unauthenticated {
			t.Errorf("%s: a call without a token: %v", name, err)
		}
		if n == 0 {
			t.Errorf("%s: the policy was not loaded", name)
		}
	}
}
