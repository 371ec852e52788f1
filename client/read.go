package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

const (
	// readTaskPieces bounds the pieces of one Read RPC: each is one operation and one list of
	// checksums. Small blocks reach this bound before ReadTaskBytes.
	readTaskPieces = 512
	// landWithin bounds the wait for immediates after the node has reported that it sent them. On
	// every provider that confirms at the target, the immediates arrive before that report. The
	// bound covers a provider that lost an immediate.
	landWithin = 10 * time.Second
)

// reading is one Read under way.
type reading struct {
	store *Store
	req   ReadRequest
	ids   []kv.BlockID
	// epochs has the epoch of each block of a mixed read; nil: all blocks are of req.Epoch.
	epochs []kv.Epoch
	digest kv.GeometryDigest
	pieces []Piece
	tasks  []readTask
	// targets are the memories that the Read writes to. fragments[i] are the
	// destinations of piece i in them. If fragments is nil, there is one target, and
	// each piece goes to its Offset there.
	targets   []*Memory
	fragments [][]run
	// local is nil unless the pieces are borrowed instead of moved.
	local *borrowing
	// progress is nil unless the caller asked for it.
	progress *progress

	mu     sync.Mutex
	states []pieceState // of pieces
	// broken is the first block known not to arrive whole. Tasks behind it are not begun.
	// brokenAbsent reports whether that block is absent, rather than lost.
	broken       int
	brokenAbsent bool
}

// pieceState is the result of a piece.
type pieceState struct {
	delivered bool
	// lost is the reason why the piece did not arrive. If the piece did not match, cut is set
	// instead.
	lost   Reason
	cut    Cut
	detail string
}

