package server_test

import (
	"crypto/sha256"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/membership"
)

// TestNoRolesYet: a node that has read no roles document from etcd is not ready, and refuses every call with a code after
// which clients try again.
func TestNoRolesYet(t *testing.T) {
	var log testkit.Log
	h := newHost(t, func(o *server.Options) { o.Roles, o.Logger = access.None, slog.New(slog.NewTextHandler(&log, nil)) }, nil)
	if code, body := get(t, h.web+"/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, `"no_roles"`) {
		t.Errorf("/readyz: %d, %s", code, body)
	}
	if code, body := get(t, h.web+"/metrics"); code != http.StatusServiceUnavailable || !strings.Contains(body, "no roles document") {
		t.Errorf("/metrics: %d, %s", code, body)
	}
	if code, body := get(t, h.web+"/healthz"); code != http.StatusOK {
		t.Errorf("/healthz: %d, %s", code, body)
	}
	const calls = 200
	for i := range calls {
		principal := []string{"", "root"}[i%2]
		if _, err := h.admin.Status(as(t.Context(), principal), &pb.StatusRequest{}); status.Code(err) != codes.Unavailable {
			t.Errorf("a call with the token of %q: %v", principal, err)
		}
	}
	if n := strings.Count(log.String(), "call refused"); n == 0 || n > calls/2 {
		t.Errorf("%d lines of %d refused calls", n, calls)
	}
}

// TestReplaceRolesAfterRevocation: a principal whose roles the document in etcd lacks cannot take them back by a node
// that uses an earlier document.
func TestReplaceRolesAfterRevocation(t *testing.T) {
	document, err := membership.NewRoles(membership.RolesOptions{Endpoints: testetcd.Start(t, 1).Endpoints, Key: "/penstock/roles", Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer document.Close()
	text := func(names ...string) []byte {
		text := "principals:\n"
		for _, name := range names {
			text += fmt.Sprintf("  - {name: %s, tokens: [sha256:%x], grants: [{roles: [operate, admin], namespaces: [\"*\"]}]}\n", name, sha256.Sum256([]byte(tokenOf(name))))
		}
		return []byte(text)
	}
	both := text("removed", "sre")
	policy, err := access.Parse("both", both)
	if err != nil {
		t.Fatal(err)
	}
	id, ok := policy.ByHeader("Bearer " + tokenOf("removed"))
	if !ok {
		t.Fatal("the principal has no credential")
	}
	replace := func(text []byte, revision int64) (int64, error) {
		_, now, err := server.ReplaceRoles(t.Context(), document, text, revision, &id.Credential, false)
		return now, err
	}
	first, err := replace(both, 0)
	if err != nil {
		t.Fatal(err)
	}
	second, err := document.Set(t.Context(), text("sre"), first)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := replace(both, second); status.Code(err) != codes.PermissionDenied {
		t.Errorf("the removed principal replaces the document: %v", err)
	}
	if d, err := document.Get(t.Context()); err != nil || d.Revision != second {
		t.Errorf("the document has revision %d, %v; want %d", d.Revision, err, second)
	}
	// Without a valid document in etcd, the document that the node uses decides.
	third, err := document.Set(t.Context(), []byte("principals: 7"), second)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := replace(both, third); err != nil {
		t.Errorf("the document is damaged: %v", err)
	}
}
