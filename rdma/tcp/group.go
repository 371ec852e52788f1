package tcp

import (
	"context"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/peers"
)

// AddPeerGroup implements rdma.Engine.
func (e *Engine) AddPeerGroup(ids []rdma.EngineID) (rdma.PeerGroup, error) {
	return peers.NewGroup(e, ids, e.core.Session)
}

// Scatter implements rdma.Engine.
func (e *Engine) Scatter(ctx context.Context, x rdma.Scatter) error {
	return e.core.Scatter(ctx, e, x, e.write)
}

// Barrier implements rdma.Engine.
func (e *Engine) Barrier(ctx context.Context, b rdma.Barrier) error {
	return e.Scatter(ctx, b.Scatter())
}
