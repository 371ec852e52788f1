package traffic

import (
	"context"
	"fmt"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
)

// chain is the ids of a prompt's blocks under one epoch.
type chain struct {
	ids   []kv.BlockID
	epoch kv.Epoch
}

// load reads the blocks of a part from storage into the buffer, until ctx (a context that reading
// returned) ends. Block b goes to offset base plus (b - part.From) times the size of a Full Block.
// load returns the part that was read, the checksums of the blocks of this part, and a Stop with
// the reason why the other blocks were not read. The Stop is nil if the whole part was read.
// progress, if set, is called during the read.
func (t *transfer) load(ctx context.Context, c chain, part Part, into arena.Buffer, base uint64, progress func(Progress)) (Part, [][]uint64, *Stop, error) {
	g := t.m.geo
	pieces := make([]client.Piece, part.Len())
	layerSums := make([][]uint64, part.Len())
	flat := make([]uint64, part.Len()*g.layers)
	for i := range pieces {
		pieces[i] = client.Piece{Block: part.From + i, Offset: into.Offset() + int64(base) + int64(i)*int64(g.fullBytes)}
		layerSums[i] = flat[i*g.layers : (i+1)*g.layers]
	}
	req := client.ReadRequest{
		Namespace: t.m.opts.Namespace, IDs: c.ids[:part.To], Epoch: c.epoch, Into: t.m.buffer.memory, Pieces: pieces, Sums: layerSums,
	}
	if progress != nil {
		req.Progress = func(p client.ReadProgress) {
			// Progress up to Part.To means that the part is complete, so the last block
			// is reported only after the read has succeeded.
			progress(Progress{part, min(max(p.Blocks, part.From), part.To-1), p.Bytes})
		}
	}
	res, err := t.m.opts.Storage.Read(ctx, req)
	if t.ctx.Err() != nil {
		return Part{}, nil, nil, fmt.Errorf("traffic: request %q: read: %w", t.request, t.ctx.Err())
	}
	cut := ctx.Err() != nil
	// The blocks before an error are in memory and verified.
	have := Part{part.From, max(part.From, min(res.Blocks, part.To))}
	if have.To == part.To {
		return have, layerSums, nil, nil
	}
	stop := &Stop{Part: part, Upto: have.To, Err: err}
	if cut {
		stop.Err = ErrCut
	} else if err == nil {
		switch res.Cut {
		case client.CutAbsent, client.CutEpoch:
			stop.Gone = true
		}
		stop.Err = fmt.Errorf("%v: %v %s", res.Outcome, res.Cut, res.Detail)
	}
	return have, layerSums, stop, nil
}
