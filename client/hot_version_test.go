package client_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// TestDemoteCopiesVersion: DemoteCopies leaves copies on a node of an earlier version as they are. It returns the other errors of a node.
func TestDemoteCopiesVersion(t *testing.T) {
	home, other := newFake(t), newFake(t)
	home.members = []*pb.Member{
		{Name: "a", Addr: home.addr, State: "serving", CapacityBytes: 1 << 30}, {Name: "b", Addr: other.addr, State: "serving", CapacityBytes: 1 << 30},
	}
	other.members = home.members
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = engine.Close() })
	s, err := client.Open(t.Context(), client.Options{Servers: []string{home.addr}, Discover: true, MembersEvery: time.Hour, Engine: engine})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	ns, err := s.Namespace(t.Context(), "m")
	if err != nil {
		t.Fatal(err)
	}
	ids := []kv.BlockID{{1}}
	if err := s.DemoteCopies(t.Context(), ns, 1, ids, 2); err != nil {
		t.Errorf("nodes of an earlier version: %v", err)
	}
	var calls atomic.Int64
	demote := func(*pb.DemoteRequest) error {
		calls.Add(1)
		return status.Error(codes.NotFound, "no such namespace")
	}
	home.demote, other.demote = demote, demote
	if err := s.DemoteCopies(t.Context(), ns, 1, ids, 2); !errors.Is(err, client.ErrNotFound) || calls.Load() != 1 {
		t.Errorf("%d calls were made, with the error %v; want one, to the node that is not the home", calls.Load(), err)
	}
}
