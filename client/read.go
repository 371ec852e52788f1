package client

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/kv"
)

// reading is the state of one running Read.
type reading struct {
	store *Store
	req   ReadRequest
	ids   []kv.BlockID
	// epochs has the epoch of each block of a mixed read; nil: all blocks are of req.Epoch.
	epochs []kv.Epoch
	digest kv.GeometryDigest
	pieces []Piece
	tasks  []readTask
	// nodesOf returns the nodes that may have a block, in the order in which they are asked.
	nodesOf func(block int) []*node
	// hot is set if nodesOf has nodes with copies of a hot prefix.
	hot bool
	// several is set if a block has more than one such node. No task is skipped then, because a later
	// turn may deliver the block before it, and does not ask this node again.
	several bool
	// targets are the memories that the Read writes to. fragments[i] are the destinations of piece
	// i in the targets. If fragments is nil, there is one target, and each piece goes to its Offset
	// there.
	targets   []*Memory
	fragments [][]run
	// local is nil unless the pieces are borrowed instead of moved.
	local *borrowing
	// progress is nil unless the caller requested it.
	progress *progress

	mu     sync.Mutex
	states []pieceState // of pieces
	// broken is the index of the first block of which a piece is lost or absent. Tasks for later
	// blocks are not begun. brokenAbsent reports whether the block is absent on the node.
	broken       int
	brokenAbsent bool
}

// pieceState is the result of a piece.
type pieceState struct {
	delivered bool
	// lost is the reason why the piece did not arrive. If the node does not have the piece, cut is
	// set instead.
	lost   Reason
	cut    Cut
	detail string
}

// Read loads pieces of a chain into the caller's memory and verifies them. A lost block shortens
// the prefix. After Read has returned, with or without an error, nothing writes to the memory any
// more. If ctx ended, the result has the blocks that had arrived by then.
func (s *Store) Read(ctx context.Context, req ReadRequest) (ReadResult, error) {
	s.stats.reads.Add(1)
	r, err := s.newReading(req)
	if err != nil {
		return ReadResult{}, err
	}
	if err := r.checkInto(); err != nil {
		return ReadResult{}, err
	}
	return r.run(ctx)
}

// run performs a Read whose request has been checked.
func (r *reading) run(ctx context.Context) (ReadResult, error) {
	if len(r.pieces) == 0 {
		n := r.req.First
		res := ReadResult{Blocks: n, Tokens: n * r.req.Namespace.Geometry.BlockTokens, Cut: CutComplete, Epoch: r.req.Epoch}
		if n > 0 {
			res.Outcome = Hit
		}
		return res, nil
	}
	if err := r.plan(ctx, 0); err != nil {
		return ReadResult{}, err
	}
	err := r.runTasks(ctx)
	// Pieces can be borrowed only from the node of this host.
	for turn := 1; err == nil && ctx.Err() == nil && r.local == nil && !r.complete(); turn++ {
		if err = r.plan(ctx, turn); err != nil || len(r.tasks) == 0 {
			break
		}
		err = r.runAgain(ctx)
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("client: read: %w", ctx.Err())
	}
	return r.result(), err
}

// complete reports whether all pieces have arrived. No task is running.
func (r *reading) complete() bool {
	return !slices.ContainsFunc(r.states, func(s pieceState) bool { return !s.delivered })
}

// runAgain performs the tasks for pieces that another node did not deliver. The reasons of that node
// stay those of the pieces that do not arrive now either.
func (r *reading) runAgain(ctx context.Context) error {
	before := slices.Clone(r.states)
	for i := range r.states {
		if !r.states[i].delivered {
			r.states[i] = pieceState{}
		}
	}
	broken, brokenAbsent := r.broken, r.brokenAbsent
	r.broken, r.brokenAbsent = math.MaxInt, false
	err := r.runTasks(ctx)
	for i := range r.states {
		if !r.states[i].delivered {
			r.states[i] = before[i]
		}
	}
	r.broken, r.brokenAbsent = broken, brokenAbsent
	return err
}

