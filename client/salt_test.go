package client_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/storage"
)

// tenantToken is the bearer token of the tenant of tenantRoles whose namespaces have a prefix.
func tenantToken(prefix string) string { return "a bearer token of " + prefix }

// tenantRoles returns a policy with the tenants a and b, whose namespaces begin with a/ and b/, and the
// administrator root.
func tenantRoles(t testing.TB) server.Roles {
	t.Helper()
	var text strings.Builder
	text.WriteString("principals:\n")
	for name, pattern := range map[string]string{"a": "a/*", "b": "b/*", "root": "*"} {
		fmt.Fprintf(&text, "  - {name: %s, tokens: [sha256:%x], grants: [{roles: [read, write, admin], namespaces: [%q]}]}\n", name, sha256.Sum256([]byte(tenantToken(name))), pattern)
	}
	policy, err := access.Parse("roles.yaml", []byte(text.String()))
	if err != nil {
		t.Fatal(err)
	}
	return func() *access.Policy { return policy }
}

// tenantHosts returns n nodes with tenantRoles, in the order of their addresses.
func tenantHosts(t testing.TB, n int) []*host {
	t.Helper()
	roles := tenantRoles(t)
	var hosts []*host
	for range n {
		hosts = append(hosts, newHost(t, func(_ *storage.Options, o *server.Options) { o.Roles = roles }))
	}
	slices.SortFunc(hosts, func(a, b *host) int { return strings.Compare(a.control, b.control) })
	return hosts
}

// newTenant is newRig for a principal of tenantRoles.
func newTenant(t testing.TB, name string, hosts ...*host) *rig {
	t.Helper()
	return newRig(t, func(o *client.Options) { o.BearerToken = tenantToken(name) }, hosts...)
}

// define is the definition of a namespace without a salt.
func define(name string) kv.Namespace {
	return kv.Namespace{Name: name, Geometry: geometry, Index: kv.IndexTrie}
}

func (r *rig) ensure(def kv.Namespace) kv.Namespace {
	r.t.Helper()
	ns, err := r.store.EnsureNamespace(r.t.Context(), def)
	if err != nil {
		r.t.Fatal(err)
	}
	return ns
}

// saltOn returns the salt of a namespace on one node, and whether the node has the namespace.
func (h *host) saltOn(name string) ([]byte, bool) {
	ns, err := h.node.Namespace(name)
	return ns.Salt, err == nil
}

// TestTenantSalt: a namespace that a tenant creates has a random salt, so neither its definition
// without the salt nor another namespace gives its block ids. Another client of the tenant gets the
// same ids. The namespaces of an administrator have no salt.
func TestTenantSalt(t *testing.T) {
	hosts := tenantHosts(t, 1)
	a, b, root := newTenant(t, "a", hosts...), newTenant(t, "b", hosts...), newTenant(t, "root", hosts...)
	ns := a.ensure(define("a/m"))
	if len(ns.Salt) != 32 || slices.Equal(ns.Salt, make([]byte, 32)) {
		t.Fatalf("a salt of %d bytes", len(ns.Salt))
	}
	ids := chain(ns, 4, 1)
	a.mustPut(ns, ids)
	if guess := chain(define("a/m"), 4, 1); slices.Equal(guess, ids) {
		t.Error("the ids do not depend on the salt")
	}
	of := b.ensure(define("b/m"))
	if slices.Equal(of.Salt, ns.Salt) {
		t.Error("two namespaces have one salt")
	}
	for what, ids := range map[string][]kv.BlockID{"its own ids": chain(of, 4, 1), "the ids of a": ids} {
		if got := b.get(of, ids); got.Blocks != 0 {
			t.Errorf("b finds %d blocks of a by %s", got.Blocks, what)
		}
	}
	ns.ID = 0
	if _, err := b.store.Match(t.Context(), client.MatchRequest{Namespace: ns, IDs: ids}); !errors.Is(err, client.ErrAuth) {
		t.Errorf("b matches in a/m: %v", err)
	}
	if _, err := b.store.EnsureNamespace(t.Context(), define("a/m")); !errors.Is(err, client.ErrAuth) {
		t.Errorf("b ensures a/m: %v", err)
	}
	again := newTenant(t, "a", hosts...)
	same := again.ensure(define("a/m"))
	if got := again.get(same, chain(same, 4, 1)); got.Blocks != 4 {
		t.Errorf("another client of a finds %d of 4 blocks", got.Blocks)
	}
	if ns := root.ensure(define("shared")); len(ns.Salt) != 0 {
		t.Errorf("an administrator's namespace has a salt of %d bytes", len(ns.Salt))
	}
}

// TestExplicitSalt: a caller with a salt needs the salt of the namespace, and no error has a salt. A namespace
// without a salt stays without one.
func TestExplicitSalt(t *testing.T) {
	hosts := tenantHosts(t, 2)
	a, root := newTenant(t, "a", hosts...), newTenant(t, "root", hosts...)
	ns := a.ensure(define("a/m"))
	given := define("a/m")
	given.Salt = ns.Salt
	if got := a.ensure(given); !slices.Equal(got.Salt, ns.Salt) {
		t.Error("the salt of the namespace gives another namespace")
	}
	given.Salt = []byte("s3cret")
	_, err := a.store.EnsureNamespace(t.Context(), given)
	if !errors.Is(err, client.ErrMismatch) || !strings.Contains(err.Error(), "the salts differ") {
		t.Errorf("another salt: %v", err)
	}
	for _, secret := range []string{"s3cret", hex.EncodeToString(given.Salt), string(ns.Salt), hex.EncodeToString(ns.Salt)} {
		if strings.Contains(err.Error(), secret) {
			t.Errorf("%q has a salt", err)
		}
	}
	given.Name = "a/given"
	if got := a.ensure(given); string(got.Salt) != "s3cret" {
		t.Errorf("a new namespace has the salt %q; want the given one", got.Salt)
	}
	root.ensure(define("a/old"))
	if got := a.ensure(define("a/old")); len(got.Salt) != 0 {
		t.Errorf("a namespace without a salt has one of %d bytes after a tenant's call", len(got.Salt))
	}
}