// readTask is the work of one Read RPC.
type readTask struct {
	node *node
	ids  []kv.BlockID
	// epoch is the epoch of all blocks of the task.
	epoch kv.Epoch
	// pieces are indices into reading.pieces. local has the position of each piece's block in ids.
	pieces []int
	local  []int
	// suffix is set if ids does not begin with the first block of the prompt.
	suffix bool
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
	if err := r.plan(ctx); err != nil {
		return ReadResult{}, err
	}
	err := r.runTasks(ctx)
	if ctx.Err() != nil {
		err = fmt.Errorf("client: read: %w", ctx.Err())
	}
	return r.result(), err
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

// newReading checks the request, except for its memory.
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
// node's current epoch would be wrong: after a bump it is the epoch of other weights.
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
// blocks needs. Each piece is at its place in the prompt, whose block 0 lies at base. Of each piece
// the layers from firstLayer on are read.
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

// plan divides the pieces into tasks, in the order given.
func (r *reading) plan(ctx context.Context) error {
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
		n := r.store.owner(r.ids[0])
		if flat {
			n = r.store.owner(r.ids[p.Block])
		}
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
			open[n] = &readTask{node: n, epoch: epoch}
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

// readLimits are the limits of one task for a node.
type readLimits struct {
	bytes int64
	// whole bounds the sum of the task's pieces in their full sizes. The node counts full sizes
	// even if it reads only some layers.
	whole    int64
	suffixes bool // a task may begin in the middle of a chain
}

// readLimit returns the limits of tasks for the node. For a node that is down, the limits do not
// matter: its tasks will be lost.
func (s *Store) readLimit(ctx context.Context, n *node) (readLimits, error) {
	sess, err := n.live(ctx)
	if errors.Is(err, errDown) {
		return readLimits{bytes: s.opts.ReadTaskBytes, whole: s.opts.ReadTaskBytes}, nil
	}
	if err != nil {
		return readLimits{}, err
	}
	return readLimits{bytes: min(s.opts.ReadTaskBytes, sess.readBytes), whole: sess.readBytes, suffixes: sess.suffixes}, nil
}

// add puts a piece into the task. In a flat namespace blocks have no ancestors: the task's keys are
// those of its pieces.
func (t *readTask) add(piece, block int, ids []kv.BlockID, flat bool) {
	t.pieces = append(t.pieces, piece)
	if flat {
		t.ids = append(t.ids, ids[block])
		block = len(t.ids) - 1
	}
	t.local = append(t.local, block)
}

// setChains sets the ids of each task. With full attention, the blocks behind the task's last one
// are not needed, and the node finds the ancestors of its first one. With window and state groups,
// the length of the chain decides which pieces are needed, so every task sends the whole chain.
func (r *reading) setChains(limits map[*node]readLimits) {
	groups := r.req.Namespace.Geometry.Groups
	whole := len(groups) > 1 || groups[0].Kind != kv.Full
	for i := range r.tasks {
		t := &r.tasks[i]
		t.ids = r.ids
		if whole {
			continue
		}
		t.ids = r.ids[:slices.Max(t.local)+1]
		if first := slices.Min(t.local); first > 0 && limits[t.node].suffixes && r.epochs == nil {
			t.ids, t.suffix = t.ids[first:], true
			for k := range t.local {
				t.local[k] -= first
			}
		}
	}
}

// runTask performs one task, and retries it if the connection broke. Pieces that could not be
// loaded are recorded in states. An error ends the whole Read.
func (r *reading) runTask(ctx context.Context, t *readTask) error {
	if r.skip(t) {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	err := t.node.retry(ctx, t.node.live, func(sess *session) error {
		if r.local != nil {
			return r.borrow(ctx, t, sess)
		}
		err := r.copyTask(ctx, t, sess)
		if errors.Is(err, errNotLocal) {
			err = r.attempt(ctx, t, sess)
		}
		return err
	})
	switch {
	case errors.Is(err, errDown):
		r.loseAll(t, LostNodeDown, err.Error())
	case errors.Is(err, errBusy):
		r.loseAll(t, LostBusy, err.Error())
	case err != nil:
		return err
	}
	return nil
}

// skip reports whether the task lies wholly behind a block that will not arrive.
func (r *reading) skip(t *readTask) bool {
	first := math.MaxInt
	for _, i := range t.pieces {
		first = min(first, r.pieces[i].Block)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return first > r.broken
}

// attempt makes one Read RPC: it opens windows, makes the call, waits for the immediates, revokes
// the windows, and verifies the bytes.
func (r *reading) attempt(ctx context.Context, t *readTask, sess *session) error {
	zones := r.zones(t)
	arrival := r.newArrival(t, zones)
	counted, delivered := r.progress.attempt(), int64(0)
	defer func() { counted.end(delivered) }()
	windows, err := r.openWindows(arrival, zones, sess, counted)
	imm := r.store.imms.Add(1)
	var resp *pb.ReadResponse
	if err == nil {
		var landed bool
		resp, landed, err = r.call(ctx, t, sess, windows, zones, imm)
		if err == nil && !landed {
			err = r.land(ctx, sess, imm, resp.GetImmediates())
		}
	}
	// The windows are revoked in all cases, and without ctx. After the revocation nothing changes
	// the bytes, so the bytes that were hashed, on arrival or below, are the bytes that the caller
	// sees.
	for k, window := range windows {
		if window == nil {
			continue
		}
		if revokeErr := window.Revoke(context.WithoutCancel(ctx)); revokeErr != nil {
			return fmt.Errorf("client: read: memory [%d,%d) may still be written to: %w", zones[k].lo, zones[k].hi, revokeErr)
		}
	}
	if err != nil {
		r.store.forgetImm(imm)
		return err
	}
	if resp.GetOutcome() == pb.Outcome_OUTCOME_BUSY && len(resp.GetPieces()) == 0 {
		return fmt.Errorf("client: read: %s: %w", t.node.target, inWords(errBusy, resp.GetBusyReason()))
	}
	if anyFailed(resp) && !t.node.dataConnected(sess) {
		return fmt.Errorf("client: read: %s: %w: its data-plane session has ended", t.node.target, errDown)
	}
	r.verify(t, resp, arrival)
	if counted != nil {
		delivered = r.delivered(t)
		r.progress.verified(r.prefix())
	}
	return nil
}

func anyFailed(resp *pb.ReadResponse) bool {
	return slices.ContainsFunc(resp.GetPieces(), func(p *pb.PieceResult) bool { return p.GetState() == pb.PieceResult_STATE_FAILED })
}

// openWindows opens a window for the node over each zone. It returns the windows that it has
// opened, also together with an error.
func (r *reading) openWindows(a *arrival, zones []zone, sess *session, counted *attemptBytes) ([]rdma.Window, error) {
	windows := make([]rdma.Window, len(zones))
	for k, z := range zones {
		if z.lo > z.hi {
			continue
		}
		var err error
		if windows[k], err = a.window(k, r.targets[k].region, uint64(z.lo), uint64(z.hi-z.lo), sess.engine, counted); err != nil {
			windows[k] = nil
			return windows, fmt.Errorf("client: read: open a window of %d bytes at %d: %w", z.hi-z.lo, z.lo, err)
		}
	}
	return windows, nil
}

// call makes the Read call for the task's pieces. landed reports whether the immediates have been
// counted already, so the bytes are in place.
func (r *reading) call(ctx context.Context, t *readTask, sess *session, windows []rdma.Window, zones []zone, imm uint32) (_ *pb.ReadResponse, landed bool, _ error) {
	destinations := make([]uint32, len(windows))
	var descs [][]byte
	for k, w := range windows {
		if w == nil {
			continue
		}
		desc, err := w.Desc().MarshalBinary()
		if err != nil {
			return nil, false, fmt.Errorf("client: read: %w", err)
		}
		destinations[k] = uint32(len(descs))
		descs = append(descs, desc)
	}
	if r.fragments != nil && !sess.fragments {
		return nil, false, fmt.Errorf("client: read: %s has version %s, which cannot read into fragments: %w", t.node.target, sess.version, ErrVersion)
	}
	refs := make([]*pb.PieceRef, len(t.pieces))
	sums := 0
	for k, i := range t.pieces {
		sums += r.layers(r.pieces[i].Group)
		refs[k] = r.pieceRef(t, k, zones, destinations)
	}
	req := r.request(t, refs)
	req.Destination, req.MoreDestinations, req.Imm = descs[0], descs[1:], imm
	resp, landed, err := ask(ctx, sess, api.MethodRead, req, imm, replyMax(len(refs), sums), func() (*pb.ReadResponse, error) { return sess.cache.Read(ctx, req) })
	if err != nil {
		return nil, false, callError(ctx, "read", t.node.target, err)
	}
	if got := resp.GetPieces(); len(got) != len(t.pieces) && len(got) != 0 {
		return nil, false, fmt.Errorf("client: read: %s answered for %d pieces of %d", t.node.target, len(got), len(t.pieces))
	}
	return resp, landed, nil
}

// request returns the request of a task, without the destinations of its pieces.
func (r *reading) request(t *readTask, refs []*pb.PieceRef) *pb.ReadRequest {
	return &pb.ReadRequest{
		Namespace:      r.req.Namespace.Name,
		Epoch:          uint64(t.epoch),
		Alone:          r.epochs != nil,
		Suffix:         t.suffix,
		BlockIds:       api.AppendIDs(nil, t.ids),
		Pieces:         refs,
		FirstLayer:     uint32(r.req.FirstLayer),
		Layers:         uint32(r.req.Layers),
		GeometryDigest: r.digest[:],
	}
}

// land waits until the given number of the node's immediates have been counted. Then the payload of
// each is in place.
func (r *reading) land(ctx context.Context, sess *session, imm, count uint32) error {
	if count == 0 {
		return nil
	}
	landed := rdma.NewFlag()
	expectation, err := r.store.opts.Engine.ExpectImm(rdma.Expect{Imm: imm, Count: count, From: []rdma.EngineID{sess.engine}, Done: landed.Set})
	if err != nil {
		return fmt.Errorf("client: read: %w", err)
	}
	wait, cancel := context.WithTimeout(ctx, landWithin)
	defer cancel()
	err = landed.Wait(wait)
	if err == nil {
		return nil
	}
	expectation.Cancel()
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("client: read: %w", ctx.Err())
	case errors.Is(err, rdma.ErrClosed):
		return fmt.Errorf("client: read: transfer engine: %w", err)
	case errors.Is(err, rdma.ErrPeerDied):
		return fmt.Errorf("client: read: %w: %w", errDown, err)
	}
	return fmt.Errorf("client: read: %w: not all of %d immediates arrived within %v", errDown, count, landWithin)
}

// forgetImm drops the count of an immediate that is not waited for, so that counts of abandoned
// immediates do not accumulate in the engine.
func (s *Store) forgetImm(imm uint32) {
	expectation, err := s.opts.Engine.ExpectImm(rdma.Expect{Imm: imm, Count: math.MaxUint32})
	if err == nil {
		expectation.Cancel()
	}
}

// verify hashes the bytes that were not hashed on arrival, and records the result of
// each piece. arrival is nil if no bytes were hashed on arrival.
func (r *reading) verify(t *readTask, resp *pb.ReadResponse, arrival *arrival) {
	for k, i := range t.pieces {
		result := resp.GetPieces()[k]
		state := pieceState{detail: result.GetReason()}
		switch result.GetState() {
		case pb.PieceResult_STATE_DELIVERED:
			state.delivered, state.detail = r.intact(i, result.GetLayerSums(), arrival.sumsOf(k, r.layers(r.pieces[i].Group)))
			// KV of two epochs must not meet in one prefix, unless the caller mixes epochs.
			if got := kv.Epoch(resp.GetEpoch()); state.delivered && got != t.epoch {
				state = pieceState{lost: LostEpoch, detail: fmt.Sprintf("read under epoch %d; epoch %d was requested", got, t.epoch)}
				break
			}
			if state.delivered && r.req.Sums != nil {
				copy(r.req.Sums[i], result.GetLayerSums())
			}
			if !state.delivered {
				state.lost = LostChecksum
				r.store.stats.lostChecksum.Add(1)
				r.store.opts.Logger.Error("a piece does not have the bytes that its writer wrote", "server", t.node.target, "namespace", r.req.Namespace.Name,
					"block", r.ids[r.pieces[i].Block], "group", r.pieces[i].Group, "detail", state.detail)
			}
		case pb.PieceResult_STATE_MISS:
			if t.local[k] >= int(resp.GetMatchedBlocks()) {
				state.cut = Cut(resp.GetCut())
			} else {
				state.lost = LostGone
			}
		case pb.PieceResult_STATE_CORRUPT:
			state.lost = LostCorrupt
		default:
			state.lost = LostFailed
			if b := resp.GetBusyReason(); b != "" && b == result.GetReason() {
				state.lost = LostBusy
			}
		}
		r.settle(i, state)
	}
}

// intact compares a piece in memory with its writer's checksums. landed are the piece's layers as
// hashed on arrival, or nil.
func (r *reading) intact(i int, sums []uint64, landed []arrivedLayer) (ok bool, detail string) {
	p := r.pieces[i]
	layers, layerBytes := r.layers(p.Group), r.req.Namespace.Geometry.LayerBytes(p.Group)
	if len(sums) != layers {
		return false, fmt.Sprintf("%d checksums for %d layers", len(sums), layers)
	}
	first := 0 // index of the run's first layer in the piece
	var one [1]run
	for _, f := range r.runs(i, &one) {
		mem, want := r.bytesOf(i, f), int64(f.layers)*layerBytes
		if int64(len(mem)) < want {
			return false, fmt.Sprintf("the memory that the node named has %d bytes; the piece has %d", len(mem), want)
		}
		if k, got := r.store.firstBadOf(mem, layerBytes, sums[first:first+f.layers], landed[min(first, len(landed)):]); k >= 0 {
			k += first
			return false, fmt.Sprintf("layer %d has checksum %016x; its writer computed %016x", r.req.FirstLayer+k, got, sums[k])
		}
		first += f.layers
	}
	return true, ""
}

// bytesOf returns the memory from the start of a run of piece i to the memory's end.
func (r *reading) bytesOf(i int, f run) []byte {
	if r.local != nil {
		return r.local.pieces[i]
	}
	return r.targets[f.target].Bytes()[f.offset:]
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

// result returns the totals. No task is running.
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

// decides reports whether the loss of piece i explains the cut better than that of piece j. The
// loss of an earlier block does. With allOrNothing, a loss that the node reported comes first: the
// node may have dropped the piece meanwhile, and then other tasks of the read find their pieces
// absent.
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

// allOrNothing reports whether the loss of one piece makes all pieces useless. A shorter prefix of
// a window or a state needs other pieces than the longer one, so the caller must match again.
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
