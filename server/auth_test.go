package server

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

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
			audit: newAudit(nil),
		}
		if _, err := a.tap(t.Context(), &tap.Info{FullMethodName: pb.Cache_Match_FullMethodName, Header: metadata.MD{}}); status.Code(err) != codes.Unauthenticated {
			t.Errorf("%s: a call without a token: %v", name, err)
		}
		if n == 0 {
			t.Errorf("%s: the policy was not loaded", name)
		}
	}
}

// TestRefusalsWithoutIdentityAreLimited: of the refused calls of callers without an identity, one in each
// second is logged, and the next line has the number of the others. The refused calls of a principal
// are all logged.
func TestRefusalsWithoutIdentityAreLimited(t *testing.T) {
	policy, err := access.Parse("roles.yaml", []byte("principals:\n  - {name: a, subjects: [CN=a], grants: [{roles: [read], namespaces: [m]}]}\n"))
	if err != nil {
		t.Fatal(err)
	}
	id, _ := policy.BySubject("CN=a")
	for name, c := range map[string]struct {
		roles  Roles
		method string
	}{
		"with roles":  {func() *access.Policy { return policy }, pb.Cache_Match_FullMethodName},
		"with tokens": {nil, pb.Admin_Status_FullMethodName},
	} {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			a := authenticator{
				tokens: func() []string { return []string{"a token of the token file"} },
				guard:  guard{roles: c.roles},
				audit:  newAudit(slog.New(slog.NewTextHandler(&log, nil))),
			}
			call := func() {
				t.Helper()
				if _, err := a.tap(t.Context(), &tap.Info{FullMethodName: c.method, Header: metadata.MD{}}); status.Code(err) != codes.Unauthenticated {
					t.Errorf("%s: %v", name, err)
				}
			}
			for range 1000 {
				call()
			}
			if n := strings.Count(log.String(), "\n"); n != 1 {
				t.Errorf("%s: %d lines of 1000 refused calls, want 1", name, n)
			}
			log.Reset()
			time.Sleep(time.Second)
			call()
			if !strings.Contains(log.String(), "left_out=999") {
				t.Errorf("%s: the next line is %s", name, log.String())
			}
			log.Reset()
			for _, err := range []error{lacks(id, access.Write, "on any namespace"), refuse(codes.Unauthenticated, "removed")} {
				for range 3 {
					a.audit.line(withIdentity(context.Background(), id), pb.Cache_Reserve_FullMethodName, nil, nil, err)
				}
			}
			if n := strings.Count(log.String(), "principal=a"); n != 6 {
				t.Errorf("%s: %d lines of 6 refused calls of a principal", name, n)
			}
		})
	}
}