// runTasks performs the tasks, at most ReadParallel at a time.
func (r *reading) runTasks(ctx context.Context) error {
	if len(r.tasks) == 1 {
		return r.runTask(ctx, &r.tasks[0])
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(r.store.opts.ReadParallel)
	for i := range r.tasks {
		group.Go(func() error { return r.runTask(ctx, &r.tasks[i]) })
	}
	return group.Wait()
}

// newReading checks the request, except for its memory, and returns the state of the Read.
func (s *Store) newReading(req ReadRequest) (*reading, error) {
	if err := checkNamespace(req.Namespace); err != nil {
		return nil, err
	}
	ids, err := chainOf(req.Namespace, req.IDs, req.Tokens)
	if err != nil {
		return nil, err
	}
	epochs, err := blockEpochs(&req, len(ids))
	if err != nil {
		return nil, fmt.Errorf("client: read: %w", err)
	}
	g := req.Namespace.Geometry
	r := &reading{store: s, req: req, ids: ids, epochs: epochs, digest: g.Digest(), pieces: req.Pieces, broken: math.MaxInt}
	if req.First < 0 || req.First > len(ids) {
		return nil, fmt.Errorf("client: read: %w: first block %d of a chain of %d", ErrRequest, req.First, len(ids))
	}
	if req.FirstLayer < 0 || req.Layers < 0 {
		return nil, fmt.Errorf("client: read: %w: %d layers from %d", ErrRequest, req.Layers, req.FirstLayer)
	}
	if r.pieces == nil {
		r.pieces = neededPieces(g, req.First, len(ids), req.Base, req.FirstLayer)
	}
	for _, p := range r.pieces {
		if err := checkPiece(g, len(ids), p); err != nil {
			return nil, fmt.Errorf("client: read: %w", err)
		}
		if p.Block < req.First {
			return nil, fmt.Errorf("client: read: %w: a piece of block %d, before the first block to read, %d", ErrRequest, p.Block, req.First)
		}
		if n := g.Groups[p.Group].Layers; req.FirstLayer >= n || req.Layers > n-req.FirstLayer {
			return nil, fmt.Errorf("client: read: %w: layers %d to %d of group %d, which has %d", ErrRequest, req.FirstLayer, req.FirstLayer+req.Layers, p.Group, n)
		}
	}
	if err := r.checkSums(); err != nil {
		return nil, err
	}
	if n := len(req.Arrived); req.Arrived != nil && n != len(r.pieces) {
		return nil, fmt.Errorf("client: read: %w: Arrived has %d entries for %d pieces", ErrRequest, n, len(r.pieces))
	}
	r.states = make([]pieceState, len(r.pieces))
	r.progress = r.newProgress()
	return r, nil
}

// checkSums returns an error unless req.Sums, if set, has room for all checksums.
func (r *reading) checkSums() error {
	if r.req.Sums == nil {
		return nil
	}
	if len(r.req.Sums) != len(r.pieces) {
		return fmt.Errorf("client: read: %w: sums for %d pieces of %d", ErrRequest, len(r.req.Sums), len(r.pieces))
	}
	for i, p := range r.pieces {
		if got, want := len(r.req.Sums[i]), r.layers(p.Group); got != want {
			return fmt.Errorf("client: read: %w: room for %d sums of piece %d, which has %d layers", ErrRequest, got, i, want)
		}
	}
	return nil
}

// checkInto returns an error unless the caller's memory has room for every piece.
func (r *reading) checkInto() error {
	if err := r.place(); err != nil || r.fragments != nil {
		return err
	}
	if len(r.pieces) > 0 && r.req.Into == nil {
		return fmt.Errorf("client: read: %w: no memory to read into (ReadRequest.Into)", ErrRequest)
	}
	for _, p := range r.pieces {
		if err := checkRange(p, r.pieceBytes(p.Group), r.req.Into); err != nil {
			return fmt.Errorf("client: read: %w", err)
		}
	}
	if err := checkApart(r.pieces, r.pieceBytes); err != nil {
		return fmt.Errorf("client: read: %w", err)
	}
	return nil
}

// blockEpochs returns the epoch of each block of a mixed read, and sets the request's Epoch to the
// newest of them. req.Epochs may be longer than the chain. For a read that is not mixed it returns
// nil and fills in the Epoch.
func blockEpochs(req *ReadRequest, blocks int) ([]kv.Epoch, error) {
	if req.Epochs == nil {
		return nil, ownEpoch(req.Namespace, &req.Epoch)
	}
	if req.Epoch != 0 {
		return nil, fmt.Errorf("%w: both epoch %d and the epochs of the blocks are given", ErrRequest, req.Epoch)
	}
	epochs := make([]kv.Epoch, 0, blocks)
	for _, run := range req.Epochs {
		if run.Epoch == 0 || run.Blocks < 1 {
			return nil, fmt.Errorf("%w: %d blocks of epoch %d", ErrRequest, run.Blocks, run.Epoch)
		}
		if n := min(run.Blocks, blocks-len(epochs)); n > 0 {
			epochs = append(epochs, slices.Repeat([]kv.Epoch{run.Epoch}, n)...)
			req.Epoch = max(req.Epoch, run.Epoch)
		}
	}
	if len(epochs) != blocks {
		return nil, fmt.Errorf("%w: epochs of %d blocks; the chain has %d", ErrRequest, len(epochs), blocks)
	}
	return epochs, nil
}

// ownEpoch replaces epoch 0 by the epoch of ns, which is the epoch of the caller's weights. The
// node's newest epoch would be wrong: after BumpEpoch it is the epoch of other weights.
func ownEpoch(ns kv.Namespace, epoch *kv.Epoch) error {
	if *epoch == 0 {
		*epoch = ns.Epoch
	}
	if *epoch == 0 {
		return fmt.Errorf("%w: no epoch in the request and none in namespace %q: use the namespace that Store.Namespace returned", ErrRequest, ns.Name)
	}
	return nil
}

// neededPieces returns the pieces of the blocks from first on that a prefix of the given number of
// blocks needs. Each piece gets the offset of its position in the prompt; block 0 of the prompt
// lies at base. The layers of each piece from firstLayer on are read.
func neededPieces(g kv.Geometry, first, blocks int, base int64, firstLayer int) []Piece {
	var pieces []Piece
	for b := first; b < blocks; b++ {
		for group := range g.Groups {
			if b >= g.FirstNeeded(group, blocks) {
				at := base + g.PieceOffset(b, group) + int64(firstLayer)*g.LayerBytes(group)
				pieces = append(pieces, Piece{Block: b, Group: group, Offset: at})
			}
		}
	}
	return pieces
}

// checkApart returns an error if pieces share bytes, because they would overwrite each other. The
// offsets must be in range.
func checkApart(pieces []Piece, pieceBytes func(group int) int64) error {
	byOffset := func(a, b Piece) int { return cmp.Compare(a.Offset, b.Offset) }
	if !slices.IsSortedFunc(pieces, byOffset) {
		pieces = slices.SortedFunc(slices.Values(pieces), byOffset)
	}
	for i := 1; i < len(pieces); i++ {
		if a, b := pieces[i-1], pieces[i]; b.Offset < a.Offset+pieceBytes(a.Group) {
			return fmt.Errorf("%w: block %d, group %d at offset %d and block %d, group %d at offset %d share bytes", ErrRequest, a.Block, a.Group, a.Offset, b.Block, b.Group, b.Offset)
		}
	}
	return nil
}

func checkPiece(g kv.Geometry, blocks int, p Piece) error {
	if p.Block < 0 || p.Block >= blocks || p.Group < 0 || p.Group >= len(g.Groups) {
		return fmt.Errorf("%w: block %d, group %d does not exist: the chain has %d blocks and the namespace %d groups", ErrRequest, p.Block, p.Group, blocks, len(g.Groups))
	}
	return nil
}

func checkRange(p Piece, sizeBytes int64, m *Memory) error {
	if have := int64(len(m.Bytes())); p.Offset < 0 || p.Offset > have-sizeBytes {
		return fmt.Errorf("%w: block %d, group %d at offset %d: %d bytes do not fit in memory of %d (offsets count from block 0 of the prompt)", ErrRequest, p.Block, p.Group, p.Offset, sizeBytes, have)
	}
	return nil
}

// layers returns the number of layers of the group that are read.
func (r *reading) layers(group int) int {
	if r.req.Layers > 0 {
		return r.req.Layers
	}
	return r.req.Namespace.Geometry.Groups[group].Layers - r.req.FirstLayer
}

func (r *reading) pieceBytes(group int) int64 {
	return int64(r.layers(group)) * r.req.Namespace.Geometry.LayerBytes(group)
}

// matching returns the request for a match of the blocks that are read.
func (r *reading) matching() MatchRequest {
	m := MatchRequest{Namespace: r.req.Namespace, Epoch: r.req.Epoch}
	if r.epochs != nil {
		m.Mix, m.Oldest = true, slices.Min(r.epochs)
	}
	return m
}

// plan divides the pieces that have not arrived into tasks, in the order given. turn is the index, in the
// list of a block's nodes, of the node that is asked.
func (r *reading) plan(ctx context.Context, turn int) error {
	if r.tasks = nil; turn == 0 {
		r.nodesOf, r.hot = r.store.routes(ctx, r.matching(), r.ids, r.local == nil) // ReadLocal borrows from the node of this host only
	}
	g := r.req.Namespace.Geometry
	flat := r.req.Namespace.Index == kv.IndexFlat
	limits := make(map[*node]readLimits)
	open := make(map[*node]*readTask)
	bytes, whole := make(map[*node]int64), make(map[*node]int64)
	flush := func(n *node) {
		if t := open[n]; t != nil {
			r.tasks = append(r.tasks, *t)
		}
		open[n], bytes[n], whole[n] = nil, 0, 0
	}
	var order []*node
	for i, p := range r.pieces {
		if r.states[i].delivered {
			continue
		}
		nodes := r.nodesOf(p.Block)
		if turn >= len(nodes) {
			continue
		}
		n := nodes[turn]
		r.several = r.several || len(nodes) > 1
		if _, ok := limits[n]; !ok {
			limit, err := r.store.readLimit(ctx, n)
			if err != nil {
				return err
			}
			limits[n] = limit
			order = append(order, n)
		}
		size, wholeSize := r.pieceBytes(p.Group), g.PieceBytes(p.Group)
		epoch := r.req.Epoch
		if r.epochs != nil {
			epoch = r.epochs[p.Block]
		}
		if t := open[n]; t != nil && (bytes[n]+size > limits[n].bytes || whole[n]+wholeSize > limits[n].whole || len(t.pieces) == readTaskPieces || t.epoch != epoch) {
			flush(n)
		}
		if open[n] == nil {
			open[n] = &readTask{node: n, epoch: epoch, copy: r.isCopy(n)}
		}
		open[n].add(i, p.Block, r.ids, flat)
		bytes[n] += size
		whole[n] += wholeSize
	}
	for _, n := range order {
		flush(n)
	}
	if !flat {
		r.setChains(limits)
	}
	return nil
}

// isCopy reports whether a node is no home of the sequence, so that it has copies of a hot prefix.
func (r *reading) isCopy(n *node) bool {
	return r.hot && !slices.Contains(r.store.candidates(r.req.Namespace, r.ids[0]), n)
}

// settle records the result of piece i.
func (r *reading) settle(i int, state pieceState) {
	block := r.pieces[i].Block
	r.mu.Lock()
	defer r.mu.Unlock()
	r.states[i] = state
	if !state.delivered && block < r.broken {
		r.broken, r.brokenAbsent = block, state.lost == ""
	}
}

func (r *reading) loseAll(t *readTask, why Reason, detail string) {
	for _, i := range t.pieces {
		r.settle(i, pieceState{lost: why, detail: detail})
	}
}

// result returns the result of the Read. It is called when no task is running.
func (r *reading) result() ReadResult {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := ReadResult{Cut: CutComplete, Epoch: r.req.Epoch}
	first, last, missing := math.MaxInt, -1, -1
	allOrNothing := r.allOrNothing()
	for i, p := range r.pieces {
		first, last = min(first, p.Block), max(last, p.Block)
		state := &r.states[i]
		if state.delivered {
			if r.req.Arrived != nil {
				r.req.Arrived[i] = true
			}
			out.Bytes += r.pieceBytes(p.Group)
			continue
		}
		if state.lost == "" && state.cut == "" && !r.brokenAbsent {
			state.lost = LostSkipped
		}
		if missing < 0 || r.decides(i, missing, allOrNothing) {
			missing = i
		}
		if state.lost != "" {
			out.Lost = append(out.Lost, LostPiece{Block: p.Block, Group: p.Group, Reason: state.lost, Detail: state.detail})
		}
	}
	slices.SortStableFunc(out.Lost, func(a, b LostPiece) int { return a.Block - b.Block })
	out.Blocks = last + 1
	if missing >= 0 {
		state := r.states[missing]
		out.Blocks, out.Cut = r.pieces[missing].Block, state.why()
		if allOrNothing {
			out.Blocks = 0
		}
		if out.Blocks <= first && state.lost == LostBusy {
			out.Outcome, out.Detail = Busy, state.detail
			r.store.stats.busy.Add(1)
		}
	}
	if out.Blocks > first {
		out.Outcome = Hit
	}
	out.Tokens = out.Blocks * r.req.Namespace.Geometry.BlockTokens
	r.store.stats.readBytes.Add(uint64(out.Bytes))
	r.store.stats.lostPieces.Add(uint64(len(out.Lost)))
	return out
}

// decides reports whether the loss of piece i, and not the loss of piece j, is the reason that the
// result gives for the end of the prefix (Cut). The piece of the earlier block decides. Exception:
// with allOrNothing, a piece with a reported loss takes precedence over an absent piece, because
// the node may have dropped the lost piece meanwhile, and then other tasks of the read find their
// pieces absent.
func (r *reading) decides(i, j int, allOrNothing bool) bool {
	if a, b := r.states[i].reported(), r.states[j].reported(); a != b && allOrNothing {
		return a
	}
	block, other := r.pieces[i].Block, r.pieces[j].Block
	return block < other || block == other && r.states[j].lost == LostSkipped
}

// reported reports whether the node or the client found this piece lost. Pieces that are absent, or
// were skipped behind a lost piece, do not count.
func (s pieceState) reported() bool { return s.lost != "" && s.lost != LostSkipped }

// allOrNothing reports whether the loss of one piece makes all pieces useless. With window or state
// groups, a shorter prefix needs other pieces than the requested prefix, so the caller must match
// again.
func (r *reading) allOrNothing() bool {
	return slices.ContainsFunc(r.pieces, func(p Piece) bool {
		return r.req.Namespace.Geometry.Groups[p.Group].Kind != kv.Full
	})
}

// why returns the cut that the loss of the piece causes.
func (s pieceState) why() Cut {
	switch s.lost {
	case "":
		if s.cut == "" {
			return CutAbsent
		}
		return s.cut
	case LostNodeDown:
		return CutNodeDown
	case LostBusy:
		return CutBusy
	case LostEpoch:
		return CutEpoch
	}
	return CutLost
}
