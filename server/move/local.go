package move

import (
	"context"
	"errors"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/relay"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

// local reads blocks of this node into memory of the process.
type local struct {
	node *storage.Node
	mem  []byte
}

var _ relay.Source = (*local)(nil)

// Register implements relay.Source.
func (l *local) Register(mem []byte) (*client.Memory, error) {
	l.mem = mem
	return nil, nil
}

// Read implements relay.Source. In a namespace with several layer groups each piece is looked up by itself.
func (l *local) Read(ctx context.Context, r client.ReadRequest) (client.ReadResult, error) {
	load := storage.LoadRequest{Namespace: r.Namespace.Name, Epoch: r.Epoch, IDs: r.IDs, Geometry: r.Namespace.Geometry.Digest()}
	skip := 0 // the blocks of the chain before the first of load.IDs
	switch {
	case len(r.Namespace.Geometry.Groups) > 1:
		load.Alone = true
	case r.Namespace.Index != kv.IndexFlat:
		load.Suffix, load.IDs, skip = true, r.IDs[r.First:], r.First
	}
	for _, p := range r.Pieces {
		load.Pieces = append(load.Pieces, storage.PieceRef{Block: p.Block - skip, Group: p.Group})
	}
	// A Load that ctx ends may write to the memory after it has returned.
	result, err := l.node.Load(context.WithoutCancel(ctx), load, func(_ context.Context, parts []storage.Part) {
		for i := range parts {
			p := &parts[i]
			copy(l.mem[r.Pieces[p.Piece].Offset+p.At:], p.Bytes)
			p.Done(nil)
		}
	})
	out := client.ReadResult{Blocks: len(r.IDs), Cut: client.CutComplete, Epoch: r.Epoch}
	if errors.Is(err, storage.ErrBusy) {
		out.Blocks, out.Outcome, out.Cut, out.Detail = r.First, client.Busy, client.CutBusy, err.Error()
		return out, nil
	}
	if err != nil {
		return out, err
	}
	for i, p := range result.Pieces {
		if p.State != storage.Delivered {
			out.Blocks, out.Cut = r.Pieces[i].Block, client.CutAbsent
			if p.Err != nil {
				out.Cut, out.Detail = client.CutLost, p.Err.Error()
				out.Lost = append(out.Lost, client.LostPiece{Block: r.Pieces[i].Block, Group: p.Group, Reason: client.LostFailed, Detail: out.Detail})
			}
			break
		}
		copy(r.Sums[i], p.LayerSums)
		r.Arrived[i], out.Outcome = true, client.Hit
	}
	return out, nil
}
