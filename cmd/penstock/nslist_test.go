package main

import (
	"context"
	"slices"
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
