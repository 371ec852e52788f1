package server_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server"
)

// TestConsoleHost: without a roles file the console refuses, over loopback, requests for a name of
// another machine. Other paths, which browsers do not open, are served.
func TestConsoleHost(t *testing.T) {
	h := newHost(t, nil, nil)
	own, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	get := func(web, path, host string) int {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, web+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode == http.StatusForbidden && !strings.Contains(string(body), "auth.roles_file") {
			t.Errorf("%s for %s: %s", path, host, body)
		}
		return resp.StatusCode
	}
	for _, c := range []struct {
		path, host string
		code       int
	}{
		{"/", "127.0.0.1:7422", 200}, {"/", "127.0.0.1", 200}, {"/", "[::1]:7422", 200}, {"/", "localhost:1", 200}, {"/", "LOCALHOST", 200}, {"/", "a.localhost:7422", 200},
		{"/", own + ":7422", 200}, {"/namespaces", "10.1.2.3:7422", 200},
		{"/", "attacker.example:7422", 403}, {"/namespaces", "attacker.example", 403}, {"/pins", "localhost.attacker.example:7422", 403}, {"/", "127.0.0.1.attacker.example", 403},
		{"/metrics", "node.example:7422", 200}, {"/readyz", "node.example:7422", 200},
	} {
		if code := get(h.web, c.path, c.host); code != c.code {
			t.Errorf("%s for %s: %d, want %d", c.path, c.host, code, c.code)
		}
	}
	_, web := plannerHost(t, nil, nil, nil)
	if code := get(web.base, "/requests", "attacker.example"); code != http.StatusForbidden {
		t.Errorf("a planner: %d", code)
	}
}

// TestConsolePinsAreFiltered: the page of the pins has the pins of the caller's namespaces, although the node
// has more pins of other namespaces than one page of the index.
func TestConsolePinsAreFiltered(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles, o.ConsoleInterval = policy.current, time.Nanosecond }, nil)
	ns := h.namespace()
	h.write(ns, 2)
	if _, err := h.admin.CreateNamespace(t.Context(), &pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: "other", Geometry: api.GeometryProto(geometry)}}); err != nil {
		t.Fatal(err)
	}
	const pins = 4200
	pin := func(namespace string) {
		t.Helper()
		resp, err := h.cache.PinEpoch(t.Context(), &pb.PinEpochRequest{Namespace: namespace, TtlMs: 600_000})
		if err != nil || resp.GetLease() == 0 {
			t.Fatal(resp, err)
		}
	}
	for range pins {
		pin("m")
	}
	pin("other")
	policy.set(t, everyRole...)
	for principal, want := range map[string][]string{
		"admin": {"The page shows 100 of 4200 pins"},
		"other": {"The page shows 1 of 1 pins", ">other<"},
		"root":  {"The page shows 100 of 4201 pins"},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, h.web+"/pins", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.SetBasicAuth("any", tokenOf(principal))
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err = errors.Join(err, resp.Body.Close()); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s, %v", principal, resp.Status, err)
		}
		for _, text := range want {
			if !strings.Contains(string(body), text) {
				t.Errorf("the page of %s has no %q:\n%s", principal, text, body)
			}
		}
	}
}

// TestConsolePrefixes: the page of the prefixes has the prefix that a match has found, and none of an epoch that
// was retired.
func TestConsolePrefixes(t *testing.T) {
	h := newHost(t, func(o *server.Options) { o.ConsoleInterval = time.Nanosecond }, nil)
	ns := h.namespace()
	h.write(ns, 3)
	ids := chain(ns, 3)
	if resp, err := h.cache.Match(t.Context(), &pb.MatchRequest{Namespace: "m", BlockIds: ids}); err != nil || resp.GetMatchedBlocks() != 3 {
		t.Fatal(resp, err)
	}
	row := fmt.Sprintf(`<code>%x</code></th><td>m</td><td class="number">1</td><td class="number">%d</td><td class="number">1</td><td class="number">3</td>`, ids[:16], 3*ns.Geometry.BlockTokens)
	if code, page := get(t, h.web+"/prefixes"); code != http.StatusOK || !strings.Contains(page, row) {
		t.Errorf("%d, the page has no %s:\n%s", code, row, page)
	}
	if _, err := h.admin.BumpEpoch(t.Context(), &pb.BumpEpochRequest{Name: "m"}); err != nil {
		t.Fatal(err)
	}
	if _, page := get(t, h.web+"/prefixes"); strings.Contains(page, fmt.Sprintf("%x", ids[:16])) {
		t.Errorf("the page has a prefix of a retired epoch:\n%s", page)
	}
}
