package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
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
