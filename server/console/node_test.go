package console_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/server/access"
)

// Tokens of the principals of policyOf.
const (
	operatorToken = "the-token-of-the-operator"
	tenantToken   = "the-token-of-a-tenant"
)

func policyOf(t *testing.T) *access.Policy {
	t.Helper()
	p, err := access.Parse("roles.yaml", fmt.Appendf(nil, `principals:
  - name: sre
    tokens: [sha256:%x]
    grants: [{roles: [operate, admin], namespaces: ["*"]}]
  - name: team-a
    tokens: [sha256:%x]
    grants: [{roles: [read, write], namespaces: ["team-a/*"]}]
`, sha256.Sum256([]byte(operatorToken)), sha256.Sum256([]byte(tenantToken))))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// openAs gets a page of a node as a browser does, with a token as the password. An empty token sends
// none.
func openAs(t *testing.T, url, token string) (*http.Response, string) {
	t.Helper()
	if token != "" {
		url = strings.Replace(url, "http://", "http://any:"+token+"@", 1)
	}
	return get(t, url)
}

// row returns the text of the row of a namespace.
func row(page, name string) string {
	for _, r := range strings.Split(page, "<tr>") {
		if strings.HasPrefix(r, `<th scope="row">`+name+"<") {
			return text(r)
		}
	}
	return ""
}

// TestNodeStreamsPerPrincipal: the streams of a principal are counted together, and do not count for
// another one.
func TestNodeStreamsPerPrincipal(t *testing.T) {
	policy := policyOf(t)
	n := testnode.Start(t, testnode.Options{Name: "n1", Web: true, Roles: func() *access.Policy { return policy }})
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	as := func(token string) string {
		return strings.Replace(n.Web, "http://", "http://any:"+token+"@", 1) + "/live/namespaces"
	}
	for range 8 {
		defer listen(t, as(operatorToken)).close()
	}
	if resp, body := openAs(t, n.Web+"/live/namespaces", operatorToken); resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(body, "sre has 8 streams") {
		t.Errorf("the ninth stream: %s, %s", resp.Status, body)
	}
	defer listen(t, as(tenantToken)).close()
}

// openTeams makes a namespace for each of two teams, and opens that of team-a, with memory for four blocks.
func openTeams(t *testing.T, n *testnode.Node) (*client.Store, kv.Namespace, *client.Memory) {
	t.Helper()
	g := kv.SingleGroup(4, 4, 512)
	for _, name := range []string{"team-a/chat", "team-b/rollout"} {
		n.Namespace(t, name, g)
	}
	store, ns := n.Open(t, "team-a/chat")
	memory, err := store.Register(make([]byte, 4*g.BlockBytes()))
	if err != nil {
		t.Fatal(err)
	}
	return store, ns, memory
}

// TestNode shows a node with a roles file: the figures of its namespaces, the callers that see
// them, and their changes in a browser.
func TestNode(t *testing.T) {
	var policy atomic.Pointer[access.Policy]
	n := testnode.Start(t, testnode.Options{Name: "n1", Web: true, ConsoleInterval: 20 * time.Millisecond, Roles: policy.Load})
	store, ns, memory := openTeams(t, n)
	g := ns.Geometry
	prompt := make([]kv.Token, 4*g.BlockTokens)
	for i := range prompt {
		prompt[i] = kv.Token(i)
	}
	match := func(tokens []kv.Token) {
		t.Helper()
		if _, err := store.Match(t.Context(), client.MatchRequest{Namespace: ns, Tokens: tokens}); err != nil {
			t.Fatal(err)
		}
	}
	bump := func() {
		t.Helper()
		if _, err := store.BumpEpoch(t.Context(), ns.Name, 0, 2); err != nil {
			t.Fatal(err)
		}
		var err error
		if ns, err = store.Namespace(t.Context(), ns.Name); err != nil {
			t.Fatal(err)
		}
	}
	page := func() string {
		t.Helper()
		// The state of a page is at most half an interval old.
		var page string
		for limit := time.Now().Add(patience); time.Now().Before(limit); {
			_, page = get(t, n.Web+"/namespaces")
			if strings.Contains(row(page, "team-a/chat"), fmt.Sprintf("none %d", ns.Epoch)) {
				break
			}
		}
		return page
	}
	write := func() {
		t.Helper()
		w, err := store.Write(t.Context(), client.WriteRequest{Namespace: ns, Tokens: prompt, From: memory})
		if err != nil || w.Stored != 4 {
			t.Fatalf("%+v, %v", w, err)
		}
	}
	write()
	match(prompt) // a hit before the bump, which does not count
	bump()
	if r := row(page(), "team-a/chat"); !strings.Contains(r, "– unknown") {
		t.Errorf("without a match since the bump: %q", r)
	}
	write()
	match(prompt)
	match(append(prompt[:2*g.BlockTokens:2*g.BlockTokens], make([]kv.Token, 2*g.BlockTokens)...)) // half of it
	waitFor := func(want string) {
		t.Helper()
		for limit := time.Now().Add(patience); ; {
			r := row(page(), "team-a/chat")
			if strings.Contains(r, want) {
				return
			}
			if time.Now().After(limit) {
				t.Fatalf("%q is not in %q", want, r)
			}
		}
	}
	waitFor("75.0 %") // of the tokens queried since the bump
	bump()
	waitFor("none 3 (2 live)")
	waitFor("32 KiB no quota 32 KiB") // all of it belongs to the old epoch

	policy.Store(policyOf(t))
	for _, c := range []struct {
		path, token string
		code        int
		hidden      string
	}{
		{"/", "", http.StatusUnauthorized, "Overview"},
		{"/", "some-unknown-token", http.StatusUnauthorized, "Overview"},
		{"/", tenantToken, http.StatusForbidden, "Overview"},
		{"/", operatorToken, http.StatusOK, "team-"},
		{"/namespaces", tenantToken, http.StatusOK, "team-b"},
		{"/namespaces", operatorToken, http.StatusOK, "<b>"},
		{"/metrics", operatorToken, http.StatusUnauthorized, "penstock_"},
	} {
		resp, body := openAs(t, n.Web+c.path, c.token)
		if resp.StatusCode != c.code || strings.Contains(body, c.hidden) {
			t.Errorf("%s with %q: %s; want %d without %q in\n%s", c.path, c.token, resp.Status, c.code, c.hidden, body)
		}
		asks := strings.HasPrefix(resp.Header.Get("WWW-Authenticate"), "Basic ")
		if want := c.code == http.StatusUnauthorized && c.path != "/metrics"; asks != want {
			t.Errorf("%s with %q: WWW-Authenticate is %q", c.path, c.token, resp.Header.Get("WWW-Authenticate"))
		}
	}
	if _, body := openAs(t, n.Web+"/namespaces", tenantToken); !strings.Contains(body, "team-a/chat") || strings.Contains(body, `href="/"`) {
		t.Errorf("the tenant gets\n%s", body)
	}

	b := openBrowser(t)
	b.open(strings.Replace(n.Web, "http://", "http://any:"+operatorToken+"@", 1) + "/")
	b.await(`document.getElementById("live").innerText.includes("No faults.")`)
	b.open(n.Web + "/namespaces") // the browser keeps the token
	b.await(`document.querySelectorAll("tbody th").length === 2 && document.querySelector("tbody tr:nth-child(2) th").textContent === "team-b/rollout"`)
	policy.Store(nil)
	bump()
	b.await(fmt.Sprintf(`document.querySelector("tbody td:nth-child(3)").textContent.startsWith("%d")`, ns.Epoch))
	policy.Store(policyOf(t))
}

// awaitPage returns a page once it contains a text.
func awaitPage(t *testing.T, url, token, want string) string {
	t.Helper()
	for limit := time.Now().Add(patience); ; {
		_, page := openAs(t, url, token)
		if strings.Contains(text(page), want) {
			return page
		}
		if time.Now().After(limit) {
			t.Fatalf("%q is not in\n%s", want, text(page))
		}
	}
}

// TestNodeTenants: a principal of one tenant sees the use and the quota of its tenant in a browser, live,
// and nothing of the other tenant. An operator sees both.
func TestNodeTenants(t *testing.T) {
	policy := policyOf(t)
	var current atomic.Pointer[access.Policy]
	n := testnode.Start(t, testnode.Options{Name: "n1", Web: true, ConsoleInterval: 20 * time.Millisecond, Roles: current.Load})
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	store, ns, memory := openTeams(t, n)
	write := func(first kv.Token) {
		t.Helper()
		prompt := make([]kv.Token, 4*ns.Geometry.BlockTokens)
		for i := range prompt {
			prompt[i] = first + kv.Token(i)
		}
		if w, err := store.Write(t.Context(), client.WriteRequest{Namespace: ns, Tokens: prompt, From: memory}); err != nil || w.Stored != 4 {
			t.Fatalf("%+v, %v", w, err)
		}
	}
	write(1)
	used := n.Storage.Stats().Index.Bytes
	n.Storage.SetTenantQuotas([]kv.TenantQuota{{Prefix: "team-a/", Bytes: 2 * used}, {Prefix: "team-b/", Bytes: 1 << 40}})
	current.Store(policy)
	awaitPage(t, n.Web+"/namespaces", operatorToken, "team-b/* 1 0 B 0.0 % of 1.0 TiB")
	page := awaitPage(t, n.Web+"/namespaces", tenantToken, "50.0 % of")
	if strings.Contains(page, "team-b") || strings.Contains(page, "1.0 TiB") {
		t.Errorf("the tenant gets\n%s", page)
	}

	b := openBrowser(t)
	b.open(strings.Replace(n.Web, "http://", "http://any:"+tenantToken+"@", 1) + "/namespaces")
	b.await(`document.querySelectorAll("#tenants tbody tr").length === 1 && document.querySelector("#tenants tbody th").textContent === "team-a/*"`)
	b.await(`document.querySelector("#tenants tbody tr").textContent.includes("50.0 %")`)
	current.Store(nil) // the client has no token
	write(1000)
	write(2000) // evicts
	current.Store(policy)
	want := n.Storage.Tenants()[0]
	if want.EvictedPieces == 0 {
		t.Fatalf("a write above the quota evicted nothing: %+v", want)
	}
	b.await(fmt.Sprintf(`document.querySelector("#tenants tbody td:nth-child(5)").textContent === "%d" && document.querySelector("#tenants tbody td:nth-child(4)").textContent.includes("%.1f %%")`,
		want.EvictedPieces, 100*float64(want.UsedBytes)/float64(want.Bytes)))
	if all := b.text("document.documentElement.outerHTML"); strings.Contains(all, "team-b") || strings.Contains(all, "TiB") {
		t.Errorf("the browser of the tenant has\n%s", all)
	}
	b.open(n.Web + "/namespaces?q=team-b")
	if all := b.text("document.body.innerText"); strings.Contains(all, "rollout") || strings.Contains(all, "TiB") {
		t.Errorf("the filter shows the tenant\n%s", all)
	}
	b.do(chromedp.Click("#tenants tbody a"))
	b.await(`location.search.includes("q=team-a%2F") && document.querySelectorAll("table:not(#tenants) tbody tr").length === 1`)
	b.shoot("tenant")
}

// members returns the texts of the rows of a cluster's nodes on the overview.
func members(page string) (rows []string) {
	_, cluster, _ := strings.Cut(page, `id="cluster-title"`)
	cluster, _, _ = strings.Cut(cluster, "</section>")
	for i, r := range strings.Split(cluster, `<th scope="row">`) {
		if i > 0 {
			r, _, _ = strings.Cut(r, "</tr>")
			rows = append(rows, text(r))
		}
	}
	return rows
}

// TestCluster shows a cluster of two nodes with etcd: its members in the order of their names, the
// revision up to which each has applied the changes of namespaces, a node that stops, and the end
// and the return of the lease while etcd is down and after its start.
func TestCluster(t *testing.T) {
	etcd := testetcd.Start(t, 1)
	n1 := testnode.Start(t, testnode.Options{Name: "n1", Web: true, Etcd: etcd.Endpoints, ConsoleInterval: 20 * time.Millisecond})
	n2 := testnode.Start(t, testnode.Options{Name: "n2", Etcd: etcd.Endpoints, CapacityBytes: 32 << 20})
	await := func(what string, found func(page string) bool) string {
		t.Helper()
		for limit := time.Now().Add(patience); ; {
			_, page := get(t, n1.Web+"/")
			if found(page) {
				return page
			}
			if time.Now().After(limit) {
				t.Fatalf("%s: the page is\n%s", what, text(page))
			}
		}
	}
	page := await("two members", func(page string) bool {
		return len(members(page)) == 2 && strings.Contains(text(page), "Node n1 is serving. 0 faults. 2 members.")
	})
	wants(t, text(page), "No faults.", "Lease of this node: valid")
	for i, want := range []struct{ begin, capacity, end string }{
		{"n1 (this node) none serving", "64 MiB", "v0 " + n1.Addr},
		{"n2 none serving", "32 MiB", "v0 " + n2.Addr},
	} {
		if r := members(page)[i]; !strings.HasPrefix(r, want.begin+" ") || !strings.Contains(r, " UTC "+want.capacity+" ") || !strings.HasSuffix(r, want.end) || !strings.Contains(r, " %") {
			t.Errorf("the row %d is %q; want %q … %q … %q with its fill", i, r, want.begin, want.capacity, want.end)
		}
	}

	// A change of namespaces has a revision of etcd, and both members apply it.
	applied := func(row string) string {
		words := strings.Fields(row)
		return words[len(words)-3]
	}
	before := applied(members(page)[0])
	n1.Namespace(t, "m", kv.SingleGroup(4, 4, 512))
	page = await("the revision of a new namespace at both members", func(page string) bool {
		m := members(page)
		return len(m) == 2 && applied(m[0]) != before && applied(m[0]) == applied(m[1])
	})
	wants(t, text(page), "Namespaces 1 ")

	stop, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := n2.Stop(stop); err != nil {
		t.Fatal(err)
	}
	// The node that has left is not a member, and has a row, because it was not drained.
	down := func(page string) bool {
		m := members(page)
		return len(m) == 2 && strings.HasPrefix(m[0], "n2 none down ") && strings.HasPrefix(m[1], "n1 (this node) none serving ")
	}
	page = await("a node that is down", down)
	wants(t, text(page), "1 member. Down: 1 node.", "node n2 down its lease in etcd has ended")

	etcd.Kill(0)
	page = await("an invalid lease", func(page string) bool { return strings.Contains(text(page), "lease in etcd not valid") })
	wants(t, text(page), "list of members not read", "The list of members was not read:", "Lease of this node: not valid this node has no lease in etcd")
	if m := members(page); len(m) != 0 || strings.Contains(text(page), " member.") {
		t.Errorf("without etcd the page has the members %q", m)
	}
	etcd.Run(0)
	page = await("the lease after the start of etcd", func(page string) bool { return strings.Contains(text(page), " 1 fault. 1 member.") && down(page) })
	wants(t, text(page), "Lease of this node: valid")
}