// TestConcurrentCreators: clients that create namespaces at once, with lists of nodes in different
// orders, get one salt for each namespace.
func TestConcurrentCreators(t *testing.T) {
	hosts := tenantHosts(t, 3)
	reversed := slices.Clone(hosts)
	slices.Reverse(reversed)
	rigs := []*rig{newTenant(t, "a", hosts...), newTenant(t, "a", reversed...), newTenant(t, "a", hosts[1], hosts[2], hosts[0])}
	for i := range 16 {
		name := fmt.Sprint("a/", i)
		salts, errs := make([][]byte, len(rigs)), make([]error, len(rigs))
		var wg sync.WaitGroup
		for j, r := range rigs {
			wg.Go(func() {
				ns, err := r.store.EnsureNamespace(t.Context(), define(name))
				salts[j], errs[j] = ns.Salt, err
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		for _, h := range hosts {
			if salt, ok := h.saltOn(name); ok {
				salts = append(salts, salt)
			}
		}
		if len(salts) != 6 || len(salts[0]) != 32 || len(slices.CompactFunc(salts, slices.Equal)) != 1 {
			t.Fatalf("%s: the salts differ, or a node lacks the namespace", name)
		}
	}
}

// TestSaltWhileNodeIsDown: a node makes no random salt while another node is down, because that one may have the
// namespace with another salt. An existing salt is used with any node down. A node that lacks the
// namespace gets the salt of the others, also the first node.
func TestSaltWhileNodeIsDown(t *testing.T) {
	for down := range 2 {
		hosts := tenantHosts(t, 2)
		a, root := newTenant(t, "a", hosts...), newTenant(t, "root", hosts...)
		existing := a.ensure(define("a/existing"))
		hosts[down].kill()
		_, err := a.store.EnsureNamespace(t.Context(), define("a/new"))
		if !errors.Is(err, client.ErrUnavailable) || !strings.Contains(err.Error(), "only while every node answers") || !strings.Contains(err.Error(), hosts[down].control) {
			t.Errorf("node %d is down: %v", down, err)
		}
		if _, ok := hosts[1-down].saltOn("a/new"); ok {
			t.Errorf("node %d is down: the other node has the refused namespace", down)
		}
		if ns := a.ensure(define("a/existing")); !slices.Equal(ns.Salt, existing.Salt) {
			t.Errorf("node %d is down: the salt has changed", down)
		}
		given := define("a/given")
		given.Salt = []byte("given")
		a.ensure(given)
		if ns := root.ensure(define("unsalted")); len(ns.Salt) != 0 {
			t.Errorf("node %d is down: an administrator's namespace has a salt", down)
		}
		hosts[down].start()
		ns := newTenant(t, "a", hosts...).ensure(define("a/new"))
		if len(ns.Salt) != 32 {
			t.Errorf("all nodes answer: a salt of %d bytes", len(ns.Salt))
		}
		if _, err := hosts[down].node.DeleteNamespace(t.Context(), "a/new", false); err != nil {
			t.Fatal(err)
		}
		if again := newTenant(t, "a", hosts...).ensure(define("a/new")); !slices.Equal(again.Salt, ns.Salt) {
			t.Errorf("node %d lacks the namespace: it is created with another salt", down)
		}
		if salt, _ := hosts[down].saltOn("a/new"); !slices.Equal(salt, ns.Salt) {
			t.Errorf("node %d has not got the salt of the other node", down)
		}
	}
}

// TestSaltOfCluster: in a cluster a random salt needs no answer of the other nodes, because etcd has
// it for all.
func TestSaltOfCluster(t *testing.T) {
	etcd := testetcd.Start(t, 1)
	roles := tenantRoles(t)
	var nodes []*testnode.Node
	for _, name := range []string{"n1", "n2"} {
		nodes = append(nodes, testnode.Start(t, testnode.Options{Name: name, Etcd: etcd.Endpoints, Roles: roles}))
	}
	open := func(servers ...string) *rig {
		return newRig(t, func(o *client.Options) { o.Servers, o.BearerToken = servers, tenantToken("a") })
	}
	one := open(nodes[0].Addr, testkit.Port(t)).ensure(define("a/m"))
	two := open(nodes[1].Addr).ensure(define("a/m"))
	if len(one.Salt) != 32 || !slices.Equal(one.Salt, two.Salt) {
		t.Errorf("salts of %d and %d bytes; want one of 32", len(one.Salt), len(two.Salt))
	}
}

// TestOlderCaller: a request without the field salting, as older clients send it, gets exactly its salt.
func TestOlderCaller(t *testing.T) {
	h := tenantHosts(t, 1)[0]
	conn, err := client.Dial(h.control, client.DialOptions{Timeout: time.Minute, BearerToken: tenantToken("a")})
	h.must(err)
	defer conn.Close()
	create := func(salting pb.Salting) error {
		_, err := pb.NewAdminClient(conn).CreateNamespace(context.Background(), &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(define("a/m")), Salting: salting})
		return err
	}
	h.must(create(pb.Salting_SALTING_NONE))
	if salt, ok := h.saltOn("a/m"); !ok || len(salt) != 0 {
		t.Errorf("a salt of %d bytes", len(salt))
	}
	h.must(create(pb.Salting_SALTING_RANDOM))
}
