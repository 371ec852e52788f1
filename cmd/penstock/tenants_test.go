package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testetcd"
)

// tenants returns the tenants that the status of a node has.
func (r *rolesRig) tenants(s *served) []*pb.TenantStatus {
	r.Helper()
	return decode[struct{ Tenants []*pb.TenantStatus }](r, r.as(s, "sre", "status", "--format", "json")).Tenants
}

// TestTenantStatus: the status shows the tenants with a quota, also after a change of the roles file, which is watched,
// and after a restart, which counts the stored blocks again.
func TestTenantStatus(t *testing.T) {
	testkit.VerifyNone(t)
	r := &rolesRig{T: t, dir: t.TempDir()}
	all := r.principal("sre", `{roles: [operate, admin, read, write], namespaces: ["*"]}`)
	document := func(quotas ...string) string { return "principals:\n" + all + "tenants:\n" + strings.Join(quotas, "") }
	file := r.file(document("  - {namespaces: a/*, quota: 1GiB}\n"))
	args := []string{"--auth-roles-file", file}
	s := startServed(t, filepath.Join(r.dir, "data"), args...)
	r.as(s, "sre", "ns", "create", "a/m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "512").must(t)
	tokens := writeFile(t, r.dir, "tokens", []byte("1 2 3 4 5 6 7 8"))
	data := writeFile(t, r.dir, "block", slices.Repeat([]byte("kv"), 4096))
	r.as(s, "sre", "block", "put", "a/m", "--tokens-file", tokens, "--data-file", data).must(t)
	check := func(s *served, quota, used int64) {
		t.Helper()
		got := r.tenants(s)
		if len(got) == 0 || got[0].GetNamespaces() != "a/*" || got[0].GetQuotaBytes() != quota || got[0].GetUsedBytes() != used || got[0].GetNamespaceCount() != 1 {
			t.Errorf("tenants %v; want a/* with %d of %d bytes", got, used, quota)
		}
	}
	used := r.tenants(s)[0].GetUsedBytes()
	if used <= 0 {
		t.Fatal("the status does not count the stored blocks")
	}
	check(s, 1<<30, used)
	if out := r.as(s, "sre", "status").must(t); !strings.Contains(strings.Join(strings.Fields(out), " "), "TENANT NAMESPACES USED QUOTA EVICTED REFUSED BLOCKS a/* 1 ") || !strings.Contains(out, "1.0 GiB  0 B      0\n") {
		t.Errorf("the status has no table of the tenants:\n%s", out)
	}
	if err := os.WriteFile(file, []byte(document("  - {namespaces: b/*, quota: 1TiB}\n", "  - {namespaces: a/*, quota: 2GiB}\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	awaitTrue(t, "the changed file is in use", func() bool { return len(r.tenants(s)) == 2 })
	check(s, 2<<30, used)
	if got := r.tenants(s)[1]; got.GetNamespaces() != "b/*" || got.GetUsedBytes() != 0 || got.GetNamespaceCount() != 0 {
		t.Errorf("a tenant without namespaces: %v", got)
	}
	s.stop()
	s = startServed(t, filepath.Join(r.dir, "data"), args...)
	check(s, 2<<30, used)
}

// TestTenantsInEtcd: the quotas of a document in etcd are in force once it is in use. A document with a quota below one
// block is refused by cluster roles set.
func TestTenantsInEtcd(t *testing.T) {
	testkit.VerifyNone(t)
	r := &rolesRig{t, testetcd.Start(t, 1), t.TempDir()}
	sre := r.principal("sre", `{roles: [operate, admin, read, write], namespaces: ["*"]}`)
	document := func(quota string) string {
		return fmt.Sprintf("principals:\n%stenants:\n  - {namespaces: a/*, quota: %s}\n", sre, quota)
	}
	r.put(document("1GiB"))
	a := r.node(r.etcd.Endpoints[0], "60s")
	awaitTrue(t, "the document is in use", func() bool { return r.as(a, "sre", "status").code == 0 })
	awaitTrue(t, "a namespace is created", func() bool {
		return r.as(a, "sre", "ns", "create", "a/m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "512").code == 0
	})
	if got := r.tenants(a); len(got) != 1 || got[0].GetQuotaBytes() != 1<<30 || got[0].GetNamespaceCount() != 1 {
		t.Errorf("tenants %v", got)
	}
	line, _, _ := strings.Cut(r.as(a, "sre", "cluster", "roles", "get").must(t), "\n")
	if out := r.as(a, "sre", "cluster", "roles", "set", r.file(line+"\n"+document("1KiB"))); out.code == 0 || !strings.Contains(out.err, "too small for one block") {
		t.Errorf("a quota below one block: %d, %s", out.code, out.err)
	}
	if out := r.as(a, "sre", "cluster", "roles", "set", r.file(line+"\n"+document("1MiB"))).must(t); !strings.Contains(out, "tenant a/*: quota: 1073741824 → 1048576") {
		t.Errorf("set prints %q", out)
	}
	awaitTrue(t, "the second document is in use", func() bool { return r.tenants(a)[0].GetQuotaBytes() == 1<<20 })
	if out := r.as(a, "sre", "ns", "create", "a/large", "--layers", "8", "--block-tokens", "16", "--token-bytes", "32768"); out.code == 0 || !strings.Contains(out.err, "tenant a/*") {
		t.Errorf("a namespace of which no block fits: %d, %s", out.code, out.err)
	}
	// Etcd has a document that no node checked. Its grants are used, and its quota refuses every write.
	r.put(document("1KiB"))
	awaitTrue(t, "the third document is in use", func() bool { return r.tenants(a)[0].GetQuotaBytes() == 1<<10 })
	tokens := writeFile(t, r.dir, "tokens", []byte("1 2 3 4"))
	data := writeFile(t, r.dir, "block", slices.Repeat([]byte("kv"), 2048))
	if out := r.as(a, "sre", "block", "put", "a/m", "--tokens-file", tokens, "--data-file", data); out.code == 0 || !strings.Contains(out.err, "over_quota") {
		t.Errorf("a write without room: %d, %s", out.code, out.err)
	}
}
