package binding

import (
	"context"
	"slices"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
)

// Do performs a batch and returns its result.
func (n *Namespace) Do(op Op, b *Batch) Result {
	s := n.store
	if err := s.begin(); err != nil {
		return Result{Op: op, Err: err}
	}
	defer s.calls.Done()
	c, err := n.plan(op, b)
	if err != nil {
		return Result{Op: op, Err: err}
	}
	defer c.end()
	ctx, cancel := s.within(c.within)
	defer cancel()
	return c.run(ctx)
}

// run performs the call and sets its results.
func (c *call) run(ctx context.Context) Result {
	r := Result{Op: c.op, N: c.n(), Epoch: c.def.Epoch, Cut: client.CutComplete}
	switch c.op {
	case OpMatch:
		c.match(ctx, &r)
		return r
	case OpGet:
		if c.device != nil {
			c.load(ctx, &r)
		} else {
			c.get(ctx, &r)
		}
	case OpPut:
		if c.device != nil {
			c.save(ctx, &r)
		} else {
			c.put(ctx, &r)
		}
	default:
		c.each(ctx, &r)
	}
	for _, k := range c.results {
		if k == KeyOK || k == KeyExists {
			r.OK++
		}
	}
	r.Prefix = c.prefix()
	return r
}

// prefix returns the number of consecutive keys, from the first one on, without a failed
// piece. A key without a piece in the batch counts as a success.
func (c *call) prefix() int {
	first := len(c.ids)
	for i, k := range c.results {
		if k == KeyOK || k == KeyExists {
			continue
		}
		key := i
		if c.op.moves() {
			key = c.pieces[i].Block
		}
		first = min(first, key)
	}
	return first
}

func (c *call) match(ctx context.Context, r *Result) {
	s := c.ns.store
	m, err := s.client.Match(ctx, client.MatchRequest{Namespace: c.def, IDs: c.ids, Lease: c.lease, Oldest: c.oldest, Newest: c.newest, Mix: c.mix})
	r.Prefix, r.Cut, r.Bytes, r.Err = m.Blocks, m.Cut, m.Bytes, err
	if err == nil {
		r.Epoch = m.Epoch
		next := c.epochs
		for _, run := range m.Epochs {
			for i := 0; i < run.Blocks && len(next) > 0; i++ {
				next[0], next = run.Epoch, next[1:]
			}
		}
	}
	if m.Lease != nil {
		r.Lease = s.library.addLease(&Lease{store: s, lease: m.Lease}, c.lease)
	}
}

// each performs a batch whose operation is exists, touch or delete.
func (c *call) each(ctx context.Context, r *Result) {
	s := c.ns.store
	req := client.KeysRequest{Namespace: c.def, IDs: c.ids}
	var found []client.Presence
	if c.op == OpDelete {
		found, r.Err = s.client.Delete(ctx, req)
	} else {
		found, r.Err = s.client.Exists(ctx, req, c.op == OpTouch)
	}
	for i, p := range found {
		switch p {
		case client.Present:
			c.results[i] = KeyOK
		case client.Unknown:
			c.results[i] = KeyDown
		}
	}
}

// put stores the pieces.
func (c *call) put(ctx context.Context, r *Result) {
	existed := make([]bool, len(c.pieces))
	w, err := c.ns.store.client.Write(ctx, client.WriteRequest{
		Namespace: c.def, IDs: c.ids, First: c.first, From: c.memory, Pieces: c.pieces, Fragments: c.fragments, Existed: existed,
	})
	r.Bytes, r.Err = w.Bytes, err
	if err != nil && w.Stored+w.Existed == 0 {
		return
	}
	refused := make(map[client.Piece]KeyState, len(w.Refused))
	for _, p := range w.Refused {
		state := KeyRefused
		switch p.Reason {
		case client.LostBusy:
			state = KeyBusy
		case client.LostNodeDown:
			state = KeyDown
		case client.LostSkipped:
			state = KeyMiss
		}
		refused[client.Piece{Block: p.Block, Group: p.Group}] = state
	}
	for i, p := range c.pieces {
		switch state, no := refused[client.Piece{Block: p.Block, Group: p.Group}]; {
		case no:
			c.results[i] = state
		case existed[i]:
			c.results[i] = KeyExists
		default:
			c.results[i] = KeyOK
		}
	}
}

// get loads the pieces. A Read of a flat namespace returns only the keys before the first absent
// key of each node, and skips keys behind a lost one. So get repeats: each further round checks
// which of the remaining keys are stored, and reads these keys. Each round determines the result of
// at least one piece, so get ends. Two rounds are nearly always enough.
func (c *call) get(ctx context.Context, r *Result) {
	open := make([]int, len(c.pieces))
	for i := range open {
		open[i] = i
	}
	for turn := 0; len(open) > 0; turn++ {
		if turn > 0 {
			if open = c.present(ctx, open, r); len(open) == 0 {
				return
			}
		}
		open = c.read(ctx, open, r)
		if r.Err != nil || c.def.Index != kv.IndexFlat {
			return
		}
	}
}

