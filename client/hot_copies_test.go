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

// twoFakes returns a client of two nodes with a namespace.
func twoFakes(t *testing.T) (home, other *fake, s *client.Store, ns kv.Namespace) {
	t.Helper()
	home, other = newFake(t), newFake(t)
	home.members = []*pb.Member{
		{Name: "a", Addr: home.addr, State: "serving", CapacityBytes: 1 << 30}, {Name: "b", Addr: other.addr, State: "serving", CapacityBytes: 1 << 30},
	}
	other.members = home.members
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = engine.Close() })
	s, err = client.Open(t.Context(), client.Options{Servers: []string{home.addr}, Discover: true, MembersEvery: time.Hour, Engine: engine})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	if ns, err = s.Namespace(t.Context(), "m"); err != nil {
		t.Fatal(err)
	}
	return home, other, s, ns
}

// TestMatchAsksCopies: a match asks the nodes with copies after the home. A match of several epochs asks only the home, as the reads after it do.
func TestMatchAsksCopies(t *testing.T) {
	_, _, s, ns := twoFakes(t)
	ids := []kv.BlockID{{1}, {2}}
	s.LearnCopies(ns, ns.Epoch, ids, 2)
	for mix, want := range map[bool]int{false: 2, true: 1} {
		req := client.MatchRequest{Namespace: ns, Epoch: ns.Epoch, Mix: mix}
		if n := s.MatchAsked(t.Context(), req, ids); n != want {
			t.Errorf("mix %t: a match asks %d nodes; want %d", mix, n, want)
		}
	}
}

// TestDemoteCopiesVersion: DemoteCopies leaves copies on a node of an earlier version as they are. It returns the other errors of a node.
func TestDemoteCopiesVersion(t *testing.T) {
	home, other, s, ns := twoFakes(t)
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
