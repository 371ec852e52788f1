package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// TestRolesFileIsFollowed: a node that runs uses a changed roles file. It refuses the token of a
// removed principal and ends the data-plane session of its client, and leaves the session of the other
// client open.
func TestRolesFileIsFollowed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "roles.yaml")
	write := func(principals ...string) {
		text := "principals:\n"
		for _, name := range principals {
			text += fmt.Sprintf("  - {name: %s, tokens: [sha256:%x], grants: [{roles: [read], namespaces: [m]}]}\n", name, sha256.Sum256([]byte("0123456789abcdef-"+name)))
		}
		if err := errors.Join(os.WriteFile(path+".tmp", []byte(text), 0o600), os.Rename(path+".tmp", path)); err != nil {
			t.Fatal(err)
		}
	}
	write("a", "b")
	node, r := tryServed(t, nil, append(small(t.TempDir()), "--auth-roles-file", path)...)
	if node == nil {
		t.Fatal(r.err)
	}
	type session struct {
		cache  pb.CacheClient
		engine rdma.Engine
	}
	open := func(name string) session {
		conn, err := client.Dial(node.ready.Listen, client.DialOptions{BearerToken: "0123456789abcdef-" + name})
		if err != nil {
			t.Fatal(err)
		}
		engine, err := tcp.New(t.Context(), tcp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := errors.Join(conn.Close(), engine.Close()); err != nil {
				t.Error(err)
			}
		})
		s := session{pb.NewCacheClient(conn), engine}
		d, err := s.cache.Describe(t.Context(), &pb.DescribeRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var addr rdma.Addr
		if err := addr.UnmarshalBinary(d.GetDataAddress()); err != nil {
			t.Fatal(err)
		}
		if _, err := engine.Connect(t.Context(), addr, d.GetDataToken()); err != nil {
			t.Fatal(err)
		}
		return s
	}
	a, b := open("a"), open("b")
	write("b")
	for len(a.engine.Peers()) > 0 {
		if t.Context().Err() != nil {
			t.Fatal("the session of the removed principal stays open")
		}
		runtime.Gosched()
	}
	if _, err := a.cache.Describe(t.Context(), &pb.DescribeRequest{}); status.Code(err) != codes.Unauthenticated {
		t.Errorf("the removed principal: %v", err)
	}
	if _, err := b.cache.Describe(t.Context(), &pb.DescribeRequest{}); err != nil || len(b.engine.Peers()) != 1 {
		t.Errorf("the other principal: %v, %d sessions", err, len(b.engine.Peers()))
	}
}

// TestTenantCreates: ns create by a tenant makes a random salt, which no output has. --no-salt and an
// administrator's ns create make none. The same definition twice is no error, but --no-salt or
// another salt for a namespace with a salt is one.
func TestTenantCreates(t *testing.T) {
	dir := t.TempDir()
	text := "principals:\n"
	tokens := make(map[string]string)
	for name, pattern := range map[string]string{"a": "a/*", "root": "*"} {
		text += fmt.Sprintf("  - {name: %s, tokens: [sha256:%x], grants: [{roles: [read, write, admin], namespaces: [%q]}]}\n", name, sha256.Sum256([]byte("0123456789abcdef-"+name)), pattern)
		tokens[name] = writeFile(t, dir, name, []byte("0123456789abcdef-"+name))
	}
	node, r := tryServed(t, nil, append(small(filepath.Join(dir, "volume")), "--auth-roles-file", writeFile(t, dir, "roles.yaml", []byte(text)))...)
	if node == nil {
		t.Fatal(r.err)
	}
	create := func(principal, name string, more ...string) result {
		return node.run(append([]string{"ns", "create", name, "--layers", "2", "--block-tokens", "4", "--token-bytes", "64", "--token-file", tokens[principal], "--format", "json"}, more...)...)
	}
	for _, c := range []struct {
		principal, name string
		more            []string
		bytes           string
	}{
		{"a", "a/m", nil, `"salt_bytes": 32`},
		{"a", "a/m", nil, `"salt_bytes": 32`},
		{"root", "a/m", nil, `"salt_bytes": 32`},
		{"a", "a/plain", []string{"--no-salt"}, `"salt_bytes": 0`},
		{"a", "a/plain", nil, `"salt_bytes": 0`},
		{"root", "shared", nil, `"salt_bytes": 0`},
	} {
		out := create(c.principal, c.name, c.more...).must(t)
		if !strings.Contains(out, c.bytes) {
			t.Errorf("ns create %s by %s with %q: %s", c.name, c.principal, c.more, out)
		}
	}
	for _, more := range [][]string{{"--no-salt"}, {"--salt", "other"}} {
		if r := create("a", "a/m", more...); r.code == 0 || !strings.Contains(r.err, "has another salt") {
			t.Errorf("ns create a/m with %q: exit %d, %s", more, r.code, r.err)
		}
	}
	if r := create("a", "a/m", "--no-salt", "--salt", "other"); r.code != exitUsage {
		t.Errorf("both --no-salt and --salt: exit %d, %s", r.code, r.err)
	}
}
