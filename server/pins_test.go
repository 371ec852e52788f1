package server_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/server"
)

// TestListPins: every caller can list a pin, and the pin ends with its namespace.
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

// TestPinsAreAudited: calls that make or end a pin are logged like calls of the Admin
// service. Calls for a lease with a TTL are not logged.
func TestPinsAreAudited(t *testing.T) {
	var log testkit.Log
	h := newHost(t, func(o *server.Options) {
		o.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}, nil)
	ns := h.namespace()
	h.write(ns, 3)
	ctx := t.Context()
	audited(&log)
	lease := func(req *pb.MatchRequest) uint64 {
		req.BlockIds = chain(ns, 3)
		resp, _ := h.cache.Match(ctx, req) // the test looks for the error in the log
		return resp.GetLease()
	}
	release := func(id uint64) {
		if _, err := h.cache.ReleaseLease(ctx, &pb.ReleaseLeaseRequest{Lease: id}); err != nil {
			t.Fatal(err)
		}
	}
	release(lease(&pb.MatchRequest{Namespace: "m", LeaseTtlMs: 60_000}))
	if lines := audited(&log); len(lines) != 0 {
		t.Errorf("a lease with a TTL was logged: %q", lines)
	}
	id := lease(&pb.MatchRequest{Namespace: "m", Pin: true})
	release(id)
	lease(&pb.MatchRequest{Namespace: "nope", Pin: true})
	epoch, err := h.cache.PinEpoch(ctx, &pb.PinEpochRequest{Namespace: "m", TtlMs: 60_000})
	if err != nil || epoch.GetEpoch() != 1 || epoch.GetTtlMs() != 60_000 {
		t.Fatal(epoch, err)
	}
	release(epoch.GetLease())
	if _, err := h.cache.PinEpoch(ctx, &pb.PinEpochRequest{Namespace: "m", Epoch: 9, TtlMs: 60_000}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("pin of an epoch that is not live: %v", err)
	}
	lines := audited(&log)
	want := [][]string{
		{"level=INFO", "call=Pin ", "peer=127.0.0.1:", "result=OK", "request.namespace=m", fmt.Sprintf("response.lease=%d ", id)},
		{"level=INFO", "call=Unpin ", "peer=127.0.0.1:", "result=OK", fmt.Sprintf("request.lease=%d", id)},
		{"level=WARN", "call=Pin ", "peer=127.0.0.1:", "result=NotFound", "request.namespace=nope", "err="},
		{"level=INFO", "call=PinEpoch ", "peer=127.0.0.1:", "result=OK", "request.namespace=m", "response.epoch=1 "},
		{"level=INFO", "call=Unpin ", "peer=127.0.0.1:", "result=OK", fmt.Sprintf("request.lease=%d", epoch.GetLease())},
		{"level=WARN", "call=PinEpoch ", "peer=127.0.0.1:", "result=FailedPrecondition", "request.epoch=9 ", "err="},
	}
	if len(lines) != len(want) {
		t.Fatalf("lines %q; want %d", lines, len(want))
	}
	for i, words := range want {
		for _, word := range words {
			if !strings.Contains(lines[i], word) {
				t.Errorf("%s: want %s in it", lines[i], word)
			}
		}
	}
}
