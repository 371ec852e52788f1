package server_test

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// TestListPins: a pin is found by whoever asks, and ends with its namespace.
func TestListPins(t *testing.T) {
	h := newHost(t, nil, nil)
	ns := h.namespace()
	h.write(ns, 3)
	ctx := t.Context()
	match := func(req *pb.MatchRequest) *pb.MatchResponse {
		req.Namespace, req.BlockIds = "m", chain(ns, 3)
		resp, err := h.cache.Match(ctx, req)
		if err != nil || resp.GetLease() == 0 {
			t.Fatal(resp, err)
		}
		return resp
	}
	pinned := match(&pb.MatchRequest{Pin: true})
	match(&pb.MatchRequest{LeaseTtlMs: 60_000})
	list := func(req *pb.ListPinsRequest) []*pb.Pin {
		resp, err := h.admin.ListPins(ctx, req)
		if err != nil || resp.GetCursor() != 0 {
			t.Fatal(resp, err)
		}
		return resp.GetPins()
	}
	pins := list(&pb.ListPinsRequest{})
	if len(pins) != 1 {
		t.Fatalf("%d pins; want 1", len(pins))
	}
	p := pins[0]
	if p.GetLease() != pinned.GetLease() || p.GetNamespace() != "m" || p.GetBlocks() != 3 || p.GetBytes() == 0 || p.GetExpiresUnixMs() != 0 ||
		p.GetSinceUnixMs() == 0 || !strings.HasPrefix(p.GetOwner(), "127.0.0.1:") {
		t.Errorf("%v; want lease %d of 3 blocks in m, owned by a peer on 127.0.0.1, without an end", p, pinned.GetLease())
	}
	if pins := list(&pb.ListPinsRequest{Namespace: "m", Leases: true}); len(pins) != 2 {
		t.Errorf("%d pins and leases; want 2", len(pins))
	}
	if _, err := h.admin.ListPins(ctx, &pb.ListPinsRequest{Namespace: "nope"}); status.Code(err) != codes.NotFound {
		t.Errorf("pins of no namespace: %v; want NotFound", err)
	}
	if _, err := h.admin.DeleteNamespace(ctx, &pb.DeleteNamespaceRequest{Name: "m"}); err != nil {
		t.Fatal(err)
	}
	if pins := list(&pb.ListPinsRequest{}); len(pins) != 0 {
		t.Errorf("pins %v; want none after the namespace was deleted", pins)
	}
}
