package server_test

import (
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
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
	_, web := plannerHost(t, nil, nil)
	if code := get(web, "/requests", "attacker.example"); code != http.StatusForbidden {
		t.Errorf("a planner: %d", code)
	}
}
