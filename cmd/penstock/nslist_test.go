package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// pagedAdmin returns its namespaces in pages of two.
type pagedAdmin struct {
	pb.AdminClient
	names []string
}

func (a pagedAdmin) ListNamespaces(_ context.Context, req *pb.ListNamespacesRequest, _ ...grpc.CallOption) (*pb.ListNamespacesResponse, error) {
	resp := &pb.ListNamespacesResponse{}
	for _, name := range a.names {
		if name <= req.GetAfter() {
			continue
		}
		if n := len(resp.Namespaces); n == 2 && req.GetLimit() > 0 {
			resp.Next = resp.Namespaces[n-1].GetName()
			break
		}
		resp.Namespaces = append(resp.Namespaces, &pb.Namespace{Name: name})
	}
	return resp, nil
}

// TestListsAllPages: the commands list the namespaces of all pages.
func TestListsAllPages(t *testing.T) {
	for _, names := range [][]string{nil, {"a"}, {"a", "b"}, {"a", "b", "c"}, {"a", "b", "c", "d", "e"}} {
		all, err := listNamespaces(t.Context(), pagedAdmin{names: names})
		var got []string
		for _, ns := range all {
			got = append(got, ns.GetName())
		}
		if err != nil || !slices.Equal(got, names) {
			t.Errorf("listed %q, %v; want %q", got, err, names)
		}
	}
}

// TestCreateOnSeveralNodes: nodes without etcd begin a namespace at the same epoch, also if the name was deleted on one of them. If they
// have it at different epochs, the command fails, and the command that its error names is the remedy.
func TestCreateOnSeveralNodes(t *testing.T) {
	a, b := startServed(t, t.TempDir()), startServed(t, t.TempDir())
	create := func(servers string) result {
		return penstock(t, "", nil, "ns", "create", "m", "--layers", "1", "--block-tokens", "16", "--token-bytes", "16", "--server", servers)
	}
	epochs := func() string {
		t.Helper()
		var all []string
		for _, s := range []*served{a, b} {
			all = append(all, fmt.Sprint(decode[struct{ Epoch uint64 }](t, s.run("ns", "show", "m", "--format", "json")).Epoch))
		}
		return strings.Join(all, " ")
	}
	remove := func(s *served) {
		t.Helper()
		s.run("ns", "delete", "m", "--yes").must(t)
	}
	both := a.ready.Listen + "," + b.ready.Listen
	create(a.ready.Listen).must(t)
	a.run("ns", "bump-epoch", "m").must(t)
	remove(a)
	create(both).must(t)
	if got := epochs(); got != "3 3" {
		t.Errorf("epochs of a name that was deleted on one node: %s", got)
	}
	remove(b)
	remove(a)
	a.run("ns", "create", "m", "--layers", "1", "--block-tokens", "16", "--token-bytes", "16").must(t)
	a.run("ns", "bump-epoch", "m").must(t)
	b.run("ns", "create", "m", "--layers", "1", "--block-tokens", "16", "--token-bytes", "16").must(t)
	r := create(both)
	remedy := fmt.Sprintf("penstock --server %s ns bump-epoch m --to 5", b.ready.Listen)
	if r.code == exitOK || !strings.Contains(r.err, remedy) || epochs() != "5 4" {
		t.Fatalf("different epochs %s: exit %d\n%s%s\nwant %s", epochs(), r.code, r.out, r.err, remedy)
	}
	penstock(t, "", nil, strings.Fields(remedy)[1:]...).must(t)
	create(both).must(t)
	if got := epochs(); got != "5 5" {
		t.Errorf("epochs after the remedy: %s", got)
	}
	if r := penstock(t, "", nil, "ns", "create", "m", "--layers", "1", "--block-tokens", "16", "--token-bytes", "16", "--no-salt", "--server", both); r.code != exitUsage {
		t.Errorf("--no-salt on several nodes: exit %d\n%s", r.code, r.err)
	}
	b.stop()
	if r := create(both); r.code == exitOK || !strings.Contains(r.err, b.ready.Listen) {
		t.Errorf("a node is down: exit %d\n%s%s", r.code, r.out, r.err)
	}
}
