package server_test

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// TestEventsOfNoNamespace: a stream of events of a namespace that does not exist ends.
func TestEventsOfNoNamespace(t *testing.T) {
	h := newHost(t, nil, nil)
	next := func(req *pb.EventsRequest) (*pb.Event, error) {
		s, err := h.cache.Events(t.Context(), req)
		if err != nil {
			return nil, err
		}
		return s.Recv()
	}
	for _, after := range []uint64{0, 1 << 40} {
		if e, err := next(&pb.EventsRequest{Namespace: "nope", After: after}); status.Code(err) != codes.NotFound || !strings.Contains(err.Error(), "nope") {
			t.Errorf("after %d: %v, %v; want NotFound that names the namespace", after, e, err)
		}
	}
	h.write(h.namespace(), 2)
	s, err := h.cache.Events(t.Context(), &pb.EventsRequest{Namespace: "m", After: h.node.Events().Last()})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.admin.DeleteNamespace(t.Context(), &pb.DeleteNamespaceRequest{Name: "m"}); err != nil {
		t.Fatal(err)
	}
	if e, err := s.Recv(); err != nil || e.GetKind() != pb.Event_KIND_ALL_BLOCKS_CLEARED {
		t.Errorf("%v, %v; want the clearing of the deleted namespace", e, err)
	}
	if e, err := s.Recv(); status.Code(err) != codes.NotFound {
		t.Errorf("%v, %v; want NotFound once the namespace is gone", e, err)
	}
}
