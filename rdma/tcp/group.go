package tcp

import (
	"context"
	"fmt"
	"slices"

	"github.com/penstock-kv/penstock/rdma"
)

// peerGroup is a set of sessions, resolved once.
type peerGroup struct {
	e        *Engine
	peers    []rdma.EngineID
	sessions map[rdma.EngineID]*session
}

// AddPeerGroup implements rdma.Engine.
func (e *Engine) AddPeerGroup(peers []rdma.EngineID) (rdma.PeerGroup, error) {
	g := &peerGroup{e: e, peers: slices.Clone(peers), sessions: make(map[rdma.EngineID]*session, len(peers))}
	for _, p := range peers {
		s, err := e.session(p)
		if err != nil {
			return nil, err
		}
		g.sessions[p] = s
	}
	return g, nil
}

// Peers implements rdma.PeerGroup.
func (g *peerGroup) Peers() []rdma.EngineID { return slices.Clone(g.peers) }

// Close implements rdma.PeerGroup. A group holds nothing but pointers.
func (g *peerGroup) Close() {}

// grouped writes in the sessions of a group, and is otherwise the engine.
type grouped struct {
	*Engine
	g *peerGroup
}

// Write submits a write in the session that the group found.
func (x grouped) Write(ctx context.Context, w rdma.Write) error {
	return x.write(ctx, x.g.sessions[w.Dst.Engine], &w)
}

// in returns the engine as it writes for a group, which has to be whole, ours,
// and hold the peer of each of n destinations.
func (e *Engine) in(group rdma.PeerGroup, n int, peer func(i int) rdma.EngineID) (rdma.Engine, error) {
	if group == nil {
		return e, nil
	}
	g, ok := group.(*peerGroup)
	if !ok || g.e != e {
		return nil, fmt.Errorf("tcp: peer group: %w", rdma.ErrForeign)
	}
	for p, s := range g.sessions {
		if s.hasEnded() {
			return nil, fmt.Errorf("tcp: peer group: session with %v has ended: %w", p, rdma.ErrPeerDied)
		}
	}
	for i := range n {
		if g.sessions[peer(i)] == nil {
			return nil, fmt.Errorf("tcp: destination %d is at %v, which is not in the peer group: %w", i, peer(i), rdma.ErrRange)
		}
	}
	return grouped{e, g}, nil
}

// Scatter implements rdma.Engine.
func (e *Engine) Scatter(ctx context.Context, s rdma.Scatter) error {
	to, err := e.in(s.Group, len(s.Dsts), func(i int) rdma.EngineID { return s.Dsts[i].Dst.Engine })
	if err != nil {
		return err
	}
	return rdma.ScatterOver(ctx, to, s)
}

// Barrier implements rdma.Engine.
func (e *Engine) Barrier(ctx context.Context, b rdma.Barrier) error {
	to, err := e.in(b.Group, len(b.Dsts), func(i int) rdma.EngineID { return b.Dsts[i].Engine })
	if err != nil {
		return err
	}
	return rdma.BarrierOver(ctx, to, b)
}
