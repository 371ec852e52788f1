package move

import (
	"context"
	"log/slog"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

// repeater repeats deletions of one node on the other nodes.
type repeater struct {
	node *storage.Node
	to   Target
	log  *slog.Logger
}

// since repeats the deletions after the event seq for which which returns true, and returns the number of the last event. If ctx
// ends, the rest is left, and since returns the number of the event before it.
// A deletion that reaches another node before a copy of the block would have no effect there.
// If the log of events has lost the deletion, or the other node is down, the copy stays.
func (r repeater) since(ctx context.Context, seq uint64, which func(storage.Event) bool) uint64 {
	last := r.node.Events().Last()
	for seq < last && ctx.Err() == nil {
		events, err := r.node.Events().After(ctx, seq, 256)
		if ctx.Err() != nil {
			return seq
		}
		if err != nil {
			return last
		}
		for _, e := range events {
			if e.Kind == storage.BlockRemoved && e.Reason == "deleted" && which(e) {
				if r.deleteOn(ctx, e); ctx.Err() != nil {
					return seq
				}
			}
			seq = e.Sequence
		}
	}
	return seq
}

// deleteOn deletes the blocks of an event on the other nodes. It leaves a block that this node has again.
func (r repeater) deleteOn(ctx context.Context, e storage.Event) {
	ns, err := r.node.Namespace(e.Namespace)
	if err != nil || !ns.IsLive(e.Epoch) {
		return
	}
	have, _, err := r.node.Exists(e.Namespace, e.Epoch, e.IDs, false)
	if err != nil {
		return
	}
	var gone []kv.BlockID
	for i, id := range e.IDs {
		if have[i] == 0 {
			gone = append(gone, id)
		}
	}
	if len(gone) == 0 {
		return
	}
	if _, err := r.to.Delete(ctx, client.KeysRequest{Namespace: ns, Epoch: e.Epoch, IDs: gone}); err != nil && ctx.Err() == nil {
		r.log.Warn("blocks that were deleted on this node may have been copied, and cannot be deleted on the other nodes", "namespace", ns.Name, "blocks", len(gone), "err", err)
	}
}
