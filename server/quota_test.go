package server_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	api "github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/membership"
	"github.com/penstock-kv/penstock/server/reload"
)

// rolesText is a roles document in place of etcd.
type rolesText struct{ membership.RolesDocument }

func (d *rolesText) Key() string { return "/penstock/roles" }

func (d *rolesText) Get(context.Context) (membership.RolesDocument, error) {
	return d.RolesDocument, nil
}

func (d *rolesText) Set(_ context.Context, text []byte, _ int64) (int64, error) {
	d.Text, d.Revision = text, d.Revision+1
	return d.Revision, nil
}

// TestListTenants: a caller sees the tenants on all of whose namespaces it has a role, by its prefix or a
// shorter one, and no other tenant.
func TestListTenants(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles = policy.current }, nil)
	ns := h.namespace()
	h.write(ns, 3)
	h.node.SetTenantQuotas([]kv.TenantQuota{{Prefix: "m", Bytes: 1 << 20}, {Prefix: "team-a/", Bytes: 1 << 30}, {Prefix: "team-b/", Bytes: 1 << 29}})
	list := func(ctx context.Context) (out []string, all []*pb.TenantStatus) {
		t.Helper()
		resp, err := h.admin.ListTenants(ctx, &pb.ListTenantsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, tn := range resp.GetTenants() {
			out = append(out, tn.GetNamespaces())
		}
		return out, resp.GetTenants()
	}
	if got, _ := list(t.Context()); fmt.Sprint(got) != "[m* team-a/* team-b/*]" {
		t.Errorf("without roles: %q", got)
	}
	policy.set(t, "reader read team-a/*", "writer write team-b/*", "part read team-a/x/*", "one read,write,admin team-a/x", "both read team-*", "operator operate *", "other read other*", "root admin,read,write *")
	for principal, want := range map[string]string{
		"reader": "[team-a/*]", "writer": "[team-b/*]", "part": "[]", "one": "[]", "both": "[team-a/* team-b/*]", "operator": "[m* team-a/* team-b/*]", "other": "[]", "root": "[m* team-a/* team-b/*]",
	} {
		if got, _ := list(as(t.Context(), principal)); fmt.Sprint(got) != want {
			t.Errorf("%s sees the tenants %q; want %s", principal, got, want)
		}
	}
	_, all := list(as(t.Context(), "root"))
	used := h.node.Stats().Index.Bytes
	if m := all[0]; m.GetUsedBytes() != used || used == 0 || m.GetQuotaBytes() != 1<<20 || m.GetNamespaceCount() != 1 || m.GetEvictedBlocks() != 0 || m.GetRefusedBlocks() != 0 {
		t.Errorf("the tenant m* is %v; want %d bytes", m, used)
	}
	// Above the quota the node evicts and refuses blocks. List, status and metrics count these blocks.
	h.node.SetTenantQuotas([]kv.TenantQuota{{Prefix: "m", Bytes: used / 3}})
	if _, err := h.node.Evict("", 1, false); err != nil {
		t.Fatal(err)
	}
	_, all = list(as(t.Context(), "root"))
	s, err := h.admin.Status(as(t.Context(), "operator"), &pb.StatusRequest{})
	if err != nil || len(all) != 1 || len(s.GetTenants()) != 1 || !proto.Equal(all[0], s.GetTenants()[0]) || all[0].GetEvictedBlocks() == 0 || all[0].GetEvictedBytes() == 0 {
		t.Errorf("above the quota: %v, %v; the status has %v", all, err, s.GetTenants())
	}
}

// TestTenants: the status and the metrics show what the tenants with a quota use, until they have none. A roles document
// with a quota below one block of an existing namespace is refused.
func TestTenants(t *testing.T) {
	var policy roles
	document := &rolesText{}
	h := newHost(t, func(o *server.Options) {
		o.Roles, o.RolesDocument = policy.current, document
		o.RolesState = func() reload.RolesState { return reload.RolesState{Policy: policy.current()} }
	}, nil)
	ctx := as(t.Context(), "root")
	ns := h.namespace() // before there are roles
	if _, err := h.admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: "x", Geometry: api.GeometryProto(geometry)}}); err != nil {
		t.Fatal(err)
	}
	h.write(ns, 3)
	policy.set(t, "root admin,read,write *", "root operate *")
	s, err := h.admin.Status(ctx, &pb.StatusRequest{})
	if err != nil || len(s.GetTenants()) != 0 {
		t.Fatalf("tenants without quotas: %v, %v", s.GetTenants(), err)
	}
	h.node.SetTenantQuotas([]kv.TenantQuota{{Prefix: "z", Bytes: 1 << 30}, {Prefix: "m", Bytes: 1 << 20}})
	if s, err = h.admin.Status(ctx, &pb.StatusRequest{}); err != nil {
		t.Fatal(err)
	}
	used := h.node.Stats().Index.Bytes
	got := s.GetTenants()
	if len(got) != 2 || got[0].GetNamespaces() != "m*" || got[0].GetQuotaBytes() != 1<<20 || got[0].GetUsedBytes() != used || used == 0 || got[0].GetNamespaceCount() != 1 ||
		got[1].GetNamespaces() != "z*" || got[1].GetUsedBytes() != 0 || got[1].GetNamespaceCount() != 0 {
		t.Errorf("the tenants are %v; %d bytes are used", got, used)
	}
	page := h.metricsAs("root")
	for _, line := range []string{fmt.Sprintf(`penstock_tenant_used_bytes{tenant="m*"} %d`, used), `penstock_tenant_quota_bytes{tenant="m*"} 1.048576e+06`, `penstock_tenant_used_bytes{tenant="z*"} 0`} {
		if !strings.Contains(page, line+"\n") {
			t.Errorf("/metrics has no line %s", line)
		}
	}

	text := func(quota string) []byte {
		return fmt.Appendf(nil, "principals:\n  - {name: root, tokens: [sha256:%x], grants: [{roles: [operate, admin], namespaces: [\"*\"]}]}\ntenants:\n  - {namespaces: m*, quota: %s}\n", sha256.Sum256([]byte(tokenOf("root"))), quota)
	}
	for _, dryRun := range []bool{true, false} {
		_, err := h.admin.SetRoles(ctx, &pb.SetRolesRequest{Document: text("100"), DryRun: dryRun})
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "tenant m*: a quota of 100 bytes is too small for one block") || document.Revision != 0 {
			t.Errorf("a quota below one block: %v, revision %d", err, document.Revision)
		}
	}
	if r, err := h.admin.SetRoles(ctx, &pb.SetRolesRequest{Document: text("1GiB")}); err != nil || r.GetRevision() != 1 || !strings.Contains(strings.Join(r.GetChanges(), "\n"), "tenant m* is added: quota 1073741824") {
		t.Errorf("a valid document: %v, %v", r, err)
	}
	h.node.SetTenantQuotas(nil)
	if page := h.metricsAs("root"); strings.Contains(page, "penstock_tenant_") {
		t.Error("the metrics show tenants without a quota")
	}
}
