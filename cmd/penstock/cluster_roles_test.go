package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testetcd"
)

const (
	rolesKey    = "/penstock/roles"
	govern      = `{roles: [operate, admin], namespaces: ["*"]}`
	operateOnly = `{roles: [operate], namespaces: ["*"]}`
)

// rolesRig is an etcd with a roles document, and files for the commands.
type rolesRig struct {
	*testing.T
	etcd *testetcd.Etcd
	dir  string
}

// principal returns the entry of a principal, and writes the file with its token.
func (r *rolesRig) principal(name, grant string) string {
	token := "0123456789abcdef-" + name
	writeFile(r, r.dir, name+".token", []byte(token))
	return fmt.Sprintf("  - {name: %s, tokens: [sha256:%x], grants: [%s]}\n", name, sha256.Sum256([]byte(token)), grant)
}

func (r *rolesRig) file(text string) string {
	return writeFile(r, r.dir, "roles.yaml", []byte(text))
}

// as runs a command on a node with the token of a principal.
func (r *rolesRig) as(s *served, principal string, args ...string) result {
	r.Helper()
	return s.run(append(args, "--token-file", filepath.Join(r.dir, principal+".token"))...)
}

// put writes the document without any check, and delete removes it.
func (r *rolesRig) put(text string) {
	r.Helper()
	r.withEtcd(func(c *clientv3.Client) error { _, err := c.Put(r.Context(), rolesKey, text); return err })
}

func (r *rolesRig) delete() {
	r.Helper()
	r.withEtcd(func(c *clientv3.Client) error { _, err := c.Delete(r.Context(), rolesKey); return err })
}

func (r *rolesRig) withEtcd(do func(*clientv3.Client) error) {
	r.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: r.etcd.Endpoints, Logger: zap.NewNop()})
	if err != nil {
		r.Fatal(err)
	}
	defer c.Close()
	if err := do(c); err != nil {
		r.Fatal(err)
	}
}

// node starts a node that follows the document at an endpoint of etcd.
func (r *rolesRig) node(endpoint, ttl string) *served {
	r.Helper()
	return startServed(r, filepath.Join(r.dir, "data"), "--node", "a", "--cluster-etcd", endpoint, "--cluster-lease-ttl", ttl, "--auth-roles-etcd", rolesKey)
}

// problem returns the problem of the document that a node shows to a principal.
func (r *rolesRig) problem(s *served, principal string) string {
	r.Helper()
	var status struct{ Roles struct{ Problem string } }
	if err := json.Unmarshal([]byte(r.as(s, principal, "status", "--format", "json").must(r)), &status); err != nil {
		r.Fatal(err)
	}
	return status.Roles.Problem
}