// present returns the elements of open (indices of pieces) whose keys are stored.
func (c *call) present(ctx context.Context, open []int, r *Result) []int {
	byEpoch := make(map[kv.Epoch][]int)
	for _, i := range open {
		e := c.epochOf(c.pieces[i].Block)
		byEpoch[e] = append(byEpoch[e], i)
	}
	var left []int
	for e, pieces := range byEpoch {
		req := client.KeysRequest{Namespace: c.def, Epoch: e, IDs: make([]kv.BlockID, len(pieces))}
		for k, i := range pieces {
			req.IDs[k] = c.ids[c.pieces[i].Block]
		}
		found, err := c.ns.store.client.Exists(ctx, req, false)
		if err != nil {
			r.Err = err
			return nil
		}
		for k, i := range pieces {
			switch found[k] {
			case client.Present:
				left = append(left, i)
			case client.Unknown:
				c.results[i] = KeyDown
			}
		}
	}
	slices.Sort(left)
	return left
}

// epochOf returns the epoch of a key.
func (c *call) epochOf(key int) kv.Epoch {
	if c.epochs == nil {
		return c.def.Epoch
	}
	return c.epochs[key]
}

// runs returns the epochs of the keys in the form of client.ReadRequest, or nil if all keys are of
// the call's epoch.
func (c *call) runs(keys int, key func(int) int) (runs []kv.EpochRun) {
	if c.epochs == nil {
		return nil
	}
	for i := range keys {
		runs = append(runs, kv.EpochRun{Epoch: c.epochs[key(i)], Blocks: 1})
	}
	return runs
}

// read makes one Read of the pieces whose indices are in open. It sets the results of the pieces,
// and returns the pieces whose result is still unknown because the Read ended before it reached
// them.
func (c *call) read(ctx context.Context, open []int, r *Result) (left []int) {
	req := client.ReadRequest{
		Namespace: c.def, IDs: c.ids, First: c.first, Into: c.memory, Pieces: c.pieces, Fragments: c.fragments,
		FirstLayer: c.firstLayer, Layers: c.layers,
	}
	req.Epochs = c.runs(len(c.ids), func(i int) int { return i })
	if len(open) < len(c.pieces) {
		// The namespace is flat here, because in other namespaces get calls read only once. The
		// request has only the keys of the open pieces.
		req.IDs, req.First, req.Pieces, req.Fragments = make([]kv.BlockID, len(open)), 0, make([]client.Piece, len(open)), nil
		for k, i := range open {
			req.IDs[k] = c.ids[c.pieces[i].Block]
			req.Pieces[k] = client.Piece{Block: k, Offset: c.pieces[i].Offset}
			if c.fragments != nil {
				req.Fragments = append(req.Fragments, c.fragments[i])
			}
		}
		req.Epochs = c.runs(len(open), func(k int) int { return c.pieces[open[k]].Block })
	}
	req.Arrived = make([]bool, len(open))
	got, err := c.ns.store.client.Read(ctx, req)
	r.Bytes += got.Bytes
	r.Err = err
	if len(open) == len(c.pieces) {
		r.Cut = got.Cut
	}
	lost := make(map[client.Piece]client.Reason, len(got.Lost))
	for _, p := range got.Lost {
		lost[client.Piece{Block: p.Block, Group: p.Group}] = p.Reason
	}
	for k, i := range open {
		p := req.Pieces[k]
		why, isLost := lost[client.Piece{Block: p.Block, Group: p.Group}]
		switch {
		case req.Arrived[k]:
			c.results[i] = KeyOK
		case isLost && why != client.LostSkipped:
			c.results[i] = lostState(why)
		case isLost && c.def.Index == kv.IndexFlat:
			// Skipped because a key of another node, which may be down, was lost.
			left = append(left, i)
		case got.Cut == client.CutNodeDown:
			c.results[i] = KeyDown
		case got.Cut == client.CutBusy:
			c.results[i] = KeyBusy
		case got.Cut == client.CutEpoch && c.epochs == nil || p.Block == got.Blocks && !isLost:
			// KeyMiss: the first absent key, or any key at another epoch.
		default:
			left = append(left, i)
		}
	}
	return slices.Clip(left)
}

func lostState(why client.Reason) KeyState {
	switch why {
	case client.LostGone, client.LostEpoch:
		return KeyMiss
	case client.LostBusy:
		return KeyBusy
	case client.LostNodeDown:
		return KeyDown
	}
	return KeyLost
}
