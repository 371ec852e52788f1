package peers

import (
	"context"
	"fmt"
	"slices"

	"github.com/penstock-kv/penstock/rdma"
)

// Group is a set of sessions of one engine, looked up once. It implements rdma.PeerGroup.
type Group[S any] struct {
	owner    rdma.Engine
	peers    []rdma.EngineID
	sessions map[rdma.EngineID]S
}

// NewGroup looks up the sessions with peers. It returns the first error of find.
func NewGroup[S any](owner rdma.Engine, peers []rdma.EngineID, find func(rdma.EngineID) (S, error)) (*Group[S], error) {
	g := &Group[S]{owner: owner, peers: slices.Clone(peers), sessions: make(map[rdma.EngineID]S, len(peers))}
	for _, p := range peers {
		s, err := find(p)
		if err != nil {
			return nil, err
		}
		g.sessions[p] = s
	}
	return g, nil
}

// Peers implements rdma.PeerGroup.
func (g *Group[S]) Peers() []rdma.EngineID { return slices.Clone(g.peers) }

// Close implements rdma.PeerGroup. A group holds only pointers, so there is nothing to release.
func (g *Group[S]) Close() {}

// Resolve returns the function that finds the sessions for an operation on group. If group is nil,
// Resolve returns find. Otherwise group must belong to owner, and none of its sessions may have
// ended.
func Resolve[S any](owner rdma.Engine, group rdma.PeerGroup, find func(rdma.EngineID) (S, error), ended func(S) bool) (func(rdma.EngineID) (S, error), error) {
	if group == nil {
		return find, nil
	}
	g, ok := group.(*Group[S])
	if !ok || g.owner != owner {
		return nil, fmt.Errorf("rdma: peer group: %w", rdma.ErrForeign)
	}
	for p, s := range g.sessions {
		if ended(s) {
			return nil, fmt.Errorf("rdma: peer group: session with %v has ended: %w", p, rdma.ErrPeerDied)
		}
	}
	return func(p rdma.EngineID) (S, error) {
		s, ok := g.sessions[p]
		if !ok {
			return s, fmt.Errorf("rdma: a destination is at %v, which is not in the peer group: %w", p, rdma.ErrRange)
		}
		return s, nil
	}, nil
}

// Scatter performs x as one write for each destination, in the sessions that find returns. If a
// destination has no session, nothing is submitted.
func Scatter[S any](ctx context.Context, x rdma.Scatter, find func(rdma.EngineID) (S, error), write func(context.Context, S, *rdma.Write) error) error {
	for i := range x.Dsts {
		if _, err := find(x.Dsts[i].Dst.Engine); err != nil {
			return fmt.Errorf("rdma: scatter destination %d: %w", i, err)
		}
	}
	return rdma.ScatterOver(ctx, scatterEngine[S]{find: find, write: write}, x)
}

// scatterEngine is an rdma.Engine whose writes go to the sessions that find returns.
type scatterEngine[S any] struct {
	rdma.Engine
	find  func(rdma.EngineID) (S, error)
	write func(context.Context, S, *rdma.Write) error
}

// Write implements rdma.Engine.
func (o scatterEngine[S]) Write(ctx context.Context, w rdma.Write) error {
	s, err := o.find(w.Dst.Engine)
	if err != nil {
		return err
	}
	return o.write(ctx, s, &w)
}