// TestRolesInEtcd: a node follows the document in etcd. Before the first one it refuses every call. An administrator replaces
// a document of the revision that the administrator has read, and not by one that is invalid or locks the administrator out. A document that is
// invalid or deleted in etcd leaves the one in use, and the status has the reason.
func TestRolesInEtcd(t *testing.T) {
	testkit.VerifyNone(t)
	r := &rolesRig{t, testetcd.Start(t, 1), t.TempDir()}
	a := r.node(r.etcd.Endpoints[0], "60s") // the calls of etcd have this time, also on a busy machine

	sre := r.principal("sre", govern)
	team := r.principal("team", "{roles: [read, admin], namespaces: [team/*]}")
	if out := r.as(a, "sre", "status"); out.code == 0 || !strings.Contains(out.err, "no roles document from etcd") || strings.Contains(out.err, "penstock serve") {
		t.Fatalf("before the first document: %d, %s", out.code, out.err)
	}
	if out := a.run("status"); out.code == 0 {
		t.Fatal("before the first document a call without a token is served")
	}
	config := writeFile(t, r.dir, "node.yaml", fmt.Appendf(nil, "cluster: {etcd: [%q], lease_ttl: 60s}\nauth: {roles_etcd: %s}\n", r.etcd.Endpoints[0], rolesKey))
	first := r.file("principals:\n" + sre + team)
	direct := func(args ...string) result {
		return penstock(t, "", nil, append([]string{"cluster", "roles"}, append(args, "--config", config)...)...)
	}
	if out := direct("set", first); out.code == 0 || !strings.Contains(out.err, "give --revision") {
		t.Errorf("a file without a revision: %d, %s", out.code, out.err)
	}
	direct("set", first, "--revision", "0").must(t)
	awaitTrue(t, "the first document is in use", func() bool { return r.as(a, "sre", "status").code == 0 })
	awaitTrue(t, "the team creates a namespace", func() bool {
		return r.as(a, "team", "ns", "create", "team/m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "256").code == 0
	})

	// The next administrator adds a principal to the document that he has read.
	read := r.as(a, "sre", "cluster", "roles", "get").must(t)
	next := r.file(read + r.principal("other", govern))
	if out := r.as(a, "sre", "cluster", "roles", "set", next, "--dry-run").must(t); !strings.Contains(out, "principal other is added") || !strings.Contains(out, "nothing was changed") {
		t.Errorf("the dry run prints %q", out)
	}
	if got := r.as(a, "sre", "cluster", "roles", "get").must(t); got != read {
		t.Errorf("the dry run has changed the document to %q", got)
	}
	refused := func(want, principal, file string) {
		t.Helper()
		for _, more := range [][]string{{"--dry-run"}, nil} {
			if out := r.as(a, principal, append([]string{"cluster", "roles", "set", file}, more...)...); out.code == 0 || !strings.Contains(out.err, want) {
				t.Errorf("set %v by %s: %d, %s, want %q", more, principal, out.code, out.err, want)
			}
		}
	}
	line, _, _ := strings.Cut(read, "\n")
	refused("lacks the role operate", "team", next)
	refused("would lock you out", "sre", writeFile(t, r.dir, "without.yaml", []byte(line+"\nprincipals:\n"+team+r.principal("other", govern))))
	refused("would lock you out", "sre", writeFile(t, r.dir, "demoted.yaml", []byte(line+"\nprincipals:\n"+r.principal("sre", operateOnly)+r.principal("other", govern))))
	refused("has no principal", "sre", writeFile(t, r.dir, "empty.yaml", []byte(line+"\nprincipals: []\n")))
	r.as(a, "sre", "cluster", "roles", "set", next).must(t)
	awaitTrue(t, "the second document is in use", func() bool { return r.as(a, "other", "status").code == 0 })
	refused("changed meanwhile", "other", next)

	// The team is removed. Its token is refused, and so is the one with operate alone.
	read = r.as(a, "other", "cluster", "roles", "get").must(t)
	line, _, _ = strings.Cut(read, "\n")
	last := "principals:\n" + r.principal("sre", operateOnly) + r.principal("other", govern)
	r.as(a, "other", "cluster", "roles", "set", r.file(line+"\n"+last)).must(t)
	awaitTrue(t, "the removed principal is refused", func() bool { return r.as(a, "team", "ns", "list").code != 0 })
	refused("lacks the role admin on every namespace", "sre", next)

	// Changes past the command.
	problem := func() string { return r.problem(a, "other") }
	if p := problem(); p != "" {
		t.Errorf("the problem of a valid document: %s", p)
	}
	r.put("principals: 7")
	awaitTrue(t, "an invalid document is a problem", func() bool { return strings.Contains(problem(), "write a list") })
	r.delete()
	awaitTrue(t, "a deletion is a problem", func() bool { return strings.Contains(problem(), "etcd has no key") })
	if out := r.as(a, "other", "status").must(t); !strings.Contains(out, "2 principals") || !strings.Contains(out, "etcd has no key") {
		t.Errorf("the status is %s", out)
	}
	if a.run("status").code == 0 || r.as(a, "team", "ns", "list").code == 0 {
		t.Error("after the deletion a call without a role is served")
	}
	r.put(last)
	awaitTrue(t, "the problem ends", func() bool { return problem() == "" })
}

// TestRolesWithoutEtcd: a node that cannot reach etcd keeps the document, and its status has the reason. When the document is outdated,
// the node shows only its state, until it reaches etcd again. A node that
// starts without etcd refuses every call.
func TestRolesWithoutEtcd(t *testing.T) {
	testkit.VerifyNone(t)
	r := &rolesRig{t, testetcd.Start(t, 1), t.TempDir()}
	gate := testetcd.NewGate(t, r.etcd.Endpoints[0])
	r.put("principals:\n" + r.principal("sre", govern))
	a := r.node(gate.Addr, "2s")
	awaitTrue(t, "the document is in use", func() bool { return r.as(a, "sre", "status").code == 0 })
	gate.Cut()
	awaitTrue(t, "an etcd that does not answer is a problem", func() bool { return strings.Contains(r.problem(a, "sre"), "etcd at") })
	if a.run("status").code == 0 {
		t.Error("without etcd a call without a token is served")
	}
	awaitTrue(t, "the document is outdated", func() bool {
		out := r.as(a, "sre", "ns", "list")
		return out.code != 0 && strings.Contains(out.err, "etcd has not answered for longer")
	})
	r.as(a, "sre", "status").must(t)
	gate.Mend()
	awaitTrue(t, "the document is in use again", func() bool { return r.as(a, "sre", "ns", "list").code == 0 })
	gate.Cut()
	a.stop()
	a = r.node(gate.Addr, "2s")
	for _, args := range [][]string{{"status"}, {"ns", "list"}, {"cluster", "roles", "get"}} {
		if out := r.as(a, "sre", args...); out.code == 0 || !strings.Contains(out.err, "no roles document from etcd") {
			t.Errorf("%v after a start without etcd: %d, %s", args, out.code, out.err)
		}
	}
	gate.Mend()
	awaitTrue(t, "the document is in use after a start", func() bool { return r.as(a, "sre", "status").code == 0 })
}

// TestPlannerRolesInEtcd: a planner follows the document too.
func TestPlannerRolesInEtcd(t *testing.T) {
	testkit.VerifyNone(t)
	r := &rolesRig{t, testetcd.Start(t, 1), t.TempDir()}
	p, out := tryServed(t, nil, "planner", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-format", "json",
		"--cluster-etcd", strings.Join(r.etcd.Endpoints, ","), "--auth-roles-etcd", rolesKey)
	if p == nil {
		t.Fatal(out.err)
	}
	metrics := func() int {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+p.ready.HTTP+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		token, err := os.ReadFile(filepath.Join(r.dir, "sre.token"))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+string(token))
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		_, _ = io.Copy(io.Discard, resp.Body)
		return resp.StatusCode
	}
	sre := r.principal("sre", govern)
	if code := metrics(); code != http.StatusServiceUnavailable {
		t.Errorf("before the first document: %d", code)
	}
	r.put("principals:\n" + sre)
	awaitTrue(t, "the planner has the document", func() bool { return metrics() == http.StatusOK })
	r.put("principals:\n" + r.principal("other", govern))
	awaitTrue(t, "the removed principal is refused", func() bool { return metrics() == http.StatusUnauthorized })
	http.DefaultClient.CloseIdleConnections()
}

// TestRolesCheck: check finds the line of an error, and a document that no principal could replace.
func TestRolesCheck(t *testing.T) {
	r := &rolesRig{T: t, dir: t.TempDir()}
	check := func(text string) result {
		return penstock(t, "", nil, "cluster", "roles", "check", r.file(text))
	}
	if out := check("# revision 3\nprincipals:\n" + r.principal("sre", govern)).must(t); out != "valid: 1 principals\n" {
		t.Errorf("a valid document: %q", out)
	}
	if out := check("principals:\n" + r.principal("sre", operateOnly)).must(t); !strings.Contains(out, "no document in etcd") {
		t.Errorf("a document without a governor: %q", out)
	}
	if out := check("# revision 3\nprincipals:\n" + r.principal("sre", "{roles: [owner], namespaces: [m]}")); out.code == 0 || !strings.Contains(out.err, "roles.yaml:3: ") {
		t.Errorf("an unknown role: %d, %s", out.code, out.err)
	}
}
