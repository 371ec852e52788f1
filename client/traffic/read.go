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

// load reads the blocks of a part of a cached prefix of hit blocks from storage into the buffer,
// until ctx (a context that reading returned) ends. Block b goes to offset base plus (b - part.From)
// times the size of a Full Block, without the layers that do not need it. load returns the part that
// was read, the checksums of the blocks of this part in the order of a Full Block, and a Stop with
// the reason why the other blocks were not read. The Stop is nil if the whole part was read.
// progress, if set, is called during the read.
func (t *transfer) load(ctx context.Context, c chain, hit int, part Part, into arena.Buffer, base uint64, progress func(Progress)) (Part, [][]uint64, *Stop, error) {
	g := &t.m.geo
	ids := c.ids[:part.To]
	if g.partial {
		ids = c.ids[:hit] // the client reads a prefix with windows or state only in its whole length
	}
	pieces, sums := make([]client.Piece, 0, part.Len()), make([][]uint64, 0, part.Len())
	blockSums := make([][]uint64, part.Len())
	flat := make([]uint64, part.Len()*g.layers)
	for i := range blockSums {
		blockSums[i] = flat[i*g.layers : (i+1)*g.layers]
		b := part.From + i
		pieces, sums = g.pieces(pieces, sums, b, func(group int) bool { return b >= g.FirstNeeded(group, hit) }, into.Offset()+int64(base)+int64(i)*int64(g.fullBytes), blockSums[i])
	}
	req := client.ReadRequest{
		Namespace: t.m.opts.Namespace, IDs: ids, Epoch: c.epoch, Into: t.m.buffer.memory, Pieces: pieces, Sums: sums,
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
		return have, blockSums, nil, nil
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
	return have, blockSums, stop, nil
}
