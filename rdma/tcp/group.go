package tcp

import (
	"fmt"
	"slices"

	"github.com/penstock-kv/penstock/rdma"
)

// peerGroup is a set of sessions, resolved once.
type peerGroup struct {
	e        *Engine
	peers    []rdma.EngineID
	sessions []*session
}

// AddPeerGroup implements rdma.Engine.
func (e *Engine) AddPeerGroup(peers []rdma.EngineID) (rdma.PeerGroup, error) {
	g := &peerGroup{e: e, peers: slices.Clone(peers)}
	for _, p := range peers {
		s, err := e.session(p)
		if err != nil {
			return nil, err
		}
		g.sessions = append(g.sessions, s)
	}
	return g, nil
}

// Peers implements rdma.PeerGroup.
func (g *peerGroup) Peers() []rdma.EngineID { return slices.Clone(g.peers) }

// Close implements rdma.PeerGroup. A group holds nothing but pointers.
func (g *peerGroup) Close() {}

// checkGroup returns an error unless group, if there is one, is whole, ours,
// and holds the peer of each of n destinations.
func (e *Engine) checkGroup(group rdma.PeerGroup, n int, peer func(i int) rdma.EngineID) error {
	if group == nil {
		return nil
	}
	g, ok := group.(*peerGroup)
	if !ok || g.e != e {
		return fmt.Errorf("tcp: peer group: %w", rdma.ErrForeign)
	}
	for i, s := range g.sessions {
		if now, err := e.session(g.peers[i]); err != nil || now != s {
			return fmt.Errorf("tcp: peer group: session with %v has ended: %w", g.peers[i], rdma.ErrPeerDied)
		}
	}
	for i := range n {
		if !slices.Contains(g.peers, peer(i)) {
			return fmt.Errorf("tcp: destination %d is at %v, which is not in the peer group: %w", i, peer(i), rdma.ErrRange)
		}
	}
	return nil
}
